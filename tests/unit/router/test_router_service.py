"""The router as a service: its three endpoints, in front of workers of any endpoint."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from dynamo.errors import DynamoException, InvalidArgument, Overloaded, Unknown, WorkerUnavailable
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_query import Trust
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.queueing import PolicyClass, PolicyProfile, UncachedIslBucket
from dynamo.router.__main__ import parse_router_args
from dynamo.router.kv.pre_dispatch import PreDispatchGate
from dynamo.router.kv.queue_gate import QueueGate, RouterRanks
from dynamo.router.kv.router import KvRouter
from dynamo.router.kv.sessions import PoolSessions
from dynamo.router.peers.load_reports import LOAD_TOPIC
from dynamo.router.standalone.routed_endpoint import RoutedEndpoint, kv_query_of, ranks_of
from dynamo.router.standalone.service import RouterService
from dynamo.router.standalone.worker_reports import busy_filter
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.distributed import DistributedRuntime
from support.frontend_cluster import memory_runtime
from support.processes import until

BLOCK = 16
PROMPT = list(range(100))


class OnePrompt:
    """An index in which one rank holds the beginning of `PROMPT`."""

    rank: WorkerRank | None = None
    held = Overlap(3, 2, 1)

    def find(self, sequence: Sequence[int], now: float = 0.0) -> Mapping[WorkerRank, Overlap]:
        is_it = sequence == sequence_hashes(block_hashes(PROMPT, BLOCK))
        return {self.rank: self.held} if is_it and self.rank is not None else {}


class Pool:
    """A router service and the workers behind it."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime = runtime
        self.index = OnePrompt()
        self.router = KvRouter(block_size=BLOCK, policy=kv_policy("default"), rng=random.Random(1), index=self.index)
        self.requests: dict[int, list[dict[str, Any]]] = {}
        self.errors: dict[int, DynamoException] = {}  # of workers that decline
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.runtimes: list[DistributedRuntime] = []
        self.workers: RoutedEndpoint

    async def worker(self, **card: Any) -> int:
        """Start one more worker, and return its id once the router knows it."""
        runtime = memory_runtime()
        self.runtimes.append(runtime)
        endpoint = runtime.endpoint("ns.pool.generate")
        worker_id = endpoint.connection_id()
        self.requests[worker_id] = []

        async def generate(body: Any, context: Context, sink: ResponseSink) -> None:
            self.requests[worker_id].append(body)
            if worker_id in self.errors:
                raise self.errors[worker_id]
            sink.send_tokens([7], extra={"routing_data": {"more": 1}})
            await self.may_end.wait()
            sink.send_tokens([8, 9], finish_reason="stop", extra={"usage": 3})
            sink.send_object({"event": "note", "comment": ["end"]})

        await endpoint.start_serving(generate)
        if card:
            await endpoint.publish_model({"display_name": "m", "runtime_config": card})
        ranks = card.get("data_parallel_size", 1)
        known = [WorkerRank(worker_id, dp_rank) for dp_rank in range(ranks)]
        await until(lambda: self.router.ranks.keys() >= set(known))
        return worker_id

    async def ask(self, endpoint: str, body: Any) -> list[Any]:
        """Return every item of an answer."""
        client = await self.runtime.endpoint(f"ns.router.{endpoint}").client()
        (instance_id,) = await client.wait_for_instances()
        stream = await client.open(client.named(instance_id), body, Context())
        try:
            found: list[Any] = []
            while items := await stream.next_batch():
                found += items
            return found
        finally:
            stream.close()
            await client.close()


@asynccontextmanager
async def served(profile: PolicyProfile | None = None) -> AsyncIterator[Pool]:
    """`profile`: requests wait by it for a worker."""
    runtime = memory_runtime()
    pool = Pool(runtime)
    gate = None if profile is None else QueueGate(pool.router, profile, RouterRanks(pool.router))
    try:
        async with (
            RoutedEndpoint(
                runtime.endpoint("ns.pool.generate"), pool.router, pre_dispatch=PreDispatchGate(gate)
            ) as pool.workers,
            RouterService(pool.workers),
        ):
            yield pool
    finally:
        for each in [*pool.runtimes, runtime]:
            await each.aclose()


async def test_a_request_goes_where_its_prefix_lies_and_its_answer_comes_back() -> None:
    async with served() as pool:
        await pool.worker()
        holder = await pool.worker(data_parallel_size=2, total_kv_blocks=50)
        pool.index.rank = held = WorkerRank(holder, 1)
        pool.may_end.clear()
        answer = asyncio.ensure_future(pool.ask("generate", {"token_ids": PROMPT, "model": "m"}))
        load = pool.router.load
        await until(lambda: load.decode_blocks(held) == 6 and not load.prefill_tokens(held))
        pool.may_end.set()
        first, last, note = await answer
        who = {
            "prefill_worker_id": holder, "prefill_dp_rank": 1, "decode_worker_id": holder, "decode_dp_rank": 1,
        }  # fmt: skip
        assert (first.token_ids, first.extra) == ([7], {"routing_data": {"worker_id": who, "more": 1}})
        assert (last.token_ids, last.finish_reason, last.extra) == ([8, 9], "stop", {"usage": 3})
        assert note.extra == {"event": "note", "comment": ["end"]}
        (body,) = pool.requests[holder]
        assert body == {"token_ids": PROMPT, "model": "m", "routing": {"dp_rank": 1}}
        assert len(load) == 0


