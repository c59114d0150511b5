"""What goes wrong between this process and NATS."""

from __future__ import annotations

from typing import Final

from dynamo.runtime.observe.metrics import Family, MetricsRegistry

ERRORS: Final = Family(
    "dynamo_transport_nats_errors_total", "counter", "Errors of the NATS connection, by class", ("error_type",)
)


class NatsMetrics:
    """Errors of the connection. One per process."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._errors = ERRORS.counters(registry)

    def failed(self, error_type: str) -> None:
        """Count an error; `error_type` is its class."""
        self._errors.labels(error_type).inc()
