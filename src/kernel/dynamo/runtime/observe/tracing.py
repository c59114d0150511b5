"""W3C trace context, and spans that cost nothing where no exporter is set."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, Literal, Protocol

from msgspec import Struct

from dynamo.runtime.base.settings import FromEnvironment
from dynamo.settings.extras import install_command
from dynamo.settings.readers import number, switch, text
from dynamo.settings.table import setting

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer

logger = logging.getLogger(__name__)

_TRACEPARENT: Final = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")


class TraceContext(Struct, frozen=True):
    """What arrived in (or will leave through) the W3C headers."""

    trace_id: str  # 32 lower-case hex digits
    span_id: str  # 16 lower-case hex digits: the caller's span
    sampled: bool = True
    tracestate: str | None = None
    x_request_id: str | None = None
    request_id: str | None = None
    parent_span_id: str | None = None

    @classmethod
    def from_headers(cls, headers: dict[str, str]) -> TraceContext | None:
        """Read `traceparent` and its companions (lower-case names); None when absent or malformed."""
        found = _TRACEPARENT.match(headers.get("traceparent", "").strip())
        if found is None or found[1] == "0" * 32 or found[2] == "0" * 16:
            return None
        return cls(
            found[1],
            found[2],
            bool(int(found[3], 16) & 1),
            headers.get("tracestate"),
            headers.get("x-request-id"),
            headers.get("request-id"),
        )

    def extra_headers(self) -> dict[str, str]:
        """Return the companions, which are carried along unchanged."""
        pairs = {
            "tracestate": self.tracestate,
            "x-request-id": self.x_request_id,
            "request-id": self.request_id,
        }
        return {name: value for name, value in pairs.items() if value is not None}

    def headers(self) -> dict[str, str]:
        """Return the headers of an outgoing call that is made for this context."""
        flags = "01" if self.sampled else "00"
        return {"traceparent": f"00-{self.trace_id}-{self.span_id}-{flags}", **self.extra_headers()}


class TracedRequest(Protocol):
    """What a span and a log record need of the context of a request."""

    @property
    def trace(self) -> TraceContext | None: ...

    def id(self) -> str: ...

    def attach_span(self, span: SpanProxy) -> None: ...


class SpanProxy:
    """A span an engine may decorate. This base class is the silent one."""

    __slots__ = ()

    trace_id: str | None = None
    span_id: str | None = None
    is_recording: bool = False

    def set_attribute(self, key: str, value: object) -> None:
        """Record one attribute; bool, int, float and str are kept, anything else becomes its repr."""

    def add_event(self, name: str, attrs: dict[str, object] | None = None) -> None:
        """Record a moment."""

    def set_status(self, status: str, description: str | None = None) -> None:
        """Mark the outcome. Raises ValueError for anything but "ok" and "error"."""
        check_status(status)

    def child(self, name: str, attrs: dict[str, object] | None = None) -> SpanProxy:
        """Return a nested span."""
        return NO_SPAN

    def headers(self) -> dict[str, str] | None:
        """Return the `traceparent` that names this span, or None."""
        return None

    def close(self) -> None:
        """End the span; idempotent."""

    def __enter__(self) -> SpanProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False


def check_status(status: str) -> None:
    """Raise ValueError unless `status` is "ok" or "error"."""
    if status not in ("ok", "error"):
        raise ValueError(f'span status must be "ok" or "error", got {status!r}')


NO_SPAN: Final = SpanProxy()
NO_ATTRIBUTES: Final[Mapping[str, object]] = MappingProxyType({})


# -- spans that are exported ----------------------------------------------------------------------------------------------


def coerce_attribute(value: object) -> bool | int | float | str | tuple[str, ...]:
    """Return what a span keeps of a value."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return value
    return repr(value)


