"""Prefill and decode workers behind one frontend: the hand-over, what replaces it, and how it ends."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect, Disconnected, EngineShutdown, InvalidArgument, Overloaded, Unknown
from dynamo.protocol.model_types import ModelType, WorkerType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.dispatch.stages import PrefillStage
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import Cluster, Script, ScriptedWorker, cluster, fail, say
from support.patience import PATIENCE_SECONDS

PARAMS = {"room": 7, "anything": ["the", "engines", "like"]}
DETAILS = {"completion_usage": {"prompt_tokens_details": {"cached_tokens": 3}}}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


def hand_over(**extra: Any) -> Script:
    return say("x", finish="length", extra={"disaggregated_params": PARAMS, **DETAILS, **extra})


async def add_prefill(house: Cluster, script: Script | None = None, **runtime_config: Any) -> ScriptedWorker:
    worker = await house.worker(
        script or hand_over(),
        component="prefill",
        worker_type=WorkerType.Prefill,
        model_type=ModelType.Prefill,
        needs=[["decode"]],
        runtime_config=ModelRuntimeConfig(**runtime_config),
        wait=False,
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: known(house, worker))
    return worker


def known(house: Cluster, worker: ScriptedWorker) -> bool:
    router = house.frontend.models._stages.prefill.get("m", "ns")
    return router is not None and router.workers.instance(worker.endpoint.connection_id()) is not None


async def forgotten(house: Cluster, worker: ScriptedWorker) -> None:
    await worker.stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: not known(house, worker))


async def add_decode(house: Cluster, script: Script | None = None, *, wait: bool = True) -> ScriptedWorker:
    return await house.worker(
        script or say("hello"), worker_type=WorkerType.Decode, needs=[["prefill"]], component="decode", wait=wait
    )


def content(answer: Any) -> str:
    return str(answer.json["choices"][0]["message"]["content"])


async def test_the_prompt_goes_to_a_prefill_worker_and_its_result_to_a_decode_worker(house: Cluster) -> None:
    prefill = await add_prefill(house)
    decode = await add_decode(house)
    nvext = {"extra_fields": ["worker_id"]}
    answer = await house.client.chat("hi", max_tokens=20, nvext=nvext)
    assert content(answer) == "hello"
    (first,), (second,) = prefill.requests, decode.requests
    assert first["token_ids"] == second["token_ids"]
    assert (first["stop_conditions"]["max_tokens"], second["stop_conditions"]["max_tokens"]) == (1, 20)
    assert second["prefill_result"] == {"disaggregated_params": PARAMS, "prompt_tokens_details": {"cached_tokens": 3}}
    assert "prefill_result" not in first
    assert second["router_config_override"] == {
        "overlap_score_credit": 0.0,
        "assume_kv_reuse": False,
        "track_prefill_tokens": False,
    }
    prefill_id, decode_id = prefill.endpoint.connection_id(), decode.endpoint.connection_id()
    assert first["routing"]["prefill_worker_id"] == second["routing"]["prefill_worker_id"] == prefill_id
    assert answer.json["nvext"]["worker_id"] == {"prefill_worker_id": prefill_id, "decode_worker_id": decode_id}
    assert prefill.contexts[0].id() == decode.contexts[0].id() == answer.json["id"].removeprefix("chatcmpl-")


async def test_a_streamed_answer_is_the_decode_workers(house: Cluster) -> None:
    await add_prefill(house)
    await add_decode(house, say("he", "llo"))
    answer = await house.client.chat("hi", stream=True)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in answer.chunks) == "hello"


async def test_every_choice_has_a_prefill_of_its_own(house: Cluster) -> None:
    prefill, decode = await add_prefill(house), await add_decode(house)
    answer = await house.client.chat("hi", n=3)
    assert [choice["message"]["content"] for choice in answer.json["choices"]] == ["hello"] * 3
    assert len(prefill.requests) == len(decode.requests) == 3


async def test_a_prefill_that_ends_the_answer_is_the_answer(house: Cluster) -> None:
    """An end-of-sequence token came first: nothing is handed over."""
    await add_prefill(house, say("", finish="eos"))
    decode = await add_decode(house)
    answer = await house.client.chat("hi")
    assert (content(answer), answer.json["choices"][0]["finish_reason"], decode.requests) == ("", "stop", [])


async def test_a_prefill_without_a_handover_is_an_error(house: Cluster) -> None:
    await add_prefill(house, say("x", finish="length"))
    await add_decode(house)
    assert (await house.client.chat("hi")).status == 500


async def test_what_the_prefill_worker_refuses_reaches_the_client(house: Cluster) -> None:
    prefill = await add_prefill(house, fail(InvalidArgument("too long")))
    decode = await add_decode(house)
    answer = await house.client.chat("hi")
    assert (answer.status, answer.json["message"], decode.requests) == (400, "too long", [])
    assert len(prefill.requests) == 1


async def test_another_prefill_worker_is_tried_before_the_decode_worker_has_to_do_it(house: Cluster) -> None:
    workers = [await add_prefill(house, fail(EngineShutdown("going"))) for _ in range(2)]
    workers.append(await add_prefill(house))
    decode = await add_decode(house)
    for _ in range(3):
        assert content(await house.client.chat("hi")) == "hello"
    assert all("prefill_result" in request for request in decode.requests)
    assert len(workers[2].requests) == 3


async def test_prompts_are_computed_where_they_are_decoded_when_no_prefill_worker_can(
    house: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    prefill = await add_prefill(house, fail(EngineShutdown("going")))
    decode = await add_decode(house)
    for _ in range(2):
        assert content(await house.client.chat("hi")) == "hello"
    assert ["prefill_result" in request for request in decode.requests] == [False, False]
    assert caplog.text.count("decode workers compute it themselves") == 1
    await forgotten(house, prefill)
    assert content(await house.client.chat("hi")) == "hello"  # the model stays when its last prefill worker left
    ready = await house.client.get("/v1/models/m/ready")
    assert (ready.status, ready.json["namespaces"]["ns"]["missing_worker_types"]) == (200, ["prefill"])
    await add_prefill(house)
    assert content(await house.client.chat("hi")) == "hello"
    assert "prefill_result" in decode.requests[-1]
    assert "prompts go to prefill workers again" in caplog.text


async def test_a_decode_worker_that_is_lost_is_replaced_without_a_second_prefill(house: Cluster) -> None:
    prefill = await add_prefill(house)
    workers = [await add_decode(house, fail(EngineShutdown("going"))) for _ in range(2)]
    workers.append(await add_decode(house))
    assert content(await house.client.chat("hi")) == "hello"
    assert len(prefill.requests) == 1
    asked = [request["prefill_result"] for worker in workers for request in worker.requests]
    assert asked == [asked[0]] * len(asked)


async def test_in_the_direct_mode_the_client_names_its_prefill_worker(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="direct") as house:
        workers = [await add_prefill(house) for _ in range(2)]
        decode = await add_decode(house)
        named = {"decode_worker_id": decode.endpoint.connection_id()}
        answer = await house.client.chat("hi", nvext=named)
        assert (answer.status, answer.json["message"][:26]) == (400, "Prefill worker ID required")
        named["prefill_worker_id"] = workers[1].endpoint.connection_id()
        assert content(await house.client.chat("hi", nvext=named)) == "hello"


async def test_full_prefill_workers_shed_and_do_not_drown_the_decode_workers(house: Cluster) -> None:
    await add_prefill(house, fail(Overloaded()))
    decode = await add_decode(house)
    assert (await house.client.chat("hi")).status == 529
    assert decode.requests == []


async def test_an_enforced_prefill_fails_instead(tmp_path: Path) -> None:
    async with cluster(tmp_path, enforce_disagg=True) as house:
        prefill = await add_prefill(house, fail(EngineShutdown("going")))
        decode = await add_decode(house)
        assert (await house.client.chat("hi")).status == 503
        await forgotten(house, prefill)
        assert (await house.client.chat("hi")).status == 503
        assert (await house.client.get("/v1/models/m/ready")).status == 503
        assert decode.requests == []


async def test_an_engine_that_cannot_do_without_gets_the_client_the_reason_of_the_prefill(house: Cluster) -> None:
    """A decode worker that only decodes says so with a ValueError, which is neither the client's fault nor a bug."""
    await add_prefill(house, fail(EngineShutdown("going")))
    await add_decode(house, fail(Unknown("ValueError: no prefill_result")))
    assert (await house.client.chat("hi")).status == 503


