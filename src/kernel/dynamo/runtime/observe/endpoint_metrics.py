"""What one served endpoint counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from dynamo.runtime.observe.metrics import Family, MetricsRegistry, sanitize

AUTO_LABELS: Final = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id")

ErrorType = Literal[
    "deserialization",
    "invalid_message",
    "response_stream",
    "generate",
    "serialization",
    "publish_response",
    "publish_final",
]

REQUESTS: Final = Family(
    "dynamo_component_requests_total", "counter", "Requests this endpoint has begun to handle", AUTO_LABELS
)
INFLIGHT: Final = Family("dynamo_component_inflight_requests", "gauge", "Requests being handled now", AUTO_LABELS)
DURATION: Final = Family(
    "dynamo_component_request_duration_seconds", "histogram", "Seconds from dispatch to end", AUTO_LABELS
)
REQUEST_BYTES: Final = Family(
    "dynamo_component_request_bytes_total", "counter", "Bytes of request payloads received", AUTO_LABELS
)
RESPONSE_BYTES: Final = Family(
    "dynamo_component_response_bytes_total", "counter", "Bytes of encoded response items sent", AUTO_LABELS
)
CANCELLATIONS: Final = Family(
    "dynamo_component_cancellation_total", "counter", "Requests stopped or killed by their caller", AUTO_LABELS
)
ERRORS: Final = Family(
    "dynamo_component_errors_total",
    "counter",
    "Failed requests; this version only uses `generate`",
    (*AUTO_LABELS, "error_type"),
)
FAMILIES: Final = (REQUESTS, INFLIGHT, DURATION, REQUEST_BYTES, RESPONSE_BYTES, CANCELLATIONS, ERRORS)


def endpoint_labels(namespace: str, component: str, endpoint: str, worker_id: str) -> tuple[tuple[str, str], ...]:
    """Return the labels of an endpoint's metrics; an empty value gives no label. `worker_id` is lower-case hex."""
    return tuple(zip(AUTO_LABELS, (namespace, component, endpoint, worker_id), strict=True))


class EndpointMetrics:
    """What one served endpoint counts. Every series exists, at 0, from construction; `error_type`s on first use.

    Methods are called once per request, never per token: `response_bytes` takes the sum of a whole response.
    Constructing it again for the same endpoint continues the same series (an endpoint may be served again).
    """

    __slots__ = ("_bytes_in", "_bytes_out", "_cancelled", "_duration", "_errors", "_inflight", "_requests")

    def __init__(
        self,
        registry: MetricsRegistry,
        *,
        namespace: str,
        component: str,
        endpoint: str,
        worker_id: str,
        user_labels: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Raises ValueError when a user label takes the name of an automatic one, or is given twice."""
        for name, _ in user_labels:
            if sanitize(name, label=True) in AUTO_LABELS:
                raise ValueError(f"metrics_labels: {name!r} is set by the framework; use another label name")
        labels = endpoint_labels(namespace, component, endpoint, worker_id) + tuple((n, v) for n, v in user_labels)

        self._requests = REQUESTS.counter(registry, labels)
        self._bytes_in = REQUEST_BYTES.counter(registry, labels)
        self._bytes_out = RESPONSE_BYTES.counter(registry, labels)
        self._cancelled = CANCELLATIONS.counter(registry, labels)
        self._inflight = INFLIGHT.gauge(registry, labels)
        self._duration = DURATION.histogram(registry, labels)
        self._errors = ERRORS.counters(registry, labels)

    def started(self, request_bytes: int) -> None:
        """Count a request that begins; `request_bytes` is the size of its payload on the wire."""
        self._requests.inc()
        self._bytes_in.inc(request_bytes)
        self._inflight.inc()

    def finished(self, seconds: float) -> None:
        """Count the end of a request; call it on every path for each `started`."""
        self._inflight.dec()
        self._duration.observe(seconds)

    def cancelled(self) -> None:
        self._cancelled.inc()

    def error(self, error_type: ErrorType) -> None:
        self._errors.labels(error_type).inc()

    def response_bytes(self, count: int) -> None:
        """Count the bytes of all items of one response, without the framing."""
        self._bytes_out.inc(count)
