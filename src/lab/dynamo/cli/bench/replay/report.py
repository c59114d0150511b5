"""What a command line of replays found: means over seeds, tables, bars, JSON. Pure."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dynamo import __version__
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
