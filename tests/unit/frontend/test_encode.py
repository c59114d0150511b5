"""Encode workers before the workers of a model: the hop, what replaces it, and how it ends in every phase."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    Overloaded,
    WorkerUnavailable,
)
from dynamo.protocol.model_types import ModelType, WorkerType
from dynamo.protocol.records import ENCODER_HANDOFF, ModelRuntimeConfig
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.failover import DispatchLimits, DispatchRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stream import RoutedStream
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import Cluster, Script, ScriptedWorker, cluster, fail, say
from support.patience import PATIENCE_SECONDS

MEDIA: Any = {"image_url": [{"Url": "data:image/png;base64,AA=="}]}
RESULT = {"handle": "h1"}
KV = {"disaggregated_params": {"room": 1}}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


class Untimed:
    def routed(self) -> None: ...

    def dispatched(self) -> None: ...

    def arrived(self, *, failed: bool = False) -> None: ...


class Asked:
    """One request with media, dispatched as the frontend does it behind its HTTP side."""

    def __init__(self, house: Cluster, media: Any = MEDIA) -> None:
        (served,) = house.frontend.models.serving("m")
        prompt = [1, 2, 3]
        body: WorkerRequest = {"model": "m", "token_ids": prompt, "stop_conditions": {"max_tokens": 50}}
        if media is not None:
            body["multi_modal_data"] = media
        self.record, self.context = DispatchRecord(), Context("one")
        self.request = DispatchRequest(
            body, prompt, record=self.record, timer=Untimed(), limits=DispatchLimits(retries=3)
        )
        self.stream: RoutedStream = served.dispatcher.open(self.request, self.context)

    async def text(self) -> str:
        found = self.request.answer.generated
        try:
            async for items in self.stream:
                for item in items:
                    found += item.token_ids
                    if item.finish_reason is not None:
                        self.request.answer.is_complete = True
                        self.stream.finish()
            return bytes(found).decode()
        finally:
            self.stream.close()


def encoded(**extra: Any) -> Script:
    """An encode worker: one chunk without tokens."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([], finish_reason="stop", extra={"encoder_result": dict(RESULT), **extra})

    return script


def numbered() -> Script:
    """An encode worker whose every result is another one."""
    count = 0

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        nonlocal count
        count += 1
        sink.send_tokens([], finish_reason="stop", extra={"encoder_result": {"handle": f"h{count}"}})

    return script


async def add_encode(house: Cluster, script: Script | None = None, component: str = "encode") -> ScriptedWorker:
    worker = await house.worker(
        script or encoded(),
        component=component,
        worker_type=WorkerType.Encode,
        model_type=ModelType.Empty,
        needs=[["prefill", "decode"], ["aggregated"]],
        wait=False,
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: knows(house, worker))
    return worker


def knows(house: Cluster, worker: ScriptedWorker) -> bool:
    router = house.frontend.models._stages.encode.get("m", "ns")
    return router is not None and router.workers.instance(worker.endpoint.connection_id()) is not None


async def add_whole(
    house: Cluster, script: Script | None = None, *, needs: Any = (("encode",),), wait: bool = True
) -> ScriptedWorker:
    handoff = ModelRuntimeConfig(runtime_data={ENCODER_HANDOFF: True})
    return await house.worker(script or say("hello"), needs=needs, runtime_config=handoff, wait=wait)


async def add_pair(
    house: Cluster, prefill: Script | None = None, decode: Script | None = None
) -> tuple[ScriptedWorker, ScriptedWorker]:
    first = await house.worker(
        prefill or say("x", finish="length", extra=KV),
        component="prefill",
        worker_type=WorkerType.Prefill,
        model_type=ModelType.Prefill,
        needs=[["decode", "encode"]],
        runtime_config=ModelRuntimeConfig(runtime_data={ENCODER_HANDOFF: True}),
        wait=False,
    )
    second = await house.worker(
        decode or say("hello"), component="decode", worker_type=WorkerType.Decode, needs=[["prefill"]]
    )
    return first, second