async def test_a_model_is_served_once_both_roles_are_there(house: Cluster) -> None:
    decode = await add_decode(house, wait=False)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: house.frontend.models.is_registered("m"))
    assert (await house.client.chat("hi")).status == 503
    assert (await house.client.get("/v1/models")).json["data"] == []
    await add_prefill(house)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: house.sees(decode, "m"))
    assert content(await house.client.chat("hi")) == "hello"
    assert [model["id"] for model in (await house.client.get("/v1/models")).json["data"]] == ["m"]


async def test_prefill_workers_alone_are_no_model(house: Cluster) -> None:
    await add_prefill(house)
    assert (await house.client.chat("hi")).status == 503
    ready = await house.client.get("/v1/models/m/ready")
    assert ready.json["namespaces"]["ns"]["missing_worker_types"] == ["decode"]


async def test_a_client_that_names_its_prefill_worker_gets_that_one(house: Cluster) -> None:
    workers = [await add_prefill(house) for _ in range(3)]
    await add_decode(house)
    wanted = workers[1].endpoint.connection_id()
    for _ in range(3):
        await house.client.chat("hi", nvext={"prefill_worker_id": wanted})
    assert [len(worker.requests) for worker in workers] == [0, 3, 0]
    assert (await house.client.chat("hi", nvext={"prefill_worker_id": 12})).status == 400


