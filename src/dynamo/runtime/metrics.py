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
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Generic, Literal, TypeVar

logger = logging.getLogger(__name__)

__all__ = [
    "AUTO_LABELS",
    "CONTENT_TYPE",
    "DURATION_BUCKETS",
    "LATENCY_BUCKETS",
    "MAX_SERIES",
    "CallerMetrics",
    "Counter",
    "EndpointMetrics",
    "ErrorType",
    "Gauge",
    "Histogram",
    "MetricsRegistry",
    "TooManySeries",
    "TransportMetrics",
    "TypedFamily",
    "Vector",
    "WorkHandlerMetrics",
    "endpoint_labels",
    "escape_label",
    "register_uptime",
    "sanitize",
]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

DURATION_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Seconds; a request lives from milliseconds (embeddings) to ten minutes (long reasoning)."""

LATENCY_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Seconds; for the parts of a request's way that should take well under a millisecond."""

MAX_SERIES: Final = 10_000
"""Series per metric. Label values may come from outside (model names); a map that outsiders can grow needs a bound."""

MAX_CALLBACKS: Final = 256

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

Labels = Mapping[str, str] | Iterable[tuple[str, str]]
TypedFamily = tuple[Any, ...]
"""What a typed callback returns, in a list: `(family, help, type word, ..., samples)` with samples
`(name, [(label, value)], value, ...)`. Versions of the contract put further members where the dots are."""

_INVALID: Final = re.compile(r"[^a-zA-Z0-9_:]")


@lru_cache(maxsize=1024)  # the same few names come with every series
def sanitize(name: str, *, label: bool = False) -> str:
    """`name` as Prometheus accepts it: other characters become `_`, a leading digit gets a `_` before it."""
    cleaned = _INVALID.sub("_", name)
    if label:
        cleaned = cleaned.replace(":", "_")
    return f"_{cleaned}" if not cleaned or cleaned[0].isdigit() else cleaned


def escape_label(value: str) -> str:
    """A label value as it stands between the quotes."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    if value == -math.inf:
        return "-Inf"
    if value != value:
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


class Counter:
    """A number that only grows."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`. Raises ValueError when it is negative: a rate over a falling counter is nonsense."""
        if amount < 0:
            raise ValueError(f"a counter cannot fall (by {amount})")
        self._value += amount

    @property
    def value(self) -> float:
        return self._value

    def _samples(self, name: str, labels: str) -> list[str]:
        return [f"{name}{_braces(labels)} {_number(self._value)}"]


class Gauge:
    """A number that comes and goes, or a function that is asked at scrape time."""

    __slots__ = ("_read", "_value")

    def __init__(self) -> None:
        self._value: float = 0
        self._read: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        self._value = value

    def inc(self, amount: float = 1) -> None:
        self._value += amount

    def dec(self, amount: float = 1) -> None:
        self._value -= amount

    def read_from(self, read: Callable[[], float]) -> None:
        """From now on the value is `read()`, asked at every scrape (in the scraping thread)."""
        self._read = read

    @property
    def value(self) -> float:
        return self._value if self._read is None else self._read()

    def _samples(self, name: str, labels: str) -> list[str]:
        return [f"{name}{_braces(labels)} {_number(self.value)}"]


class Histogram:
    """How often a value fell into each bucket."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, buckets: Sequence[float] = DURATION_BUCKETS) -> None:
        bounds = tuple(bound for bound in buckets if bound != math.inf)
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"histogram buckets must be non-empty and strictly increasing, got {tuple(buckets)}")
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
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
        """How many values fell into each bucket, `+Inf` last; not cumulated."""
        return list(self._counts)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Count what another histogram with the same bounds has counted. Raises ValueError for other bounds."""
        if len(counts) != len(self._counts):
            raise ValueError(f"{len(counts)} buckets cannot be added to {len(self._counts)}")
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, counts, strict=True)]
        self._sum += total

    def _samples(self, name: str, labels: str) -> list[str]:
        counts, lines, total = list(self._counts), [], 0
        comma = "," if labels else ""
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels}{comma}le="{_number(bound)}"}} {total}')
        lines.append(f"{name}_sum{_braces(labels)} {_number(self._sum)}")
        lines.append(f"{name}_count{_braces(labels)} {total}")
        return lines


