"""W3C contexts and exported spans, over an in-memory exporter."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.tracing import (
    NO_SPAN,
    TraceContext,
    Tracing,
    TracingSettings,
    build_sampler,
    build_tracing,
    reset_tracing,
    start_request_span,
    tracing,
)
from support.cases import each_case

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OTEL_EXPORT_ENABLED", raising=False)
    reset_tracing()
    yield
    reset_tracing()


def inbound(*, sampled: bool = True) -> TraceContext:
    return TraceContext(TRACE_ID, PARENT_ID, sampled, "vendor=1", "x-1", "r-1")


def begin(context: Context, **options: object):  # type: ignore[no-untyped-def]
    return start_request_span(context, model="m", input_tokens=3, role="agg", **options)


@pytest.mark.usefixtures("no_tracing")
def test_nothing_is_made_when_nothing_is_exported_and_headers_pass_through() -> None:
    context = Context("r", trace=inbound())
    assert begin(context) is None
    assert context.current_span() is NO_SPAN
    assert context.trace_headers() == {
        "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01",
        "tracestate": "vendor=1",
        "x-request-id": "x-1",
        "request-id": "r-1",
    }


@pytest.mark.usefixtures("no_tracing")
def test_without_an_inbound_trace_there_are_no_headers() -> None:
    context = Context("r")
    begin(context)
    assert (context.trace_headers(), context.trace_id, context.span_id) == (None, None, None)


def test_the_span_continues_the_inbound_trace_and_heads_outgoing_calls(exported: InMemorySpanExporter) -> None:
    context = Context("r", trace=inbound())
    span = begin(context)
    headers = context.trace_headers()
    assert span is not None
    assert headers == {
        "traceparent": f"00-{TRACE_ID}-{span.span_id}-01",
        "tracestate": "vendor=1",
        "x-request-id": "x-1",
        "request-id": "r-1",
    }
    assert (context.trace_id, context.span_id, context.parent_span_id) == (TRACE_ID, span.span_id, PARENT_ID)
    span.finish()
    [found] = exported.get_finished_spans()
    assert found.name == "engine.generate"
    assert found.parent is not None
    assert format(found.parent.span_id, "016x") == PARENT_ID
    assert dict(found.attributes or {}) == {"model": "m", "input_tokens": 3, "disagg_role": "agg", "request_id": "r"}


def test_a_request_without_an_inbound_trace_begins_one(exported: InMemorySpanExporter) -> None:
    context = Context("r")
    span = begin(context)
    assert span is not None
    assert context.trace_id == span.trace_id
    assert (context.trace_headers() or {})["traceparent"] == f"00-{span.trace_id}-{span.span_id}-01"
    span.finish()
    assert exported.get_finished_spans()[0].parent is None


def test_an_unsampled_inbound_trace_is_not_exported(exported: InMemorySpanExporter) -> None:
    context = Context("r", trace=inbound(sampled=False))
    assert begin(context) is None
    context.start_span("child").close()
    assert exported.get_finished_spans() == ()
    assert (context.trace_headers() or {})["traceparent"].endswith("-00")


def test_only_the_framework_ends_the_request_span(exported: InMemorySpanExporter) -> None:
    context = Context("r")
    span = begin(context)
    assert span is not None
    with context.current_span() as own:
        own.set_attribute("x", 1)
    context.current_span().close()
    before = exported.get_finished_spans()
    span.finish()
    span.finish()
    assert (before, len(exported.get_finished_spans())) == ((), 1)


def test_child_spans_nest_coerce_values_and_close_on_an_exception(exported: InMemorySpanExporter) -> None:
    context = Context("r")
    span = begin(context)
    assert span is not None

    def work() -> None:
        with context.start_span("tokenize", {"n": 3, "what": [1]}) as child:
            child.set_attribute("ok", True)
            child.set_attribute("where", None)
            child.add_event("begun", {"x": (1, 2)})
            child.set_status("error", "because")
            raise KeyError

    with pytest.raises(KeyError):
        work()
    [found] = exported.get_finished_spans()
    assert dict(found.attributes or {}) == {"n": 3, "what": "[1]", "ok": True, "where": "None"}
    assert found.parent is not None
    assert format(found.parent.span_id, "016x") == span.span_id
    assert [(event.name, dict(event.attributes or {})) for event in found.events] == [("begun", {"x": "(1, 2)"})]
    assert (found.status.status_code, found.status.description) == (StatusCode.ERROR, "because")
    span.finish()


@pytest.mark.usefixtures("exported")
def test_any_other_status_is_a_value_error() -> None:
    context = Context("r")
    for span in (NO_SPAN, begin(context)):
        assert span is not None
        with pytest.raises(ValueError, match="status"):
            span.set_status("maybe")
        span.set_status("ok")


def test_a_migrated_request_links_to_the_span_it_came_from(exported: InMemorySpanExporter) -> None:
    span = begin(Context("r"), link={"trace_id": TRACE_ID, "span_id": PARENT_ID})
    assert span is not None
    span.finish()
    [found] = exported.get_finished_spans()
    attributes = dict(found.attributes or {})
    assert (attributes["migration_trace_id"], attributes["migration_span_id"]) == (TRACE_ID, PARENT_ID)
    assert [format(link.context.span_id, "016x") for link in found.links] == [PARENT_ID]


@pytest.mark.parametrize("link", [{"trace_id": "zz", "span_id": PARENT_ID}, {"trace_id": "0" * 31, "span_id": ""}, {}])
def test_a_malformed_link_is_attributes_only(exported: InMemorySpanExporter, link: dict[str, str]) -> None:
    span = begin(Context("r"), link=link)
    assert span is not None
    span.finish()
    [found] = exported.get_finished_spans()
    assert (dict(found.attributes or {})["migration_trace_id"], found.links) == (link.get("trace_id", ""), ())


# -- settings


@each_case(
    ("env", "expected"),
    [
        ({}, TracingSettings()),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, TracingSettings()),
        ({"OTEL_EXPORT_ENABLED": "1"}, TracingSettings(True)),
        (
            {
                "OTEL_EXPORT_ENABLED": "true",
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_SERVICE_NAME": "w",
            },
            TracingSettings(True, "w", "http/protobuf", "http://c:4318/v1/traces"),
        ),
        (
            {
                "OTEL_EXPORT_ENABLED": "on",
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/x",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            TracingSettings(True, "dynamo", "http/protobuf", "http://b/x"),
        ),
        (
            {"OTEL_EXPORT_ENABLED": "1", "OTEL_TRACES_SAMPLE_RATIO": "0.25"},
            TracingSettings(True, sampler="parentbased_traceidratio", sampler_ratio=0.25),
        ),
        (
            {"OTEL_EXPORT_ENABLED": "1", "OTEL_TRACES_SAMPLER": "TraceIdRatio", "OTEL_TRACES_SAMPLER_ARG": "0.5"},
            TracingSettings(True, sampler="traceidratio", sampler_ratio=0.5),
        ),
        (
            {"OTEL_EXPORT_ENABLED": "1", "OTEL_TRACES_SAMPLER": "odd", "OTEL_EXPORTER_OTLP_PROTOCOL": "odd"},
            TracingSettings(True),
        ),
    ],
)
def test_settings_from_the_environment(env: dict[str, str], expected: TracingSettings) -> None:
    assert TracingSettings.from_env(env) == expected


@each_case("parent", ["", "parentbased_"])
@each_case(
    ("kind", "ratio", "sampled"),
    [("always_on", 1.0, True), ("always_off", 1.0, False), ("traceidratio", 1.0, True), ("traceidratio", 0.0, False)],
)
def test_the_sampler_decides_about_traces_that_begin_here(parent: str, kind: str, ratio: float, sampled: bool) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=build_sampler(TracingSettings(True, sampler=parent + kind, sampler_ratio=ratio)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    context = Context("r")
    span = Tracing(provider).start_request_span(context, model="m", input_tokens=1, role="agg")
    if span is not None:
        span.finish()
    assert (span is not None, len(exporter.get_finished_spans())) == (sampled, int(sampled))
    assert sampled or context.current_span() is NO_SPAN


@pytest.mark.parametrize(
    "settings",
    [
        TracingSettings(True, protocol="grpc", endpoint="localhost:1"),
        TracingSettings(True, protocol="http/protobuf", endpoint="http://localhost:1/v1/traces"),
    ],
)
def test_both_exporters_can_be_built_and_closed(settings: TracingSettings) -> None:
    found = build_tracing(settings)
    assert found is not None
    found.close()


@pytest.mark.usefixtures("no_tracing")
def test_a_missing_exporter_is_one_warning_and_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORT_ENABLED", "1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    for _ in range(3):
        assert begin(Context("r")) is None
    assert tracing() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pip install 'opentelemetry-exporter-otlp" in caplog.text
