"""The first lines of a screen: the whole system, its figures of the last minute, and what to know about the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dynamo.cli.inspect.figures import age, bytes_of, clock, count, milliseconds, per_second, percent, sparkline
from dynamo.cli.inspect.lines import Line, Tone, TonedText, flow, width_of_line
from dynamo.cli.inspect.tables import FULL_SHARE
from dynamo.protocol.inspector.views import CountersView, FleetView, Picture

SPARK_CELLS: Final = 12
NARROW: Final = 110  # below it the sparklines are shorter
BAD_ERROR_SHARE: Final = 0.05
_Shown = Callable[[CountersView], str]


def summary_lines(picture: Picture, now_ms: int, width: int) -> list[Line]:
    """Return the lines of the whole system: what there is, and how it does."""
    fleet = picture.fleet
    if fleet is None:
        return []
    left: Line = (
        TonedText(" dynamo top", Tone.STRONG),
        TonedText.of(f"  {fleet.cluster}", Tone.ACCENT),
        TonedText(
            f"  {_some(fleet.frontends, 'frontend')}  {_some(fleet.workers, 'worker')}  {_some(fleet.models, 'model')}"
        ),
    )
    right: Line = (
        TonedText(f"{clock(now_ms)}  up {age((now_ms - fleet.started_ms) / 1000)}  "),
        TonedText.of(f"role: {fleet.role}"),
        *((TonedText("  [RO]", Tone.WARN),) if fleet.read_only or fleet.role in ("viewer", "content") else ()),
        TonedText(" "),
    )  # fmt: skip
    gap = width - width_of_line(left) - width_of_line(right)
    first = [(*left, TonedText(" " * gap), *right)] if gap >= 1 else [left, (TonedText(" "), *right)]
    return [*first, *flow(_figures(fleet, SPARK_CELLS if width >= NARROW else 7), width)]


def _some(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def _figures(fleet: FleetView, cells: int) -> list[Line]:
    now = fleet.now

    def rate(name: str, value: float, history: str) -> Line:
        line: Line = (TonedText(f"{name} ", Tone.DIM), TonedText(per_second(value), Tone.STRONG))
        values = fleet.history.get(history)
        return (*line, TonedText(f" {sparkline(values, cells)}", Tone.ACCENT)) if values else line

    def pair(name: str, p50: float | None, p99: float | None) -> Line:
        return (
            TonedText(f"{name} ", Tone.DIM),
            TonedText(f"p50 {milliseconds(p50)} p99 {milliseconds(p99)} ms"),
        )

    def one(name: str, value: str, tone: Tone = Tone.NORMAL) -> Line:
        return (TonedText(f"{name} ", Tone.DIM), TonedText(value, tone))

    errors = Tone.BAD if (now.error_share or 0.0) >= BAD_ERROR_SHARE else Tone.NORMAL
    kv = Tone.WARN if (now.kv_share or 0.0) >= FULL_SHARE else Tone.NORMAL
    return [
        rate("req/s", now.requests_per_second, "requests_per_second"),
        rate("tok/s", now.output_tokens_per_second, "output_tokens_per_second"),
        one("in/s", per_second(now.input_tokens_per_second)),
        one("run", count(now.running)),
        one("wait", count(now.waiting), Tone.WARN if now.waiting else Tone.NORMAL),
        pair("TTFT", now.ttft_p50_seconds, now.ttft_p99_seconds),
        pair("ITL", now.itl_p50_seconds, now.itl_p99_seconds),
        one("err", _with_sign(now.error_share), errors),
        one("refused", _with_sign(now.refused_share), Tone.WARN if now.refused_share else Tone.NORMAL),
        one("shed/s", per_second(now.shed_per_second), Tone.WARN if now.shed_per_second else Tone.NORMAL),
        one("kv", _with_sign(now.kv_share), kv),
        one("hit", _with_sign(now.prefix_hit_share)),
        *(() if fleet.resident_bytes is None else (one("mem", _memory(fleet)),)),
    ]


def _memory(fleet: FleetView) -> str:
    budget = "" if fleet.budget_bytes is None else f"/{bytes_of(fleet.budget_bytes)}"
    return f"{bytes_of(fleet.resident_bytes)}{budget}"


def _with_sign(share: float | None) -> str:
    return percent(share) if share is None else f"{percent(share)}%"


def picture_notes(picture: Picture, width: int) -> list[Line]:
    """Return what is missing from a picture."""
    if not picture.partial:
        return []
    return flow([(TonedText.of(f"! without {', '.join(picture.partial)}: no answer in time", Tone.WARN),)], width)


def section_title(picture: Picture, view: str, title: str) -> str:
    """Return a title with the number of entries, and of those in all where only some were sent."""
    entries = getattr(picture, view) or []
    total = picture.totals.get(view, len(entries))
    number = count(len(entries)) if total <= len(entries) else f"{count(len(entries))} of {count(total)}"
    stalled = sum(stream.is_stalled for stream in entries) if view == "streams" else 0
    return f"{title} {number}" + (f", {stalled} stalled" if stalled else "")
