"""The `engine.generate` span of a worker in Rust, as a collector gets it. The trees of whole requests: test_traces.py."""

from __future__ import annotations

import asyncio
import json
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import ResponseTimeout
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from dynamo.runtime.observe.tracing import TraceContext
from support.otlp_receiver import ERROR, OtlpReceiver, Span, otlp_receiver
from support.processes import until, wait
from support.rust_worker import NEEDS_ENGINE, RustWorker, body
from support.streams import read_all

pytestmark = NEEDS_ENGINE
CALLER = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[RustWorker]:
    names = {"OTEL_SERVICE_NAME": "rust", "OTEL_RESOURCE_ATTRIBUTES": "site=a%20b"}
    env: dict[str, Any] = receiver.environment | names | {"DYN_LOGGING_CONSOLE_FORMAT": "jsonl"}
    worker = RustWorker.start(tmp_path_factory.mktemp("traces"), **env)
    yield worker
    worker.close()


@pytest.fixture
async def client() -> AsyncIterator[MuxClient]:
    client = MuxClient()
    yield client
    await client.close()


def traced(**more: Any) -> tuple[str, Context]:
    """The id of a new trace, and a context in it."""
    trace_id = uuid.uuid4().hex
    return trace_id, Context(trace=TraceContext(trace_id, CALLER, request_id="r-7"), **more)


async def span_of(receiver: OtlpReceiver, trace_id: str) -> Span:
    """The one span of a trace; what this process still has to send leaves meanwhile."""
    await until(lambda: bool(receiver.trace(trace_id)), lambda: f"a span of {trace_id}")
    (span,) = receiver.trace(trace_id)
    return span


async def test_it_has_the_attributes_of_the_guide(
    worker: RustWorker, client: MuxClient, receiver: OtlpReceiver
) -> None:
    trace_id, context = traced()
    items = await read_all(await client.open(worker.instance(), body(5), context))
    span = await span_of(receiver, trace_id)
    assert (span.name, span.service, span.parent_id, span.status) == ("engine.generate", "rust", CALLER, 0)
    pace = {name: span.attributes.pop(name) for name in [*span.attributes] if name.endswith("_ms")}
    assert span.attributes == {
        "model": "",
        "input_tokens": 3,
        "disagg_role": "agg",
        "request_id": context.id(),
        "output_tokens": 5,
        "finish_reason": "length",
        "cancelled": False,
    }
    assert pace.keys() == {"ttft_ms", "avg_itl_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms"}
    assert all(float(value) > 0 and len(value.partition(".")[2]) == 2 for value in pace.values())
    assert float(pace["itl_p50_ms"]) <= float(pace["itl_p99_ms"]) <= float(pace["itl_max_ms"])
    links = [item.extra["worker_trace_link"] for item in items if item.extra and "worker_trace_link" in item.extra]
    assert links == [{"trace_id": trace_id, "span_id": span.span_id}]


@pytest.mark.parametrize("kill", [False, True])
async def test_a_request_that_was_given_up_says_so(
    worker: RustWorker, client: MuxClient, receiver: OtlpReceiver, kill: bool
) -> None:
    trace_id, context = traced()
    stream = await client.open(worker.instance(), body(10**6), context)
    await stream.next_batch()
    (context.kill if kill else context.stop_generating)()
    await read_all(stream)
    span = await span_of(receiver, trace_id)
    assert span.attributes["cancelled"] is True
    assert span.attributes["output_tokens"] > 0
    # The engine sees a kill, too, and may end its stream before it is dropped.
    assert span.attributes["finish_reason"] in ({"cancelled", "Dropped"} if kill else {"cancelled"})
    assert (span.status == ERROR) == (span.attributes["finish_reason"] == "Dropped")


@pytest.mark.parametrize(
    ("link", "links"),
    [
        ({"trace_id": "a" * 32, "span_id": "b" * 16}, [("a" * 32, "b" * 16)]),
        ({"trace_id": "x", "span_id": "b" * 16}, []),
        (7, []),
    ],
)
async def test_the_worker_before_it_is_linked(
    worker: RustWorker, client: MuxClient, receiver: OtlpReceiver, link: Any, links: list[tuple[str, str]]
) -> None:
    trace_id, context = traced()
    await read_all(await client.open(worker.instance(), body(1) | {"migration_link": link}, context))
    span = await span_of(receiver, trace_id)
    assert span.links == links
    assert span.attributes.get("migration_trace_id") == (link["trace_id"] if link != 7 else None)


async def test_a_request_without_a_trace_begins_one(
    worker: RustWorker, client: MuxClient, receiver: OtlpReceiver
) -> None:
    context = Context()
    await read_all(await client.open(worker.instance(), body(1), context))

    def mine() -> list[Span]:
        return [span for span in receiver.spans if span.attributes.get("request_id") == context.id()]

    await until(lambda: bool(mine()), lambda: "a span of the request")
    (span,) = mine()
    assert span.parent_id == ""
    assert int(span.trace_id, 16) > 0
    assert b"site" in receiver.raw
    assert b"a b" in receiver.raw


async def test_a_failure_is_in_the_span_and_its_log_line_names_the_trace(
    worker: RustWorker, client: MuxClient, receiver: OtlpReceiver
) -> None:
    trace_id, context = traced(deadline=asyncio.get_running_loop().time() + 0.1)
    with pytest.raises(ResponseTimeout):
        await read_all(await client.open(worker.instance(), body(10**6), context))
    span = await span_of(receiver, trace_id)
    assert (span.status, span.attributes["error_kind"]) == (ERROR, "ResponseTimeout")
    worker.wait_log(trace_id)
    (line,) = [json.loads(line) for line in worker.log.splitlines() if trace_id in line]
    assert (line["span_id"], line["parent_id"], line["span_name"]) == (span.span_id, CALLER, "engine.generate")
    assert line["request_id"] == context.id()


async def test_a_collector_that_is_gone_costs_spans_which_are_counted(tmp_path: Path, client: MuxClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    env: dict[str, Any] = {"OTEL_EXPORT_ENABLED": "1", "OTEL_BSP_SCHEDULE_DELAY": "1"}
    env["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
    worker = RustWorker.start(tmp_path, **env)
    try:
        items = await read_all(await client.open(worker.instance(), body(3), Context()))
        assert items[-1].finish_reason == "length"
        name = "dynamo_component_spans_dropped_total"
        wait(lambda: worker.metric(name) == 1, lambda: f"a lost span; log:\n{worker.log}")
        assert "1 spans are lost: the collector at http://127.0.0.1:" in worker.log
        worker.terminate()
        assert await worker.ended() == 0
    finally:
        worker.close()


async def test_without_export_nothing_is_measured_and_log_lines_name_the_request(
    tmp_path: Path, client: MuxClient
) -> None:
    worker = RustWorker.start(tmp_path, DYN_LOGGING_CONSOLE_FORMAT="jsonl")
    try:
        context = Context(deadline=asyncio.get_running_loop().time() + 0.5)
        with pytest.raises(ResponseTimeout):
            await read_all(await client.open(worker.instance(), body(10**6), context))
        worker.wait_log(context.id())
        (line,) = [json.loads(line) for line in worker.log.splitlines() if context.id() in line]
        assert "trace_id" not in line
        assert line["span_name"] == "engine.generate"
        assert "spans_dropped" not in worker.get("/metrics")[1]
        items = await read_all(await client.open(worker.instance(), body(2), Context()))
        assert not any("worker_trace_link" in (item.extra or {}) for item in items)
    finally:
        worker.close()
