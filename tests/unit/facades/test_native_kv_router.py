"""`KvRouter`, its configuration and the indexers, as the native bindings have them. What both systems show alike, step by
step, is in `tests/long/interop/test_kv_router_across.py`; here is what that script sees of ours."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import dynamo._core
import dynamo.llm
from dynamo.errors import InvalidArgument, Overloaded, WorkerUnavailable
from dynamo.kv.overlap import WorkerRank
from dynamo.llm import (
    ApproxKvIndexer,
    KvEventPublisher,
    KvIndexer,
    KvRouter,
    KvRouterConfig,
    LoadThresholdConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterConfig,
    RouterMode,
    RoutingConstraints,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime
from support.cases import each_case
from support.frontend_cluster import memory_runtime
from support.kv_router_script import PROMPT, observe
from support.patience import PATIENCE_SECONDS
from support.processes import until
from support.tiny_model import write_tiny_model

CHUNK = {
    "token_ids": [0], "tokens": None, "text": None, "output_type": "text", "cum_log_probs": None, "log_probs": None,
    "top_logprobs": None, "finish_reason": None, "index": 0,
}  # fmt: skip


def load(worker: str, prefill: int, requests: int = 0) -> dict[str, Any]:
    return {
        "worker_id": worker, "dp_rank": 0, "potential_prefill_tokens": prefill, "potential_decode_blocks": 4,
        "active_requests": requests,
    }  # fmt: skip


async def test_what_a_caller_sees_is_what_the_native_system_shows(tmp_path: Path) -> None:
    seen = await observe(str(write_tiny_model(tmp_path / "model")), ("mem", "mem"))
    choices = {step: seen[step] for step in ("best", "adapter", "namespace", "required", "preferred", "booked")}
    assert choices == {
        "best": ["A", 0, 3], "adapter": ["A", 0, 2], "namespace": ["B", 0, 2], "required": ["A", 0, 0],
        "preferred": ["B", 0, 0], "booked": ["A", 0, 3],
    }  # fmt: skip
    assert [each["device_blocks"] for each in seen["media"]["workers"]] == [1, 0]
    assert seen["loads"] == [load("A", 21), load("B", 69)]
    assert seen["loads, booked"] == [load("A", 42, 1), load("B", 69)]
    assert seen["loads, prefilled"] == [load("A", 21, 1), load("B", 69)]
    assert seen["loads, freed"] == seen["loads, dropped"] == seen["loads"]
    refused = ("required of nobody", "bad override", "booked twice", "freed twice", "marked unknown", "blind dump")
    assert {seen[step] for step in refused} == {"error"}
    assert seen["unknown override"] == ["A", 0, 3]
    overridden = {step.partition(": ")[2]: at[0] for step, at in seen.items() if "overridden: " in step}
    assert overridden == {
        "None": "A",
        "{'track_prefill_tokens': False}": "A",
        "{'assume_kv_reuse': False}": "A",
        "{'overlap_score_credit': 0.0}": "B",
        "{'prefill_load_scale': 0.0}": "B",
        "{'overlap_score_weight': 0.0}": "B",
    }
    assert seen["prefill not tracked"] == seen["prefill tracked after all"] == ["A", 0, 3]
    kinds = [seen[f"token ids: {step}"] for step in ("negative", "too large", "a fraction", "a text")]
    assert kinds == ["OverflowError", "OverflowError", "TypeError", "TypeError"]
    assert [[row[0], row[4], row[5]["block_hash"]] for row in seen["dump"]] == [
        ["A", 1001, 1002], ["A", 1002, 1003], ["A", 2001, 2002], ["A", None, 1001], ["A", None, 2001],
        ["B", 3001, 3002], ["B", None, 3001],
    ]  # fmt: skip
    assert [each["device_blocks"] for each in seen["nothing learned"]["workers"]] == [0, 0]
    assert [each["device_blocks"] for each in seen["learned"]["workers"]] == [4, 0]
    assert [row[4] for row in seen["dump of guesses"]].count(None) == 1
    assert len(seen["dump of guesses"]) == 4
    served_by = {"prefill_worker_id": "A", "prefill_dp_rank": 0, "decode_worker_id": "A", "decode_dp_rank": 0}
    first, _, last = seen["generate"]
    assert first == {**CHUNK, "routing_data": {"worker_id": served_by}}
    assert last["finish_reason"] == "stop"
    assert last["routing_data"]["timing"]["kv_hit_rate"] == 0.6
    assert seen["request"]["stop_conditions"]["max_tokens"] is None
    assert seen["request at B"]["routing"] == {"backend_instance_id": "B", "dp_rank": 0}
    assert (seen["request at B"]["stop_conditions"]["max_tokens"], seen["request at B"]["extra_args"]) == (5, {"a": 1})
    assert seen["generate at B"][0]["routing_data"]["worker_id"]["decode_worker_id"] == "B"
    assert seen["from a request"] == seen["demand driven"] == seen["generate"]
    assert seen["no prompt"] == seen["unknown worker"] == ["error"]
    assert seen["negative buffer"] == ["ValueError: response_buffer_size must be non-negative"]
    assert seen["fails"][1:] == ["ValueError: InvalidRequest: ValueError: boom"]
    assert seen["dropped: the worker learned of it"] == [True]
    assert seen["queued: goes at once"] == ["A", 0, 3]
    assert seen["queued: done while the worker has much to prefill"] == [False, False]
    assert seen["queued: done once that is prefilled"] == ["A", 0, 3]
    assert seen["queued: the one behind it, which books nothing"] == ["A", 0, 0]
    assert seen["loads, running"] == [load("A", 21, 1), load("B", 69)]


# -- configuration ------------------------------------------------------------------------------------------------------


def weights(config: KvRouterConfig) -> tuple[float, ...]:
    return (
        config.overlap_score_credit,
        config.overlap_score_credit_decay,
        config.overlap_score_weight,
        config.prefill_load_scale,
        config.decode_active_request_weight,
    )


def test_the_weights_of_a_configuration() -> None:
    assert weights(KvRouterConfig()) == (1.0, 0.0, 1.0, 1.0, 0.0)
    assert weights(KvRouterConfig(0)) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert weights(KvRouterConfig(overlap_score_weight=2, prefill_load_scale=5)) == (1.0, 0.0, 2.0, 2.0, 0.0)
    config = KvRouterConfig()
    config.overlap_score_credit, config.prefill_load_scale = 0.5, 2
    config.overlap_score_credit_decay, config.decode_active_request_weight = 0.25, 3
    assert weights(config) == (0.5, 0.25, 2.0, 2.0, 3.0)
    other = config.copy()
    other.overlap_score_weight = 0
    assert weights(other) == (0.0, 0.25, 0.0, 0.0, 3.0)
    assert weights(config.with_overrides(overlap_score_credit=9)) == (9.0, 0.25, 2.0, 2.0, 3.0)
    assert weights(config.with_overrides(0, overlap_score_credit=9)) == (0.0, 0.25, 0.0, 0.0, 3.0)
    assert weights(config) == (0.5, 0.25, 2.0, 2.0, 3.0)
    with pytest.raises(ValueError, match="overlap_score_credit"):
        config.overlap_score_credit = -1
    assert weights(KvRouterConfig.from_json('{"overlap_score_weight": 0, "router_snapshot_threshold": 3}'))[0] == 0.0


@each_case(
    ("arguments", "error"),
    [
        ({"overlap_score_credit": -1}, ValueError),
        ({"overlap_score_credit": float("nan")}, ValueError),
        ({"prefill_load_scale": float("inf")}, ValueError),
        ({"overlap_score_credit_decay": -1}, ValueError),
        ({"decode_active_request_weight": -1}, ValueError),
        ({"router_temperature": -1}, ValueError),
        ({"host_cache_hit_weight": 3}, ValueError),
        ({"disk_cache_hit_weight": -0.1}, ValueError),
        ({"shared_cache_multiplier": 2}, ValueError),
        ({"router_ttl_secs": -1}, ValueError),
        ({"router_queue_threshold": -1}, ValueError),
        ({"router_approximate_cache_policy": "x"}, ValueError),
        ({"router_approximate_cache_policy": "lru"}, ValueError),
        ({"router_queue_policy": "x"}, ValueError),
        ({"router_prefill_load_model": "x"}, ValueError),
        ({"shared_cache_type": "x"}, ValueError),
        ({"conditional_disagg_policy": "x"}, ValueError),
        ({"conditional_disagg_eff_isl_ratio_threshold": 2}, ValueError),
        ({"router_tracking_hash": "x"}, ValueError),
        ({"router_tracking_hash": "keyed-xxh3-v1"}, ValueError),
        ({"router_tracking_key_file": "x"}, ValueError),
        ({"router_predicted_ttl_secs": 3, "use_kv_events": False}, ValueError),
        ({"router_event_threads": 0}, ValueError),
        ({"enable_session_prefix_index": True, "use_kv_events": False}, ValueError),
        ({"use_kv_events": 1}, TypeError),
        ({"router_temperature": "1"}, TypeError),
        ({"no_such_setting": 1}, TypeError),
    ],
)
def test_a_bad_setting_is_refused_by_name(arguments: dict[str, Any], error: type[Exception]) -> None:
    name = next(iter(arguments)).removesuffix("_file").removesuffix("_hash")
    with pytest.raises(error, match=name):
        KvRouterConfig(**arguments)
    if error is ValueError and not any(isinstance(value, float) for value in arguments.values()):
        with pytest.raises(ValueError, match=name):
            KvRouterConfig.from_json(json.dumps(arguments))


@each_case("text", ["[", "[]", '{"no_such_setting": 1}', '{"router_temperature": "x"}', '{"durable_kv_events": true}'])
def test_json_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="KvRouterConfig JSON"):
        KvRouterConfig.from_json(text)


@each_case(
    "arguments",
    [
        {"router_queue_policy": "lcfs"},
        {"router_prefill_policy": "x"},
        {"router_decode_policy": "x"},
        {"router_prefill_load_model": "ais"},
        {"use_remote_indexer": True},
        {"serve_indexer": True},
        {"shared_cache_type": "hicache"},
        {"conditional_disagg_enabled": True},
        {
            "router_tracking_hash": "keyed-xxh3-v1",
            "router_tracking_key_file": Path("key"),
            "router_tracking_key_id": "1",
        },
    ],
)
def test_what_is_not_built_is_refused_by_name_where_a_router_is_made(arguments: dict[str, Any]) -> None:
    config = KvRouterConfig(**arguments).copy()
    with pytest.raises(NotImplementedError, match=next(iter(arguments))):
        config.settings()


def test_a_configuration_becomes_the_settings_of_a_router() -> None:
    config = KvRouterConfig(
        2.0, 0.5, 0.125, 0.25, False, router_ttl_secs=0, router_approximate_cache_policy="lru",
        router_track_output_blocks=True, router_replica_sync=True,
    )  # fmt: skip
    settings = config.settings()
    assert (settings.policy, settings.prefill_load_scale, settings.host_cache_hit_weight) == ("default", 2.0, 0.5)
    assert (settings.disk_cache_hit_weight, settings.router_temperature, settings.use_kv_events) == (0.125, 0.25, False)
    assert (settings.router_ttl_secs, settings.router_approximate_cache_policy) == (0.1, "lru")
    assert (settings.router_track_output_blocks, settings.router_replica_sync) == (True, True)


async def test_a_router_configuration_travels_in_a_model_card_as_the_native_one(tmp_path: Path) -> None:
    runtime = memory_runtime()
    endpoint = runtime.endpoint("ns.pool.generate")
    kv = KvRouterConfig(2.0, router_temperature=0.5, shared_cache_multiplier=0.25, router_queue_threshold=1.0)
    config = RouterConfig(RouterMode.KV, kv, 0.5, session_affinity_ttl_secs=60)
    await register_model(
        ModelInput.Tokens, ModelType.Chat, endpoint, str(write_tiny_model(tmp_path / "model")), "m",
        worker_type=WorkerType.Aggregated, router_config=config,
    )  # fmt: skip
    card = await endpoint.published_model()
    assert card is not None
    found = card["router_config"]
    weights = {name: found["kv_router_config"].pop(name) for name in ("prefill_load_scale", "shared_cache_multiplier")}
    assert weights == {"prefill_load_scale": 2.0, "shared_cache_multiplier": 0.25}
    assert found == {
        "router_mode": "k_v",
        "kv_router_config": {
            "overlap_score_credit": 1.0, "overlap_score_credit_decay": 0.0, "host_cache_hit_weight": 0.75,
            "disk_cache_hit_weight": 0.25, "router_temperature": 0.5, "use_kv_events": True, "router_replica_sync": False,
            "router_track_active_blocks": True, "router_track_output_blocks": False, "router_assume_kv_reuse": True,
            "router_track_prefill_tokens": True, "router_prefill_load_model": "none", "router_ttl_secs": 120.0,
            "router_queue_threshold": 1.0, "router_policy_config": None, "router_event_threads": 4,
            "skip_initial_worker_wait": False, "router_queue_policy": "fcfs", "use_remote_indexer": False,
            "serve_indexer": False, "shared_cache_type": "none", "router_predicted_ttl_secs": None,
        },
        "load_threshold_config": {"active_decode_blocks_threshold": 0.5},
        "enforce_disagg": False, "session_affinity_ttl_secs": 60, "session_affinity_mode": "hard",
    }  # fmt: skip
    modes = [RouterConfig(mode).as_record()["router_mode"] for mode in RouterMode]
    assert set(modes) == {
        "k_v", "round_robin", "random", "power_of_two_choices", "least_loaded", "direct", "device_aware_weighted",
    }  # fmt: skip
    await runtime.aclose()


def test_a_policy_file_is_read_when_a_router_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no_such_file"):
        KvRouterConfig(router_policy_config="no_such_file").settings()
    file = tmp_path / "policies.yaml"
    file.write_text("router: {router_replica_sync: true}")
    assert KvRouterConfig(router_policy_config=str(file)).settings().router_replica_sync


def test_constraints_thresholds_and_modes_are_values() -> None:
    constraints = RoutingConstraints({"a"}, {"b": 1.5})
    assert (constraints.required_taints, constraints.preferred_taints) == ({"a"}, {"b": 1.5})
    assert (RoutingConstraints().required_taints, RoutingConstraints().preferred_taints) == (set(), {})
    wrong_set: Any = ["a"]
    with pytest.raises(TypeError, match="required_taints"):
        RoutingConstraints(wrong_set)
    thresholds = LoadThresholdConfig(active_decode_blocks_threshold=0.5)
    assert (thresholds.active_decode_blocks_threshold, thresholds.active_prefill_tokens_threshold) == (0.5, None)
    with pytest.raises(ValueError, match="active_decode_blocks_threshold must be between"):
        LoadThresholdConfig(active_decode_blocks_threshold=2)
    config = RouterConfig(RouterMode.KV, KvRouterConfig(overlap_score_credit=2), session_affinity_ttl_secs=5)
    assert config.router_mode is RouterMode.KV
    assert config.kv_router_config.overlap_score_credit == 2.0
    for arguments in ({"session_affinity_mode": "x"}, {"session_affinity_ttl_secs": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            RouterConfig(RouterMode.KV, **arguments)
    wrong_mode: Any = "kv"
    with pytest.raises(TypeError, match="RouterMode"):
        RouterConfig(wrong_mode)


@each_case(
    ("call", "parameters"),
    [
        (
            KvRouter.__init__,
            "self endpoint block_size kv_router_config ais_perf_config session_affinity_ttl_secs load_threshold_config "
            "session_affinity_mode",
        ),
        (
            KvRouter.best_worker,
            "self token_ids router_config_override request_id update_indexer block_mm_infos lora_name "
            "routing_constraints strict_priority policy_class cache_namespace",
        ),
        (
            KvRouter.generate,
            "self token_ids model stop_conditions sampling_options output_options router_config_override worker_id "
            "dp_rank extra_args block_mm_infos multi_modal_data mm_routing_info routing_constraints response_buffer_size",
        ),
        (KvRouter.generate_from_request, "self request response_buffer_size"),
        (KvRouter.get_potential_loads, "self token_ids block_mm_infos lora_name cache_namespace"),
        (
            KvRouter.get_overlap_scores,
            "self token_ids router_config_override block_mm_infos lora_name include_shared cache_namespace",
        ),
        (KvRouter.dump_events, "self"),
        (KvRouter.mark_prefill_complete, "self request_id"),
        (KvRouter.free, "self request_id"),
        (KvIndexer.find_matches_for_request, "self token_ids lora_name is_eagle"),
        (ApproxKvIndexer.process_routing_decision_for_request, "self tokens worker_id dp_rank"),
        (WorkerMetricsPublisher.publish, "self dp_rank active_decode_blocks kv_used_blocks"),
    ],
)
def test_the_keywords_are_the_native_ones(call: Any, parameters: str) -> None:
    assert " ".join(inspect.signature(call).parameters) == parameters


# -- the life of a router -----------------------------------------------------------------------------------------------


async def worker(**members: Any) -> DistributedRuntime:
    """Start a worker that answers with one token."""
    runtime = memory_runtime()
    endpoint = runtime.endpoint("ns.pool.generate")

    async def generate(body: Any, context: Any, sink: Any) -> None:
        sink.send_tokens([7], finish_reason="stop")

    await endpoint.start_serving(generate)
    await endpoint.publish_model({"display_name": "m", "runtime_config": members})
    return runtime


async def test_a_router_is_made_of_what_it_can_use() -> None:
    runtime = memory_runtime()
    endpoint, wrong = runtime.endpoint("ns.pool.generate"), "ns.pool.generate"
    for make, error in (
        (lambda: KvRouter(wrong, 16, KvRouterConfig()), TypeError),  # type: ignore[arg-type]
        (lambda: KvRouter(endpoint, 16, None), TypeError),  # type: ignore[arg-type]
        (lambda: KvRouter(endpoint, 0, KvRouterConfig()), ValueError),
        (lambda: KvRouter(endpoint, 16, KvRouterConfig(), None, 0), ValueError),
        (lambda: KvRouter(endpoint, 16, KvRouterConfig(), object()), NotImplementedError),
        (lambda: KvIndexer(endpoint, 0), ValueError),
    ):
        with pytest.raises(error):
            make()

    async def elsewhere() -> None:
        with pytest.raises(RuntimeError, match=r"event loop"):
            KvRouter(endpoint, 16, KvRouterConfig())

    await asyncio.to_thread(asyncio.run, elsewhere())
    await runtime.aclose()


@pytest.mark.parametrize("uses_events", [True, False])
async def test_the_first_call_of_a_router_finds_the_workers_that_are_registered(uses_events: bool) -> None:
    serving = await worker()
    runtime = memory_runtime()
    router = KvRouter(runtime.endpoint("ns.pool.generate"), 16, KvRouterConfig(use_kv_events=uses_events))
    assert (await router.best_worker(PROMPT))[0] == serving.connection_id()
    for each in (serving, runtime):
        await each.aclose()


async def test_a_router_made_in_a_thread_serves_the_loop_of_its_runtime() -> None:
    serving = await worker()
    runtime = memory_runtime()
    endpoint = runtime.endpoint("ns.pool.generate")
    router = await asyncio.to_thread(KvRouter, endpoint, 16, KvRouterConfig())
    assert (await router.best_worker(PROMPT))[0] == serving.connection_id()
    indexer = await asyncio.to_thread(KvIndexer, endpoint, 16)
    assert (await indexer.find_matches([1])).scores == {}
    for each in (serving, runtime):
        await each.aclose()


async def test_a_router_made_in_a_thread_and_dropped_at_once_leaves_nothing() -> None:
    runtime = memory_runtime()
    endpoint = runtime.endpoint("ns.pool.generate")
    before = len(runtime._clients)

    def make_and_drop() -> None:
        KvRouter(endpoint, 16, KvRouterConfig())
        gc.collect()

    await asyncio.to_thread(make_and_drop)
    await until(lambda: len(runtime._clients) == before)
    await runtime.aclose()


async def test_a_router_ends_with_its_runtime_by_close_and_when_it_is_collected() -> None:
    runtime = memory_runtime()
    endpoint = runtime.endpoint("ns.pool.generate")
    kept, closed, dropped = (KvRouter(endpoint, 16, KvRouterConfig()) for _ in range(3))
    for router in (kept, closed, dropped):
        with pytest.raises(WorkerUnavailable):
            await router.best_worker(PROMPT)
    everything = len(runtime._clients)
    await closed.close()
    await closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        await closed.best_worker(PROMPT)
    del router, dropped
    gc.collect()
    await until(lambda: len(runtime._clients) == everything // 3)
    await runtime.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await kept.best_worker(PROMPT)


async def test_a_worker_above_a_threshold_gets_no_requests() -> None:
    workers = [await worker(total_kv_blocks=10) for _ in range(2)]
    runtime = memory_runtime()
    thresholds = LoadThresholdConfig(active_decode_blocks_threshold=0.5)
    router = KvRouter(runtime.endpoint("ns.pool.generate"), 16, KvRouterConfig(), load_threshold_config=thresholds)
    publishers = []
    for each in workers:
        publishers.append(WorkerMetricsPublisher())
        await publishers[-1].create_endpoint(each.endpoint("ns.pool.generate"))

    async def chosen() -> set[int] | None:
        try:
            return {(await router.best_worker(PROMPT))[0] for _ in range(8)}
        except Overloaded:
            return None

    async def comes_to(wanted: set[int] | None) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await chosen() != wanted:
                await asyncio.sleep(0.01)

    ids = [each.connection_id() for each in workers]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(await router.get_potential_loads(PROMPT)) < 2:
            await asyncio.sleep(0.01)
    publishers[0].publish(0, kv_used_blocks=9)
    await comes_to({ids[1]})
    publishers[1].publish(0, kv_used_blocks=9)
    await comes_to(None)
    publishers[0].publish(0, kv_used_blocks=1)
    await comes_to({ids[0]})
    for each in [*workers, runtime]:
        await each.aclose()


async def test_the_requests_of_a_session_go_to_one_worker() -> None:
    workers = [await worker(total_kv_blocks=10) for _ in range(3)]
    runtime = memory_runtime()
    router = KvRouter(runtime.endpoint("ns.pool.generate"), 16, KvRouterConfig(use_kv_events=False), None, 60)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(await router.get_potential_loads(PROMPT)) < 3:
            await asyncio.sleep(0.01)

    async def serves(first: int, **members: Any) -> int:
        chunks = [chunk async for chunk in await router.generate_from_request({"token_ids": [first] * 40, **members})]
        found: int = chunks[0]["routing_data"]["worker_id"]["decode_worker_id"]
        return found

    session = {"agent_context": {"session_id": "s"}}
    bound = await serves(0, **session)
    assert {await serves(number, **session) for number in range(12)} == {bound}
    assert len({await serves(number) for number in range(30)}) > 1  # without a session they spread
    for each in [*workers, runtime]:
        await each.aclose()


async def test_the_indexers_find_what_ranks_hold() -> None:
    serving, runtime = await worker(), memory_runtime()
    publisher = KvEventPublisher(serving.endpoint("ns.pool.generate"), kv_block_size=16, enable_local_indexer=True)
    publisher.publish_stored(PROMPT[:48], [16] * 3, [1, 2, 3])
    indexer = KvIndexer(runtime.endpoint("ns.pool.generate"), 16)  # comes later: it asks for what it has missed
    rank = (serving.connection_id(), 0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await indexer.find_matches_for_request(PROMPT)).scores != {rank: 3}:
            await asyncio.sleep(0.01)
    assert (await indexer.find_matches_for_request(PROMPT, lora_name="a")).scores == {}
    hashes = dynamo.llm.compute_block_hash_for_seq(PROMPT[:32], 16)
    assert (await indexer.find_matches(hashes)).scores == {rank: 2}
    guesses = ApproxKvIndexer(runtime.endpoint("ns.pool.generate"), 16)
    assert (indexer.block_size(), guesses.block_size()) == (16, 16)
    await guesses.process_routing_decision_for_request(PROMPT, 7, 1)
    assert (await guesses.find_matches_for_request(PROMPT[:40])).scores == {WorkerRank(7, 1): 2}
    await indexer.close()
    publisher.shutdown()
    for each in (serving, runtime):
        await each.aclose()


@each_case(
    ("arguments", "error"),
    [
        ((), InvalidArgument),
        ((0,), InvalidArgument),
        ((-1, 1), OverflowError),
        ((2**32, 1), OverflowError),
        ((0, -1), OverflowError),
        ((0, None, 2**64), OverflowError),
        ((0, 1.5), TypeError),
        (("0", 1), TypeError),
    ],
)
def test_a_load_that_is_none_is_refused_where_it_is_published(
    arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"load metric|dp_rank|active_decode_blocks|kv_used_blocks"):
        WorkerMetricsPublisher().publish(*arguments)


async def test_a_request_that_is_not_one_is_refused_before_it_is_sent() -> None:
    runtime = memory_runtime()
    router = KvRouter(runtime.endpoint("ns.pool.generate"), 16, KvRouterConfig())
    for request, error in (
        ({"token_ids": [1], "stop_conditions": [1]}, TypeError),
        ({"token_ids": [1], "routing": {"dp_rank": "x"}}, InvalidArgument),
        ({"token_ids": [1], "mm_routing_info": {"block_mm_infos": [{}]}}, InvalidArgument),
        ({"token_ids": [1], "router_config_override": {"prefill_load_scale": -1}}, InvalidArgument),
    ):
        with pytest.raises(error):
            await router.generate_from_request(request)
    await runtime.aclose()


def test_the_runtime_configuration_of_the_script_is_the_native_one() -> None:
    config = ModelRuntimeConfig()
    config.taints = {"gold"}
    assert set(config.taints) == {"gold"}