class ExportedSpan(SpanProxy):
    """A span of the OpenTelemetry SDK."""

    __slots__ = ("_span", "_tracer", "span_id", "trace_id")

    is_recording = True

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        identity = span.get_span_context()
        self.trace_id = format(identity.trace_id, "032x")
        self.span_id = format(identity.span_id, "016x")

    def set_attribute(self, key: str, value: object) -> None:
        self._span.set_attribute(key, coerce_attribute(value))

    def add_event(self, name: str, attrs: dict[str, object] | None = None) -> None:
        self._span.add_event(name, {key: coerce_attribute(value) for key, value in (attrs or {}).items()})

    def set_status(self, status: str, description: str | None = None) -> None:
        check_status(status)
        from opentelemetry.trace import StatusCode

        if status == "ok":
            self._span.set_status(StatusCode.OK)
        else:
            self._span.set_status(StatusCode.ERROR, description)

    def child(self, name: str, attrs: dict[str, object] | None = None) -> SpanProxy:
        from opentelemetry.trace import set_span_in_context

        attributes = {key: coerce_attribute(value) for key, value in (attrs or {}).items()}
        inner = self._tracer.start_span(name, context=set_span_in_context(self._span), attributes=attributes)
        return ExportedSpan(self._tracer, inner)

    def headers(self) -> dict[str, str] | None:
        identity = self._span.get_span_context()
        found = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{identity.trace_flags & 1:02x}"}
        if state := identity.trace_state.to_header():
            found["tracestate"] = state
        return found

    def close(self) -> None:
        if self._span.is_recording():  # ending twice is a warning of the SDK
            self._span.end()


class CallSpan(ExportedSpan):
    """The span of one call to a worker, from the choice of the worker to the end of its answer."""

    __slots__ = ("request_span",)

    def __init__(self, tracer: Tracer, span: Span, request_span: RequestSpan) -> None:
        super().__init__(tracer, span)
        self.request_span = request_span

    def failed(self, error: BaseException) -> None:
        """Mark the call as failed."""
        self.set_attribute("error.type", type(error).__name__)
        self.set_status("error", str(error))


class RequestSpan(ExportedSpan):
    """The `engine.generate` span: engines may decorate it, the framework alone ends it."""

    __slots__ = ("_calls",)

    def __init__(self, tracer: Tracer, span: Span) -> None:
        super().__init__(tracer, span)
        self._calls: dict[str, SpanContext] = {}  # the last call by request

    def close(self) -> None:
        """Do nothing: only the framework ends this span, with `finish`."""

    def past_child(
        self, name: str, began_ns: int, ended_ns: int, attributes: Mapping[str, object] = NO_ATTRIBUTES
    ) -> None:
        """Record a part of this span that is over. Times are Unix nanoseconds."""
        from opentelemetry.trace import set_span_in_context

        ambient = set_span_in_context(self._span)
        kept = {key: coerce_attribute(value) for key, value in attributes.items()}
        self._tracer.start_span(name, context=ambient, start_time=began_ns, attributes=kept).end(ended_ns)

    def start_call(self, request_id: str, attributes: Mapping[str, bool | int | float | str]) -> CallSpan:
        """Open the span of a call to another process. A later call for the same request has a link to the one before it:
        to a worker that failed, or to the prefill worker.
        """
        from opentelemetry.trace import Link, SpanKind, set_span_in_context

        earlier = self._calls.get(request_id)
        links = () if earlier is None else (Link(earlier),)
        span = self._tracer.start_span(
            "dispatch",
            context=set_span_in_context(self._span),
            kind=SpanKind.CLIENT,
            attributes=dict(attributes),
            links=links,
        )
        self._calls[request_id] = span.get_span_context()  # as many as the request has choices and prompts
        return CallSpan(self._tracer, span, self)

    def finish(self) -> None:
        """End the span; idempotent."""
        super().close()


@dataclass(frozen=True, slots=True)
class TracingVariables(FromEnvironment):
    """What an operator sets for tracing. `TracingSettings` is what follows from it."""

    # fmt: off
    is_enabled: bool = setting(False, "OTEL_EXPORT_ENABLED", switch, "Export spans")
    service_name: str = setting("dynamo", "OTEL_SERVICE_NAME", text, "Name of this service in the spans")
    endpoint: str | None = setting(None, "OTEL_EXPORTER_OTLP_ENDPOINT", text, "Where spans go",
        shown="the exporter's own")
    traces_endpoint: str | None = setting(None, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", text,
        "The same, for traces only; wins")
    protocol: str = setting("grpc", "OTEL_EXPORTER_OTLP_PROTOCOL", text, "`grpc` or `http/protobuf`")
    traces_protocol: str | None = setting(None, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", text,
        "The same, for traces only; wins")
    sampler: str | None = setting(None, "OTEL_TRACES_SAMPLER", text,
        "`always_on`, `always_off`, `traceidratio`, each also with `parentbased_`", shown="`parentbased_always_on`")
    sampler_ratio: float = setting(1.0, "OTEL_TRACES_SAMPLER_ARG", number(0), "The ratio of `traceidratio`")
    sample_ratio: float | None = setting(None, "OTEL_TRACES_SAMPLE_RATIO", number(0),
        "Without a sampler: `parentbased_traceidratio` with this ratio")
    captures_content: bool = setting(False, "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", switch,
        "Spans of requests hold the messages of requests and answers, up to 64 KiB each")
    # fmt: on


