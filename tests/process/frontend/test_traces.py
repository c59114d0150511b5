"""Traces as a collector gets them: real frontends and workers export over OTLP, and each request is one tree."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.http_client import ask, chat, script
from support.otlp_receiver import CLIENT, ERROR, INTERNAL, SERVER, OtlpReceiver, Span, otlp_receiver
from support.processes import Cluster, Frontend, wait

pytestmark = pytest.mark.process

CALLER = "00f067aa0ba902b7"
MARKER = "a marker that nothing else contains"
KEY = "sk-a-key-that-is-nowhere"


@dataclass
class Rig:
    receiver: OtlpReceiver
    frontend: Frontend
    speaking: Frontend  # exports content, too

    async def ask(
        self, model: str, *steps: Any, frontend: Frontend | None = None, sampled: bool = True, **more: Any
    ) -> tuple[str, int]:
        """Send a request with a trace of its own; the trace's id and the status."""
        trace_id = uuid.uuid4().hex
        headers = {
            "traceparent": f"00-{trace_id}-{CALLER}-{'01' if sampled else '00'}",
            "authorization": f"Bearer {KEY}",
            "host": f"localhost:{(frontend or self.frontend).port}",
            "x-dynamo-session-id": "s-1",
            **script(*steps, tag=trace_id),
        }
        body = {**chat(model), "messages": [{"role": "user", "content": MARKER}], **more}
        answer = await ask((frontend or self.frontend).port, "/v1/chat/completions", body, headers=headers)
        return trace_id, answer.status


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    root: Path = tmp_path_factory.mktemp("traces")
    with otlp_receiver() as receiver, Cluster(root, DYN_REPLACEMENT_WAIT_SECS="0", **receiver.environment) as cluster:
        shows = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
        frontend = cluster.frontend("frontend", OTEL_SERVICE_NAME="frontend", DYN_RUNTIME_INHIBITED_DURATION_SECS="0")
        speaking = cluster.frontend("speaking", OTEL_SERVICE_NAME="speaking", **shows)
        workers = [
            cluster.worker("one", "one", OTEL_SERVICE_NAME="one"),
            *[cluster.worker(name, "pair", OTEL_SERVICE_NAME=name) for name in ("pair-a", "pair-b")],
        ]
        for role in ("prefill", "decode"):
            flags = ("--disaggregation-mode", role, "--block-size", "16", "--speedup-ratio", "20")
            cluster.mocker(role, "split", *flags, OTEL_SERVICE_NAME=role).wait_ready()
        cluster.wait_ready(frontend, *workers)
        cluster.wait_ready(speaking, *workers)
        wait(lambda: len(frontend.roles("split")) == 2, lambda: f"both roles; log:\n{frontend.log}")
        yield Rig(receiver, frontend, speaking)


