"""`router_config` on a card: the workers of a model are chosen as it says, whatever the frontend's flags are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dynamo.bindings.config import KvRouterConfig, RouterConfig
from dynamo.frontend.models.card_routing import read_router_config
from dynamo.placement import RouterMode
from dynamo.protocol.model_types import ModelType, WorkerType
from dynamo.router.kv.settings import KvRouterSettings
from support.cases import each_case
from support.frontend_cluster import Cluster, ScriptedWorker, cluster, say

GUESSES = KvRouterConfig(use_kv_events=False)
KV = RouterConfig(RouterMode.KV, GUESSES).as_record()
PROMPT = list(range(1, 65))


async def pair(house: Cluster, router_config: Any, model: str = "m", **members: Any) -> list[ScriptedWorker]:
    card = {"kv_cache_block_size": 16, "router_config": router_config, **members}
    return [await house.worker(say("hello"), model=model, component=model, **card) for _ in range(2)]


async def spread(house: Cluster, workers: list[ScriptedWorker], model: str = "m", requests: int = 6) -> list[int]:
    """How many of as many equal prompts each worker got."""
    before = [len(worker.requests) for worker in workers]
    for _ in range(requests):
        answer = await house.client.call("POST", "/v1/completions", {"model": model, "prompt": PROMPT})
        assert answer.status == 200
    return sorted(len(worker.requests) - count for worker, count in zip(workers, before, strict=True))


async def test_a_card_asks_for_the_kv_mode_and_others_keep_the_frontends(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="round-robin") as house:
        routed, plain = await pair(house, KV), await pair(house, None, model="other")
        assert await spread(house, routed) == [0, 6]
        assert await spread(house, plain, "other") == [3, 3]


async def test_a_card_asks_for_another_mode_than_the_kv_mode(tmp_path: Path) -> None:
    own = KvRouterSettings(use_kv_events=False)
    async with cluster(tmp_path, router_mode="kv", kv_router=own) as house:
        assert await spread(house, await pair(house, {"router_mode": "round_robin"})) == [3, 3]
        assert await spread(house, await pair(house, None, model="other"), "other") == [0, 6]


async def test_prefill_and_decode_workers_may_differ(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="round-robin") as house:
        await house.worker(
            say("x", finish="length", extra={"disaggregated_params": {"a": 1}}),
            component="prefill", worker_type=WorkerType.Prefill, model_type=ModelType.Prefill, needs=[["decode"]],
            router_config=KV, wait=False,
        )  # fmt: skip
        await house.worker(say("hello"), component="decode", worker_type=WorkerType.Decode, needs=[["prefill"]])
        router = house.frontend.models._stages.prefill.get("m", "ns")
        (served,) = house.frontend.models.served()
        assert router is not None
        assert (router.workers.kv is not None, served.kv) == (True, None)
        assert (await house.client.chat("hi")).status == 200


async def test_the_choice_ends_with_the_model(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="round-robin") as house:
        for worker in await pair(house, KV):
            await worker.stop()
        await house.gone("m")
        assert await spread(house, await pair(house, None)) == [3, 3]


async def test_what_cannot_be_read_is_named_and_the_frontends_mode_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, router_mode="round-robin") as house:
        with caplog.at_level(logging.ERROR):
            workers = await pair(house, {"router_mode": "k_v", "kv_router_config": {"router_temperature": -1}})
        assert await spread(house, workers) == [3, 3]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "model m: the card's router_config.kv_router_config: router_temperature must be" in said


async def test_what_is_not_done_is_named_and_the_rest_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = {**KV, "load_threshold_config": {"active_prefill_tokens_threshold": 5}}
    async with cluster(tmp_path, router_mode="round-robin") as house:
        with caplog.at_level(logging.ERROR):
            assert await spread(house, await pair(house, asked)) == [0, 6]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said.endswith("is not done: load_threshold_config.active_prefill_tokens_threshold")


@each_case(
    ("given", "said"),
    [
        ({"router_mode": "psychic"}, "router_config: unknown router mode 'psychic'"),
        ({"weather": 1}, "router_config: Object contains unknown field `weather`"),
        ([1], "router_config: Expected `object`"),
        (
            {"kv_router_config": {"weather": 1}},
            "router_config.kv_router_config: Object contains unknown field `weather`",
        ),
        ({"kv_router_config": {"use_kv_events": 1}}, "router_config.kv_router_config: Expected `bool`"),
        (
            {"kv_router_config": {"router_approximate_cache_policy": "lru"}},
            "router_config.kv_router_config: router_approximate_cache_policy=lru needs use_kv_events=False",
        ),
        ({"router_mode": "kv", "session_affinity_ttl_secs": 1e12}, "router_config: --router-session-affinity-ttl-secs"),
    ],
)
async def test_a_wrong_member_is_named(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match="router_config") as error:
        read_router_config(given, RouterMode.RANDOM, KvRouterSettings())
    assert str(error.value).startswith(said)


def test_a_configuration_of_the_native_bindings_is_understood() -> None:
    config = KvRouterConfig(router_temperature=0.5, router_queue_threshold=2.0, use_remote_indexer=True)
    record = RouterConfig(RouterMode.KV, config, session_affinity_ttl_secs=60, session_affinity_mode="soft").as_record()
    own = KvRouterSettings(policy="two-tier", kv_cache_block_size=32, decisions_path="x")
    mode, settings, refused = read_router_config(record, RouterMode.RANDOM, own)
    assert (mode, refused) == (RouterMode.KV, ["kv_router_config.use_remote_indexer=True"])
    assert (settings.router_temperature, settings.router_queue_threshold) == (0.5, 2.0)
    assert (settings.router_session_affinity_ttl_secs, settings.router_session_affinity_mode) == (60, "soft")
    assert (settings.policy, settings.kv_cache_block_size, settings.decisions_path) == ("two-tier", 32, None)