async def test_the_best_worker_and_what_ranks_hold_can_be_asked() -> None:
    async with served() as pool:
        other, holder = await pool.worker(), await pool.worker()
        pool.index.rank = WorkerRank(holder)
        (item,) = await pool.ask("best_worker_id", PROMPT)
        assert item.extra == {"data": holder}
        (item,) = await pool.ask("get_overlap_scores", {"token_ids": PROMPT})
        scores = item.extra["data"]
        assert (scores["block_size"], scores["num_blocks"]) == (16, 6)
        assert scores["shared_cache"] == {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}
        assert [each["worker_id"] for each in scores["workers"]] == sorted([other, holder])
        assert next(each for each in scores["workers"] if each["worker_id"] == holder) == {
            "worker_id": holder,
            "dp_rank": 0,
            "device_blocks": 3,
            "host_pinned_blocks": 5,
            "disk_blocks": 6,
            "host_pinned_extension_blocks": 2,
            "disk_extension_blocks": 1,
            "shared_beyond_device_blocks": None,
        }
        assert len(pool.router.load) == 0


async def test_a_worker_that_declines_is_left_out_and_an_error_of_the_last_one_is_the_answer() -> None:
    async with served() as pool:
        first, second = await pool.worker(), await pool.worker()
        pool.index.rank = WorkerRank(first)
        pool.errors[first] = WorkerUnavailable("drains")
        items = await pool.ask("generate", {"token_ids": PROMPT})
        assert [len(pool.requests[each]) for each in (first, second)] == [1, 1]
        assert items[0].extra["routing_data"]["worker_id"]["decode_worker_id"] == second
        with pytest.raises(WorkerUnavailable, match="drains"):
            await pool.ask("generate", {"token_ids": PROMPT, "routing": {"backend_instance_id": first}})
        pool.errors[second] = Unknown("broken")
        with pytest.raises(Unknown, match="broken"):
            await pool.ask("generate", {"token_ids": PROMPT})
        assert len(pool.router.load) == 0


async def test_what_cannot_be_served_is_a_typed_error() -> None:
    async with served() as pool:
        with pytest.raises(WorkerUnavailable):
            await pool.ask("generate", {"token_ids": PROMPT})
        with pytest.raises(WorkerUnavailable):
            await pool.ask("best_worker_id", PROMPT)
        for endpoint, body in (("generate", [1]), ("generate", {}), ("best_worker_id", {"token_ids": [1]}),
                               ("best_worker_id", [-1]), ("get_overlap_scores", {}), ("get_overlap_scores", [1])):  # fmt: skip
            with pytest.raises(InvalidArgument, match="token_ids"):
                await pool.ask(endpoint, body)


def test_a_workers_request_says_where_it_may_go() -> None:
    query = kv_query_of(
        {
            "token_ids": [1, 2],
            "routing": {
                "dp_rank": 3,
                "decode_worker_id": 9,
                "lora_name": "a",
                "cache_namespace": "t",
                "priority": -2,
                "expected_output_tokens": 40,
                "allowed_worker_ids": [9, 10],
                "routing_constraints": {"required_taints": ["x"], "preferred_taints": {"y": 0.5}},
                "strict_priority": 1,
                "slo_ttft_ms": 300,
            },
            "router_config_override": {"overlap_score_credit": 0.0},
        }
    )
    assert (query.token_ids, query.pinned_worker_id, query.pinned_dp_rank) == ([1, 2], 9, 3)
    assert (query.lora_name, query.cache_salt, query.priority, query.expected_output) == ("a", "t", -2, 40)
    assert (query.allowed, query.required_taints, query.preferred_taints) == ({9, 10}, ["x"], {"y": 0.5})
    assert query.overrides is not None
    assert query.overrides.overlap_score_credit == 0.0
    assert query.aim.target_ms == 300
    for wrong, named in (
        ({"routing": {"dp_rank": "x"}}, r"routing: .*dp_rank"),
        ({"router_config_override": {"foo": 1}}, "router_config_override: .*foo"),
        ({"router_config_override": {"router_temperature": -1.0}}, "router_config_override.router_temperature"),
        ({"router_config_override": {"prefill_load_scale": float("nan")}}, "router_config_override.prefill_load_scale"),
    ):
        with pytest.raises(InvalidArgument, match=named):
            kv_query_of({"token_ids": [1], **wrong})


