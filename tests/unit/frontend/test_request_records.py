"""What the log and the trace keep of a request, at the frontend and at its worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dynamo.errors import Disconnected, InvalidArgument, Unknown
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import Cluster, cluster, fail, say
from support.machine_log import MachineLog, machine_log
from support.patience import PATIENCE_SECONDS

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
IDS = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE}-{CALLER}-01"}
FRONTEND, WORKER = "dynamo.frontend.pipeline.request_records", "dynamo.runtime.calls.request_log"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[MachineLog]:
    with machine_log(monkeypatch, capsys) as found:
        yield found


def part(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: record.get(key) for key in keys}


@pytest.mark.parametrize("streams", [False, True])
async def test_three_records_accompany_a_request_and_carry_its_ids(
    house: Cluster, log: MachineLog, streams: bool
) -> None:
    worker = await house.worker(say("hel", "lo"))
    assert (await house.client.chat("hi", headers=IDS, stream=streams)).status == 200
    received, sent, completed = log.records(target=FRONTEND)
    assert [r["message"] for r in (received, sent, completed)] == [
        "request received", "http response sent", "request completed",
    ]  # fmt: skip
    for record in (received, sent, completed):
        assert part(record, "request_id", "response_id", "x_request_id", "trace_id", "parent_id", "span_name") == {
            "request_id": worker.contexts[0].id(),
            "response_id": f"chatcmpl-{worker.contexts[0].id()}",
            "x_request_id": "mine-1",
            "trace_id": TRACE,
            "parent_id": CALLER,
            "span_name": "http-request",
        }
        assert part(record, "route", "model", "endpoint", "request_type") == {
            "route": "/v1/chat/completions",
            "model": "m",
            "endpoint": "chat_completions",
            "request_type": "stream" if streams else "unary",
        }
    assert (sent["http_status"], sent["status"]) == (200, "success")
    assert sent["latency_ms"] >= 0


async def test_the_last_record_says_how_the_request_went(house: Cluster, log: MachineLog) -> None:
    worker = await house.worker(say("hel", "lo"))
    await house.client.chat("hi")
    completed = log.only("request completed", FRONTEND)
    assert part(completed, "status", "http_status", "finish_reason", "output_tokens", "input_tokens") == {
        "status": "success",
        "http_status": 200,
        "finish_reason": "stop",
        "output_tokens": 5,
        "input_tokens": len(worker.requests[0]["token_ids"]),
    }
    assert completed["decode_worker_id"] == f"{worker.endpoint.connection_id():x}"
    assert 0 <= completed["ttft_ms"] <= completed["elapsed_ms"]
    assert 0 <= completed["avg_itl_ms"] <= completed["elapsed_ms"]
    assert "error_type" not in completed


async def test_a_failed_request_has_its_status_and_type(house: Cluster, log: MachineLog) -> None:
    await house.worker(fail(Unknown("it broke\nat night")))
    await house.client.chat("hi")
    assert part(log.only("request completed", FRONTEND), "status", "http_status", "error_type") == {
        "status": "error",
        "http_status": 500,
        "error_type": "internal",
    }


async def test_a_request_that_was_declined_is_one_record_too(house: Cluster, log: MachineLog) -> None:
    await house.worker()
    await house.client.chat("hi", temperature=9, headers=IDS)
    received, sent, declined = log.records(target=FRONTEND)
    assert [received["message"], sent["message"]] == ["request received", "http response sent"]
    for record in (received, sent, declined):
        assert part(record, "span_name", "trace_id", "parent_id") == {
            "span_name": "http-request",
            "trace_id": TRACE,
            "parent_id": CALLER,
        }
    assert part(declined, "message", "status", "http_status", "error_type", "x_request_id", "route") == {
        "message": "request completed",
        "status": "error",
        "http_status": 400,
        "error_type": "validation",
        "x_request_id": "mine-1",
        "route": "/v1/chat/completions",
    }
    assert "Temperature must be between 0 and 2" in declined["error"]


async def test_a_reader_gets_one_line_for_each_request(house: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    await house.worker(say("hello"))
    caplog.set_level("INFO")
    await house.client.chat("hi")
    lines = [record for record in caplog.records if record.name in (FRONTEND, WORKER)]
    assert [record.message for record in lines] == ["request completed"]


# -- the worker


async def test_the_worker_logs_the_same_request(house: Cluster, log: MachineLog) -> None:
    worker = await house.worker(say("hel", "lo"))
    await house.client.chat("hi", headers=IDS)
    received, completed = log.records(target=WORKER)
    assert [received["message"], completed["message"]] == ["request received", "request completed"]
    for record in (received, completed):
        assert part(record, "request_id", "trace_id", "model", "input_tokens", "instance_id") == {
            "request_id": worker.contexts[0].id(),
            "trace_id": TRACE,
            "model": "m",
            "input_tokens": len(worker.requests[0]["token_ids"]),
            "instance_id": f"{worker.endpoint.connection_id():x}",
        }
    assert completed["status"] == "success"
    assert completed["elapsed_ms"] >= 0


async def test_the_worker_names_the_kind_of_an_error(house: Cluster, log: MachineLog) -> None:
    await house.worker(fail(InvalidArgument("no")))
    await house.client.chat("hi")
    assert part(log.only("request completed", WORKER), "status", "error_type") == {
        "status": "error",
        "error_type": "InvalidArgument",
    }


async def test_a_client_that_leaves_is_seen_at_both_ends(house: Cluster, log: MachineLog) -> None:
    worker = await house.worker()
    worker.script = worker.hold
    request = asyncio.create_task(house.client.chat("hi", stream=True))
    await worker.started.wait()
    request.cancel()
    await asyncio.wait({request})
    async with asyncio.timeout(PATIENCE_SECONDS):
        await worker.killed.wait()
        while not log.records("request completed", WORKER):
            await asyncio.sleep(0)
    assert log.only("request cancellation received")["cancellation.signal"] == "kill"
    assert log.only("request completed", WORKER)["error_type"] == "cancelled"
    assert log.only("request completed", FRONTEND)["error_type"] == "cancelled"


async def test_span_events_frame_every_request(
    house: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await house.worker(say("hello"))
    with machine_log(monkeypatch, capsys, DYN_LOGGING_SPAN_EVENTS="1", DYN_LOG="error") as log:
        await house.client.chat("hi")
        events = log.records(target="request_span")
    assert sorted((record["span_name"], record["message"]) for record in events) == [
        ("handle_payload", "SPAN_CLOSED"),
        ("handle_payload", "SPAN_FIRST_ENTRY"),
        ("http-request", "SPAN_CLOSED"),
        ("http-request", "SPAN_FIRST_ENTRY"),
    ]
    assert all(record["duration_us"] >= 0 for record in events if record["message"] == "SPAN_CLOSED")


async def test_span_events_frame_a_request_that_was_declined(
    house: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with machine_log(monkeypatch, capsys, DYN_LOGGING_SPAN_EVENTS="1", DYN_LOG="error") as log:
        await house.client.chat("hi", model="nope", headers=IDS)
        events = log.records(target="request_span")
    assert [(record["span_name"], record["message"], record["trace_id"]) for record in events] == [
        ("http-request", "SPAN_FIRST_ENTRY", TRACE),
        ("http-request", "SPAN_CLOSED", TRACE),
    ]


# -- the trace


async def test_a_request_that_was_declined_has_a_span(house: Cluster, exported: InMemorySpanExporter) -> None:
    await house.worker()
    await house.client.chat("hi", temperature=9, headers=IDS)
    (server,) = exported.get_finished_spans()
    assert server.kind is SpanKind.SERVER
    assert server.parent is not None
    assert format(server.parent.span_id, "016x") == CALLER
    assert dict(server.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 400,
        "error.type": "validation",
    }


async def test_a_server_span_continues_the_callers_trace_and_has_its_parts(
    house: Cluster, exported: InMemorySpanExporter
) -> None:
    worker = await house.worker(say("hel", "lo"))
    await house.client.chat("hi", headers=IDS)
    spans = {span.name: span for span in exported.get_finished_spans()}
    server = spans.pop("POST /v1/chat/completions")
    assert server.kind is SpanKind.SERVER
    assert server.parent is not None
    assert format(server.parent.span_id, "016x") == CALLER
    attributes = dict(server.attributes or {})
    assert {name: attributes[name] for name in attributes if "time" not in name} == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dynamo",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": False,
        "gen_ai.response.id": f"chatcmpl-{worker.contexts[0].id()}",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len(worker.requests[0]["token_ids"]),
        "gen_ai.usage.output_tokens": 5,
        "dynamo.decode_worker_id": f"{worker.endpoint.connection_id():x}",
    }
    own = server.get_span_context()
    assert own is not None
    assert {name: (span.parent.span_id, span.kind) for name, span in spans.items() if span.parent is not None} == {
        "preprocess": (own.span_id, SpanKind.INTERNAL),
        "route": (own.span_id, SpanKind.INTERNAL),
        "dispatch": (own.span_id, SpanKind.CLIENT),
    }


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


async def test_the_workers_span_is_a_child_of_the_call_to_it(house: Cluster, exported: InMemorySpanExporter) -> None:
    worker = await house.worker(say("hello"))
    await house.client.chat("hi", headers=IDS)
    trace = worker.contexts[0].trace
    (call,) = [span for span in exported.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert trace is not None
    assert (trace.trace_id, trace.span_id) == (TRACE, format(id_of(call), "016x"))
    worker_id = f"{worker.endpoint.connection_id():x}"
    assert dict(call.attributes or {}) == {"endpoint": "ns.backend.generate", "worker_id": worker_id}
    assert [event.name for event in call.events] == ["first output"]
    assert (call.status.status_code, call.links) == (StatusCode.UNSET, ())


async def test_each_attempt_has_a_span_that_is_linked_to_the_one_before(
    house: Cluster, exported: InMemorySpanExporter
) -> None:
    attempts: list[str] = []

    async def script(body: Any, context: Context, sink: ResponseSink) -> None:
        attempts.append(context.id())
        if len(attempts) == 1:  # whichever is asked first fails, and then the other answers
            sink.send_tokens([104])
            raise Disconnected("gone")
        sink.send_tokens([105], finish_reason="stop")

    for _ in range(2):
        await house.worker(script)
    assert (await house.client.chat("hi")).status == 200
    failed, served = [span for span in exported.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert (failed.status.status_code, (failed.attributes or {})["error.type"]) == (StatusCode.ERROR, "Disconnected")
    assert (served.status.status_code, [link.context.span_id for link in served.links]) == (
        StatusCode.UNSET,
        [id_of(failed)],
    )


async def test_only_the_servers_own_failures_mark_its_span(house: Cluster, exported: InMemorySpanExporter) -> None:
    worker = await house.worker(fail(Unknown("it broke")))
    await house.client.chat("hi")
    worker.script = fail(InvalidArgument("no"))
    await house.client.chat("hi")
    servers = [span for span in exported.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert [(span.status.status_code, dict(span.attributes or {})["error.type"]) for span in servers] == [
        (StatusCode.ERROR, "internal"),
        (StatusCode.UNSET, "validation"),
    ]


async def test_a_trace_that_its_caller_does_not_sample_is_not_exported(
    house: Cluster, exported: InMemorySpanExporter
) -> None:
    await house.worker(say("hello"))
    await house.client.chat("hi", headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
    assert exported.get_finished_spans() == ()