class TracingSettings(Struct, frozen=True):
    """`OTEL_*` as far as we read them; the OTLP exporters read the rest (endpoints' headers, certificates) themselves."""

    enabled: bool = False
    service_name: str = "dynamo"
    protocol: str = "grpc"  # or http/protobuf
    endpoint: str | None = None  # None: the exporter's own default
    sampler: str = "parentbased_always_on"
    sampler_ratio: float = 1.0
    captures_content: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> TracingSettings:
        """Read the settings of this process."""
        given = TracingVariables.from_env(env)
        if not given.is_enabled:
            return cls()
        protocol = given.traces_protocol or given.protocol
        if protocol not in ("grpc", "http/protobuf"):
            logger.warning('OTLP protocol %r is neither "grpc" nor "http/protobuf"; using grpc', protocol)
            protocol = "grpc"
        endpoint = given.traces_endpoint
        if endpoint is None and given.endpoint is not None:
            endpoint = f"{given.endpoint.rstrip('/')}/v1/traces" if protocol == "http/protobuf" else given.endpoint
        sampler, ratio = given.sampler, given.sampler_ratio
        if sampler is None and given.sample_ratio is not None:
            sampler, ratio = "parentbased_traceidratio", given.sample_ratio
        sampler = (sampler or "parentbased_always_on").lower()
        if sampler not in SAMPLERS:
            logger.warning("OTEL_TRACES_SAMPLER=%r is none of %s; every trace is sampled", sampler, sorted(SAMPLERS))
            sampler = "parentbased_always_on"
        return cls(True, given.service_name, protocol, endpoint, sampler, min(ratio, 1.0), given.captures_content)


SAMPLERS: Final = frozenset(
    prefix + name for prefix in ("", "parentbased_") for name in ("always_on", "always_off", "traceidratio")
)


class Tracing:
    """Where the spans of this process go. One per process: see `tracing`; tests build their own."""

    def __init__(self, provider: TracerProvider, *, captures_content: bool = False) -> None:
        """`captures_content`: spans may hold what requests and answers contain."""
        self.captures_content = captures_content
        self._provider = provider
        self._tracer = provider.get_tracer("dynamo")

    def start_request_span(
        self,
        context: TracedRequest,
        *,
        model: str,
        input_tokens: int,
        role: str,
        link: object = None,
        name: str = "engine.generate",
    ) -> RequestSpan | None:
        """Open the request's span under the inbound one and attach it to `context`; None when it is not sampled.

        An inbound trace that its sender did not sample is never exported, whatever the sampler.
        """
        from opentelemetry import trace as api

        attributes: dict[str, bool | int | float | str] = {
            "model": model,
            "input_tokens": input_tokens,
            "disagg_role": role,
            "request_id": context.id(),
        }
        links: list[api.Link] = []
        if isinstance(link, Mapping):
            trace_id, span_id = str(link.get("trace_id", "")), str(link.get("span_id", ""))
            attributes |= {"migration_trace_id": trace_id, "migration_span_id": span_id}
            if _TRACEPARENT.match(f"00-{trace_id}-{span_id}-01"):
                links.append(api.Link(api.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True)))
        return self._open(context, name, api.SpanKind.INTERNAL, attributes, links)

    def start_server_span(
        self, context: TracedRequest, name: str, attributes: Mapping[str, object]
    ) -> RequestSpan | None:
        """Open the span of an HTTP request; the same rules. What is sent to workers afterwards continues it."""
        from opentelemetry import trace as api

        return self._open(context, name, api.SpanKind.SERVER, attributes, ())

    def _open(
        self, context: TracedRequest, name: str, kind: SpanKind, attributes: Mapping[str, object], links: Sequence[Link]
    ) -> RequestSpan | None:
        from opentelemetry import trace as api
        from opentelemetry.context import Context as Ambient

        # An empty Context, not None: None would take a parent from the ambient context, which belongs to another request.
        parent: Ambient = Ambient()
        inbound = context.trace
        if inbound is not None:
            if not inbound.sampled:
                return None
            remote = api.SpanContext(
                int(inbound.trace_id, 16),
                int(inbound.span_id, 16),
                is_remote=True,
                trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
                trace_state=api.TraceState.from_header([inbound.tracestate]) if inbound.tracestate else None,
            )
            parent = api.set_span_in_context(api.NonRecordingSpan(remote))
        kept = {key: coerce_attribute(value) for key, value in attributes.items()}
        span = self._tracer.start_span(name, context=parent, kind=kind, attributes=kept, links=links)
        if not span.is_recording():
            return None
        found = RequestSpan(self._tracer, span)
        context.attach_span(found)
        return found

    def close(self) -> None:
        """Export what is queued and end the exporter's thread."""
        self._provider.shutdown()


