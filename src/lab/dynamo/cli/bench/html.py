"""A report that is one file: tables, and plots as SVG. It loads nothing, so it can be mailed and kept. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from dynamo.cli.bench.results import LATENCIES, Results
from dynamo.cli.bench.samples import Recorder
from dynamo.cli.bench.table import failure_rows, figure_rows, latency_rows, remarks

WIDTH: Final = 720
HEIGHT: Final = 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 34
LABEL_ROOM: Final = 30  # half of the widest label
MAX_POINTS: Final = 400  # more than a screen shows
COLOURS: Final = ("#2563eb", "#d97706", "#059669", "#9333ea")

STYLE: Final = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 780px; margin: 2rem auto; padding: 0 1rem; color: #1f2937; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } tr + tr { border-top: 1px solid #e5e7eb; }
h2 { font-size: 1.1rem; margin: 2rem 0 0; } svg { width: 100%; height: auto; } .remark { background: #fef3c7; padding: .5rem .8rem; }
svg text { font: 11px system-ui, sans-serif; fill: #4b5563; } details pre { overflow-x: auto; background: #f3f4f6; padding: .6rem; }
"""

Point = tuple[float, float]


def html_report(results: Results, recorder: Recorder) -> str:
    """Return the whole page."""
    parts = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8"><title>dynamo bench</title>']
    parts.append(f"<style>{STYLE}</style></head><body><h1>dynamo bench</h1>")
    parts.extend(f'<p class="remark">{html.escape(remark)}</p>' for remark in remarks(results))
    parts.append(_table((), figure_rows(results)))
    parts.append("<h2>Latency, ms</h2>")
    parts.append(_table(("", "mean", "p50", "p90", "p99", "max", "samples"), latency_rows(results)))
    if results["failures"]:
        parts.append("<h2>Failures</h2>")
        parts.append(_table(("kind", "count", "share", "for example"), failure_rows(results)))
    curves = {
        title: thinned([(1e3 * seconds, share) for seconds, share in getattr(recorder, attribute).cumulative()])
        for attribute, title in LATENCIES.values()
        if getattr(recorder, attribute).count
    }
    if curves:
        parts.append("<h2>Share of the samples below a latency (ms, logarithmic)</h2>")
        parts.append(plot(curves, is_log=True, y_top=1.0, x_unit="ms"))
    timeline = results["timeline"]
    if len(timeline) > 1:
        for title, key, is_rate in (
            ("Answers per second", "answered", True),
            ("Output tokens per second, of the answers that ended then", "tokens", True),
            ("Mean time to first token, ms", "mean_ttft_ms", False),
            ("Slowest answer, ms", "slowest_ms", False),
            ("Failures per second", "failed", True),
        ):
            points = list(_points(timeline, key, is_rate=is_rate))
            if any(value for _, value in points):
                parts.append(f"<h2>{title}</h2>")
                parts.append(plot({title: points}, x_unit="s", has_legend=False))
    settings = "\n".join(f"{name}: {value}" for name, value in results["settings"].items() if value is not None)
    parts.append(f"<details><summary>Settings</summary><pre>{html.escape(settings)}</pre></details>")
    parts.append(f"<p>dynamo-unified {html.escape(results['version'])}, Python {html.escape(results['python'])}</p>")
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _points(timeline: Iterable[dict[str, float | None]], key: str, *, is_rate: bool) -> Iterator[Point]:
    """Yield a figure of each interval at its middle; an interval without a sample has no point."""
    for row in timeline:
        value, seconds = row[key], row["seconds"] or 1.0
        if value is not None:
            yield (row["from_seconds"] or 0.0) + seconds / 2, value / seconds if is_rate else value


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cell(tag: str, text: str, column: int) -> str:
        is_number = column > 0 and text[:1].isdigit() and len(head) > 4
        return f"<{tag}{' class=n' if is_number or (tag == 'th' and len(head) > 4 and column) else ''}>{html.escape(text)}</{tag}>"

    lines = ["<table>"]
    if head:
        lines.append("<tr>" + "".join(cell("th", text, column) for column, text in enumerate(head)) + "</tr>")
    lines.extend(
        "<tr>" + "".join(cell("td", text, column) for column, text in enumerate(row)) + "</tr>" for row in rows
    )
    return "".join(lines) + "</table>"


def thinned(points: Sequence[Point]) -> list[Point]:
    """Thin the points out to at most `MAX_POINTS`, keeping both ends."""
    if len(points) <= MAX_POINTS:
        return list(points)
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(index * step)] for index in range(MAX_POINTS)]


def plot(
    curves: dict[str, list[Point]],
    *,
    is_log: bool = False,
    y_top: float | None = None,
    x_unit: str = "",
    has_legend: bool = True,
) -> str:
    """Lines over common axes, as one SVG."""
    xs = [x for points in curves.values() for x, _ in points]
    x_low, x_high = min(xs), max(xs)
    if is_log:
        x_low = 10 ** math.floor(math.log10(max(x_low, 1e-6)))
        x_high = 10 ** math.ceil(math.log10(max(x_high, x_low * 10)))
    elif x_high == x_low:
        x_high = x_low + 1
    if not is_log:
        x_low = 0.0
    top = y_top or nice(max(y for points in curves.values() for _, y in points) or 1.0)

    def x_at(value: float) -> float:
        low, high, at = (
            (math.log10(v) for v in (x_low, x_high, max(value, x_low))) if is_log else (x_low, x_high, value)
        )
        return LEFT + (at - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y_at(value: float) -> float:
        return HEIGHT - BOTTOM - min(value / top, 1.0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for fraction in (0, 0.25, 0.5, 0.75, 1):
        y = y_at(fraction * top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(fraction * top)}</text>')
    for tick in ticks(x_low, x_high, is_log=is_log):
        x = x_at(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#f3f4f6"/>')
        label = f"{short(tick)} {x_unit}"
        is_last = x + LABEL_ROOM > WIDTH  # its right half would be cut off
        anchor = "end" if is_last else "middle"
        at = WIDTH - 2 if is_last else x
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{label}</text>')
    for number, (title, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
        if is_log:
            path = f"{x_at(points[0][0]):.1f},{y_at(0):.1f} {path}"  # a distribution begins at nothing
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>')
        if has_legend:
            y = TOP + 12 + 16 * number
            parts.append(f'<rect x="{LEFT + 8}" y="{y - 8}" width="14" height="4" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + 28}" y="{y - 2}">{html.escape(title)}</text>')
    return "".join(parts) + "</svg>"


def ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Return the positions of an axis's labels."""
    if is_log:
        first, last = round(math.log10(low)), round(math.log10(high))
        return [10.0**power for power in range(first, last + 1)]
    step = nice((high - low) / 6)
    return [low + step * index for index in range(int((high - low) / step + 1e-9) + 1)]


def nice(value: float) -> float:
    """Round up to the next of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= value * (1 - 1e-9))


def short(value: float) -> str:
    """Format a number: 12, 1.5k, 0.25."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"
