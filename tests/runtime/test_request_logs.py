"""Records logged while a request is served carry its ids."""

from __future__ import annotations

import json
import logging

from dynamo.runtime.context import Context
from dynamo.runtime.logging import enter_request_span, format_jsonl
from dynamo.runtime.tracing import TraceContext


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