async def test_a_client_that_leaves_cancels_the_prefill(house: Cluster) -> None:
    prefill = await add_prefill(house)
    prefill.script = prefill.hold
    decode = await add_decode(house)
    exchange = house.client.begin_chat("hi", stream=True)
    await prefill.started.wait()
    exchange.disconnect()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await prefill.killed.wait()
    assert decode.requests == []


async def test_a_client_that_leaves_after_the_prefill_still_has_its_blocks_fetched(house: Cluster) -> None:
    """Otherwise they would stay with the prefill worker until they expire."""
    prefill = await add_prefill(house)
    decode = await add_decode(house)
    models = house.frontend.models
    (served,) = models.serving("m")
    (stage,) = served.dispatcher.stages
    assert isinstance(stage, PrefillStage)
    read = stage.router.compute

    async def leave_in_between(*arguments: Any) -> Any:
        handoff = await read(*arguments)
        exchange.disconnect()
        await arguments[2].context.async_killed_or_stopped()
        return handoff

    stage.router.compute = leave_in_between  # type: ignore[assignment, method-assign]
    exchange = house.client.begin_chat("hi", max_tokens=50)
    await exchange.done()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await decode.started.wait()
    (body,) = decode.requests
    assert body["prefill_result"]["disaggregated_params"] == PARAMS
    assert body["stop_conditions"]["max_tokens"] == 1
    assert len(prefill.requests) == 1


# -- the bootstrap way ---------------------------------------------------------------------------------------------------


BOOTSTRAP: dict[str, Any] = {"disaggregated_endpoint": {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000}}


