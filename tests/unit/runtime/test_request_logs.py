"""Records logged while a request is served carry its ids."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_log import WorkerRequestLog
from dynamo.runtime.observe.logging import enter_request_span, format_jsonl
from dynamo.runtime.observe.tracing import TraceContext
from dynamo.worker.serving import TokenServing
from support.machine_log import machine_log


def logged() -> dict[str, object]:
    record = logging.getLogger("an.engine").makeRecord("an.engine", logging.INFO, "f", 1, "hi", (), None, "step")
    return dict(json.loads(format_jsonl(record)))


async def test_the_inbound_trace_and_the_request_id_are_on_the_engines_own_records() -> None:
    trace = TraceContext("a" * 32, "b" * 16, x_request_id="x-1")
    enter_request_span({"namespace": "ns", "instance_id": 2**63}, Context("r1", trace=trace))
    found = logged()
    assert {key: found.get(key) for key in ("span_name", "request_id", "trace_id", "parent_id", "x_request_id")} == {
        "span_name": "handle_payload",
        "request_id": "r1",
        "trace_id": "a" * 32,
        "parent_id": "b" * 16,
        "x_request_id": "x-1",
    }
    assert (found["namespace"], found["instance_id"]) == ("ns", str(2**63))


async def test_without_a_trace_only_the_request_is_named() -> None:
    enter_request_span({}, Context("r2"))
    found = logged()
    assert found["request_id"] == "r2"
    assert "trace_id" not in found


class NoSink:
    """Takes everything and keeps nothing."""

    request_bytes = response_bytes = 0

    def __init__(self) -> None:
        self.ended = False

    def send_tokens(self, *_: Any) -> None:
        return

    def send_token(self, token_id: int) -> bool:
        return not self.ended

    def has_credit(self) -> bool:
        return True

    def end(self, error: BaseException | None = None) -> None:
        self.ended = True


class ThreeTokens:
    """Yields three tokens and ends."""

    async def generate(self, request: Any, context: Context) -> AsyncIterator[dict[str, Any]]:
        for token in (1, 2):
            yield {"token_ids": [token]}
        yield {"token_ids": [3], "finish_reason": "length"}


async def test_the_workers_last_record_has_what_its_stream_was_like(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context, body, sink = Context("r1"), {"model": "m", "token_ids": [7, 8]}, NoSink()
    with machine_log(monkeypatch, capsys) as log:
        record = WorkerRequestLog({"endpoint": "generate"}, context, body)
        await TokenServing(ThreeTokens()).handle(body, context, sink)  # type: ignore[arg-type]
        record.completed(0.25, None)
        completed = log.only("request completed")
    assert completed["ttft_ms"] >= 0
    assert completed["avg_itl_ms"] >= 0
    kept = ("status", "model", "input_tokens", "output_tokens", "finish_reason", "elapsed_ms", "endpoint")
    assert {key: completed[key] for key in kept} == {
        "status": "success",
        "model": "m",
        "input_tokens": 2,
        "output_tokens": 3,
        "finish_reason": "length",
        "elapsed_ms": 250.0,
        "endpoint": "generate",
    }
