"""Metrics of a process: bound once, counted without a lock, written as Prometheus text.

Why not `prometheus_client` itself: it decides at import time, from `PROMETHEUS_MULTIPROC_DIR`, whether every value of
the process lives in memory or in shared files. Engines set that variable inside `start()`, long after the runtime was
built, so a runtime that had imported the library would have taken the decision away from them (and with the variable
preset our own values would be written to the engine's files and exposed twice). It also costs 5 MB and about 1 us for
each increment. Registries of that library join the output through `MetricsRegistry.add_callback`.

Counting belongs to the event loop; `Gauge.set` may be called from any thread. `expose` may run in any thread.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from dynamo.runtime.observe.metrics.exposition import (
    Block,
    TypedFamily,
    braces,
    escape_help,
    label_text,
    merge_text,
    merge_typed,
    number_text,
    render,
    sanitize,
)

logger = logging.getLogger(__name__)

DURATION_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Seconds; a request lives from milliseconds (embeddings) to ten minutes (long reasoning)."""

LATENCY_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Seconds; for the parts of a request's way that should take well under a millisecond."""

MAX_SERIES: Final = 10_000
"""Series per metric. Label values may come from outside (model names); a map that outsiders can grow needs a bound."""

MAX_CALLBACKS: Final = 256

Collected = tuple[str, str, str, float]
"""What a collector returns for each of its families: name, kind, help and value; there are no labels."""

Labels = Mapping[str, str] | Iterable[tuple[str, str]]


_NOWHERE: Final = ("", "")  # the place of a series, in a registry, is the name of its metric and its label text


class Counter:
    """A number that only grows."""

    __slots__ = ("_place", "_value")

    def __init__(self) -> None:
        self._value: float = 0
        self._place = _NOWHERE

    def inc(self, amount: float = 1) -> None:
        """Add `amount`. Raises ValueError when it is negative: a rate over a falling counter is nonsense."""
        if amount < 0:
            raise ValueError(f"a counter cannot fall (by {amount})")
        self._value += amount

    @property
    def value(self) -> float:
        return self._value

    def _samples(self, name: str, labels: str) -> list[str]:
        return [f"{name}{braces(labels)} {number_text(self._value)}"]


class Gauge:
    """A number that comes and goes, or a function that is called at every scrape."""

    __slots__ = ("_place", "_read", "_value")

    def __init__(self) -> None:
        self._value: float = 0
        self._place = _NOWHERE
        self._read: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        self._value = value

    def inc(self, amount: float = 1) -> None:
        self._value += amount

    def dec(self, amount: float = 1) -> None:
        self._value -= amount

    def read_from(self, read: Callable[[], float]) -> None:
        """Take the value from `read()` from now on; it is called at every scrape, in the scraping thread."""
        self._read = read

    @property
    def value(self) -> float:
        return self._value if self._read is None else self._read()

    def _samples(self, name: str, labels: str) -> list[str]:
        return [f"{name}{braces(labels)} {number_text(self.value)}"]


class Histogram:
    """How often a value fell into each bucket."""

    __slots__ = ("_bounds", "_counts", "_place", "_sum")

    def __init__(self, buckets: Sequence[float] = DURATION_BUCKETS) -> None:
        bounds = tuple(bound for bound in buckets if bound != math.inf)
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"histogram buckets must be non-empty and strictly increasing, got {tuple(buckets)}")
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._place = _NOWHERE

    def observe(self, value: float) -> None:
        bounds = self._bounds
        self._counts[0 if value <= bounds[0] else bisect_left(bounds, value)] += 1
        self._sum += value

    def observe_many(self, value: float, count: int) -> None:
        """Observe the same value `count` times: a batch of tokens is one call."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def sum(self) -> float:
        return self._sum

    @property
    def bounds(self) -> tuple[float, ...]:
        """The upper bounds, without `+Inf`."""
        return self._bounds

    @property
    def counts(self) -> list[int]:
        """The number of values in each bucket, `+Inf` last; not cumulated."""
        return list(self._counts)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add the counts of another histogram with the same bounds. Raises ValueError for other bounds."""
        if len(counts) != len(self._counts):
            raise ValueError(f"{len(counts)} buckets cannot be added to {len(self._counts)}")
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, counts, strict=True)]
        self._sum += total

    def _samples(self, name: str, labels: str) -> list[str]:
        counts, lines, total = list(self._counts), [], 0
        comma = "," if labels else ""
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels}{comma}le="{number_text(bound)}"}} {total}')
        lines.append(f"{name}_sum{braces(labels)} {number_text(self._sum)}")
        lines.append(f"{name}_count{braces(labels)} {total}")
        return lines


