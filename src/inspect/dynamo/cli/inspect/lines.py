"""Lines of a screen as values, and tables laid out into them. Both the live screen and `--plain` show these."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from msgspec import Struct

from dynamo.cli.inspect.printable import fit, printable, width_of

GAP: Final = 2  # between columns
DETAIL_RANK: Final = 10  # of columns that matter less than the end of a text that is cut
MARGIN: Final = 1  # before the first, where the mark of the chosen row is drawn


class Tone(enum.Enum):
    """What a piece of text is meant to look like; a word beside it always means the same."""

    NORMAL = enum.auto()
    DIM = enum.auto()
    STRONG = enum.auto()
    GOOD = enum.auto()
    WARN = enum.auto()
    BAD = enum.auto()
    ACCENT = enum.auto()


class TonedText(Struct, frozen=True):
    """Some text of one tone. `of` makes it from text of any origin."""

    text: str
    tone: Tone = Tone.NORMAL

    @staticmethod
    def of(text: str, tone: Tone = Tone.NORMAL) -> TonedText:
        """Make a piece whose text is safe to show."""
        return TonedText(printable(text), tone)


Line = tuple[TonedText, ...]


def plain_text(line: Line) -> str:
    """Return a line without its tones and without blanks at its end."""
    return "".join(piece.text for piece in line).rstrip()


def width_of_line(line: Line) -> int:
    """Return how many cells a line covers."""
    return sum(width_of(piece.text) for piece in line)


def heading(title: str, width: int, right: str = "") -> Line:
    """Return a rule with a title in it, and with `right` near its end."""
    title, right = printable(title), printable(right)
    begin = f" ─ {title} "
    end = f" {right} ─" if right else ""
    room = width - width_of(begin) - width_of(end)
    if room < 1 and right:
        end = f" {fit(right, max(1, width - width_of(begin) - 4)).rstrip()} ─"
        room = width - width_of(begin) - width_of(end)
    return (TonedText(fit(begin + "─" * max(0, room) + end, width), Tone.ACCENT),)


def flow(parts: Iterable[Line], width: int, *, gap: int = 3) -> list[Line]:
    """Return parts one behind the other, on as many lines as they need; none is broken."""
    found: list[Line] = []
    line: tuple[TonedText, ...] = (TonedText(" " * MARGIN),)
    used = MARGIN
    for part in parts:
        needed = width_of_line(part)
        if used > MARGIN and used + gap + needed > width:
            found.append(line)
            line, used = (TonedText(" " * MARGIN),), MARGIN
        if used > MARGIN:
            line, used = (*line, TonedText(" " * gap)), used + gap
        line, used = (*line, *part), used + needed
    return [*found, line] if used > MARGIN else found


# -- tables ------------------------------------------------------------------------------------------------------------


class Cell(Struct, frozen=True):
    """What stands in one place of a table."""

    text: str
    tone: Tone = Tone.NORMAL


E = TypeVar("E")
CellOf = Callable[[E, int, int], Cell]
"""Makes the text of a column from a row, the server's time in ms and the width that it has."""


@dataclass(frozen=True, slots=True)
class Column(Generic[E]):
    """One column of rows of one kind."""

    title: str
    cell: CellOf[E]
    width: int
    widest: int = 0
    """It grows up to this where there is room; 0: it keeps its width."""
    rank: int = 0
    """Where there is no room, columns of the highest rank go first; those from DETAIL_RANK on also where others need theirs."""
    is_right: bool = False
    keeps_tail: bool = False


