"""Responses that are kept: conversations that go on, items that are only named, and the routes that read and delete."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.base.steady_wall import steady_wall
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, ScriptedWorker, cluster, say
from support.response_streams import ResponseReader, read_events

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "f"}]


@pytest.fixture(params=["memory", "sqlite"])
async def house(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    place = "memory" if request.param == "memory" else f"sqlite:{tmp_path / 'r.db'}"
    async with cluster(tmp_path, responses_store=place) as found:
        yield found


async def ask(house: Cluster, given: Any, *, headers: dict[str, str] | None = None, **body: Any) -> Exchange:
    members = {"model": "m", "input": given, **body}
    return await house.client.begin("POST", "/v1/responses", members, headers=headers).done()


async def answered(house: Cluster, given: Any, **body: Any) -> dict[str, Any]:
    answer = await ask(house, given, **body)
    assert answer.status == 200, answer.body
    if body.get("stream"):
        whole = ResponseReader(read_events(answer.body)).response
        assert whole is not None
        return whole
    found: dict[str, Any] = answer.json
    return found


def prompt(worker: ScriptedWorker) -> str:
    """What the worker was asked last."""
    return bytes(worker.requests[-1]["token_ids"]).decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on(house: Cluster, stream: bool) -> None:
    config = ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    worker = await house.worker(say(f"<think>hm</think>Wait.{CALL}"), runtime_config=config)
    first = await answered(house, "one", instructions="Be brief.", tools=TOOLS, stream=stream)
    assert first["store"] is True
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    worker.script = say("Fine.")
    second = await answered(house, [result], previous_response_id=first["id"], tools=TOOLS, stream=stream)
    third = await answered(house, "three", previous_response_id=second["id"], tools=TOOLS, stream=stream)
    assert third["previous_response_id"] == second["id"]
    history = [{"role": "user", "content": "one"}, *first["output"], result, *second["output"]]
    remembered = prompt(worker)
    await answered(house, [*history, {"role": "user", "content": "three"}], tools=TOOLS, store=False)
    assert prompt(worker) == remembered
    assert "Be brief" not in remembered, "instructions are those of one request"


async def test_a_response_that_is_not_kept_is_named(house: Cluster) -> None:
    await house.worker(say("x"))
    unkept = await answered(house, "one", store=False)
    assert unkept["store"] is False
    for id in (unkept["id"], "resp_" + "0" * 32, "nonsense"):
        answer = await ask(house, "two", previous_response_id=id)
        assert (answer.status, answer.json["error"]["code"]) == (400, "previous_response_not_found")
        assert answer.json["error"]["param"] == "previous_response_id"
        assert (await house.client.get(f"/v1/responses/{id}")).status == 404


async def test_a_wall_clock_that_jumps_loses_no_response(house: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.worker(say("one"))
    first = await answered(house, "hello")
    monkeypatch.setattr(steady_wall, "_wall", lambda: time.time() + 400 * 86_400)
    await answered(house, "another", previous_response_id=first["id"])
    assert (await house.client.get(f"/v1/responses/{first['id']}")).status == 200


async def test_a_response_is_read_and_deleted(house: Cluster) -> None:
    await house.worker(say("x"))
    made = await answered(house, "one")
    path = f"/v1/responses/{made['id']}"
    assert (await house.client.get(path)).json == made
    assert house.metric("dynamo_frontend_stored_responses") == 1
    assert house.metric("dynamo_frontend_stored_response_bytes") > 500
    (item,) = (await house.client.get(path + "/input_items")).json["data"]
    assert item == {
        "id": item["id"],
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "one"}],
    }
    cancelled = await house.client.call("POST", path + "/cancel")
    assert cancelled.status == 400
    deleted = await house.client.call("DELETE", path)
    assert (deleted.status, deleted.json) == (200, {"id": made["id"], "object": "response", "deleted": True})
    for method, below in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = await house.client.call(method, path + below)
        assert (answer.status, answer.json["error"]["code"]) == (404, "response_not_found")
    assert (await house.client.call("PUT", path)).status == 405
    assert house.metric("dynamo_frontend_stored_responses") == 0


async def test_input_items_come_in_pages(house: Cluster) -> None:
    await house.worker(say("x"))
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    made = await answered(house, [*items, {"type": "web_search_call", "id": "ws_1"}])
    path = f"/v1/responses/{made['id']}/input_items"

    async def page(query: str) -> Any:
        return await house.client.begin("GET", path, headers={}, query=query).done()

    seen: list[str] = []
    after = ""
    while True:
        found = (await page(f"order=asc&limit=4{after}")).json
        seen += [item["id"] for item in found["data"]]
        assert (found["first_id"], found["last_id"]) == (found["data"][0]["id"], found["data"][-1]["id"])
        if not found["has_more"]:
            break
        after = f"&after={found['last_id']}"
    assert len(seen) == len(set(seen)) == 6
    assert seen[-1] == "ws_1"
    assert [item["id"] for item in (await page("")).json["data"]] == seen[::-1]
    for bad in ("limit=0", "limit=101", "limit=x", "order=up", "after=nobody"):
        assert (await page(bad)).status == 400
    assert (await house.client.begin("GET", f"/v1/responses/{made['id']}", query="stream=true").done()).status == 422


async def test_items_that_are_only_named_are_looked_up(house: Cluster) -> None:
    worker = await house.worker(say("x"))
    first = await answered(house, [{"role": "user", "content": "one"}])
    (asked,) = (await house.client.get(f"/v1/responses/{first['id']}/input_items")).json["data"]
    names = [{"type": "item_reference", "id": id} for id in (asked["id"], first["output"][0]["id"])]
    second = await answered(house, [*names, {"role": "user", "content": "two"}])
    remembered = prompt(worker)
    await answered(house, [{"role": "user", "content": "one"}, *first["output"], {"role": "user", "content": "two"}])
    assert prompt(worker) == remembered
    # What the conversation has already is not said twice, and what was named is listed.
    await answered(house, [*names, {"role": "user", "content": "two"}], previous_response_id=first["id"])
    assert prompt(worker) == remembered
    listed = (await house.client.get(f"/v1/responses/{second['id']}/input_items")).json["data"]
    assert [item["type"] for item in listed] == ["message"] * 3
    lost = await ask(house, [{"type": "item_reference", "id": "msg_nobody"}])
    assert (lost.status, lost.json["error"]["param"]) == (400, "input[0]")


async def test_a_tenant_finds_what_it_stored_and_nobody_else_does(house: Cluster) -> None:
    await house.worker(say("x"))
    mine = {"x-tenant-id": "a"}
    made = (await ask(house, "one", headers=mine)).json
    assert (await ask(house, "two", headers=mine, previous_response_id=made["id"])).status == 200
    assert (await ask(house, "two", previous_response_id=made["id"])).status == 400
    assert (await house.client.get(f"/v1/responses/{made['id']}")).status == 404
    assert (await house.client.get(f"/v1/responses/{made['id']}", x_tenant_id="a")).json == made


async def test_where_tenants_are_not_known_everybody_finds_what_is_stored(tmp_path: Path) -> None:
    async with cluster(tmp_path, disable_nvext=True) as house:
        await house.worker(say("x"))
        made = (await ask(house, "one", headers={"x-tenant-id": "a"})).json
        for headers in ({}, {"x_tenant_id": "a"}, {"x_tenant_id": "b"}):
            assert (await house.client.get(f"/v1/responses/{made['id']}", **headers)).json == made


async def test_an_answer_that_was_cut_is_kept_and_one_that_failed_is_not(house: Cluster) -> None:
    worker = await house.worker(say("x", finish="length"))
    cut = await answered(house, "one")
    assert (await house.client.get(f"/v1/responses/{cut['id']}")).json["status"] == "incomplete"

    async def fails(body: Any, context: Any, sink: Any) -> None:
        sink.send_tokens([120])
        raise RuntimeError("broken")

    worker.script = fails
    failed = await answered(house, "one", stream=True)
    assert failed["status"] == "failed"
    assert (await house.client.get(f"/v1/responses/{failed['id']}")).status == 404


async def test_a_conversation_that_is_too_long_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path, messages_limit=3) as house:
        await house.worker(say("x"))
        first = await answered(house, "one")
        second = await ask(house, "two", previous_response_id=first["id"])
        assert second.status == 200
        third = await ask(house, "three", previous_response_id=second.json["id"])
        assert (third.status, third.json["error"]["param"]) == (400, "previous_response_id")


async def test_a_conversation_of_too_many_bytes_is_refused_and_a_long_one_is_read_in_a_thread(tmp_path: Path) -> None:
    async with cluster(tmp_path, inline=False, body_limit_bytes=700_000) as house:
        worker = await house.worker(say("x"))
        first = await answered(house, "w" * 300_000)
        second = await answered(house, "two", previous_response_id=first["id"])
        assert prompt(worker).count("w") >= 300_000
        third = await ask(house, "w" * 400_000, previous_response_id=second["id"])
        assert third.status == 200
        last = await ask(house, "more", previous_response_id=third.json["id"])
        assert (last.status, last.json["error"]["param"]) == (400, "previous_response_id")
        assert "DYN_HTTP_BODY_LIMIT_MB" in last.json["message"]


async def test_the_oldest_turns_go_where_the_prompt_is_too_long(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker(say("x"), runtime_config=ModelRuntimeConfig(context_length=200))
        turns = [item for number in range(12) for item in ({"role": "user", "content": f"turn {number} " + "w" * 20},)]
        assert (await ask(house, turns)).status == 400
        answer = await ask(house, turns, truncation="auto", instructions="Stay.")
        assert answer.status == 200
        assert "Stay." in prompt(worker)
        assert "turn 11" in prompt(worker)
        assert "turn 0 " not in prompt(worker)
        kept = len(worker.requests[-1]["token_ids"])
        assert 200 - 60 < kept < 200, "more went than had to"
        alone = await ask(house, "w" * 300, truncation="auto")
        assert (alone.status, alone.json["error"]["param"]) == (400, "input")


async def test_a_frontend_that_stores_nothing_says_so(tmp_path: Path) -> None:
    async with cluster(tmp_path, responses_store="off") as house:
        await house.worker(say("x"))
        made = await answered(house, "one", store=True)
        assert made["store"] is False
        refused = await ask(house, "two", previous_response_id=made["id"])
        assert (refused.status, refused.json["error"]["code"]) == (422, "not_built")
        assert (await house.client.get(f"/v1/responses/{made['id']}")).status == 404
        named = {"type": "item_reference", "id": "msg_1"}
        assert (await ask(house, [named, {"role": "user", "content": "x"}])).status == 200
        assert (await ask(house, [named])).status == 400
