"""The kv router mode from the door to the worker: who gets a prompt, and that every booking ends with its stream."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery, Trust
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.protocol.model_types import ModelType, WorkerType
from dynamo.protocol.records import ModelCard, ModelRuntimeConfig
from dynamo.router.kv.decisions import read_decisions, recompute
from dynamo.router.kv.domain import KvDomain
from dynamo.router.kv.sessions import PoolSessions
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.worker.kv_publishing.publisher import KvEventPublisher
from dynamo.worker.kv_publishing.recovery import KvRecovery
from support.frontend_cluster import Cluster, Script, ScriptedWorker, cluster, fail, say
from support.patience import PATIENCE_SECONDS
from support.processes import until

BLOCK = 4
PROMPT = list(range(1, 34))  # eight complete blocks, and one token


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    # The policy `time` also learns how fast a worker is, and these workers take no time at all.
    async with cluster(tmp_path, router_mode="kv", kv_router=KvRouterSettings(policy="default")) as found:
        yield found


async def add(house: Cluster, script: Script | None = None, **members: Any) -> ScriptedWorker:
    config = ModelRuntimeConfig(total_kv_blocks=1000, max_num_batched_tokens=8192, **members.pop("config", {}))
    return await house.worker(script, kv_cache_block_size=BLOCK, runtime_config=config, **members)


def domain(house: Cluster, role: str = "aggregated") -> KvDomain:
    domains = house.frontend.models._rules.kv
    assert domains is not None
    (found,) = [each for key, each in domains._domains.items() if key.role == role]
    return found


def booked(house: Cluster) -> int:
    domains = house.frontend.models._rules.kv
    assert domains is not None
    return sum(len(each.placement.router.load) + len(each.placement) for each in domains._domains.values())


class Cache:
    """What a worker says that it holds."""

    def __init__(self, worker: ScriptedWorker, *, dp_rank: int = 0) -> None:
        channel = worker.endpoint.event_channel("kv-events")
        self.publisher = KvEventPublisher(worker.endpoint, kv_block_size=BLOCK, dp_rank=dp_rank, channel=channel)
        self.rank = WorkerRank(*self.publisher.rank)
        self._worker, self._publisher_id = worker, channel.publisher_id
        self._recovery: KvRecovery | None = None

    async def hold(self, house: Cluster, tokens: list[int], **of: Any) -> None:
        """Publish the blocks of a prompt, and wait until the frontend knows of them."""
        names = sequence_hashes(block_hashes(tokens, BLOCK, **of))
        whole = tokens[: len(names) * BLOCK]
        self.publisher.publish_stored(whole, [BLOCK] * len(names), names, **of)
        if self._recovery is None:
            self._recovery = await KvRecovery.begin(self._worker.endpoint, self.publisher, self._publisher_id)
        placement = domain(house).placement
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.rank not in placement.router.look_up(query(tokens, **of), 0.0).overlaps:
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        if self._recovery is not None:
            await self._recovery.close()


def query(tokens: list[int], **of: Any) -> KvQuery:
    return KvQuery(token_ids=tokens, **of)


def served(*workers: ScriptedWorker) -> list[int]:
    return [len(worker.requests) for worker in workers]


async def complete(house: Cluster, prompt: list[int] = PROMPT, **members: Any) -> Any:
    return await house.client.completion(prompt, max_tokens=members.pop("max_tokens", 5), **members)


# -- the choice ------------------------------------------------------------------------------------------------------


async def test_a_prompt_goes_where_its_blocks_lie(house: Cluster) -> None:
    workers = [await add(house) for _ in range(3)]
    cache = Cache(workers[1])
    await cache.hold(house, PROMPT)
    for _ in range(4):
        assert (await complete(house)).status == 200
    assert served(*workers) == [0, 4, 0]
    assert workers[1].requests[0]["routing"]["dp_rank"] == 0
    assert booked(house) == 0
    await cache.close()


async def test_a_prompt_goes_to_the_rank_that_holds_it(house: Cluster) -> None:
    workers = [await add(house, config={"data_parallel_size": 4, "data_parallel_start_rank": 4}) for _ in range(2)]
    cache = Cache(workers[0], dp_rank=6)
    await cache.hold(house, PROMPT)
    assert (await complete(house)).status == 200
    assert [request["routing"]["dp_rank"] for request in workers[0].requests] == [6]
    assert served(*workers) == [1, 0]
    await cache.close()


async def test_adapters_and_tenants_have_blocks_of_their_own(house: Cluster) -> None:
    workers = [await add(house) for _ in range(2)]
    caches = [Cache(worker) for worker in workers]
    await caches[0].hold(house, PROMPT, cache_salt="a")
    await caches[1].hold(house, PROMPT, cache_salt="b")
    for salt in ("a", "b", "b"):
        assert (await complete(house, nvext={"cache_salt": salt})).status == 200
    assert served(*workers) == [1, 2]
    for cache in caches:
        await cache.close()


async def test_a_named_worker_is_taken_and_booked(house: Cluster) -> None:
    holder, named = await add(house), await add(house, Held().script)
    cache = Cache(holder)
    await cache.hold(house, PROMPT)
    held = Held.of(named)
    asked = house.client.begin(
        "POST",
        "/v1/completions",
        {"model": "m", "prompt": PROMPT, "nvext": {"backend_instance_id": named.endpoint.connection_id()}},
    )
    await named.started.wait()
    rank = WorkerRank(named.endpoint.connection_id())
    assert domain(house).placement.router.load.requests(rank) == 1
    held.let_go.set()
    assert (await asked.done()).status == 200
    assert (served(holder, named), booked(house)) == ([0, 1], 0)
    await cache.close()


async def test_a_worker_with_an_open_circuit_gets_nothing_although_it_holds_the_prompt(house: Cluster) -> None:
    holder, other = await add(house), await add(house)
    cache = Cache(holder)
    await cache.hold(house, PROMPT)
    (model,) = house.frontend.models.serving("m")
    instance = model.instance(holder.endpoint.connection_id())
    assert instance is not None
    client = next(iter(model._clients.values()))
    client.inhibit(instance.instance_id)  # type: ignore[attr-defined]
    assert (await complete(house)).status == 200
    assert served(holder, other) == [0, 1]
    await cache.close()


async def test_without_a_card_that_the_router_knows_the_least_loaded_worker_serves(house: Cluster) -> None:
    worker = await add(house)
    found = domain(house)
    found.placement.read_ranks = dict
    found.placement.is_stale = True
    assert (await complete(house)).status == 200
    assert (served(worker), booked(house)) == ([1], 0)


async def test_a_required_taint_that_no_worker_has_is_an_error_of_the_server(house: Cluster) -> None:
    await add(house, config={"taints": {"zone/a"}})
    constraints = {"required_taints": ["zone/b"]}
    assert (await complete(house, nvext={"routing_constraints": constraints})).status == 500
    assert (await complete(house, nvext={"routing_constraints": {"required_taints": ["zone/a"]}})).status == 200
    assert booked(house) == 0


# -- the bookings ----------------------------------------------------------------------------------------------------


class Held:
    """A script that says one token, and goes on when it is let go."""

    def __init__(self, *, says: str = "a", error: Exception | None = None) -> None:
        self.let_go = asyncio.Event()
        self.says, self.error = says, error

    async def script(self, body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        if self.says:
            sink.send_tokens(list(self.says.encode()))
        await self.let_go.wait()
        if self.error is not None:
            raise self.error
        sink.send_tokens(list(b"z"), finish_reason="stop")

    @staticmethod
    def of(worker: ScriptedWorker) -> Held:
        script: Any = worker.script
        return script.__self__


async def test_a_booking_lasts_as_long_as_its_stream(house: Cluster) -> None:
    held = Held(says="")
    worker = await add(house, held.script)
    rank = WorkerRank(worker.endpoint.connection_id())
    load = domain(house).placement.router.load
    asked = house.client.begin("POST", "/v1/completions", {"model": "m", "prompt": PROMPT})
    await worker.started.wait()
    assert (load.requests(rank), load.prefill_tokens(rank), load.decode_blocks(rank)) == (1, len(PROMPT), 8)
    held.let_go.set()
    assert (await asked.done()).status == 200
    assert (load.requests(rank), load.prefill_tokens(rank), load.decode_blocks(rank)) == (0, 0, 0)
    assert booked(house) == 0


async def test_the_first_token_ends_the_prefill(house: Cluster) -> None:
    held = Held(says="a")
    worker = await add(house, held.script)
    rank = WorkerRank(worker.endpoint.connection_id())
    load = domain(house).placement.router.load
    asked = house.client.begin("POST", "/v1/completions", {"model": "m", "prompt": PROMPT, "stream": True})
    await asked.until(lambda one: b"a" in one.body)
    assert (load.requests(rank), load.prefill_tokens(rank), load.decode_blocks(rank)) == (1, 0, 8)
    held.let_go.set()
    await asked.done()
    assert booked(house) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        say("hello"),
        fail(InvalidArgument("no")),
        fail(EngineShutdown("going")),
        fail(InvalidArgument("no"), after=("a", "b")),
        fail(EngineShutdown("going"), after=("a",)),
    ],
    ids=["success", "refused", "failed", "refused late", "failed late"],
)
async def test_every_end_of_a_request_frees_its_bookings(house: Cluster, script: Script, stream: bool) -> None:
    for _ in range(2):
        await add(house, script)
    await complete(house, stream=stream, n=2)
    await complete(house, stream=stream)
    assert booked(house) == 0


@pytest.mark.parametrize("says", ["", "a"])
async def test_a_client_that_leaves_frees_its_booking(house: Cluster, says: str) -> None:
    worker = await add(house, Held(says=says).script)
    asked = house.client.begin("POST", "/v1/completions", {"model": "m", "prompt": PROMPT, "stream": True})
    await worker.started.wait()
    assert booked(house) > 0
    asked.disconnect()
    await worker.killed.wait()
    await asked.done()
    assert booked(house) == 0
    Held.of(worker).let_go.set()


async def test_a_request_that_moves_takes_its_booking_along(house: Cluster) -> None:
    first = Held(says="a", error=EngineShutdown("going"))
    worker = await add(house, first.script)
    asked = house.client.begin("POST", "/v1/completions", {"model": "m", "prompt": PROMPT, "stream": True})
    await asked.until(lambda one: b"a" in one.body)
    second = Held(says="b")
    other = await add(house, second.script)
    first.let_go.set()
    await other.started.wait()
    load = domain(house).placement.router.load
    ranks = [WorkerRank(each.endpoint.connection_id()) for each in (worker, other)]
    assert [load.requests(rank) for rank in ranks] == [0, 1]
    second.let_go.set()
    assert (await asked.done()).text() == "abz"
    assert booked(house) == 0


async def test_output_counts_as_load_only_where_that_is_wanted(tmp_path: Path) -> None:
    settings = KvRouterSettings(router_track_output_blocks=True)
    async with cluster(tmp_path, router_mode="kv", kv_router=settings) as house:
        held = Held(says="abcdefgh")
        worker = await add(house, held.script)
        rank = WorkerRank(worker.endpoint.connection_id())
        placement = domain(house).placement
        asked = house.client.begin("POST", "/v1/completions", {"model": "m", "prompt": PROMPT, "stream": True})
        await asked.until(lambda one: b"h" in one.body)
        placement.select(query([]), asyncio.get_running_loop().time() + 1)
        assert placement.router.load.decode_blocks(rank) == 10  # 41 tokens in 11 blocks, the first 9 with the prompt
        held.let_go.set()
        await asked.done()
        assert booked(house) == 0


# -- the feed --------------------------------------------------------------------------------------------------------


async def test_the_trust_in_a_worker_follows_its_events_and_ends_with_it(house: Cluster) -> None:
    worker, other = await add(house), await add(house)
    cache = Cache(worker)
    await cache.hold(house, PROMPT)
    found = domain(house)
    trusts = {rank: info.trust for rank, info in found._ranks().items()}
    assert trusts == {cache.rank: Trust.EXACT, WorkerRank(other.endpoint.connection_id()): Trust.NONE}
    await until(lambda: house.metric("dynamo_component_router_ranks", **labels(house), trust="exact") == 1)
    await cache.close()
    await worker.stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: cache.rank not in found._ranks())
        assert found.index is not None
        while found.index.blocks(cache.rank):
            await asyncio.sleep(0.005)


async def test_only_the_ranks_that_a_card_names_are_indexed_and_a_card_may_come_late(house: Cluster) -> None:
    worker = await add(house)
    cache, found = Cache(worker), domain(house)
    early = WorkerRank(77, 3)
    channel = worker.endpoint.event_channel("kv-events")
    for rank in (early, WorkerRank(cache.rank.worker_id, 1), *(WorkerRank(number) for number in range(1000, 5000))):
        for event_id, name in enumerate((5, 6), 1):
            stored = {"parent_hash": None, "blocks": [{"block_hash": name, "tokens_hash": name}]}
            change = {"event_id": event_id, "data": {"stored": stored}, "dp_rank": rank.dp_rank}
            channel.publish([{"worker_id": rank.worker_id, "event": change}])
    await cache.hold(house, PROMPT)  # published behind all of these
    assert found.index is not None
    assert {rank for rank in (early, cache.rank) if found.index.blocks(rank)} == {cache.rank}
    assert found.index.blocks() == len(PROMPT) // BLOCK
    assert set(found._trusts) == {cache.rank}
    refused = {"dynamo_namespace": "ns", "dynamo_component": worker.endpoint.component, "reason": "unknown_rank"}
    await until(lambda: house.metric("dynamo_component_router_kv_events_refused_total", **refused) > 1000)
    config = ModelRuntimeConfig(total_kv_blocks=100, data_parallel_start_rank=3)
    card = ModelCard(display_name="other", kv_cache_block_size=BLOCK, runtime_config=config)
    late = SimpleNamespace(endpoint=worker.endpoint.path, instance_id=early.worker_id, card=card)
    domains = house.frontend.models._rules.kv
    assert domains is not None
    (key,) = domains._domains
    domains.update("late", key, [late])
    assert found.index.blocks(early) == 2
    await until(lambda: found._trusts.get(early) is Trust.EXACT)
    domains.remove("late")
    assert found.index.blocks(early) == 0
    assert set(found._trusts) == {cache.rank}
    await cache.close()


async def test_a_worker_that_reports_more_than_it_has_is_degraded_everywhere(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="kv", kv_router=KvRouterSettings(policy="time")) as house:
        worker = await add(house)
        cache, found = Cache(worker), domain(house)
        await cache.hold(house, PROMPT)
        for number in range(8):  # the worker has room for 1,000 blocks
            tokens = [number + 2] * (BLOCK * 128)
            cache.publisher.publish_stored(tokens, [BLOCK] * 128, list(range(number * 1000, number * 1000 + 128)))
        await until(lambda: house.metric("dynamo_component_router_ranks", **labels(house), trust="degraded") == 1)
        reply = await house.client.completion(PROMPT, max_tokens=3, headers={"x-dynamo-explain-routing": "1"})
        assert reply.headers["x-dynamo-kv-trust"] == "degraded"
        selection = found.placement.select(query(PROMPT), 0.0)
        assert selection.trust is Trust.DEGRADED
        cost = found.placement.router.policy.choose(selection.state, 0.5, with_terms=True).candidates[0]
        exact = msgspec.structs.replace(selection.state.ranks[0], trust=Trust.EXACT)
        state = msgspec.structs.replace(selection.state, ranks=(exact,))
        assert cost.total > found.placement.router.policy.choose(state, 0.5).cost
        cache.publisher.publish_cleared()
        await until(lambda: house.metric("dynamo_component_router_ranks", **labels(house), trust="exact") == 1)
        await cache.close()


async def test_a_namespace_that_is_gone_leaves_nothing_and_a_pool_that_stays_finds_its_next_worker(
    house: Cluster,
) -> None:
    domains = house.frontend.models._rules.kv
    assert domains is not None
    worker = await add(house)
    (key,) = domains._domains
    held = domains.placement(key)
    for number in range(20):
        gone = domains.key(f"gone{number}", "aggregated", ModelCard(display_name="m"))
        domains.update("gone", gone, [member(worker, number)])
        domains.remove("gone")
    await until(lambda: gc.collect() >= 0 and list(domains._domains) == [key])
    await worker.stop()
    await house.gone("m")
    assert domains._owners == {}
    domains.update("again", key, [member(worker, 5)])
    assert domains.placement(key) is held


def member(worker: ScriptedWorker, instance_id: int) -> Any:
    card = ModelCard(display_name="m", kv_cache_block_size=BLOCK)
    return SimpleNamespace(endpoint=worker.endpoint.path, instance_id=instance_id, card=card)


def labels(house: Cluster) -> dict[str, str]:
    router_id = f"{house.frontend.kernel.runtime.connection_id():x}"
    return {"dynamo_namespace": "ns", "dynamo_component": "aggregated", "router_id": router_id}


# -- prefill workers -------------------------------------------------------------------------------------------------


async def test_a_prefill_worker_is_chosen_by_what_it_holds_and_its_rank_is_passed_on(house: Cluster) -> None:
    params = {"disaggregated_params": {"room": 1}}
    prefills = [
        await house.worker(
            say("x", finish="length", extra=params),
            component="prefill",
            worker_type=WorkerType.Prefill,
            model_type=ModelType.Prefill,
            needs=[["decode"]],
            kv_cache_block_size=BLOCK,
            runtime_config=ModelRuntimeConfig(data_parallel_size=2),
            wait=False,
        )
        for _ in range(2)
    ]
    decode = await house.worker(
        say("hello"), component="decode", worker_type=WorkerType.Decode, needs=[["prefill"]], kv_cache_block_size=BLOCK
    )
    ids = {each.endpoint.connection_id() for each in prefills}
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(
            lambda: (
                domain(house, "prefill").placement.read_ranks().keys()
                == {WorkerRank(each, dp) for each in ids for dp in (0, 1)}
            )
        )
    found = domain(house, "prefill")
    names = sequence_hashes(block_hashes(PROMPT, BLOCK))
    channel = prefills[1].endpoint.event_channel("kv-events")
    publisher = KvEventPublisher(prefills[1].endpoint, kv_block_size=BLOCK, dp_rank=1, channel=channel)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not found.placement.router.look_up(query(PROMPT), 0.0).overlaps:
            publisher.publish_stored(PROMPT[:32], [BLOCK] * 8, names)
            await asyncio.sleep(0.005)
            publisher.publish_removed(names)
            publisher.publish_stored(PROMPT[:32], [BLOCK] * 8, names)
            await asyncio.sleep(0.005)
    answer = await complete(house, nvext={"extra_fields": ["worker_id"]})
    assert answer.status == 200
    assert served(*prefills) == [0, 1]
    assert prefills[1].requests[0]["routing"]["dp_rank"] == 1
    assert decode.requests[0]["routing"]["prefill_dp_rank"] == 1
    assert booked(house) == 0


async def test_two_frontends_keep_one_account(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path / "one", router_mode="kv", kv_router=KvRouterSettings(router_replica_sync=True)) as first,
        cluster(tmp_path / "two", router_mode="kv", kv_router=KvRouterSettings(router_replica_sync=True)) as second,
    ):
        may_end = asyncio.Event()

        async def slow(body: Any, context: Context, sink: ResponseSink) -> None:
            sink.send_tokens([65])
            await may_end.wait()
            sink.send_tokens([66], finish_reason="stop")

        worker = await add(first, slow)
        rank = WorkerRank(worker.endpoint.connection_id())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (second.frontend.models.served() and domain(first).relay.syncs and domain(second).relay.syncs):
                await asyncio.sleep(0.005)
            for here, there in ((first, second), (second, first)):
                answer = asyncio.ensure_future(complete(here))
                load = domain(there).placement.router.load
                while (load.requests(rank), load.decode_blocks(rank), load.prefill_tokens(rank)) != (1, 8, 0):
                    await asyncio.sleep(0.005)
                may_end.set()
                assert (await answer).status == 200
                while len(load):
                    await asyncio.sleep(0.005)
                may_end.clear()


async def test_what_a_frontend_has_booked_makes_a_worker_busy_without_a_word_from_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="kv", active_prefill_tokens_threshold=20) as house:
        may_answer = asyncio.Event()

        async def silent(body: Any, context: Context, sink: ResponseSink) -> None:
            await may_answer.wait()
            sink.send_tokens([66], finish_reason="stop")

        first, second = await add(house, silent), await add(house, silent)
        answers = [asyncio.ensure_future(complete(house)) for _ in range(2)]  # 33 tokens to prefill at each worker
        busy = {first.endpoint.connection_id(), second.endpoint.connection_id()}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not all(busy <= model.busy for model in house.frontend.models.served()):
                await asyncio.sleep(0.01)
            assert (await complete(house)).status == 529
            may_answer.set()
            assert [(await each).status for each in answers] == [200, 200]
            while any(model.busy for model in house.frontend.models.served()):
                await asyncio.sleep(0.01)
        assert (await complete(house)).status == 200


# -- what a client is told -------------------------------------------------------------------------------------------

EXPLAIN = {"x-dynamo-explain-routing": "1"}


async def test_an_answer_says_why_its_worker_was_chosen(house: Cluster) -> None:
    holder, other = await add(house), await add(house)
    cache = Cache(holder)
    await cache.hold(house, PROMPT)
    answer = await complete(house, headers=EXPLAIN)
    told = answer.json["nvext"]["routing"]["decode"]
    holder_id, other_id = (each.endpoint.connection_id() for each in (holder, other))
    assert (told["worker_id"], told["trust"], told["prompt_blocks"]) == (holder_id, "exact", 8)
    assert told["summary"] == (
        f"Chose worker {holder_id:x} because serving there costs least: 8.2 blocks. It has 32 of the prompt's 33 tokens in its "
        f"KV cache. Worker {other_id:x}, the next best, has 0 of them and would cost 16.2 blocks; the two differ most in "
        "`device_overlap`."
    )
    first, second = told["candidates"]
    assert (first["worker_id"], first["is_chosen"], first["cached_blocks"]["device"]) == (holder_id, True, 8)
    assert (second["worker_id"], second["is_chosen"], second["cached_blocks"]["device"]) == (other_id, False, 0)
    for candidate in told["candidates"]:
        assert sum(candidate["terms"].values()) == pytest.approx(candidate["cost"])
    assert first["cost"] < second["cost"]
    used = {name for each in told["candidates"] for name, value in each["terms"].items() if value}
    assert told["meanings"].keys() >= {"blocks", "exact", "none", "lowest_cost", *used}
    assert answer.headers["x-dynamo-worker-instance-id"] == str(holder_id)
    assert (answer.headers["x-dynamo-dp-rank"], answer.headers["x-dynamo-kv-trust"]) == ("0", "exact")
    await cache.close()


async def test_a_stream_says_so_before_its_data(house: Cluster) -> None:
    worker = await add(house)
    answer = await complete(house, headers=EXPLAIN, stream=True)
    name, _, value = answer.body.decode().split("\n\n")[0].partition("\n: ")
    assert name == "event: routing"
    told = json.loads(json.loads(value))["decode"]
    assert told["worker_id"] == worker.endpoint.connection_id()
    assert answer.headers["x-dynamo-kv-trust"] == "none"
    assert answer.text() == "hello"
    plain = await complete(house, stream=True)
    assert b"routing" not in plain.body
    assert "x-dynamo-kv-trust" not in plain.headers


async def test_the_other_modes_explain_what_they_look_at(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="least-loaded") as house:
        worker = await add(house)
        told = (await complete(house, headers=EXPLAIN)).json["nvext"]["routing"]["decode"]
    assert (told["worker_id"], told["policy"]) == (worker.endpoint.connection_id(), "least-loaded")
    assert told["reasons"] == {"in_flight": 0}


async def test_a_query_for_the_worker_runs_nothing(house: Cluster) -> None:
    holder, other = await add(house), await add(house)
    cache = Cache(holder)
    await cache.hold(house, PROMPT)
    holder_id = holder.endpoint.connection_id()
    ids = {"prefill_worker_id": holder_id, "decode_worker_id": holder_id, "prefill_dp_rank": 0, "decode_dp_rank": 0}
    nvext = {"annotations": ["query_instance_id:"]}
    (chunk,) = (await complete(house, stream=True, nvext=nvext)).chunks
    assert chunk["nvext"] == {"worker_id": ids, "token_ids": PROMPT}
    assert (await complete(house, nvext=nvext)).json["nvext"]["worker_id"] == ids
    (chunk,) = (await house.client.chat("hi", stream=True, nvext=nvext)).chunks
    assert chunk["choices"][0]["delta"] == {"role": "assistant"}
    assert (served(holder, other), booked(house)) == ([0, 0], 0)
    await cache.close()


async def test_decisions_are_recorded_and_come_out_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with cluster(tmp_path, router_mode="kv", kv_router=KvRouterSettings(decisions_path=str(path))) as house:
        workers = [await add(house) for _ in range(3)]
        cache = Cache(workers[2])
        await cache.hold(house, PROMPT)
        for length in range(1, len(PROMPT)):
            assert (await complete(house, PROMPT[:length])).status == 200
        await cache.close()
    found = list(read_decisions(path.read_bytes().splitlines()))
    assert len(found) == len(PROMPT) - 1
    for header, record in found:
        assert recompute(kv_policy(header.policy, header.parameters), record).rank == record.rank
    assert [len(each.requests) for each in workers] == [
        sum(record.rank.worker_id == each.endpoint.connection_id() for _, record in found) for each in workers
    ]


# -- without events --------------------------------------------------------------------------------------------------


async def test_without_events_a_prompt_goes_back_to_where_it_went_before(tmp_path: Path) -> None:
    async with cluster(
        tmp_path, router_mode="kv", kv_router=KvRouterSettings(policy="default", use_kv_events=False)
    ) as house:
        workers = [await add(house) for _ in range(4)]
        answers = [await complete(house, headers=EXPLAIN) for _ in range(6)]
        assert sorted(served(*workers)) == [0, 0, 0, 6]
        assert {answer.headers["x-dynamo-kv-trust"] for answer in answers} == {"predicted"}


async def test_a_worker_without_events_is_guessed_beside_one_with_events(house: Cluster) -> None:
    silent = await add(house, config={"kv_event_publishing_enabled": False})
    nvext = {"backend_instance_id": silent.endpoint.connection_id()}
    assert (await complete(house, nvext=nvext)).status == 200
    other = await add(house)
    answer = await complete(house, headers=EXPLAIN)
    trusts = {each["worker_id"]: each["trust"] for each in answer.json["nvext"]["routing"]["decode"]["candidates"]}
    ids = [each.endpoint.connection_id() for each in (silent, other)]
    assert [trusts[each] for each in ids] == ["predicted", "none"]
    assert served(silent, other) == [2, 0]


# -- sessions --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def sessions(tmp_path: Path, **settings: Any) -> AsyncIterator[Cluster]:
    made = KvRouterSettings(policy="default", use_kv_events=False, router_session_affinity_ttl_secs=60, **settings)
    async with cluster(tmp_path, router_mode="kv", kv_router=made) as found:
        yield found


async def in_session(house: Cluster, session: str = "s", **fields: Any) -> Any:
    body = {"model": "m", "prompt": fields.pop("prompt", [5, 6, 7]), "max_tokens": 5, **fields}
    headers = {"x-dynamo-session-id": session, "x-dynamo-explain-routing": "1"}
    return await house.client.call("POST", "/v1/completions", body, headers=headers)


def owner_of(house: Cluster, before: list[int]) -> int:
    """Which worker has had a request since its count in `before`."""
    (found,) = [at for at, (now, then) in enumerate(zip(served(*house.workers), before, strict=True)) if now > then]
    return found


async def test_a_session_stays_with_its_worker_and_the_answer_says_so(tmp_path: Path) -> None:
    async with sessions(tmp_path) as house:
        for _ in range(4):
            await add(house)
        answers = [await in_session(house, prompt=[number, 2, 3]) for number in range(8)]
        assert sorted(served(*house.workers)) == [0, 0, 0, 8]
        explained = [answer.json["nvext"]["routing"]["decode"] for answer in answers]
        assert [each["reason"] == "session" for each in explained] == [False] + [True] * 7
        assert "because its session is bound to it" in explained[1]["summary"]
        for number in range(12):
            assert (await in_session(house, f"other-{number}")).status == 200
        assert sum(1 for count in served(*house.workers) if count) > 1
        assert booked(house) == 0


async def test_a_session_goes_on_elsewhere_when_its_worker_is_busy_and_comes_back(tmp_path: Path) -> None:
    async with sessions(tmp_path) as house:
        for _ in range(2):
            await add(house)
        await in_session(house)
        bound = owner_of(house, [0, 0])
        (model,) = house.frontend.models.serving("m")
        model.busy = frozenset({house.workers[bound].endpoint.connection_id()})
        before = served(*house.workers)
        assert (await in_session(house)).status == 200
        assert owner_of(house, before) == 1 - bound
        model.busy, before = frozenset(), served(*house.workers)
        assert (await in_session(house)).status == 200
        assert owner_of(house, before) == bound


async def test_a_client_that_names_a_busy_worker_gets_529(house: Cluster) -> None:
    named, other = await add(house), await add(house)
    (model,) = house.frontend.models.serving("m")
    model.busy = frozenset({named.endpoint.connection_id()})
    nvext = {"backend_instance_id": named.endpoint.connection_id()}
    assert (await house.client.completion([1, 2, 3], nvext=nvext)).status == 529
    assert (served(named, other), booked(house)) == ([0, 0], 0)
    model.busy = frozenset()
    assert (await house.client.completion([1, 2, 3], nvext=nvext)).status == 200
    assert served(named, other) == [1, 0]


async def test_a_session_is_bound_anew_when_its_worker_leaves_or_fails(tmp_path: Path) -> None:
    async with sessions(tmp_path) as house:
        for _ in range(3):
            await add(house)
        await in_session(house)
        bound = owner_of(house, [0, 0, 0])
        house.workers[bound].script = fail(EngineShutdown("gone"))
        before = served(*house.workers)
        assert (await in_session(house)).status == 200
        after = served(*house.workers)
        assert after[bound] == before[bound] + 1  # it was asked, and failed
        second = next(at for at in range(3) if at != bound and after[at] > before[at])
        before = served(*house.workers)
        assert (await in_session(house)).status == 200
        assert owner_of(house, before) == second
        await house.workers[second].stop()
        await house.frontend.models.wait_for(lambda: not house.sees(house.workers[second], "m"))
        house.workers[bound].script = say("well again")
        assert (await in_session(house)).status == 200
        assert len(model_sessions(house).table) == 1


async def test_a_session_may_not_name_another_worker_than_its_own(tmp_path: Path) -> None:
    async with sessions(tmp_path) as house:
        for _ in range(2):
            await add(house)
        await in_session(house)
        bound = owner_of(house, [0, 0])
        ids = [worker.endpoint.connection_id() for worker in house.workers]
        refused = await in_session(house, nvext={"backend_instance_id": ids[1 - bound]})
        assert refused.status == 400
        assert f"session s is bound to worker {ids[bound]}, not {ids[1 - bound]}" in refused.json["message"]
        assert (await in_session(house, "x" * 257)).status == 400


async def test_routers_share_where_sessions_are_bound(tmp_path: Path) -> None:
    async with sessions(tmp_path) as one, sessions(tmp_path / "other") as other:
        for _ in range(4):
            await add(one)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await other.frontend.models.wait_for(lambda: all(other.sees(worker, "m") for worker in one.workers))
        for house in (one, other):
            domains = house.frontend.models._rules.kv
            assert domains is not None
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not all(each.relay.sessions.syncs for each in domains._domains.values()):
                    await asyncio.sleep(0.005)
        await in_session(one)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not len(model_sessions(other).table):
                await asyncio.sleep(0.005)
        for number in range(4):
            assert (await in_session(other, prompt=[number, 1])).status == 200
        assert sorted(served(*one.workers)) == [0, 0, 0, 5]


def model_sessions(house: Cluster) -> PoolSessions:
    (model,) = house.frontend.models.serving("m")
    assert model.sessions is not None
    return model.sessions
