"""A picture as plain lines, for pipes, tickets and `dynamo top --once --plain`."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.inspect.lines import Line, Tone, TonedText, heading, width_of_line
from dynamo.cli.inspect.overview import picture_notes, section_title, summary_lines
from dynamo.cli.inspect.tables import FORMS
from dynamo.protocol.inspector.views import Picture

FULL_WIDTH = 132  # of the summary, where the tables are as wide as what is in them


def picture_lines(picture: Picture, views: Sequence[str], width: int | None) -> list[Line]:
    """Return the summary and these views. `width`: cut to so many cells; None: nothing is cut."""
    now = picture.taken_ms
    tables = [table_lines(picture, view, width) for view in views if getattr(picture, view, None) is not None]
    widest = width or max([FULL_WIDTH, *(width_of_line(line) for lines in tables for line in lines)])
    found = [*summary_lines(picture, now, min(widest, width or FULL_WIDTH)), *picture_notes(picture, widest)]
    for view, lines in zip((v for v in views if getattr(picture, v, None) is not None), tables, strict=True):
        found += [
            (),
            heading(section_title(picture, view, FORMS[view].title), min(widest, width or FULL_WIDTH)),
            *lines,
        ]
    return found


def table_lines(picture: Picture, view: str, width: int | None, order: int = 0) -> list[Line]:
    """Return one view as a table with its head, or the one line for no rows."""
    form = FORMS[view]
    rows = sorted(getattr(picture, view) or (), key=form.orders[order][1])
    if not rows:
        return [(TonedText(f" {form.nothing}", Tone.DIM),)]
    now = picture.taken_ms
    least = [0] * len(form.columns)
    placed = form.whole(rows, now) if width is None else form.at(width, form.longest(rows, now, least))
    return [placed.head(), *(placed.row(row, now) for row in rows)]
