"""Prefill and decode workers in places that KV blocks do not leave, or should not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect, Disconnected
from dynamo.protocol.model_types import ModelType, WorkerType
from dynamo.protocol.records import ModelRuntimeConfig
from support.cases import each_case
from support.frontend_cluster import Cluster, Script, ScriptedWorker, cluster, fail, say
from support.patience import PATIENCE_SECONDS

HANDED_OVER = {"disaggregated_params": {"room": 1}}
MODES = ("round-robin", "random", "power-of-two", "least-loaded", "kv")


def zone(value: str | None, enforcement: str | None = None, weight: float | None = None) -> ModelRuntimeConfig:
    if value is None:
        return ModelRuntimeConfig()
    return ModelRuntimeConfig(
        topology_domains={"zone": value, "rack": "r"},
        kv_transfer_domain=None if enforcement is None else "zone",
        kv_transfer_enforcement=enforcement,
        kv_transfer_preferred_weight=weight,
    )


async def add_prefill(house: Cluster, config: ModelRuntimeConfig, script: Script | None = None) -> ScriptedWorker:
    worker = await house.worker(
        script or say("x", finish="length", extra=HANDED_OVER),
        component="prefill",
        worker_type=WorkerType.Prefill,
        model_type=ModelType.Prefill,
        needs=[["decode"]],
        runtime_config=config,
        wait=False,
    )
    models, instance_id = house.frontend.models, worker.endpoint.connection_id()

    def is_known() -> bool:
        router = models._stages.prefill.get("m", "ns")
        return router is not None and router.workers.instance(instance_id) is not None

    async with asyncio.timeout(PATIENCE_SECONDS):
        await models.wait_for(is_known)
    return worker


async def add_decode(house: Cluster, config: ModelRuntimeConfig, script: Script | None = None) -> ScriptedWorker:
    return await house.worker(
        script or say("hello"),
        worker_type=WorkerType.Decode,
        needs=[["prefill"]],
        component="decode",
        runtime_config=config,
    )


def served(*workers: ScriptedWorker) -> list[int]:
    return [len(worker.requests) for worker in workers]


async def ask(house: Cluster, **more: Any) -> Any:
    return await house.client.chat("hi", **more)


@each_case("mode", MODES)
async def test_blocks_go_only_to_workers_of_the_place_that_is_required(
    tmp_path_factory: pytest.TempPathFactory, mode: str
) -> None:
    async with cluster(tmp_path_factory.mktemp("house"), router_mode=mode) as house:
        await add_prefill(house, zone("a", "required"))
        near = [await add_decode(house, zone("a")) for _ in range(2)]
        far = [await add_decode(house, zone("b")), await add_decode(house, zone(None))]
        for _ in range(8):
            assert (await ask(house)).status == 200
        assert sum(served(*near)) == 8, mode
        assert served(*far) == [0, 0], mode
        (first, *_) = near[0].requests or near[1].requests
        assert first["routing"]["routing_constraints"] == {"required_taints": ["dynamo.topology/zone=a"]}


async def test_a_prefill_worker_without_a_rule_hands_over_to_any(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await add_prefill(house, zone("a"))
        decoders = [await add_decode(house, zone(each)) for each in ("a", "b", None)]
        for _ in range(6):
            assert (await ask(house)).status == 200
        assert served(*decoders) == [2, 2, 2]
        assert "routing_constraints" not in decoders[0].requests[0]["routing"]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


async def test_a_prefill_worker_that_no_decode_worker_is_in_reach_of_is_passed_over(house: Cluster) -> None:
    cut_off = await add_prefill(house, zone("c", "required"))
    prefill = await add_prefill(house, zone("a", "required"))
    decode = await add_decode(house, zone("a"))
    for _ in range(4):
        assert (await ask(house)).status == 200
    assert served(cut_off, prefill, decode) == [0, 4, 4]


async def test_without_any_reach_the_decode_worker_computes_the_prompt(house: Cluster) -> None:
    cut_off = await add_prefill(house, zone("c", "required"))
    decode = await add_decode(house, zone("a"))
    assert (await ask(house)).status == 200
    assert served(cut_off, decode) == [0, 1]
    assert "prefill_result" not in decode.requests[0]
    assert "routing_constraints" not in decode.requests[0]["routing"]


async def test_an_enforced_prefill_without_any_reach_is_an_error(tmp_path: Path) -> None:
    async with cluster(tmp_path, enforce_disagg=True) as house:
        cut_off = await add_prefill(house, zone("c", "required"))
        decode = await add_decode(house, zone("a"))
        assert (await ask(house)).status == 503
        assert served(cut_off, decode) == [0, 0]


async def test_the_prefill_worker_fits_the_decode_worker_that_the_client_names(house: Cluster) -> None:
    prefills = [await add_prefill(house, zone(each, "required")) for each in "ab"]
    decoders = [await add_decode(house, zone(each)) for each in "abc"]
    for decoder in decoders:
        for _ in range(2):
            answer = await ask(house, nvext={"decode_worker_id": decoder.endpoint.connection_id()})
            assert answer.status == 200
    assert served(*prefills) == [2, 2]
    assert served(*decoders) == [2, 2, 2]
    assert ["prefill_result" in decoder.requests[-1] for decoder in decoders] == [True, True, False]


async def test_a_client_that_names_two_workers_out_of_reach_is_told_so(house: Cluster) -> None:
    prefill = await add_prefill(house, zone("a", "required"))
    near, far = await add_decode(house, zone("a")), await add_decode(house, zone("b"))
    named = {"prefill_worker_id": prefill.endpoint.connection_id()}
    answer = await ask(house, nvext={**named, "decode_worker_id": far.endpoint.connection_id()})
    assert (answer.status, "dynamo.topology/zone=a" in answer.json["message"]) == (400, True)
    answer = await ask(house, nvext={**named, "decode_worker_id": near.endpoint.connection_id()})
    assert (answer.status, served(near, far)) == (200, [1, 0])


@each_case("error", [Disconnected("lost"), CannotConnect("refused")])
async def test_when_the_last_decode_worker_in_reach_is_lost_another_place_takes_the_prompt(
    tmp_path_factory: pytest.TempPathFactory, error: Exception
) -> None:
    async with cluster(tmp_path_factory.mktemp("house")) as house:
        decoders = {"a": await add_decode_early(house, "a", fail(error)), "b": await add_decode_early(house, "b")}
        prefills = {each: await add_prefill(house, zone(each, "required")) for each in "ab"}
        async with asyncio.timeout(PATIENCE_SECONDS):
            await house.frontend.models.wait_for(lambda: all(house.sees(each, "m") for each in decoders.values()))
        for _ in range(2):  # one of them begins at the prefill worker of a
            answer = await ask(house)
            assert answer.json["choices"][0]["message"]["content"] == "hello"
        assert decoders["b"].requests[-1]["routing"]["prefill_worker_id"] == prefills["b"].endpoint.connection_id()
        assert served(decoders["b"], prefills["b"]) == [2, 2]
        assert served(decoders["a"]) == served(prefills["a"]) != [0]


async def add_decode_early(house: Cluster, place: str, script: Script | None = None) -> ScriptedWorker:
    return await house.worker(
        script or say("hello"),
        worker_type=WorkerType.Decode,
        needs=[["prefill"]],
        component="decode",
        runtime_config=zone(place),
        wait=False,
    )


@each_case("mode", MODES)
async def test_a_preferred_place_goes_first_and_others_are_better_than_none(
    tmp_path_factory: pytest.TempPathFactory, mode: str
) -> None:
    async with cluster(tmp_path_factory.mktemp("house"), router_mode=mode) as house:
        await add_prefill(house, zone("a", "preferred", 1.0))
        near, far = await add_decode(house, zone("a")), await add_decode(house, zone("b"))
        for _ in range(4):
            assert (await ask(house)).status == 200
        assert served(near, far) == [4, 0], mode
        assert near.requests[0]["routing"]["routing_constraints"] == {
            "preferred_taints": {"dynamo.topology/zone=a": 1.0}
        }
        near.script = fail(Disconnected("lost"))
        answer = await ask(house)
        assert (answer.status, served(near, far)) == (200, [5, 1]), mode
