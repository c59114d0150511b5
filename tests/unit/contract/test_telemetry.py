"""The facade engines use, and what the engine.generate span learns from a stream."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dynamo.contract import telemetry
from dynamo.contract.telemetry import MAX_GAPS, GenerateSpan, _Gaps, nearest_rank
from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.tracing import NO_SPAN, TraceContext, install_tracing, reset_tracing
from support.cases import each_case


class SpyContext:
    """Records how the facade calls a context."""

    def __init__(self, headers: dict[str, str] | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._headers = headers

    def current_span(self) -> Any:
        return NO_SPAN

    def start_span(self, name: str, attrs: dict[str, Any] | None = None) -> Any:
        self.calls.append((name, attrs))
        return NO_SPAN

    def trace_headers(self) -> dict[str, str] | None:
        return self._headers


def test_no_attributes_are_none_not_an_empty_dict() -> None:
    spy = SpyContext()
    telemetry.start_span(spy, "a")
    telemetry.start_span(spy, "b", n=1)
    assert spy.calls == [("a", None), ("b", {"n": 1})]


def test_engine_kwargs_hold_the_headers_only_when_there_are_any_and_they_are_wanted() -> None:
    headers = {"traceparent": "00-a-b-01"}
    assert telemetry.engine_trace_kwargs(SpyContext(headers)) == {"trace_headers": headers}
    assert telemetry.engine_trace_kwargs(SpyContext(headers), kwarg_name="h") == {"h": headers}
    assert telemetry.engine_trace_kwargs(SpyContext(headers), enabled=False) == {}
    assert telemetry.engine_trace_kwargs(SpyContext(None)) == {}


def test_a_context_that_knows_no_spans_is_served_silently() -> None:
    bare = object()
    assert telemetry.current_span(bare) is NO_SPAN
    assert telemetry.trace_headers(bare) is None
    with telemetry.start_span(bare, "x") as span:
        span.set_attribute("a", 1)


def test_without_an_exporter_there_is_no_recorder() -> None:
    install_tracing(None)
    try:
        assert GenerateSpan.begin(Context("r"), now=0.0, model="m", input_tokens=1, role="agg") is None
    finally:
        reset_tracing()


def begin(**options: Any) -> GenerateSpan:
    found = GenerateSpan.begin(Context("r"), now=10.0, model="m", input_tokens=4, role="decode", **options)
    assert found is not None
    return found


def only(exported: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, Any]]:
    [span] = exported.get_finished_spans()
    return span, dict(span.attributes or {})


def test_a_stream_of_five_gaps_is_told_by_nearest_rank(exported: InMemorySpanExporter) -> None:
    recorder = begin()
    recorder.on_chunk(10.01, 0)  # no tokens: neither first token nor gap
    now = 10.0125
    recorder.on_chunk(now, 2)
    for gap in (0.010, 0.030, 0.020, 0.050, 0.040):
        now += gap
        recorder.on_chunk(now, 1)
    recorder.finish(7, "stop", False)
    span, attributes = only(exported)
    assert attributes == {
        "model": "m",
        "input_tokens": 4,
        "disagg_role": "decode",
        "request_id": "r",
        "ttft_ms": "12.50",
        "output_tokens": 7,
        "finish_reason": "stop",
        "cancelled": False,
        "avg_itl_ms": "30.00",
        "itl_p50_ms": "30.00",
        "itl_p99_ms": "50.00",
        "itl_max_ms": "50.00",
    }
    assert span.status.status_code is StatusCode.UNSET


def test_one_token_has_no_gaps(exported: InMemorySpanExporter) -> None:
    recorder = begin()
    recorder.on_chunk(10.5, 1)
    recorder.finish(1, "length", False)
    assert not [key for key in only(exported)[1] if "itl" in key]


def test_an_error_names_its_kind(exported: InMemorySpanExporter) -> None:
    recorder = begin()
    recorder.fail("setup_failed")
    span, attributes = only(exported)
    assert (attributes["error_kind"], span.status.status_code) == ("setup_failed", StatusCode.ERROR)
    assert "output_tokens" not in attributes


def test_a_dropped_stream_is_cancelled_and_an_error(exported: InMemorySpanExporter) -> None:
    recorder = begin()
    recorder.dropped(3)
    span, attributes = only(exported)
    assert (attributes["finish_reason"], attributes["cancelled"], attributes["output_tokens"]) == ("Dropped", True, 3)
    assert span.status.status_code is StatusCode.ERROR


def test_the_first_end_wins(exported: InMemorySpanExporter) -> None:
    recorder = begin()
    recorder.finish(1, "stop", False)
    recorder.dropped()
    recorder.fail("Unknown")
    assert only(exported)[1]["finish_reason"] == "stop"


def test_an_error_finish_is_an_error_status(exported: InMemorySpanExporter) -> None:
    begin().finish(0, "error", False)
    assert only(exported)[0].status.status_code is StatusCode.ERROR


@pytest.mark.usefixtures("exported")
def test_the_link_names_the_request_span() -> None:
    context = Context("r", trace=TraceContext("a" * 32, "b" * 16))
    recorder = GenerateSpan.begin(context, now=0.0, model="m", input_tokens=1, role="prefill")
    assert recorder is not None
    assert recorder.worker_trace_link() == {"trace_id": "a" * 32, "span_id": context.span_id}
    recorder.dropped()


@each_case(
    ("values", "quantile", "expected"),
    [([1, 2, 3, 4, 5], 0.5, 3), ([1, 2, 3, 4, 5], 0.99, 5), ([1, 2], 0.5, 2), ([7], 0.99, 7), ([1, 2, 3], 0.0, 1)],
)
def test_nearest_rank(values: list[float], quantile: float, expected: float) -> None:
    assert nearest_rank(values, quantile) == expected


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200))
def test_a_short_stream_is_kept_exactly(gaps: list[float]) -> None:
    held = _Gaps()
    for gap in gaps:
        held.add(gap)
    assert held.percentiles(0.5, 0.99) == [nearest_rank(sorted(gaps), 0.5), nearest_rank(sorted(gaps), 0.99)]


def test_a_long_stream_keeps_bounded_memory_and_even_samples() -> None:
    held, count = _Gaps(), 10 * MAX_GAPS
    for n in range(count):
        held.add(float(n))
    middle, high = held.percentiles(0.5, 0.99)
    assert len(held._kept) <= MAX_GAPS
    assert (held.count, held.longest) == (count, count - 1)
    assert middle == pytest.approx(count / 2, rel=0.01)
    assert high == pytest.approx(count * 0.99, rel=0.01)
