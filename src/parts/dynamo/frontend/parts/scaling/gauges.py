"""The autoscale signals as metrics."""

from __future__ import annotations

from typing import Final

from dynamo.runtime.observe.metrics import Family, Gauge, MetricsRegistry
from dynamo.scaling.decide import ScaleReason

AUTOSCALE_PREFIX: Final = "dynamo_autoscale"  # whatever the prefix of the frontend's own: manifests name them
_ROLE: Final = ("model", "namespace", "role")

FAMILIES: Final = (
    Family(
        "saturation", "gauge",
        "How full the workers are: 1 is full; see [the signal](scaling.md#the-signal). Averaged over 15 s", _ROLE,
    ),
    Family("desired_replicas", "gauge", "How many workers there should be", _ROLE),
    Family("ready_replicas", "gauge", "How many there are", _ROLE),
    Family(
        "reason", "gauge",
        "1 for the rule that decided how many there should be; see [the rules](scaling.md#the-rules)", (*_ROLE, "reason"),
    ),
)  # fmt: skip


class AutoscaleGauges:
    """The gauges of one role of one model."""

    def __init__(self, registry: MetricsRegistry, labels: tuple[str, str, str]) -> None:
        fixed = dict(zip(_ROLE, labels, strict=True))
        self._registry = registry
        by_name = {family.name: family.under(AUTOSCALE_PREFIX) for family in FAMILIES}
        self._values = tuple(
            by_name[name].gauge(registry, fixed) for name in ("saturation", "desired_replicas", "ready_replicas")
        )
        self._reason_family, self._fixed = by_name["reason"], fixed
        self._reason: tuple[ScaleReason, Gauge] | None = None

    def show(self, saturation: float, desired: int, ready: int, rule: ScaleReason) -> None:
        for gauge, value in zip(self._values, (saturation, desired, ready), strict=True):
            gauge.set(value)
        if self._reason is not None and self._reason[0] is rule:
            return
        if self._reason is not None:
            self._registry.remove(self._reason[1])
        gauge = self._reason_family.gauge(self._registry, {**self._fixed, "reason": rule.value})
        gauge.set(1)
        self._reason = rule, gauge

    def remove(self) -> None:
        """Show nothing of the role any more."""
        for gauge in (*self._values, *(() if self._reason is None else (self._reason[1],))):
            self._registry.remove(gauge)
        self._reason = None