def test_a_worker_without_a_card_has_one_rank() -> None:
    found = ranks_of([5, 6], {}, {WorkerRank(6): Trust.DEGRADED})
    assert {rank: info.trust for rank, info in found.items()} == {
        WorkerRank(5): Trust.NONE,
        WorkerRank(6): Trust.DEGRADED,
    }


async def test_the_trust_in_a_ranks_events_reaches_the_choice() -> None:
    async with served() as pool:
        rank = WorkerRank(await pool.worker(data_parallel_size=2), 1)
        assert pool.router.ranks[rank].trust is Trust.NONE
        for trust in (Trust.EXACT, Trust.DEGRADED, Trust.NONE):
            pool.workers.set_trust(rank, trust)
            assert pool.router.ranks[rank].trust is trust
            assert pool.router.ranks[WorkerRank(rank.worker_id)].trust is Trust.NONE


async def test_requests_wait_for_a_worker_with_little_to_prefill() -> None:
    one = PolicyClass(
        name="only", quantum=1, policy_family="f", cache_bucket="b", prefill_busy_threshold=0,
        request_queue_limit_per_worker=2,
    )  # fmt: skip
    async with served(PolicyProfile((one,), (UncachedIslBucket(0, "b"),), "f")) as pool:
        worker = await pool.worker()
        gate, load = pool.workers.pre_dispatch.gate, pool.router.load
        assert gate is not None
        load.add("b0b/theirs", WorkerRank(worker), (), prompt_tokens=10, cached_tokens=0, now=0.0)
        asked = [asyncio.ensure_future(pool.ask("generate", {"token_ids": PROMPT})) for _ in range(2)]
        await until(lambda: len(gate) == 2)
        with pytest.raises(DynamoException, match="queue requests limit reached"):
            await pool.ask("generate", {"token_ids": PROMPT})
        leaving, context = asked.pop(), Context("leaves")
        leaving.cancel()
        await until(lambda: len(gate) == 1)
        opening = asyncio.ensure_future(pool.workers.open({"token_ids": PROMPT}, context))
        await until(lambda: len(gate) == 2)
        context.kill()
        assert len(gate) == 1
        assert await (await opening).next_batch() == []
        assert pool.requests[worker] == []
        load.free("b0b/theirs", 0.0)
        assert [item.token_ids for item in (await asked[0])[:2]] == [[7], [8, 9]]
        assert (len(gate), len(load)) == (0, 0)


async def test_a_session_stays_with_its_worker_until_that_declines() -> None:
    async with served() as pool:
        workers = [await pool.worker() for _ in range(3)]
        known = pool.router.ranks
        sessions = PoolSessions(60, "hard", writer_id=1, is_known=lambda rank: rank in known)
        pool.workers.pre_dispatch = PreDispatchGate(None, sessions)
        body = {"token_ids": PROMPT, "agent_context": {"session_id": "s"}}

        async def serves() -> int:
            before = {worker: len(pool.requests[worker]) for worker in workers}
            answer = await pool.workers.open(body, Context())
            while await answer.next_batch():
                pass
            (found,) = [worker for worker in workers if len(pool.requests[worker]) > before[worker]]
            return found

        first = await serves()
        assert [await serves() for _ in range(5)] == [first] * 5
        pool.errors[first] = Overloaded()
        answer = await pool.workers.open(body, Context())
        while await answer.next_batch():
            pass
        second = answer.selection.rank.worker_id if answer.selection is not None else 0
        assert second != first
        del pool.errors[first]
        assert await serves() == second
        assert len(pool.router.load) == 0


async def test_a_worker_over_a_threshold_gets_no_requests() -> None:
    async with served() as pool:
        workers = [await pool.worker(total_kv_blocks=100) for _ in range(2)]
        endpoint = pool.runtime.endpoint("ns.pool.generate")
        publisher = endpoint.runtime.events.new_publisher(endpoint.event_scope, LOAD_TOPIC)
        settings, _ = parse_router_args(
            ["--endpoint", "ns.pool.generate", "--active-decode-blocks-threshold", "0.5"], {}
        )

        def report(worker_id: int, used: int) -> None:
            publisher.publish(msgspec.msgpack.encode({"worker_id": worker_id, "dp_rank": 0, "kv_used_blocks": used}))

        async with busy_filter(pool.workers, settings.busy_thresholds):
            report(workers[0], 60)
            await until(lambda: pool.workers.busy == {workers[0]})
            for _ in range(4):
                await pool.ask("generate", {"token_ids": PROMPT})
            assert [len(pool.requests[each]) for each in workers] == [0, 4]
            report(workers[1], 51)
            await until(lambda: pool.workers.busy == set(workers))
            with pytest.raises(Overloaded):
                await pool.ask("generate", {"token_ids": PROMPT})
            report(workers[0], 50)
            await until(lambda: pool.workers.busy == {workers[1]})
            await pool.ask("generate", {"token_ids": PROMPT})
        await publisher.close()