def _braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


Metric = Counter | Gauge | Histogram
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

    Past `MAX_SERIES` a new combination counts into a series that nobody sees, and one warning says so: losing a number
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
        """The series with these values, in the order of the label names. Keep the result: it is the cheap part."""
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


class MetricsRegistry:
    """All metrics of one runtime, by name, and the callbacks that add foreign exposition text."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._callbacks: list[Callable[[], str | bytes]] = []
        self._typed: list[Callable[[], Iterable[TypedFamily]]] = []
        self._complained: set[int] = set()

    def counter(self, name: str, help: str, labels: Labels = (), *, exist_ok: bool = False) -> Counter:
        """One series, exposed at 0 from now on.

        Raises ValueError when the name is taken by another type, or the very series exists and `exist_ok` is false.
        """
        return self._bind(name, "counter", help, labels, Counter(), exist_ok)

    def gauge(self, name: str, help: str, labels: Labels = (), *, exist_ok: bool = False) -> Gauge:
        """See `counter`."""
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
        """See `counter`; buckets are upper bounds, `+Inf` is added."""
        return self._bind(name, "histogram", help, labels, Histogram(buckets), exist_ok)

    def counter_vector(self, name: str, help: str, label_names: Sequence[str], labels: Labels = ()) -> Vector[Counter]:
        """Counters that appear on first use; `labels` are common to all of them."""
        fixed = _pairs(labels)
        return Vector(tuple(label_names), lambda more: self.counter(name, help, fixed + more, exist_ok=True), Counter())

    def gauge_vector(self, name: str, help: str, label_names: Sequence[str], labels: Labels = ()) -> Vector[Gauge]:
        """See `counter_vector`."""
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
        """See `counter_vector`."""
        fixed = _pairs(labels)
        return Vector(
            tuple(label_names),
            lambda more: self.histogram(name, help, fixed + more, buckets=buckets, exist_ok=True),
            Histogram(buckets),
        )

    def remove(self, metric: Metric) -> None:
        """Stop exposing a series; absent is fine."""
        for name, family in list(self._families.items()):
            for key, held in list(family.series.items()):
                if held is metric:
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

    def _check_room(self) -> None:
        if len(self._callbacks) + len(self._typed) >= MAX_CALLBACKS:
            raise ValueError(f"more than {MAX_CALLBACKS} metrics callbacks: register one per registry, not per request")

    def families(self) -> list[tuple[str, str, str, list[tuple[str, Metric]]]]:
        """What is here now, without the callbacks: (name, kind, help, [(label text, metric)])."""
        return [
            (name, family.kind, family.help, list(family.series.items()))
            for name, family in list(self._families.items())
        ]

    def held(self, name: str, kind: str, help: str, labels: str, fresh: M) -> M:
        """The series with this label text, which is `fresh` if there was none.

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
        if type(found) is not type(fresh) or family.kind != kind:
            raise ValueError(f"metric {name} is a {family.kind} and no {kind}")
        return found

    def expose(self) -> bytes:
        """The whole output, sorted by family name. Callbacks may take long: call it outside the event loop if any."""
        blocks: dict[str, _Block] = {}
        for name, family in list(self._families.items()):
            block = blocks[name] = _Block(family.kind, _escape_help(family.help))
            for labels, metric in list(family.series.items()):
                block.lines += metric._samples(name, labels)
        for callback in self._callbacks:
            text = self._ask(callback, "")
            _merge(blocks, text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
        known = frozenset(blocks)
        for typed in self._typed:
            for values in self._ask(typed, ()):
                _merge_typed(blocks, known, values)
        out: list[str] = []
        for name in sorted(blocks):
            block = blocks[name]
            if block.help:
                out.append(f"# HELP {name} {block.help}")
            if block.kind:
                out.append(f"# TYPE {name} {block.kind}")
            out += block.lines
        out.append("")
        return "\n".join(out).encode("utf-8", "replace")

    @property
    def has_callbacks(self) -> bool:
        """Whether a scrape runs foreign code (and so belongs in a thread)."""
        return bool(self._callbacks or self._typed)

    def _ask(self, callback: Callable[[], Any], nothing: Any) -> Any:
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
        key = _label_text(_pairs(labels))
        held = family.series.get(key)
        if held is not None:
            if exist_ok and type(held) is type(fresh):
                return held
            raise ValueError(f"metric {name}{_braces(key)} is registered already")
        if len(family.series) >= MAX_SERIES:
            raise TooManySeries(f"metric {name} has {MAX_SERIES} series; a label value is probably unbounded")
        self._families[name] = family
        family.series[key] = fresh
        return fresh


@dataclass(slots=True)
class _Block:
    kind: str
    help: str
    lines: list[str] = field(default_factory=list)


def _pairs(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(labels.items() if isinstance(labels, Mapping) else labels)


def _label_text(pairs: Iterable[tuple[str, str]]) -> str:
    clean = [(sanitize(name, label=True), value) for name, value in pairs if value != ""]
    names = [name for name, _ in clean]
    if len(set(names)) != len(names):
        raise ValueError(f"a label is given twice: {names}")
    return ",".join(f'{name}="{escape_label(str(value))}"' for name, value in clean)


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


_SUFFIXES: Final = ("_bucket", "_sum", "_count", "_total", "_created", "_info", "_gsum", "_gcount")
_SAMPLE: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def _merge(blocks: dict[str, _Block], text: str) -> None:
    """Sort foreign exposition text into `blocks`; the first HELP and TYPE of a family win."""
    current = ""
    for line in text.splitlines():
        if not line.strip():
            continue
        if line.startswith("#"):
            parts = line.split(None, 3)
            if len(parts) >= 3 and parts[1] in ("HELP", "TYPE"):
                current = parts[2]
                block = blocks.setdefault(current, _Block("", ""))
                rest = parts[3] if len(parts) > 3 else ""
                if parts[1] == "HELP":
                    block.help = block.help or rest
                else:
                    block.kind = block.kind or rest
            continue  # other comments and OpenMetrics' "# EOF" would be wrong in the middle of the output
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name = found[0]
        belongs = name == current or (name.startswith(current) and name[len(current) :] in _SUFFIXES)
        if not current or not belongs:
            current = name
            blocks.setdefault(current, _Block("", ""))
        blocks[current].lines.append(line)


def _merge_typed(blocks: dict[str, _Block], known: frozenset[str], family: TypedFamily) -> None:
    name, help_text, kind, samples = family[0], family[1], family[2], family[-1]
    # In values a counter is called `x` and its sample `x_total`; in text both are `x_total`.
    name = f"{name}_total" if kind == "counter" and not name.endswith("_total") else name
    if name in known:
        return
    block = blocks.setdefault(name, _Block(kind, _escape_help(help_text)))
    for sample in samples:
        if not sample[0].endswith("_created"):  # the text format has no place for them
            block.lines.append(f"{sample[0]}{_braces(_label_text(sample[1]))} {_number(sample[2])}")


def endpoint_labels(namespace: str, component: str, endpoint: str, worker_id: str) -> tuple[tuple[str, str], ...]:
    """The labels of an endpoint's metrics; an empty value gives no label. `worker_id` is lower-case hex."""
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

        def counter(name: str, help: str) -> Counter:
            return registry.counter(f"dynamo_component_{name}", help, labels, exist_ok=True)

        self._requests = counter("requests_total", "Requests this endpoint has begun to handle")
        self._bytes_in = counter("request_bytes_total", "Bytes of request payloads received")
        self._bytes_out = counter("response_bytes_total", "Bytes of encoded response items sent")
        self._cancelled = counter("cancellation_total", "Requests stopped or killed by their caller")
        self._inflight = registry.gauge(
            "dynamo_component_inflight_requests", "Requests being handled now", labels, exist_ok=True
        )
        self._duration = registry.histogram(
            "dynamo_component_request_duration_seconds", "Seconds from dispatch to end", labels, exist_ok=True
        )
        self._errors = registry.counter_vector(
            "dynamo_component_errors_total", "Failed requests by the step that failed", ["error_type"], labels
        )

    def started(self, request_bytes: int) -> None:
        """A request begins; `request_bytes` is the size of its payload on the wire."""
        self._requests.inc()
        self._bytes_in.inc(request_bytes)
        self._inflight.inc()

    def finished(self, seconds: float) -> None:
        """The counterpart of `started`, on every path."""
        self._inflight.dec()
        self._duration.observe(seconds)

    def cancelled(self) -> None:
        self._cancelled.inc()

    def error(self, error_type: ErrorType) -> None:
        self._errors.labels(error_type).inc()

    def response_bytes(self, count: int) -> None:
        """Bytes of all items of one response, without the framing."""
        self._bytes_out.inc(count)


class WorkHandlerMetrics:
    """The worker's side of the transport: admission and the time a request spent on its way. One per process."""

    __slots__ = (
        "engine_requests",
        "enqueue_rejected",
        "longest_silence",
        "loop_lag",
        "network_transit_seconds",
        "permit_wait_seconds",
        "pool_active_tasks",
        "pool_capacity",
        "queue_age",
        "queue_capacity",
        "queue_depth",
        "queued_requests",
        "rejected_requests",
        "silence",
        "time_to_first_response_seconds",
    )

    def __init__(self, registry: MetricsRegistry) -> None:
        def gauge(name: str, help: str) -> Gauge:
            return registry.gauge(name, help, exist_ok=True)

        def seconds(name: str, help: str) -> Histogram:
            return registry.histogram(
                f"dynamo_work_handler_{name}", help, buckets=(*LATENCY_BUCKETS, 10.0, 30.0, 60.0), exist_ok=True
            )

        self.engine_requests = gauge("dynamo_engine_request", "Requests in the engine now")
        self.queued_requests = gauge("dynamo_request_queue", "Requests waiting for a place in the engine")
        self.rejected_requests = registry.counter(
            "dynamo_rejection_request_total", "Requests declined because engine and queue were full", exist_ok=True
        )
        self.queue_depth = gauge("dynamo_work_handler_queue_depth", "Requests waiting for a handler task")
        self.queue_capacity = gauge("dynamo_work_handler_queue_capacity", "Bound of that queue")
        self.queue_age = gauge("dynamo_work_handler_queue_age_seconds", "How long the first of these has been waiting")
        self.silence = gauge("dynamo_work_handler_silence_seconds", "For how long no running request has said anything")
        self.longest_silence = gauge(
            "dynamo_work_handler_longest_silence_seconds", "The same of the request that has been silent for longest"
        )
        self.loop_lag = gauge("dynamo_work_handler_event_loop_lag_seconds", "How late the event loop ran its last beat")
        self.pool_active_tasks = gauge("dynamo_work_handler_pool_active_tasks", "Handler tasks running")
        self.pool_capacity = gauge("dynamo_work_handler_pool_capacity", "Bound of running handler tasks")
        self.enqueue_rejected = registry.counter(
            "dynamo_work_handler_enqueue_rejected_total", "Requests declined because the queue was full", exist_ok=True
        )
        self.permit_wait_seconds = seconds("permit_wait_seconds", "Seconds from arrival to a handler task")
        self.network_transit_seconds = seconds("network_transit_seconds", "Seconds from the caller's send to arrival")
        self.time_to_first_response_seconds = seconds(
            "time_to_first_response_seconds", "Seconds from arrival to the first response item"
        )


class CallerMetrics:
    """The caller's side of the request plane. One per process."""

    __slots__ = (
        "inflight_requests",
        "probes",
        "quarantined_instances",
        "quarantines",
        "queue_seconds",
        "roundtrip_ttft_seconds",
        "send_seconds",
    )

    def __init__(self, registry: MetricsRegistry) -> None:
        def seconds(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return registry.histogram(f"dynamo_request_plane_{name}", help, buckets=buckets, exist_ok=True)

        self.queue_seconds = seconds("queue_seconds", "Seconds a request waited before it was sent", LATENCY_BUCKETS)
        self.send_seconds = seconds("send_seconds", "Seconds to hand a request to its connection", LATENCY_BUCKETS)
        self.roundtrip_ttft_seconds = seconds(
            "roundtrip_ttft_seconds", "Seconds from sending a request to its first item", DURATION_BUCKETS
        )
        self.inflight_requests = registry.gauge(
            "dynamo_request_plane_inflight_requests", "Requests sent and not yet ended", exist_ok=True
        )
        self.quarantined_instances = registry.gauge(
            "dynamo_request_plane_quarantined_instances",
            "Instances that are left out after a failure, or have not answered since",
            exist_ok=True,
        )
        self.quarantines = registry.counter(
            "dynamo_request_plane_quarantines_total", "How often an instance was put in quarantine", exist_ok=True
        )
        self.probes = registry.counter(
            "dynamo_request_plane_probes_total", "Requests that tried an instance in quarantine", exist_ok=True
        )


class TransportMetrics:
    """What the sockets of the request plane count. One per process."""

    __slots__ = ("accept_backoff", "bytes_received", "bytes_sent", "errors")

    def __init__(self, registry: MetricsRegistry) -> None:
        def counter(name: str, help: str) -> Counter:
            return registry.counter(f"dynamo_transport_tcp_{name}", help, exist_ok=True)

        self.bytes_sent = counter("bytes_sent_total", "Bytes written to request plane sockets")
        self.bytes_received = counter("bytes_received_total", "Bytes read from request plane sockets")
        self.errors = counter("errors_total", "Connections that ended with an error")
        self.accept_backoff = counter("accept_backoff_total", "Pauses of the listener because accept failed")


class EventPlaneMetrics:
    """What the event plane of a process counts, by topic; `event_plane.EventCounts`. One per process."""

    def __init__(self, registry: MetricsRegistry) -> None:
        def counter(name: str, help: str) -> Callable[[str], Counter]:
            return registry.counter_vector(f"dynamo_event_plane_{name}_total", help, ("topic",)).labels

        self._published = counter("published", "Events handed to the transport")
        self._dropped = counter("publish_dropped", "Events that were not sent: the outgoing queue was full")
        self._received = counter("received", "Events that a subscriber read")
        self._missed = counter("missed", "Events that were lost on their way, seen as gaps")
        self._overflowed = counter("receive_dropped", "Events that a slow subscriber had no room for")
        self._invalid = counter("invalid", "Messages that are no event of their topic")

    def published(self, topic: str) -> None:
        self._published(topic).inc()

    def dropped(self, topic: str) -> None:
        self._dropped(topic).inc()

    def received(self, topic: str, missed: int) -> None:
        self._received(topic).inc()
        if missed:
            self._missed(topic).inc(missed)

    def overflowed(self, topic: str) -> None:
        self._overflowed(topic).inc()

    def invalid(self, topic: str) -> None:
        self._invalid(topic).inc()


class KvPublisherMetrics:
    """What becomes of the KV events that engines publish on their own ZMQ sockets. One per process."""

    def __init__(self, registry: MetricsRegistry) -> None:
        def counter(name: str, help: str) -> Counter:
            return registry.counter(f"dynamo_component_kv_publisher_{name}_total", help, exist_ok=True)

        self.engine_drops = counter("engines_dropped_events", "Messages of the engine that were lost on their way here")
        self.events = counter("zmq_events", "KV events read from engines")
        self.filtered = counter("zmq_filtered_events", "KV events left out: not of this worker's own main cache")
        self.issues = counter("zmq_conversion_issues", "Messages and KV events of engines that cannot be read")
        self.suspicious = counter("zmq_suspicious_events", "KV events whose blocks contradict each other")


class NatsMetrics:
    """What goes wrong between this process and NATS. One per process."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._errors = registry.counter_vector(
            "dynamo_transport_nats_errors_total", "Errors of the NATS connection", ("error_type",)
        )

    def failed(self, error_type: str) -> None:
        """`error_type`: the class of the error."""
        self._errors.labels(error_type).inc()


class RefusalMetrics:
    """What one listener declined or cut, by the limit that was hit. One per listener."""

    __slots__ = ("_counters",)

    def __init__(self, registry: MetricsRegistry, name: str, limits: Sequence[str]) -> None:
        vector = registry.counter_vector(
            name, "Requests and connections declined by a limit of the listener", ("limit",)
        )
        self._counters = {limit: vector.labels(limit) for limit in limits}

    def count(self, limit: str) -> None:
        """`limit` is one of those given at the start."""
        self._counters[limit].inc()


def register_uptime(registry: MetricsRegistry, worker_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Expose `dynamo_component_uptime_seconds`, counted from this call."""
    began = clock()
    registry.gauge(
        "dynamo_component_uptime_seconds", "Seconds since the runtime started", {"worker_id": worker_id}, exist_ok=True
    ).read_from(lambda: clock() - began)