def observe_each(histograms: Sequence[Histogram], values: Sequence[float]) -> None:
    """Observe one value in each histogram. One call for what a request has to count: many of its values are 0 or tiny."""
    for histogram, value in zip(histograms, values, strict=True):
        bounds = histogram._bounds
        histogram._counts[0 if value <= bounds[0] else bisect_left(bounds, value)] += 1
        histogram._sum += value


def count_up(*metrics: Counter | Gauge) -> None:
    """Add 1 to each metric."""
    for metric in metrics:
        metric._value += 1


def add_each(counters: Sequence[Counter], amounts: Sequence[float]) -> None:
    """Add to each counter its amount, none of which may be negative."""
    for counter, amount in zip(counters, amounts, strict=True):
        if amount < 0:
            raise ValueError(f"a counter cannot fall (by {amount})")
        counter._value += amount


def count_down(*gauges: Gauge) -> None:
    """Take 1 from each gauge."""
    for gauge in gauges:
        gauge._value -= 1


def set_each(gauges: Sequence[Gauge], values: Sequence[float]) -> None:
    """Set each gauge to its value."""
    for gauge, value in zip(gauges, values, strict=True):
        gauge._value = value


def count_over(source: Gauge, target: Gauge) -> None:
    """Move what is counted once from one gauge to another one."""
    source._value -= 1
    target._value += 1


Metric = Counter | Gauge | Histogram
N = TypeVar("N")
T = TypeVar("T")
M = TypeVar("M", Counter, Gauge, Histogram)


@dataclass(slots=True)
class _Family:
    kind: str
    help: str
    series: dict[str, Metric] = field(default_factory=dict)  # by the text between the braces


class TooManySeries(ValueError):
    """A metric reached `MAX_SERIES`."""


class Vector(Generic[M]):
    """Series of one metric that appear when their label values are first used.

    Past `MAX_SERIES` a new combination counts into a series that is not exposed, and one warning reports it: losing a number
    is better than losing the request that it counts.
    """

    __slots__ = ("_bind", "_complained", "_known", "_label_names", "_spare")

    def __init__(
        self, label_names: tuple[str, ...], bind: Callable[[tuple[tuple[str, str], ...]], M], spare: M
    ) -> None:
        self._label_names = label_names
        self._bind: Callable[[tuple[tuple[str, str], ...]], M] = bind
        self._spare: M = spare
        self._known: dict[tuple[str, ...], M] = {}
        self._complained = False

    def labels(self, *values: str) -> M:
        """Return the series with these values, in the order of the label names. Keep the result: using it is the cheap part."""
        found = self._known.get(values)
        if found is None:
            if len(values) != len(self._label_names):
                raise ValueError(f"expected values for {self._label_names}, got {values!r}")
            try:
                found = self._bind(tuple(zip(self._label_names, values, strict=True)))
            except TooManySeries as full:
                if not self._complained:
                    self._complained = True
                    logger.warning("%s; further combinations are not exposed", full)
                return self._spare
            self._known[values] = found
        return found

    def series(self) -> list[M]:
        """Return every series that was used and is exposed."""
        return list(self._known.values())