async def test_workers_that_meet_by_themselves_run_at_once(house: Cluster) -> None:
    met = asyncio.Event()

    async def computes(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await met.wait()
        sink.send_tokens([1], finish_reason="length")

    async def decodes(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await prefill.started.wait()
        met.set()
        sink.send_tokens(list(b"hello"), finish_reason="stop")

    prefill = await add_prefill(house, computes, **BOOTSTRAP, data_parallel_size=4)
    decode = await add_decode(house, decodes)
    answer = await house.client.chat("hi", nvext={"prefill_dp_rank": 3})
    assert content(answer) == "hello"
    (first,), (second,) = prefill.requests, decode.requests
    info = first["bootstrap_info"]
    assert info == second["bootstrap_info"]
    assert (info["bootstrap_host"], info["bootstrap_port"], info["bootstrap_room"] % 4) == ("10.0.0.1", 9000, 3)
    assert 0 <= info["bootstrap_room"] < 2**63
    assert str(uuid.UUID(info["handoff_id"])) == info["handoff_id"]
    assert first["routing"]["dp_rank"] == 3


async def test_a_rank_that_no_prefill_worker_has_is_refused_and_reaches_none(house: Cluster) -> None:
    prefill = await add_prefill(house, data_parallel_size=4)
    decode = await add_decode(house)
    for fields in ({"nvext": {"prefill_dp_rank": 4}}, {"headers": {"x-dynamo-prefill-dp-rank": "4"}}):
        answer = await house.client.chat("hi", **fields)
        assert (answer.status, answer.json["error"]["param"]) == (400, "nvext.prefill_dp_rank")
    assert (prefill.requests, decode.requests) == ([], [])
    assert (await house.client.chat("hi", nvext={"prefill_dp_rank": 3})).status == 200


async def waits_for_a_prompt(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    """A decode worker whose prompt never comes, unless it may compute the prompt itself."""
    if "bootstrap_info" in body:
        await context.async_killed_or_stopped()
    else:
        sink.send_tokens(list(b"hello"), finish_reason="stop")


async def test_a_prefill_that_fails_ends_the_decode_beside_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, enforce_disagg=True) as house:
        await add_prefill(house, fail(EngineShutdown("lost")), **BOOTSTRAP)
        decode = await add_decode(house, waits_for_a_prompt)
        assert (await house.client.chat("hi")).status == 503
        async with asyncio.timeout(PATIENCE_SECONDS):
            await decode.killed.wait()
        assert len(decode.requests) == 1


async def test_a_prefill_that_fails_beside_its_decode_is_tried_elsewhere(house: Cluster) -> None:
    failing = [await add_prefill(house, fail(EngineShutdown("lost")), **BOOTSTRAP) for _ in range(2)]
    decode = await add_decode(house, waits_for_a_prompt)
    assert content(await house.client.chat("hi")) == "hello"  # neither can, so the decode worker computes the prompt
    assert [len(worker.requests) for worker in (*failing, decode)] == [1, 1, 3]
    rooms = {body["bootstrap_info"]["bootstrap_room"] for body in decode.requests if "bootstrap_info" in body}
    assert len(rooms) == 2

    async def decodes(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        if body["routing"]["prefill_worker_id"] == working.endpoint.connection_id():
            sink.send_tokens(list(b"hello"), finish_reason="stop")
        else:
            await context.async_killed_or_stopped()

    working = await add_prefill(house, say("x", finish="length"), **BOOTSTRAP)
    decode.script = decodes
    for _ in range(3):
        assert content(await house.client.chat("hi")) == "hello"
    assert all("bootstrap_info" in body for body in decode.requests[3:])
    assert len(working.requests) == 3


async def test_a_decode_worker_that_failed_with_its_prefill_is_good_enough_for_another(house: Cluster) -> None:
    """It reports that its prompt did not come, sooner than the frontend sees the prefill worker's failure."""

    async def computes_late(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await failed.wait()
        raise EngineShutdown("lost")

    async def decodes(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        if body["routing"]["prefill_worker_id"] == broken.endpoint.connection_id():
            failed.set()
            raise Disconnected("the prompt did not come")
        sink.send_tokens(list(b"hello"), finish_reason="stop")

    failed = asyncio.Event()
    broken = await add_prefill(house, computes_late, **BOOTSTRAP)
    working = await add_prefill(house, say("x", finish="length"), **BOOTSTRAP)
    await add_decode(house, decodes)
    for _ in range(2):  # one of them begins at the broken one
        assert content(await house.client.chat("hi")) == "hello"
    assert (len(broken.requests), len(working.requests)) == (1, 2)


async def test_a_prefill_that_refuses_beside_its_decode_is_an_error(house: Cluster) -> None:
    prefill = await add_prefill(house, fail(InvalidArgument("too long")), **BOOTSTRAP)
    decode = await add_decode(house, waits_for_a_prompt)
    answer = await house.client.chat("hi")
    assert (answer.status, answer.json["message"]) == (400, "too long")
    assert (len(prefill.requests), len(decode.requests)) == (1, 1)


async def test_a_decode_worker_that_is_lost_with_its_blocks_has_the_prompt_computed_again(house: Cluster) -> None:
    """The two meet once: what was sent to the first decode worker is not there for a second one."""
    prefill = await add_prefill(house, say("x", finish="length"), **BOOTSTRAP)
    lost = [await add_decode(house, fail(EngineShutdown("lost"))) for _ in range(2)]
    decode = await add_decode(house)
    assert content(await house.client.chat("hi")) == "hello"
    asked = [body for worker in (*lost, decode) for body in worker.requests]
    rooms = [body["bootstrap_info"]["bootstrap_room"] for body in prefill.requests]
    assert len(set(rooms)) == len(rooms) == len(asked)
    assert {body["bootstrap_info"]["bootstrap_room"] for body in asked} == set(rooms)
    assert [len(worker.requests) for worker in lost] <= [1, 1]


async def test_a_decode_worker_that_could_not_be_reached_has_taken_nothing(house: Cluster) -> None:
    prefill = await add_prefill(house, say("x", finish="length"), **BOOTSTRAP)
    for _ in range(2):
        await add_decode(house, fail(CannotConnect("refused")))
    await add_decode(house)
    assert content(await house.client.chat("hi")) == "hello"
    assert len(prefill.requests) == 1


async def test_full_prefill_workers_beside_decode_workers_shed(house: Cluster) -> None:
    prefills = [await add_prefill(house, fail(Overloaded()), **BOOTSTRAP) for _ in range(2)]
    decode = await add_decode(house, waits_for_a_prompt)
    assert (await house.client.chat("hi")).status == 529
    assert [len(worker.requests) for worker in (*prefills, decode)] == [1, 1, 2]


async def test_a_decode_that_fails_ends_the_prefill_beside_it(house: Cluster) -> None:
    prefill = await add_prefill(house, **BOOTSTRAP)
    prefill.script = prefill.hold
    await add_decode(house, fail(InvalidArgument("no")))
    assert (await house.client.chat("hi")).status == 400
    async with asyncio.timeout(PATIENCE_SECONDS):
        await prefill.killed.wait()


async def test_a_client_that_leaves_ends_both_halves(house: Cluster) -> None:
    prefill = await add_prefill(house, **BOOTSTRAP)
    decode = await add_decode(house)
    prefill.script, decode.script = prefill.hold, decode.hold
    asked = house.client.begin_chat("hi", stream=True)
    await prefill.started.wait()
    await decode.started.wait()
    asked.disconnect()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await prefill.killed.wait()
        await decode.killed.wait()
    await asked.done()
    assert (len(prefill.requests), len(decode.requests)) == (1, 1)


async def test_bootstrap_members_of_a_handover_become_the_bootstrap_info(house: Cluster) -> None:
    params = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2, "more": 3}
    await add_prefill(house, say("x", finish="length", extra={"disaggregated_params": params}))
    decode = await add_decode(house)
    await house.client.chat("hi")
    (body,) = decode.requests
    assert body["bootstrap_info"] == {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}
    assert "prefill_result" not in body
