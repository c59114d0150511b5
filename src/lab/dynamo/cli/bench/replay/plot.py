"""The comparison as a plot, and the report as one page that loads nothing. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from dynamo.cli.bench.html import COLOURS, STYLE, Point, nice, plot, thinned
from dynamo.cli.bench.replay.report import HEAD, PresetReport

WIDTH: Final = 860
PANEL_HEIGHT: Final = 190
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 34, 26
LEGEND_HEIGHT: Final = 26


class _Panel(NamedTuple):
    """One row of groups of bars: a group for each preset, a bar for each row of its table."""

    title: str
    figure: str
    is_ratio: bool  # to the first row of the preset


_PANELS: Final = (
    _Panel("Hit rate, as a share of the pooled cache's", "hit_rate_by_pooled", False),
    _Panel("Mean time to first token, by that of the first bar", "mean_ttft_ms", True),
    _Panel("Mean end-to-end latency, by that of the first bar", "mean_e2e_latency_ms", True),
)


def comparison_svg(reports: Sequence[PresetReport]) -> str:
    """Return the plot of the presets that compare the same rows as the first one does."""
    labels = list(reports[0].rows)
    compared = [report for report in reports if list(report.rows) == labels]
    height = LEGEND_HEIGHT + PANEL_HEIGHT * len(_PANELS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, label in enumerate(labels):
        x = LEFT + 150 * number
        parts.append(f'<rect x="{x}" y="8" width="14" height="10" fill="{_colour(number)}"/>')
        parts.append(f'<text x="{x + 20}" y="17">{html.escape(label)}</text>')
    for number, panel in enumerate(_PANELS):
        parts.extend(_drawn(panel, compared, labels, LEGEND_HEIGHT + PANEL_HEIGHT * number))
    return "\n".join([*parts, "</svg>\n"])


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _drawn(panel: _Panel, reports: Sequence[PresetReport], labels: Sequence[str], top: int) -> Iterator[str]:
    values = [[_value(panel, report, label) for label in labels] for report in reports]
    highest = nice(max([1.0, *(value for group in values for value in group)]))
    base = top + PANEL_HEIGHT - BOTTOM

    def y_at(value: float) -> float:
        return base - value / highest * (PANEL_HEIGHT - TOP - BOTTOM)

    yield f'<text x="{LEFT}" y="{top + 20}" font-weight="bold">{html.escape(panel.title)}</text>'
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = y_at(share * highest)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share * highest:g}</text>'
    width = (WIDTH - LEFT - RIGHT) / len(reports)
    bar = min(34.0, 0.8 * width / len(labels))
    for place, (report, group) in enumerate(zip(reports, values, strict=True)):
        middle = LEFT + width * (place + 0.5)
        yield f'<text x="{middle:.1f}" y="{base + 17}" text-anchor="middle">{html.escape(report.preset.name)}</text>'
        for number, value in enumerate(group):
            x, y = middle + bar * (number - len(labels) / 2), y_at(value)
            yield f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{bar - 2:.1f}" height="{base - y:.1f}" fill="{_colour(number)}"/>'
            yield f'<text x="{x + bar / 2:.1f}" y="{y - 3:.1f}" text-anchor="middle" font-size="9">{value:.2f}</text>'


def _value(panel: _Panel, report: PresetReport, label: str) -> float:
    value = report.rows[label][panel.figure]
    if not panel.is_ratio:
        return value
    first = next(iter(report.rows.values()))[panel.figure]
    return value / first if first else 0.0


def replay_html(reports: Sequence[PresetReport]) -> str:
    """Return the whole page."""
    parts = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8"><title>dynamo bench replay</title>']
    parts.append(f"<style>{STYLE}</style></head><body><h1>dynamo bench replay</h1>")
    parts.append(comparison_svg(reports))
    for report in reports:
        parts.append(f"<h2>{html.escape(report.preset.name)}</h2><p>{html.escape(report.preset.what)}</p>")
        parts.append(_table(report))
        parts.extend(f"<p>{html.escape(line)}</p>" for line in (*report.remarks(), *map(str, report.bars())))
        curves = _first_tokens(report)
        if curves:
            parts.append("<p>Share of the requests below a time to first token (ms, logarithmic), first seed</p>")
            parts.append(plot(curves, is_log=True, y_top=1.0, x_unit="ms"))
    return "\n".join([*parts, "</body></html>\n"])


def _table(report: PresetReport) -> str:
    head = "".join(f"<th class=n>{html.escape(name)}</th>" for name in HEAD)
    rows = "".join(
        "<tr>" + "".join(f"<td{' class=n' if place else ''}>{html.escape(cell)}</td>" for place, cell in enumerate(row))
        for row in report.table()
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _first_tokens(report: PresetReport) -> dict[str, list[Point]]:
    """Return the distribution of the times to first token of each row, of the first seed."""
    curves: dict[str, list[Point]] = {}
    for variant, figures in zip(report.preset.variants, report.replayed[0].figures, strict=True):
        times = sorted(request.ttft_ms for request in figures.requests if request.ttft_ms is not None)
        if times and math.isfinite(times[-1]):
            count = len(times)
            curves[variant.label] = thinned([(max(ms, 1e-3), (place + 1) / count) for place, ms in enumerate(times)])
    return curves