async def test_media_go_to_an_encode_worker_and_its_result_with_them_to_the_next(house: Cluster) -> None:
    encode, whole = await add_encode(house), await add_whole(house)
    asked = Asked(house)
    assert await asked.text() == "hello"
    (first,), (second,) = encode.requests, whole.requests
    assert "encoder_result" not in first
    assert {**first, "encoder_result": RESULT} == second
    assert second["multi_modal_data"] == MEDIA
    assert asked.record.encode_instance_id == encode.endpoint.connection_id()
    assert encode.contexts[0].id() == whole.contexts[0].id() == "one"
    assert house.metric("dynamo_frontend_encoder_requests_total", outcome="success") == 1


@pytest.mark.parametrize("media", [None, {}, {"image_url": []}])
async def test_a_request_without_media_sees_no_encode_worker(house: Cluster, media: Any) -> None:
    encode, whole = await add_encode(house), await add_whole(house)
    assert await Asked(house, media).text() == "hello"
    assert (encode.requests, len(whole.requests)) == ([], 1)


async def test_workers_that_ask_for_no_encode_worker_get_the_media_as_they_are(house: Cluster) -> None:
    encode, whole = await add_encode(house), await house.worker(say("hello"))
    assert await Asked(house).text() == "hello"
    assert (encode.requests, "encoder_result" in whole.requests[0]) == ([], False)


async def test_encode_workers_of_several_endpoints_take_turns(house: Cluster) -> None:
    workers = [await add_encode(house, component=component) for component in ("encode", "other", "third")]
    await add_whole(house)
    for _ in range(6):
        assert await Asked(house).text() == "hello"
    assert [len(worker.requests) for worker in workers] == [2, 2, 2]


async def test_a_model_that_needs_an_encode_worker_is_not_ready_before_one_came_but_after_it_left(
    house: Cluster,
) -> None:
    await add_whole(house, wait=False)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: bool(house.frontend.models.served()))
    assert house.frontend.models.serving("m") == ()
    found = house.frontend.models.readiness("m")
    assert found is not None
    assert found["namespaces"]["ns"]["missing_worker_types"] == ["encode"]
    encode = await add_encode(house)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: bool(house.frontend.models.serving("m")))
    await encode.stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: not knows(house, encode))
    assert await Asked(house, None).text() == "hello"
    with pytest.raises(WorkerUnavailable, match="encode worker of model m"):
        await Asked(house).text()


async def test_a_disaggregated_model_is_ready_when_all_three_roles_are_there(house: Cluster) -> None:
    pair = asyncio.ensure_future(add_pair(house))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: bool(house.frontend.models.served()))
    assert house.frontend.models.serving("m") == ()
    await add_encode(house)
    await pair
    assert house.frontend.models.serving("m")


async def test_media_are_encoded_then_computed_and_left_behind_before_decoding(house: Cluster) -> None:
    encode = await add_encode(house)
    prefill, decode = await add_pair(house)
    assert await Asked(house).text() == "hello"
    assert len(encode.requests) == 1
    assert (prefill.requests[0]["encoder_result"], prefill.requests[0]["multi_modal_data"]) == (RESULT, MEDIA)
    assert {"encoder_result", "multi_modal_data"}.isdisjoint(decode.requests[0])
    assert decode.requests[0]["prefill_result"] == {"disaggregated_params": KV["disaggregated_params"]}


@pytest.mark.parametrize("error", [EngineShutdown("going"), Disconnected("gone"), CannotConnect("no way")])
async def test_one_other_encode_worker_is_tried(house: Cluster, error: DynamoException) -> None:
    workers = [await add_encode(house, fail(error)), await add_encode(house)]
    whole = await add_whole(house)
    for _ in range(2):
        assert await Asked(house).text() == "hello"
    assert [request["encoder_result"] for request in whole.requests] == [RESULT, RESULT]
    assert len(workers[1].requests) == 2


def nothing() -> Script:
    return say("", finish="stop")


@pytest.mark.parametrize("script", [fail(EngineShutdown("going")), nothing(), say("x", finish=None)])
async def test_without_an_encode_worker_the_next_worker_encodes_where_it_can(house: Cluster, script: Script) -> None:
    await add_encode(house, script)
    whole = await add_whole(house, needs=())
    assert await Asked(house).text() == "hello"
    assert ("encoder_result" in whole.requests[0], whole.requests[0]["multi_modal_data"]) == (False, MEDIA)
    assert house.metric("dynamo_frontend_encoder_fallbacks_total") == 1