def build_tracing(settings: TracingSettings) -> Tracing | None:
    """Build tracing over OTLP; None when it is off, or (with one WARNING) when the `otel` extra is not installed."""
    if not settings.enabled:
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(settings)
    except ImportError as error:
        logger.warning(
            "OTEL_EXPORT_ENABLED is set, but the exporter is not installed (%s); no trace is exported. "
            "Install it with: %s",
            error,
            install_command("otel"),
        )
        return None
    resource = Resource.create({"service.name": settings.service_name})
    provider = TracerProvider(resource=resource, sampler=build_sampler(settings))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, captures_content=settings.captures_content)


def build_sampler(settings: TracingSettings) -> Sampler:
    """Build the sampler that the settings name."""
    from opentelemetry.sdk.trace import sampling

    kind = settings.sampler.removeprefix("parentbased_")
    root: sampling.Sampler
    if kind == "traceidratio":
        root = sampling.TraceIdRatioBased(settings.sampler_ratio)
    else:
        root = sampling.ALWAYS_ON if kind == "always_on" else sampling.ALWAYS_OFF
    return sampling.ParentBased(root) if settings.sampler.startswith("parentbased_") else root


def _exporter(settings: TracingSettings) -> SpanExporter:
    if settings.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        # A bare HOST:PORT means plain text, as in the native system; the exporter would try TLS.
        insecure = None if settings.endpoint is None or "://" in settings.endpoint else True
        return Grpc(endpoint=settings.endpoint, insecure=insecure)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=settings.endpoint)


class _Process:
    """The one mutable cell of this module: this process's tracing, built at the first request."""

    ready = False
    tracing: Tracing | None = None


def tracing() -> Tracing | None:
    """Return this process's tracing, built from the environment at the first call; None when nothing is exported."""
    if not _Process.ready:
        _Process.tracing = build_tracing(TracingSettings.from_env())
        _Process.ready = True
    return _Process.tracing


def install_tracing(tracing: Tracing | None) -> None:
    """Replace this process's tracing (tests, embedding); None switches it off."""
    _Process.tracing, _Process.ready = tracing, True


def reset_tracing() -> None:
    """Close this process's tracing and forget it: the next `tracing()` reads the environment again."""
    held, _Process.tracing, _Process.ready = _Process.tracing, None, False
    if held is not None:
        held.close()


def start_request_span(
    context: TracedRequest, *, model: str, input_tokens: int, role: str, link: object = None
) -> RequestSpan | None:
    """Open the `engine.generate` span of one request, attached to `context`; None when nothing is exported.

    `role` is `agg`, `prefill`, `decode` or `encode`; `link` the request's `migration_link`. Call `finish()` on it.
    """
    found = _Process.tracing if _Process.ready else tracing()
    if found is None:
        return None
    return found.start_request_span(context, model=model, input_tokens=input_tokens, role=role, link=link)


def is_tracing() -> bool:
    """Return whether spans are exported, so that attributes are worth making."""
    return (_Process.tracing if _Process.ready else tracing()) is not None


def exports_content() -> bool:
    """Return whether spans may hold what requests and answers contain."""
    found = _Process.tracing if _Process.ready else tracing()
    return found is not None and found.captures_content


def start_server_span(context: TracedRequest, name: str, attributes: Mapping[str, object]) -> RequestSpan | None:
    """Open the span of one HTTP request, attached to `context`; None when nothing is exported. Call `finish()` on it."""
    found = _Process.tracing if _Process.ready else tracing()
    return None if found is None else found.start_server_span(context, name, attributes)
