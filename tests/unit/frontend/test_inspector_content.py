"""What the inspector shows of prompts and answers: nothing, or to those who may read it, within bounds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.settings.inspector import InspectorSettings
from dynamo.frontend.base.settings.recording import RecordingSettings, RequestTraceSettings
from dynamo.frontend.parts.inspector.tables import MAX_CONTENT_BYTES
from dynamo.protocol.inspector.actions import inspector_json
from dynamo.protocol.inspector.views import VIEWS
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.access import bearer, closed_cluster, key
from support.cases import each_case
from support.frontend_cluster import Cluster, cluster, fail
from support.inspecting import Lens

MARKER = "xyzzy-marker"
ANSWER = "plugh-answer"
SHOWN = InspectorSettings(shows_content=True)


def says(text: str) -> Any:
    """A worker that says something, and goes on until it is killed."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        sink.send_tokens(list(text.encode()))
        await context.async_killed_or_stopped()

    return script


async def begin(house: Cluster, text: str = f"say {MARKER}", **fields: Any) -> Any:
    request = house.client.begin_chat(text, stream=True, **fields)
    await request.until(lambda each: each.body.count(b'"content"') >= 1)
    return request


async def test_without_the_flag_no_route_shows_what_clients_and_models_say(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    kept = RecordingSettings(keep_failed_content=False)
    async with cluster(tmp_path, recording=kept, audit_log=str(audit)) as house:
        worker = await house.worker(says(ANSWER))
        lens = Lens(house)
        running = await begin(house, f'say "{MARKER}" {MARKER}', stop=[MARKER], user=MARKER)
        worker.script = fail(InvalidArgument(f"cannot do {MARKER}"))
        assert MARKER in (await house.client.chat(MARKER)).body.decode()
        worker.script = fail(RuntimeError(f"cannot do {MARKER}"))
        await house.client.chat(MARKER)
        await house.client.chat(MARKER, temperature=MARKER)
        explained = {"model": "m", "messages": [{"role": "user", "content": MARKER}]}
        answers = [(await lens.post("routing/explain", explained)).body]
        id = (await lens.get("snapshot", views="streams"))["streams"][0]["id"]
        failed = [row["id"] for row in (await lens.get("recent", filter="failed"))["data"] if row["status"] == 500]
        assert failed
        paths = [path for path, operations in json.loads(inspector_json())["paths"].items() if "get" in operations]
        for path in paths:
            if path.endswith("/watch"):
                continue
            for one in [id, *failed] if "{id}" in path else [""]:
                relative = path.replace("/admin/v1/", "").replace("{id}", one)
                query = f"views={','.join(VIEWS)}" if relative == "snapshot" else ""
                answer = await lens.begin("GET", relative, query=query).done()
                assert answer.status == 200 or "errors/" in relative, (relative, answer.body)
                answers.append(answer.body)
        watch = lens.watch(views=",".join(VIEWS))
        await watch.until(lambda each: len(each.events) == 1)
        answers.append(watch.body)
        assert (await lens.post(f"requests/{id}/abort")).status == 202
        answers.append(audit.read_bytes())
        for body in answers:
            assert MARKER.encode() not in body
            assert ANSWER.encode() not in body
        await running.done()


async def test_with_the_flag_a_request_in_flight_shows_its_texts_to_those_who_may_read(tmp_path: Path) -> None:
    roles = ("viewer", "content", "operator", "admin")
    keys = [key(role, role=role) for role in roles]
    async with closed_cluster(tmp_path, *keys, inspector=SHOWN) as house:
        await house.worker(says(ANSWER))
        running = await begin(house, headers={"x-request-id": "mine"} | bearer("admin"))
        for role in roles:
            shown = await Lens(house, headers=bearer(role)).get("requests/mine")
            if role in ("viewer", "operator"):
                assert shown["content"] is None
                assert MARKER not in json.dumps(shown)
                continue
            content = shown["content"]
            assert MARKER in content["prompts"][0]
            assert content["answers"] == [ANSWER]
            assert (content["schema"], content["model"], content["key"]) == ("dynamo.inspect.content.v1", "m", "admin")
            assert (content["output_tokens"], content["prompt_tokens"] > 0) == (len(ANSWER), True)
        running.disconnect()
        await running.done()
        assert (await Lens(house, headers=bearer("admin")).get("requests/mine"))["content"] is None  # nothing is kept


async def test_what_is_shown_has_bounds(tmp_path: Path) -> None:
    async with cluster(tmp_path, inspector=SHOWN) as house:
        await house.worker(says("a" * 100_000 + "end"), runtime_config=ModelRuntimeConfig(context_length=1_000_000))
        running = await begin(house, "begin" + "\N{SNOWMAN}" * 50_000, headers={"x-request-id": "mine"}, n=3)
        content = (await Lens(house).get("requests/mine"))["content"]
        assert "begin" in content["prompts"][0]
        assert "end" in content["answers"][0][-3:]
        assert len(content["answers"]) == 3
        for texts in (content["prompts"], content["answers"]):
            assert sum(len(text.encode()) for text in texts) <= MAX_CONTENT_BYTES
        assert content["prompt_tokens"] > 150_000
        running.disconnect()


def hide(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"prompts": ["***"], "answers": ["***"]}


def nothing(record: dict[str, Any]) -> None:
    return None


def broken(record: dict[str, Any]) -> None:
    raise ValueError(f"cannot hide {record}")


@each_case("redact, shown", [(hide, ["***"]), (nothing, None), (broken, None)])
async def test_the_operators_function_decides_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, redact: Any, shown: Any
) -> None:
    module = ModuleType("redacting")
    module.redact = redact  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "redacting", module)
    trace = RequestTraceSettings(redact="redacting.redact")
    async with cluster(tmp_path, inspector=SHOWN, request_trace=trace) as house:
        await house.worker(says(ANSWER))
        running = await begin(house, headers={"x-request-id": "mine"})
        detail = await Lens(house).get("requests/mine")
        assert MARKER not in json.dumps(detail)
        assert (None if detail["content"] is None else detail["content"]["prompts"]) == shown
        assert MARKER not in caplog.text
        running.disconnect()
