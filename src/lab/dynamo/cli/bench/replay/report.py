"""What a command line of replays found: means over seeds, tables, bars, JSON, a plot and a page. Pure."""

from __future__ import annotations

import html
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from dynamo import __version__
from dynamo.cli.bench.html import COLOURS, STYLE, Point, nice, plot, thinned
from dynamo.cli.bench.replay.jobs import Replayed
from dynamo.replay.presets import Bar, Preset

Row = Mapping[str, float]
"""The figures of a row by name: numbers only"""

# (heading, figure, format)
_COLUMNS: Final = (
    ("hits", "prefix_cache_reused_ratio", "{:.3f}"),
    ("of pooled", "hit_rate_by_pooled", "{:.3f}"),
    ("TTFT ms", "mean_ttft_ms", "{:,.0f}"),
    ("p90", "p90_ttft_ms", "{:,.0f}"),
    ("p99", "p99_ttft_ms", "{:,.0f}"),
    ("ITL ms", "mean_itl_ms", "{:.1f}"),
    ("p99", "p99_itl_ms", "{:,.0f}"),
    ("e2e ms", "mean_e2e_latency_ms", "{:,.0f}"),
    ("spread", "prefill_spread", "{:.2f}"),
    ("us/choice", "mean_decision_us", "{:,.0f}"),
)
HEAD: Final = (
    "",
    "hits",
    "of pooled",
    "TTFT ms",
    "x",
    *(name for name, _, _ in _COLUMNS[3:8]),
    "x",
    "spread",
    "us/choice",
)
_RATIOS: Final = {"mean_ttft_ms", "mean_e2e_latency_ms"}  # followed by the ratio to the first row
_REMARKS: Final = {
    "equal_choices": "{label}: the other frontends would have chosen the same worker {value:.1%} of the time",
    "exact_after_ms": "{label}: every index was exact again {value:,.0f} ms after a restart",
    "failed": "{label}: {value:,.0f} requests failed",
    "p99_late_ms": "{label}: requests were sent up to {value:,.1f} ms late (p99)",
    "lost_events": "{label}: {value:,.0f} KV events were lost on their way",
    "stampede_workers": "{label}: the common prefix was computed on {value:.1f} workers",
}


class JudgedBar:
    """A bar with what was found."""

    def __init__(self, bar: Bar, value: float) -> None:
        self.bar = bar
        self.value = value
        self.holds = bar.holds(value)

    def __str__(self) -> str:
        return f"{'pass' if self.holds else 'MISS'}  {self.value:8.3f}  {self.bar}"


class PresetReport:
    """One preset over all seeds."""

    def __init__(self, preset: Preset, replayed: Sequence[Replayed]) -> None:
        self.preset = preset
        self.replayed = replayed
        self.rows: dict[str, Row] = {
            variant.label: _means([each.figures[place].report() for each in replayed])
            for place, variant in enumerate(preset.variants)
        }

    def table(self) -> list[tuple[str, ...]]:
        """Return the rows under `HEAD`."""
        first = next(iter(self.rows.values()))
        return [(label, *_cells(row, first)) for label, row in self.rows.items()]

    def bars(self) -> list[JudgedBar]:
        """Return the bars whose rows were replayed."""
        found = ((bar, bar.value(self.rows)) for bar in self.preset.bars)
        return [JudgedBar(bar, value) for bar, value in found if value is not None]

    def remarks(self) -> Iterator[str]:
        """Yield what a table has no column for."""
        for label, row in self.rows.items():
            for name, text in _REMARKS.items():
                if name in row:
                    yield text.format(label=label, value=row[name])

    @property
    def busy(self) -> float:
        """The share of the time that workers computed prompts in the first row."""
        return next(iter(self.rows.values()))["prefill_busy"]


def reports_of(presets: Sequence[Preset], replayed: Sequence[Replayed]) -> list[PresetReport]:
    """Return the report of each preset."""
    return [
        PresetReport(preset, sorted((each for each in replayed if each.preset == number), key=_seed))
        for number, preset in enumerate(presets)
    ]


def _seed(replayed: Replayed) -> int:
    return replayed.seed


def _means(reports: Sequence[Mapping[str, object]]) -> Row:
    """Return the mean of every figure that is a number."""
    means: dict[str, float] = {}
    for name in reports[0]:
        values = [value for report in reports if isinstance(value := report.get(name), (int, float))]
        if len(values) == len(reports):
            means[name] = sum(values) / len(values)
    return means


def _cells(row: Row, first: Row) -> Iterator[str]:
    for _, figure, text in _COLUMNS:
        yield text.format(row[figure]) if figure in row else ""
        if figure in _RATIOS:
            yield f"{row[figure] / first[figure]:.2f}" if first[figure] else ""


def as_json(reports: Sequence[PresetReport], settings: Sequence[str], cpu_seconds: float) -> dict[str, object]:
    """Return everything as it goes into the JSON file."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "arguments": list(settings),
        "cpu_seconds": round(cpu_seconds, 3),
        "presets": {
            report.preset.name: {
                "what": report.preset.what,
                "rows": report.rows,
                "bars": [
                    {"bar": str(each.bar), "value": round(each.value, 4), "holds": each.holds} for each in report.bars()
                ],
                "replays": [
                    {"seed": each.seed, **figures.report()} for each in report.replayed for figures in each.figures
                ],
            }
            for report in reports
        },
    }


# The comparison as a plot, and the report as one page that loads nothing.

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
