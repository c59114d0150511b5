"""One metric as data: what is registered, and the row of `docs/metrics.md`, from one place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from dynamo.runtime.observe.metrics.registry import (
    DURATION_BUCKETS,
    Counter,
    Gauge,
    Histogram,
    Labels,
    MetricsRegistry,
    TooManySeries,
    Vector,
)

Kind = Literal["counter", "gauge", "histogram"]

_LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Family(Struct, frozen=True):
    """A metric's name, kind, meaning and labels.

    `counter` and its like give the one series with the labels `fixed`; `counters` and its like give a vector over the
    names `labels` that `fixed` leaves open. Registering the same series again continues it. Beyond `MAX_SERIES` a series is
    not exposed, and one warning reports it (`Vector`).
    """

    name: str
    kind: Kind
    meaning: str  # a sentence; links are for the page, and left out of the text that is exposed
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = DURATION_BUCKETS

    @property
    def help(self) -> str:
        """The meaning as `# HELP` has it."""
        return _LINK.sub(r"\1", self.meaning)

    def under(self, prefix: str) -> Family:
        """Return the same family with a prefix before its name."""
        return replace(self, name=f"{prefix}_{self.name}")

    def with_buckets(self, buckets: Sequence[float]) -> Family:
        """Return the same histogram with other bounds."""
        return replace(self, buckets=tuple(buckets))

    def counter(self, registry: MetricsRegistry, fixed: Labels = ()) -> Counter:
        """Return the counter, exposed at 0 from now on."""
        assert self.kind == "counter"
        try:
            return registry.counter(self.name, self.help, fixed, exist_ok=True)
        except TooManySeries as full:
            registry.complain_once(self.name, full)
            return Counter()

    def gauge(self, registry: MetricsRegistry, fixed: Labels = ()) -> Gauge:
        """Return the gauge, exposed at 0 from now on."""
        assert self.kind == "gauge"
        try:
            return registry.gauge(self.name, self.help, fixed, exist_ok=True)
        except TooManySeries as full:
            registry.complain_once(self.name, full)
            return Gauge()

    def histogram(self, registry: MetricsRegistry, fixed: Labels = ()) -> Histogram:
        """Return the histogram, exposed at 0 from now on."""
        assert self.kind == "histogram"
        try:
            return registry.histogram(self.name, self.help, fixed, buckets=self.buckets, exist_ok=True)
        except TooManySeries as full:
            registry.complain_once(self.name, full)
            return Histogram(self.buckets)

    def counters(self, registry: MetricsRegistry, fixed: Labels = ()) -> Vector[Counter]:
        """Return counters that appear on first use."""
        assert self.kind == "counter"
        return registry.counter_vector(self.name, self.help, self._open(fixed), fixed)

    def gauges(self, registry: MetricsRegistry, fixed: Labels = ()) -> Vector[Gauge]:
        """Return gauges that appear on first use."""
        assert self.kind == "gauge"
        return registry.gauge_vector(self.name, self.help, self._open(fixed), fixed)

    def histograms(self, registry: MetricsRegistry, fixed: Labels = ()) -> Vector[Histogram]:
        """Return histograms that appear on first use."""
        assert self.kind == "histogram"
        return registry.histogram_vector(self.name, self.help, self._open(fixed), fixed, buckets=self.buckets)

    def _open(self, fixed: Labels) -> tuple[str, ...]:
        given = dict(fixed)
        return tuple(name for name in self.labels if name not in given)
