"""The families of the table, opened in one registry under one prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.frontend.base.metrics.buckets import buckets_of
from dynamo.frontend.base.metrics.table import FAMILIES
from dynamo.runtime.observe.metrics import Counter, Family, Gauge, Histogram, MetricsRegistry, Vector


class FrontendFamilies:
    """Opens families by their names without the prefix."""

    def __init__(
        self, registry: MetricsRegistry, prefix: str, env: Mapping[str, str], families: Sequence[Family] = FAMILIES
    ) -> None:
        """`env` holds the `DYN_HISTOGRAM_*` settings; `families`: those of the frontend itself, or of one part."""
        self.registry = registry
        self.by_name = {family.name: family.under(prefix) for family in families}
        self._prefix, self._env = prefix, env

    def of(self, families: Sequence[Family]) -> FrontendFamilies:
        """Return the families of a part, in the same registry under the same prefix."""
        return FrontendFamilies(self.registry, self._prefix, self._env, families)

    def counters(self, name: str) -> Vector[Counter]:
        return self.by_name[name].counters(self.registry)

    def gauges(self, name: str) -> Vector[Gauge]:
        return self.by_name[name].gauges(self.registry)

    def histograms(self, name: str, setting: str = "") -> Vector[Histogram]:
        """Open histograms. `setting`: the one of `LOG_BUCKETS` that names their buckets. Raises ValueError naming the variable
        when it makes none.
        """
        family = self.by_name[name]
        if setting:
            family = family.with_buckets(buckets_of(setting, self._env))
        return family.histograms(self.registry)

    def counter(self, name: str) -> Counter:
        return self.by_name[name].counter(self.registry)

    def gauge(self, name: str) -> Gauge:
        return self.by_name[name].gauge(self.registry)