async def test_where_the_next_worker_cannot_encode_the_request_fails_and_the_encode_workers_are_named(
    house: Cluster,
) -> None:
    await add_encode(house, fail(EngineShutdown("going")))
    whole = await add_whole(house)
    with pytest.raises(WorkerUnavailable, match=r"no encode worker of model m could encode the media \(EngineShutdown"):
        await Asked(house).text()
    assert whole.requests == []


@pytest.mark.parametrize("error", [InvalidArgument("no image"), Overloaded("full")])
async def test_a_refusal_of_the_encode_worker_is_the_answer(house: Cluster, error: DynamoException) -> None:
    await add_encode(house, fail(error))
    whole = await add_whole(house)
    with pytest.raises(type(error), match=str(error)):
        await Asked(house).text()
    assert whole.requests == []


async def test_a_client_that_leaves_while_its_media_are_encoded_ends_that(house: Cluster) -> None:
    encode, whole = await add_encode(house), await add_whole(house)
    encode.script = encode.hold
    asked = Asked(house)
    answer = asyncio.ensure_future(asked.text())
    await encode.started.wait()
    asked.context.kill()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await encode.killed.wait()
        assert await answer == ""
    assert whole.requests == []


async def leave_with_result(house: Cluster, encode: ScriptedWorker) -> None:
    """A client that leaves at the moment that the encode worker answers all the same."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()
        sink.send_tokens([], finish_reason="stop", extra={"encoder_result": dict(RESULT)})

    encode.script = script
    asked = Asked(house)
    answer = asyncio.ensure_future(asked.text())
    await encode.started.wait()
    asked.context.stop_generating()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await answer == ""


async def test_what_was_encoded_for_a_client_that_left_is_handed_on_all_the_same(house: Cluster) -> None:
    encode, whole = await add_encode(house), await add_whole(house)
    await leave_with_result(house, encode)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await whole.started.wait()
    (request,) = whole.requests
    assert (request["encoder_result"], request["stop_conditions"]["max_tokens"]) == (RESULT, 1)


async def test_what_was_encoded_for_a_client_that_left_is_computed_and_fetched(house: Cluster) -> None:
    encode = await add_encode(house)
    prefill, decode = await add_pair(house)
    await leave_with_result(house, encode)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await decode.started.wait()
    assert prefill.requests[0]["encoder_result"] == RESULT
    assert decode.requests[0]["prefill_result"] == {"disaggregated_params": KV["disaggregated_params"]}


@pytest.mark.parametrize("after", [(), ("he",)], ids=["before the first token", "in the answer"])
async def test_a_request_that_moves_is_encoded_again(house: Cluster, after: tuple[str, ...]) -> None:
    """What one worker has taken is not there for another."""
    await add_encode(house, numbered())
    rest = "".join(("hello",)).removeprefix("".join(after))
    workers = [await add_whole(house), await add_whole(house)]
    for worker in workers:
        worker.script = fail(Disconnected("gone"), after=after)

    async def lose_once(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        for worker in workers:
            worker.script = say(rest)
        await fail(Disconnected("gone"), after=after)(body, context, sink)

    for worker in workers:
        worker.script = lose_once
    assert await Asked(house).text() == "hello"
    requests = [request for worker in workers for request in worker.requests]
    assert sorted(request["encoder_result"]["handle"] for request in requests) == ["h1", "h2"]


async def test_a_worker_that_was_never_reached_leaves_its_result_to_the_next(house: Cluster) -> None:
    encode = await add_encode(house, numbered())
    workers = [await add_whole(house, fail(Overloaded("full"))), await add_whole(house)]
    for _ in range(2):
        assert await Asked(house).text() == "hello"
    assert len(encode.requests) == 2
    assert [request["encoder_result"]["handle"] for request in workers[1].requests] == ["h1", "h2"]


async def test_a_prompt_that_moves_to_another_prefill_worker_is_encoded_again(house: Cluster) -> None:
    await add_encode(house, numbered())
    first, decode = await add_pair(house)
    second, _ = await add_pair(house)

    async def lose_once(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        first.script = second.script = say("x", finish="length", extra=KV)
        raise Disconnected("gone")

    first.script = second.script = lose_once
    assert await Asked(house).text() == "hello"
    requests = [*first.requests, *second.requests]
    assert sorted(request["encoder_result"]["handle"] for request in requests) == ["h1", "h2"]
    assert len(decode.requests) <= 1