def by_name(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def check_tree(spans: list[Span]) -> Span:
    """Every span has its parent among the others, but for the root, whose parent is the caller's; return the root."""
    ids = {span.span_id for span in spans}
    (root,) = [span for span in spans if span.parent_id not in ids]
    assert root.parent_id == CALLER
    assert root.kind == SERVER
    return root


async def test_one_request_is_one_tree_over_two_processes(rig: Rig) -> None:
    trace_id, status = await rig.ask("one", ["say", "Hello"], temperature=0.5, max_tokens=50, seed=7, stop=["zz"])
    assert status == 200
    spans = rig.receiver.wait_trace(trace_id, 5)
    root = check_tree(spans)
    (call,) = by_name(spans, "dispatch")
    (engine,) = by_name(spans, "engine.generate")
    assert {(span.name, span.kind, span.service) for span in spans} == {
        ("POST /v1/chat/completions", SERVER, "frontend"),
        ("preprocess", INTERNAL, "frontend"),
        ("route", INTERNAL, "frontend"),
        ("dispatch", CLIENT, "frontend"),
        ("engine.generate", INTERNAL, "one"),
    }
    assert (call.parent_id, engine.parent_id) == (root.span_id, call.span_id)
    asked = {name: value for name, value in root.attributes.items() if name.startswith("gen_ai.request.")}
    assert asked == {
        "gen_ai.request.model": "one",
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["zz"],
    }
    assert root.attributes["gen_ai.conversation.id"] == "s-1"
    assert root.attributes["gen_ai.provider.name"] == "dynamo"
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["server.port"] == rig.frontend.port
    # Sums over spans count a token once.
    assert not any(name.startswith("gen_ai.usage") for span in spans if span is not root for name in span.attributes)
    (route,) = by_name(spans, "route")
    assert route.attributes["dynamo.route.worker_id"] == call.attributes["worker_id"]
    assert route.attributes["dynamo.route.policy"]
    assert "Chose worker" in route.attributes["dynamo.route.summary"]


async def test_a_request_that_changes_its_worker_has_a_link_to_the_call_that_failed(rig: Rig) -> None:
    trace_id, status = await rig.ask("pair", ["say", "Hel"], ["die", "SIGKILL"], ["say", "lo"])
    assert status == 200
    spans = rig.receiver.wait_trace(trace_id, 6)
    root = check_tree(spans)
    failed, served = by_name(spans, "dispatch")
    assert (failed.status, failed.attributes["error.type"]) == (ERROR, "Disconnected")
    assert served.links == [(trace_id, failed.span_id)]
    assert (failed.parent_id, served.parent_id, root.status) == (root.span_id, root.span_id, 0)
    (engine,) = by_name(spans, "engine.generate")  # the other one died with its worker
    assert engine.parent_id == served.span_id


async def test_a_prefill_worker_is_in_the_tree_and_linked(rig: Rig) -> None:
    trace_id, status = await rig.ask("split", max_tokens=4)
    assert status == 200
    spans = rig.receiver.wait_trace(trace_id, 7)
    check_tree(spans)
    engines = {span.service: span for span in by_name(spans, "engine.generate")}
    calls = {span.span_id: span for span in by_name(spans, "dispatch")}
    assert {name: span.attributes["disagg_role"] for name, span in engines.items()} == {
        "prefill": "prefill",
        "decode": "decode",
    }
    assert (trace_id, engines["prefill"].span_id) in engines["decode"].links
    assert (trace_id, engines["prefill"].parent_id) in calls[engines["decode"].parent_id].links


async def test_a_failure_of_an_engine_marks_every_span_above_it(rig: Rig) -> None:
    trace_id, status = await rig.ask("one", ["raise", "Unknown", "it broke"])
    assert status == 500
    spans = rig.receiver.wait_trace(trace_id, 5)
    root = check_tree(spans)
    (call,), (engine,) = by_name(spans, "dispatch"), by_name(spans, "engine.generate")
    assert (root.status, root.attributes["error.type"]) == (ERROR, "internal")
    assert (call.status, call.attributes["error.type"]) == (ERROR, "Unknown")
    assert (engine.status, engine.attributes["error_kind"]) == (ERROR, "Unknown")


async def test_content_is_exported_only_where_that_was_asked_for_and_keys_never_are(rig: Rig) -> None:
    silent, _ = await rig.ask("one", ["say", "Hello"])
    speaking, _ = await rig.ask("one", ["say", "Hello"], frontend=rig.speaking, stream=True)
    for trace_id in (silent, speaking):
        rig.receiver.wait_trace(trace_id, 5)
    assert not any(MARKER in str(span.attributes) for span in rig.receiver.trace(silent))
    shown = [span for span in rig.receiver.trace(speaking) if MARKER in str(span.attributes)]
    (root,) = shown
    assert root.kind == SERVER
    assert '"parts":[{"type":"text","content":"Hello"}]' in root.attributes["gen_ai.output.messages"]
    assert MARKER in root.attributes["gen_ai.input.messages"]
    assert KEY.encode() not in rig.receiver.raw


async def test_a_trace_that_its_caller_does_not_sample_is_not_exported(rig: Rig) -> None:
    unsampled, status = await rig.ask("one", ["say", "Hello"], sampled=False)
    assert status == 200
    later, _ = await rig.ask("one", ["say", "Hello"])
    rig.receiver.wait_trace(later, 5)
    assert rig.receiver.trace(unsampled) == []


async def test_a_collector_that_is_gone_costs_spans_and_nothing_else(tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        # How long the exporter tries one batch; it is ten seconds by itself, also at the end of a process.
        environment = {**receiver.environment, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with Cluster(tmp_path, **environment) as cluster:
        frontend, worker = cluster.frontend("f"), cluster.worker("w", "w")
        cluster.wait_ready(frontend, worker)
        lost = Rig(receiver, frontend, frontend)
        assert [(await lost.ask("w", ["say", "Hello"]))[1] for _ in range(20)] == [200] * 20
        frontend.terminate()
        assert frontend.exit_code() == 0