class MetricsRegistry:
    """All metrics of one runtime, by name, and the callbacks that add foreign exposition text."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._callbacks: list[Callable[[], str | bytes]] = []
        self._typed: list[Callable[[], Iterable[TypedFamily]]] = []
        self._collectors: list[Callable[[], Iterable[Collected]]] = []
        self._complained: set[int | str] = set()

    def counter(self, name: str, help: str, labels: Labels = (), *, exist_ok: bool = False) -> Counter:
        """Register one series, exposed at 0 from now on.

        Raises ValueError when the name is taken by another type, or the very series exists and `exist_ok` is false.
        """
        return self._bind(name, "counter", help, labels, Counter(), exist_ok)

    def gauge(self, name: str, help: str, labels: Labels = (), *, exist_ok: bool = False) -> Gauge:
        """Register a gauge. See `counter`."""
        return self._bind(name, "gauge", help, labels, Gauge(), exist_ok)

    def histogram(
        self,
        name: str,
        help: str,
        labels: Labels = (),
        *,
        buckets: Sequence[float] = DURATION_BUCKETS,
        exist_ok: bool = False,
    ) -> Histogram:
        """Register a histogram. See `counter`; buckets are upper bounds, `+Inf` is added."""
        return self._bind(name, "histogram", help, labels, Histogram(buckets), exist_ok)

    def counter_vector(self, name: str, help: str, label_names: Sequence[str], labels: Labels = ()) -> Vector[Counter]:
        """Return counters that appear on first use; `labels` are common to all of them."""
        fixed = _pairs(labels)
        return Vector(tuple(label_names), lambda more: self.counter(name, help, fixed + more, exist_ok=True), Counter())

    def gauge_vector(self, name: str, help: str, label_names: Sequence[str], labels: Labels = ()) -> Vector[Gauge]:
        """Register a vector of gauges. See `counter_vector`."""
        fixed = _pairs(labels)
        return Vector(tuple(label_names), lambda more: self.gauge(name, help, fixed + more, exist_ok=True), Gauge())

    def histogram_vector(
        self,
        name: str,
        help: str,
        label_names: Sequence[str],
        labels: Labels = (),
        *,
        buckets: Sequence[float] = DURATION_BUCKETS,
    ) -> Vector[Histogram]:
        """Register a vector of histograms. See `counter_vector`."""
        fixed = _pairs(labels)
        return Vector(
            tuple(label_names),
            lambda more: self.histogram(name, help, fixed + more, buckets=buckets, exist_ok=True),
            Histogram(buckets),
        )

    def remove(self, metric: Metric) -> None:
        """Stop exposing a series; absent is fine."""
        name, key = metric._place
        family = self._families.get(name)
        if family is not None and family.series.get(key) is metric:
            del family.series[key]
            if not family.series:
                del self._families[name]

    def forget(self, names: Iterable[str], labels: Labels) -> None:
        """Stop exposing the series of the metrics `names` whose labels begin with `labels`."""
        start = label_text(_pairs(labels))
        for name in names:
            family = self._families.get(name)
            if family is None:
                continue
            for key in [key for key in family.series if key == start or key.startswith(f"{start},")]:
                del family.series[key]
            if not family.series:
                del self._families[name]

    def add_callback(self, callback: Callable[[], str | bytes]) -> None:
        """Append `callback()`, Prometheus text, to every scrape. One that raises is logged once and left out."""
        self._check_room()
        self._callbacks.append(callback)

    def add_typed_callback(self, callback: Callable[[], Iterable[TypedFamily]]) -> None:
        """Like `add_callback` for families as values. A family that a text callback also gives is taken from the text,
        because engines commonly register both forms of one registry."""
        self._check_room()
        self._typed.append(callback)

    def add_collector(self, collect: Callable[[], Iterable[Collected]]) -> None:
        """Add values that are read at each scrape. A family that an engine exposes under the same name wins."""
        self._check_room()
        self._collectors.append(collect)

    def _check_room(self) -> None:
        if len(self._callbacks) + len(self._typed) + len(self._collectors) >= MAX_CALLBACKS:
            raise ValueError(f"more than {MAX_CALLBACKS} metrics callbacks: register one per registry, not per request")

    def complain_once(self, name: str, full: TooManySeries) -> None:
        """Report, for the first time only, that further series of a metric are not exposed."""
        if name not in self._complained:
            self._complained.add(name)
            logger.warning("%s; further ones are not exposed", full)

    def families(self) -> list[tuple[str, str, str, list[tuple[str, Metric]]]]:
        """Return what is here now, without the callbacks: (name, kind, help, [(label text, metric)])."""
        return [
            *(
                (name, family.kind, family.help, list(family.series.items()))
                for name, family in list(self._families.items())
            ),
            *((name, kind, help, [("", metric)]) for name, kind, help, metric in self._collected()),
        ]

    def _collected(self) -> Iterator[tuple[str, str, str, Metric]]:
        for collect in self._collectors:
            for name, kind, help, value in collect():
                metric: Counter | Gauge = Counter() if kind == "counter" else Gauge()
                metric.inc(value)
                yield name, kind, help, metric

    def held(self, name: str, kind: str, help: str, labels: str, fresh: M) -> M:
        """Return the series with this label text; it is `fresh` if there was none.

        Raises ValueError when the name or the series is of another type, and `TooManySeries`.
        """
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = _Family(kind, help)
        found = family.series.get(labels)
        if found is None and family.kind == kind:
            if len(family.series) >= MAX_SERIES:
                raise TooManySeries(f"metric {name} has {MAX_SERIES} series")
            family.series[labels] = found = fresh
            fresh._place = name, labels
        if type(found) is not type(fresh) or family.kind != kind:
            raise ValueError(f"metric {name} is a {family.kind} and no {kind}")
        return found

    def expose(self) -> bytes:
        """Write the whole output, sorted by family name. Callbacks may take long: call it outside the event loop if any."""
        blocks: dict[str, Block] = {}
        for name, family in list(self._families.items()):
            block = blocks[name] = Block(family.kind, escape_help(family.help))
            for labels, metric in list(family.series.items()):
                block.lines += metric._samples(name, labels)
        for callback in self._callbacks:
            text = self._ask(callback, "")
            merge_text(blocks, text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
        known = frozenset(blocks)
        for typed in self._typed:
            for values in self._ask(typed, ()):
                merge_typed(blocks, known, values)
        for name, kind, help, metric in self._collected():
            if name not in blocks:
                blocks[name] = Block(kind, escape_help(help), metric._samples(name, ""))
        return render(blocks)

    @property
    def has_callbacks(self) -> bool:
        """Whether a scrape runs foreign code (and so belongs in a thread)."""
        return bool(self._callbacks or self._typed)

    def _ask(self, callback: Callable[[], T], nothing: N) -> T | N:
        try:
            return callback()
        except Exception:  # a broken vendor registry must not take the other metrics with it
            if id(callback) not in self._complained:
                self._complained.add(id(callback))
                logger.exception("metrics callback %r failed; its metrics are missing from /metrics", callback)
            return nothing

    def _bind(self, name: str, kind: str, help: str, labels: Labels, fresh: M, exist_ok: bool) -> M:
        name = sanitize(name)
        family = self._families.get(name)
        if family is None:
            family = _Family(kind, help)
        elif family.kind != kind:
            raise ValueError(f"metric {name} is a {family.kind}, it cannot also be a {kind}")
        key = label_text(_pairs(labels))
        held = family.series.get(key)
        if held is not None:
            if exist_ok and type(held) is type(fresh):
                return held
            raise ValueError(f"metric {name}{braces(key)} is registered already")
        if len(family.series) >= MAX_SERIES:
            raise TooManySeries(f"metric {name} has {MAX_SERIES} series; a label value is probably unbounded")
        self._families[name] = family
        family.series[key] = fresh
        fresh._place = name, key
        return fresh


def _pairs(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(labels.items() if isinstance(labels, Mapping) else labels)
