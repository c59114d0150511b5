"""Requests that wait for a worker with little to prefill: turns, cancellation, limits, and what a request costs that need not
wait."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from dynamo.errors import InvalidArgument, RouterQueueLimitExceeded
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import FirstTokenAim, KvQuery, RankInfo
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.queueing import PolicyClass, PolicyProfile, QueueOrder, UncachedIslBucket
from dynamo.router.kv.queue_gate import QueueGate, RouterRanks
from dynamo.router.kv.queue_metrics import QueueMetrics
from dynamo.router.kv.router import KvRouter
from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.metrics import MetricsRegistry
from support.patience import PATIENCE_SECONDS

BATCH = 100  # tokens of one step of every rank


def classes(**quanta: int) -> PolicyProfile:
    """Explicit classes beside the default family; a rank with any prompt to compute is busy for all of them."""
    limit: dict[str, Any] = {"prefill_busy_threshold": 0, "request_queue_limit_per_worker": 1000}
    rest = PolicyClass(name="rest", quantum=1, policy_family="rest", cache_bucket="all", **limit)
    explicit = [PolicyClass(name=name, quantum=quantum, **limit) for name, quantum in quanta.items()]
    return PolicyProfile((*explicit, rest), (UncachedIslBucket(0, "all"),), "rest")


class House:
    """A router with its gate, and requests that wait there and then are booked until a test frees them."""

    def __init__(self, profile: PolicyProfile | None = None, *, workers: int = 1) -> None:
        self.router = KvRouter(block_size=16, policy=kv_policy("default"), rng=random.Random(1))
        self.router.set_ranks({WorkerRank(each): RankInfo(max_num_batched_tokens=BATCH) for each in range(workers)})
        profile = profile or PolicyProfile.of_one_class(queue_threshold=0.5)
        self.registry = MetricsRegistry()
        metrics = QueueMetrics(self.registry, model="m", worker_type="decode", classes=profile.classes)
        self.gate = QueueGate(self.router, profile, RouterRanks(self.router), metrics)
        self.booked: list[str] = []
        self.tasks: list[asyncio.Task[bool]] = []

    async def serve(self, name: str, token_ids: Sequence[int], context: Context | None = None, **of: Any) -> bool:
        """Do as a dispatcher does: place, wait where that is needed, place again, book."""
        context, query, now = (
            context or Context(name),
            KvQuery(token_ids=token_ids, **of),
            asyncio.get_running_loop().time,
        )
        selection = self.router.select(query, now())
        if (policy := self.gate.parks(selection, query, context)) is not None:
            if not await self.gate.wait(policy, selection, query, context):
                return False
            selection = self.router.select(query, now())
        self.router.book(name, selection, now())
        self.booked.append(name)
        return True

    async def begin(self, name: str, tokens: int = 80, context: Context | None = None, **of: Any) -> asyncio.Task[bool]:
        """Start a request, and return once it waits or is booked."""
        return await self.begin_with(name, range(tokens), context, **of)

    async def begin_with(
        self, name: str, token_ids: Sequence[int], context: Context | None = None, **of: Any
    ) -> asyncio.Task[bool]:
        """Start a request with this prompt. See `begin`."""
        task = asyncio.ensure_future(self.serve(name, token_ids, context, **of))
        self.tasks.append(task)
        waiting, booked = len(self.gate), len(self.booked)
        await self.until(lambda: task.done() or (len(self.gate), len(self.booked)) != (waiting, booked))
        return task

    async def free(self, *names: str) -> None:
        """End requests, and let what waits take its turn."""
        for name in names:
            self.router.free(name, asyncio.get_running_loop().time())
        await self.settle()

    @staticmethod
    async def settle() -> None:
        """Let everything run that can run without time passing."""
        for _ in range(50):
            await asyncio.sleep(0)

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                await asyncio.sleep(0)

    def metric(self, name: str, policy_class: str = "default", **labels: str) -> float:
        key = {"model": "m", "worker_type": "decode", "policy_class": policy_class, **labels}
        for line in self.registry.expose().decode().splitlines():
            if line.startswith(f"dynamo_frontend_router_{name}{{"):
                found = dict(pair.split("=", 1) for pair in line[line.index("{") + 1 : line.index("}")].split(","))
                if {each: value.strip('"') for each, value in found.items()} == key:
                    return float(line.rpartition(" ")[2])
        return 0.0

    def is_idle(self) -> bool:
        """Whether nothing waits, and nothing is left of what waited."""
        return (
            len(self.gate) == 0
            and not self.router.load.on_relief
            and self.gate._recheck is None
            and self.metric("queue_pending_requests") == 0
            and self.metric("queue_pending_isl_tokens") == 0
        )


async def test_a_request_waits_while_every_worker_is_above_the_threshold_and_goes_when_a_prefill_ends() -> None:
    house = House(workers=2)
    for name in ("a", "b"):
        assert await (await house.begin(name))
    waiting = await house.begin("c")
    assert (len(house.gate), waiting.done()) == (1, False)
    assert house.metric("queue_pending_requests") == 1
    assert house.metric("queue_pending_isl_tokens") == 80
    house.router.first_token("a", 0.0)
    await house.settle()
    assert waiting.done()
    assert house.booked == ["a", "b", "c"]
    assert house.metric("admission_received_total") == 3
    assert house.is_idle()


async def test_turns_are_given_one_at_a_time_so_one_freed_worker_is_not_given_to_all_that_wait() -> None:
    house = House()
    await house.begin("a")
    for number in range(20):
        await house.begin(f"w{number}")
    for number in range(20):
        await house.free(house.booked[-1])
        assert house.booked[1:] == [f"w{each}" for each in range(number + 1)]
        assert house.router.load.prefill_tokens(WorkerRank(0)) == 80
    await house.free("w19")
    assert house.is_idle()


async def test_small_prompts_go_together_up_to_the_threshold() -> None:
    house = House()
    await house.begin("a", 80)
    for number in range(6):
        await house.begin(f"w{number}", 20)
    await house.free("a")
    assert house.booked == ["a", "w0", "w1", "w2"]  # 0, 20 and 40 tokens are not above 50; 60 are


async def test_a_request_does_not_pass_those_of_its_class_that_wait_already() -> None:
    house = House(workers=2)
    await house.begin("a")
    await house.begin("b")
    first = await house.begin("first")
    house.router.load.on_relief.clear()  # so that the first one has not noticed yet
    house.router.free("a", 0.0)
    second = await house.begin("second")
    assert not first.done()
    assert not second.done()
    assert len(house.gate) == 2
    house.gate.changed()
    await house.settle()
    assert house.booked[2:] == ["first"]
    second.cancel()
    await house.settle()
    assert len(house.gate) == 0


async def test_whoever_leaves_frees_the_place_at_once_whichever_way() -> None:
    profile = classes()
    house = House(profile)
    await house.begin("a")
    killed, stopped = Context("killed"), Context("stopped")
    by_kill, by_stop, by_task = (
        await house.begin("killed", 80, killed),
        await house.begin("stopped", 80, stopped),
        await house.begin("task"),
    )
    last = await house.begin("last")
    assert len(house.gate) == 4
    killed.kill()
    assert len(house.gate) == 3  # in the very same moment
    stopped.stop_generating()
    assert len(house.gate) == 2
    by_task.cancel()
    await house.settle()
    assert (by_kill.result(), by_stop.result(), by_task.cancelled()) == (False, False, True)
    assert len(house.gate) == 1
    await house.free("a")
    assert house.booked == ["a", "last"]
    assert last.result()
    assert house.is_idle()


async def test_a_turn_that_its_request_does_not_live_to_see_goes_to_the_next_one() -> None:
    house = House()
    await house.begin("a")
    context = Context("gone")
    gone, after = await house.begin("gone", 80, context), await house.begin("after")
    house.router.free("a", 0.0)
    while len(house.gate) == 2:  # up to the moment in which it has its turn, and has not taken it
        await asyncio.sleep(0)
    if not gone.done():
        gone.cancel()
    context.kill()
    await house.settle()
    assert house.booked in (["a", "after"], ["a", "gone"])
    await house.free("gone")
    assert after.done()
    assert house.is_idle()


async def test_a_class_that_is_full_refuses_with_its_figures_and_a_place_that_comes_free_is_given_again() -> None:
    limited = PolicyClass(
        name="all", quantum=1, policy_family="f", cache_bucket="b", prefill_busy_threshold=0,
        request_queue_limit_per_worker=1,
    )  # fmt: skip
    house = House(PolicyProfile((limited,), (UncachedIslBucket(0, "b"),), "f"), workers=2)
    await house.begin("a")
    await house.begin("b")
    waiting = [await house.begin(f"w{number}") for number in range(2)]
    refused = await house.begin("w2")
    with pytest.raises(RouterQueueLimitExceeded) as caught:
        refused.result()
    error = caught.value
    assert (error.policy_class, error.limit_kind, error.current, error.limit) == ("all", "requests", 2, 2)
    assert house.metric("queue_backpressure_total", "all", reason="request_limit") == 1
    waiting[0].cancel()
    await house.settle()
    assert not (await house.begin("w3")).done()
    for name in ("a", "b", "w1", "w3"):
        await house.free(name)
    assert house.is_idle()
    assert len(house.router.load) == 0


async def test_workers_that_leave_fail_what_waits_instead_of_keeping_it() -> None:
    house = House()
    await house.begin("a")
    waiting = await house.begin("w")
    house.router.set_ranks({})
    await house.settle()
    assert waiting.done()
    assert waiting.exception() is not None  # the choice of a worker says that there is none
    assert house.is_idle()


async def test_a_worker_that_joins_takes_what_waits() -> None:
    house = House()
    await house.begin("a")
    await house.begin("w")
    info = RankInfo(max_num_batched_tokens=BATCH)
    house.router.set_ranks({WorkerRank(0): info, WorkerRank(1): info})
    house.router.load.relieved()
    await house.settle()
    assert house.booked == ["a", "w"]
    assert house.router.load.prefill_tokens(WorkerRank(1)) == 80


async def test_a_request_that_names_its_worker_waits_for_that_one_alone() -> None:
    house = House(workers=2)
    await house.begin("a", 80, pinned_worker_id=0)
    named = await house.begin("named", 80, pinned_worker_id=0)
    other = await house.begin("other")
    assert (named.done(), other.done()) == (False, True)
    await house.free("a")
    assert named.result()
    gone = await house.begin("gone", 80, pinned_worker_id=7)
    assert isinstance(gone.exception(), InvalidArgument)


async def test_bookings_of_other_routers_make_requests_wait_and_their_ends_let_them_go() -> None:
    house = House()
    load = house.router.load
    load.add("b0b/theirs", WorkerRank(0), (), prompt_tokens=80, cached_tokens=0, now=0.0)
    waiting = await house.begin("w")
    assert not waiting.done()
    load.prefill_completed("b0b/theirs", 0.0)
    await house.settle()
    assert waiting.result()
    assert house.is_idle()


async def test_a_booking_that_its_router_never_ended_expires_although_nothing_new_is_booked() -> None:
    house = House()
    now = asyncio.get_running_loop().time()
    house.router.load.add("b0b/lost", WorkerRank(0), (), prompt_tokens=80, cached_tokens=0, now=now - 301)
    waiting = await house.begin("w")
    house.gate._look_again()  # as its timer does every minute
    await house.settle()
    assert waiting.result()


async def test_four_to_one_in_tokens() -> None:
    house = House(classes(gold=400, silver=100))
    await house.begin("a")
    sizes = {"gold": 50, "silver": 25}
    for number in range(120):
        for name, size in sizes.items():
            context = Context(f"{name}-{number}", {"policy-class": name})
            await house.begin(f"{name}-{number}", size, context)
    for _ in range(90):
        await house.free(house.booked[-1])
    served = {name: sum(each.startswith(name) for each in house.booked) * size for name, size in sizes.items()}
    assert served["gold"] / served["silver"] == pytest.approx(4.0, rel=0.15)
    for task in house.tasks:
        task.cancel()
    await house.settle()
    assert len(house.gate) == 0


async def test_strict_priority_goes_first_and_priority_jumps_ahead() -> None:
    house = House(PolicyProfile.of_one_class(queue_threshold=0.5, order=QueueOrder.FCFS))
    await house.begin("a")
    for name, of in (("plain", {}), ("jump", {"priority": 3600.0}), ("strict", {"strict_priority": 1})):
        await house.begin(name, 80, **of)
    for name in ("a", "strict", "jump"):
        await house.free(name)
    assert house.booked == ["a", "strict", "jump", "plain"]


def teach(router: KvRouter, tokens: int = 80, seconds: float = 0.8) -> None:
    """Let every rank show how long a prompt takes."""
    for number in range(60 * len(router.ranks)):
        query = KvQuery(token_ids=range(10_000, 10_000 + tokens), pinned_worker_id=number % len(router.ranks))
        router.book("lesson", router.select(query, 10.0 * number), 10.0 * number)
        router.first_token("lesson", 10.0 * number + seconds)
        router.free("lesson", 10.0 * number + seconds)


def aimed(target_ms: float) -> dict[str, Any]:
    return {"aim": FirstTokenAim(target_ms)}


async def test_what_is_due_first_goes_first_and_first_tokens_are_counted_by_their_targets() -> None:
    house = House()
    await house.begin("a")
    aims = {"late": aimed(1e9), "soon": aimed(1e8), "past": aimed(1.0)}
    await house.begin("none")
    for name, of in aims.items():
        await house.begin(name, 80, **of)
    for name in ("a", "past", "soon", "late"):
        await house.free(name)
    assert house.booked == ["a", "past", "soon", "late", "none"]
    for name, of in aims.items():
        aim = of["aim"]
        assert aim.reached is not None
        aim.reached(aim.due + (1.0 if name == "past" else -1.0))
    counted = [house.metric("ttft_targets_total", outcome=outcome) for outcome in ("kept", "missed", "refused")]
    assert counted == [2, 1, 0]


async def test_a_target_that_cannot_be_kept_is_refused_once_the_workers_have_shown_their_speed() -> None:
    house = House()
    await house.begin("a")
    waits = await house.begin("unknown", 80, **aimed(1.0))
    assert not waits.done()
    await house.free("a")
    await house.free("unknown")
    teach(house.router)
    await house.begin("b", 80, **aimed(1.0))  # it need not wait: no other time is better
    assert house.booked[-1] == "b"
    refused = (await house.begin("refused", 80, **aimed(900.0))).exception()
    assert isinstance(refused, RouterQueueLimitExceeded)
    assert (refused.limit_kind, refused.retry_after_seconds) == ("ttft_target_ms", 1)
    assert refused.limit == pytest.approx(900, abs=1)
    assert not (await house.begin("fits", 80, **aimed(60_000.0))).done()
    assert house.metric("queue_backpressure_total", reason="ttft_target") == 1
    assert house.metric("ttft_targets_total", outcome="refused") == 1


async def test_a_class_has_a_target_for_requests_without_one() -> None:
    policy = PolicyClass(
        name="c", quantum=1, policy_family="f", cache_bucket="b", prefill_busy_threshold=0, slo_ttft_ms=900
    )
    house = House(PolicyProfile((policy,), (UncachedIslBucket(0, "b"),), "f"))
    teach(house.router)
    await house.begin("a")
    assert isinstance((await house.begin("default", 80)).exception(), RouterQueueLimitExceeded)
    assert not (await house.begin("own", 80, **aimed(60_000.0))).done()


async def test_tenants_share_a_queue_and_the_cached_prefix_goes_first() -> None:
    policy = PolicyClass(
        name="c", quantum=1, policy_family="f", cache_bucket="b", prefill_busy_threshold=0, queue_policy=QueueOrder.DLPM,
        tenant_quantum=200,
    )  # fmt: skip
    house = House(PolicyProfile((policy,), (UncachedIslBucket(0, "b"),), "f"))
    await house.begin("running", 80)
    for number, first in enumerate((1000, 2000, 1000)):
        await house.begin_with(f"a{number}", range(first, first + 80), tenant="a")
    await house.begin_with("b0", range(3000, 3080), tenant="b")
    await house.free("running")
    assert house.booked == ["running", "b0"]  # it has less to do
    house.router.first_token("b0", 0.0)
    await house.settle()
    assert house.booked[2:] == ["a0"]
    house.router.first_token("a0", 0.0)  # it runs on, so that its blocks are there
    await house.settle()
    assert house.booked[3:] == ["a2"]
    await house.free("a2")
    assert house.booked[4:] == ["a1"]


async def test_a_request_that_need_not_wait_costs_few_calls() -> None:
    house = House(workers=8)
    query, context = KvQuery(token_ids=range(32)), Context("r")
    selection = house.router.select(query, 0.0)
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        assert house.gate.parks(selection, query, context) is None
    finally:
        sys.setprofile(None)
    assert calls == ["parks", "received", "inc", "is_over"]
    assert not house.router.load.on_relief  # and the ends of requests tell nobody


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_comes_and_goes_nothing_is_lost_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    house = House(classes(gold=300, silver=100), workers=3)
    load, info = house.router.load, RankInfo(max_num_batched_tokens=BATCH)
    contexts: dict[asyncio.Task[bool], Context] = {}
    foreign: list[str] = []
    for step in range(400):
        match rng.choice(("begin", "begin", "begin", "end", "first", "kill", "cancel", "theirs", "their end", "ranks")):
            case "begin":
                context = Context(f"r{step}", {"policy-class": rng.choice(("gold", "silver", "none"))})
                pin = {"pinned_worker_id": rng.randrange(3)} if rng.random() < 0.2 else {}
                task = asyncio.ensure_future(house.serve(f"r{step}", range(rng.choice((10, 60, 200))), context, **pin))
                house.tasks.append(task)
                contexts[task] = context
            case "end" if house.booked:
                house.router.free(house.booked.pop(rng.randrange(len(house.booked))), 0.0)
            case "first" if house.booked:
                house.router.first_token(rng.choice(house.booked), 0.0)
            case "kill" if contexts:
                rng.choice(list(contexts.values())).kill()
            case "cancel" if contexts:
                rng.choice(list(contexts)).cancel()
            case "theirs":
                foreign.append(f"b0b/{step}")
                rank = WorkerRank(rng.randrange(3))
                load.add(foreign[-1], rank, (), prompt_tokens=50, cached_tokens=0, now=0.0, expires=False)
            case "their end" if foreign:
                load.free(foreign.pop(), 0.0)
            case "ranks":
                house.router.set_ranks({WorkerRank(each): info for each in range(rng.randint(0, 3))})
                load.relieved()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    house.router.set_ranks({WorkerRank(each): info for each in range(3)})
    load.relieved()
    for name in foreign:
        load.free(name, 0.0)
    while not all(task.done() for task in house.tasks):
        await house.settle()
        booked, house.booked = house.booked, []
        assert booked or all(task.done() for task in house.tasks), "what waits is never given a turn"
        await house.free(*booked)
    await house.free(*house.booked)
    assert len(load) == 0
    assert house.is_idle()
    for name in ("gold", "silver", "rest"):
        assert house.metric("queue_pending_requests", name) == house.metric("queue_pending_isl_tokens", name) == 0
    for task in house.tasks:
        if not task.cancelled():
            task.exception()  # those that named a worker which was not there