@dataclass(frozen=True, slots=True)
class TableForm(Generic[E]):
    """A kind of table: which view it shows, its columns and its orders."""

    view: str
    title: str
    columns: tuple[Column[E], ...]
    orders: tuple[tuple[str, Callable[[E], str | tuple[object, ...]]], ...]
    """By name, each a sort key; the first is the usual one."""
    nothing: str
    """What stands in a table without rows."""

    def at(self, width: int, longest: Sequence[int] | None = None) -> PlacedColumns[E]:
        """Return the columns that have room, each with its width.

        `longest`: for each column how many cells its texts need; no column grows further.
        """
        return PlacedColumns(tuple(laid_out(self.columns, width, longest)), width)

    def longest(self, rows: Sequence[E], now_ms: int, least: Sequence[int]) -> list[int]:
        """Return for each column that grows how many cells its longest text needs, `least` where none needs more."""
        return [
            max([so_far, *(width_of(printable(column.cell(row, now_ms, column.widest).text)) for row in rows)])
            if column.widest
            else column.width
            for column, so_far in zip(self.columns, least, strict=True)
        ]

    def whole(self, rows: Sequence[E], now_ms: int) -> PlacedColumns[E]:
        """Return all columns, each as wide as its longest cell."""
        placed = []
        for column in self.columns:
            most = max(column.width, column.widest)
            texts = [printable(column.cell(row, now_ms, most).text) for row in rows]
            placed.append((column, max([width_of(column.title), *map(width_of, texts)])))
        return PlacedColumns(tuple(placed), MARGIN + sum(width + GAP for _, width in placed))


def laid_out(
    columns: Sequence[Column[E]], width: int, longest: Sequence[int] | None = None
) -> list[tuple[Column[E], int]]:
    """Return the columns that fit into `width`, with their widths: the least important go, and the rest grow.

    `longest`: for each column the cells that its texts need; without it, it may grow without bound. With it, details
    go before a text of a more important column is cut.
    """
    limits = {column: column.widest for column in columns}
    if longest is not None:
        limits = {column: min(column.widest, most) for column, most in zip(columns, longest, strict=True)}
    kept = list(columns)
    while len(kept) > 1 and _needed(kept) > width:
        last = max(range(len(kept)), key=lambda place: (kept[place].rank, place))
        if kept[last].rank == 0:
            break  # the lines are cut instead
        del kept[last]
    if longest is not None:
        while _wished(kept, limits) > width and (details := [column for column in kept if column.rank >= DETAIL_RANK]):
            kept.remove(max(details, key=lambda column: column.rank))
    widths = [column.width for column in kept]
    room = width - _needed(kept)
    while room > 0:
        growing = [place for place, column in enumerate(kept) if widths[place] < limits[column]]
        if not growing:
            break
        # Details get what the others leave.
        growing = [place for place in growing if kept[place].rank < DETAIL_RANK] or growing
        share = max(1, room // len(growing))
        for place in growing:
            more = min(share, room, limits[kept[place]] - widths[place])
            widths[place] += more
            room -= more
    return list(zip(kept, widths, strict=True))


def _needed(columns: Sequence[Column[E]]) -> int:
    return MARGIN + sum(column.width for column in columns) + GAP * (len(columns) - 1) + 1


def _wished(columns: Sequence[Column[E]], limits: Mapping[Column[E], int]) -> int:
    """Return the width at which only texts of details are cut."""
    spare = sum(max(0, limits[column] - column.width) for column in columns if column.rank < DETAIL_RANK)
    return _needed(columns) + spare


@dataclass(frozen=True, slots=True)
class PlacedColumns(Generic[E]):
    """The columns of one table at one width."""

    columns: tuple[tuple[Column[E], int], ...]
    width: int

    def head(self) -> Line:
        """Return the titles."""
        cells = (fit(column.title, width, right=column.is_right) for column, width in self.columns)
        return (TonedText(" " * MARGIN + (" " * GAP).join(cells), Tone.DIM),)

    def row(self, entry: E, now_ms: int, *, is_chosen: bool = False) -> Line:
        """Return one row."""
        tones, texts = [Tone.ACCENT], ["▶" if is_chosen else " " * MARGIN]
        gap = ""
        for column, width in self.columns:
            cell = column.cell(entry, now_ms, width)
            text = fit(printable(cell.text), width, right=column.is_right, tail=column.keeps_tail)
            texts[-1] += gap  # blanks have no tone
            gap = " " * GAP
            if cell.tone is tones[-1]:
                texts[-1] += text  # the fewer pieces, the less there is to draw
            else:
                tones.append(cell.tone)
                texts.append(text)
        return tuple(map(TonedText, texts, tones))
