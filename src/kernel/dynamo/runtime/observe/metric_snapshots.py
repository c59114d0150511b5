"""The metrics of several processes as one: a snapshot travels, and adds up with others.

Counters and histograms are summed. So are gauges, which report how much of something there is here, except those that state
a fact all processes know alike (a model's context length): of these the highest counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from dynamo.runtime.observe.metrics import Counter, Gauge, Histogram, MetricsRegistry, TooManySeries

IsFact = Callable[[str], bool]
"""Whether the gauge of this name states a fact, the same in all processes."""


class SnapshotError(ValueError):
    """The bytes are not a valid snapshot, or are a snapshot of another version of the metrics."""


class _Series(msgspec.Struct, array_like=True):
    labels: str  # as they stand between the braces
    value: float  # a histogram's sum
    counts: list[int] = []


class _Family(msgspec.Struct, array_like=True):
    name: str
    kind: str
    help: str
    series: list[_Series]
    bounds: list[float] = []  # a histogram's


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[_Family]).decode


def snapshot(registry: MetricsRegistry) -> bytes:
    """Encode every series of `registry`. The text of its callbacks is left out, because text does not add up."""
    families = []
    for name, kind, help_text, held in registry.families():
        series, bounds = [], []
        for labels, metric in held:
            if isinstance(metric, Histogram):
                bounds = list(metric.bounds)
                series.append(_Series(labels, metric.sum, metric.counts))
            else:
                series.append(_Series(labels, metric.value))
        families.append(_Family(name, kind, help_text, series, bounds))
    return _encode(families)


def absorb(registry: MetricsRegistry, encoded: bytes, *, is_fact: IsFact, gauges: bool = True) -> None:
    """Add a snapshot to `registry`; `gauges` false leaves them out, which is right for a process that has ended.

    Raises SnapshotError; what was added before it stays.
    """
    try:
        for family in _decode(encoded):
            if gauges or family.kind != "gauge":
                for series in family.series:
                    _add(registry, family, series, is_fact=is_fact)
    except TooManySeries:
        return  # as in a process of its own: what is beyond the bound is not exposed
    except (msgspec.MsgspecError, ValueError) as error:
        raise SnapshotError(f"metrics of another process: {error}") from error


def _add(registry: MetricsRegistry, family: _Family, series: _Series, *, is_fact: IsFact) -> None:
    where = (family.name, family.kind, family.help, series.labels)
    match family.kind:
        case "counter":
            registry.held(*where, Counter()).inc(series.value)
        case "gauge":
            gauge = registry.held(*where, Gauge())
            gauge.set(max(gauge.value, series.value) if is_fact(family.name) else gauge.value + series.value)
        case "histogram":
            histogram = registry.held(*where, Histogram(family.bounds))
            if histogram.bounds != tuple(family.bounds):
                raise ValueError(f"{family.name} has other buckets")
            histogram.add(series.counts, series.value)
        case other:
            raise ValueError(f"{family.name} is of the unknown kind {other!r}")
