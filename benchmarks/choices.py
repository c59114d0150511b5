"""What a choice of a worker costs among 64 and among 1,000: `ModelPool.choose` with its booking, no socket, the CPU clock.

    python benchmarks/choices.py
    python benchmarks/choices.py --changes                  also the choice right after a change of one worker

Each request is placed and booked, and one that began before it ends, so that loads stand. The figure is the least of several
repeats, in microseconds for one choice; booking and ending are not in it. After a change: the median of the choices, and the longest.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator
from typing import Any, Final, cast

from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.overlap import WorkerRank
from dynamo.placement import Candidate, PlacementRequest, Policy, RouterMode, policy_for
from dynamo.placement.kv_query import KvQuery, RankInfo
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.rank_states import RankInfos
from dynamo.router.kv.placement import KvPlaced, KvPlacement
from dynamo.router.kv.router import KvRouter
from dynamo.router.workers.pool import ModelPool, WorkerClient
from dynamo.router.workers.worker_holds import WorkerHold
from dynamo.runtime.calls.instances import InstanceSet
from dynamo.runtime.calls.request_plane.base import Instance

ENDPOINT: Final = "ns.c.e"
SIZES: Final = (64, 1000)
CHOICES: Final = 400  # of one repeat
PROMPT_TOKENS: Final = 1600
BLOCK: Final = 16
LIFE_SECONDS: Final = 10.0
HELD: Final = 3  # requests at each worker, on average
CHANGES: Final = 40
INFO: Final = RankInfo(total_kv_blocks=4096, max_num_batched_tokens=8192)


class Workers:
    """The instances of one endpoint, as a client has them."""

    def __init__(self, count: int, ill: int = 0) -> None:
        """`ill`: so many have an open circuit for as long as this runs."""
        self.instances = InstanceSet(ENDPOINT, inhibit_seconds=1e9)
        for number in range(count):
            self.join(number)
        for number in range(ill):
            self.instances.inhibit(number * count // ill, 0.0)

    def join(self, number: int) -> None:
        instance = Instance(
            namespace="ns", component="c", endpoint="e", instance_id=number, transport={"mem": str(number)}
        )
        self.instances.put(f"ns/c/e/{number:x}", instance)

    def leave(self, number: int) -> None:
        self.instances.remove(f"ns/c/e/{number:x}")

    def instance_ids(self) -> list[int]:
        return [each.instance_id for each in self.instances.discovered]

    def candidates(self, *, members: Container[int] | None = None, busy: Collection[int] = ()) -> list[Candidate]:
        return self.instances.candidates(asyncio.get_running_loop().time(), members=members, busy=busy)

    def named(self, instance_id: int) -> Instance:
        return self.instances.named(instance_id)

    def circuits(self) -> dict[int, float]:
        return {}


def policy(name: str, count: int) -> Policy:
    """Make the policy of a mode, or of `kv NAME`."""
    rng = random.Random(7)
    mode, _, kind = name.partition(" ")
    if mode != "kv":
        return policy_for(RouterMode(mode), rng=rng)
    router = KvRouter(block_size=BLOCK, policy=kv_policy(kind), rng=rng, index=ApproximateIndex(ttl_seconds=1e6))
    placement = KvPlacement(router, rng=rng)
    ranks = RankInfos()
    for number in range(count):
        ranks[WorkerRank(number)] = INFO
    placement.read_ranks = lambda: ranks
    placement.is_stale = True
    return placement


def changes(pool: ModelPool, workers: Workers, count: int) -> dict[str, Callable[[], None]]:
    """Return what may change, by name: each call changes one worker in the middle, or takes that back."""
    numbers, taken = iter(range(count // 3, 10**9, 7)), list[int]()

    def member(number: int, joins: bool) -> None:
        (workers.join if joins else workers.leave)(number)
        if isinstance(pool._policy, KvPlacement):
            ranks = cast(dict[WorkerRank, RankInfo], pool._policy.read_ranks())
            if joins:
                ranks[WorkerRank(number)] = INFO
            else:
                del ranks[WorkerRank(number)]
            pool._policy.is_stale = True
        pool.set_members([(ENDPOINT, each) for each in workers.instance_ids()])

    def join_or_leave() -> None:
        if taken:
            member(taken.pop(), True)
        else:
            taken.append(next(numbers) % count)
            member(taken[-1], False)

    def fail_or_answer() -> None:
        if workers.instances.breaker.open:
            workers.instances.breaker.record_answer(next(iter(workers.instances.breaker.open)))
        else:
            workers.instances.inhibit(next(numbers) % count, 0.0)

    def busy_or_free() -> None:
        pool.busy = frozenset() if pool.busy else frozenset({next(numbers) % count})

    def drained_or_not() -> None:
        number = next(iter(pool.holds.by_worker), None)
        hold = WorkerHold(next(numbers) % count, "drain") if number is None else WorkerHold(number, "")
        pool.holds.put(hold, 0.0)

    return {"fails": fail_or_answer, "busy": busy_or_free, "drained": drained_or_not, "joins, leaves": join_or_leave}


async def measure(name: str, count: int, args: argparse.Namespace) -> tuple[float, dict[str, str]]:
    """Return the least CPU of a choice, in microseconds, and what it is after changes. Time is virtual: a request runs for
    `LIFE_SECONDS`."""
    ill = args.ill
    loop, clock = asyncio.get_running_loop(), 0.0
    loop.time = lambda: clock  # type: ignore[method-assign]
    workers, chosen, rng = Workers(count, ill), policy(name, count), random.Random(3)
    pool = ModelPool("m", {ENDPOINT: cast(WorkerClient, workers)}, chosen)
    pool.set_members([(ENDPOINT, number) for number in range(count)])
    running: deque[tuple[str, Any]] = deque()
    made, best = 0, float("inf")

    def one() -> float:
        nonlocal made, clock
        made += 1
        clock += LIFE_SECONDS / (HELD * count)
        query = None
        if isinstance(chosen, KvPlacement):  # a tenth of the prompts begins as one of sixteen others
            start = rng.randrange(16) if rng.random() < 0.1 else made
            query = KvQuery(
                sequence=range(start * 1000, start * 1000 + PROMPT_TOKENS // BLOCK), prompt_tokens=PROMPT_TOKENS
            )
        request = PlacementRequest(kv=query)
        begun = time.process_time()
        worker = pool.choose(request)
        took = time.process_time() - begun
        booking, now, request_id = (
            workers.instances.book(worker.instance.instance_id),
            asyncio.get_running_loop().time(),
            str(made),
        )
        if isinstance(chosen, KvPlacement) and isinstance(worker.placement, KvPlaced):
            chosen.router.book(request_id, worker.placement.selection, now)
            chosen.router.first_token(str(made - max(1, HELD * count // 100)), now)
        running.append((request_id, booking))
        if len(running) > HELD * count:
            request_id, booking = running.popleft()
            booking.release()
            if isinstance(chosen, KvPlacement):
                chosen.router.free(request_id, now)
        return took

    for _ in range(HELD * count):
        one()
    for _ in range(args.repeats):
        best = min(best, sum(one() for _ in range(CHOICES)) / CHOICES)
    after = {}
    for kind, change in changes(pool, workers, count).items() if args.changes else ():
        took = sorted([1e6 * part for part in each_after(change, one)])
        after[kind] = f"{kind} {statistics.median(took):.0f}, {took[-1]:.0f}"
    return 1e6 * best, after


def each_after(change: Callable[[], None], one: Callable[[], float]) -> Iterator[float]:
    """Yield the CPU of each choice that is the first one after a change; the collector rests, as in a frontend nearly always."""
    gc.collect()
    gc.disable()
    for _ in range(CHANGES):
        change()
        yield one()
        for _ in range(3):
            one()
    gc.enable()


NAMES: Final = (
    "round-robin", "random", "power-of-two", "least-loaded", "kv time", "kv default", "kv two-tier",
)  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="CPU of one choice of a worker")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[*SIZES])
    parser.add_argument("--modes", nargs="+", default=[*NAMES])
    parser.add_argument("--ill", type=int, default=0, help="workers that have failed a moment ago (default: none)")
    parser.add_argument("--changes", action="store_true", help="also the choice right after a change: median, longest")
    args = parser.parse_args()
    for name in args.modes:
        figures = [asyncio.run(measure(name, size, args)) for size in args.sizes]
        shown = "  ".join(f"{size}: {figure:7.1f} us" for size, (figure, _) in zip(args.sizes, figures, strict=True))
        print(f"{name:14} {shown}", flush=True)
        for size, (_, after) in zip(args.sizes, figures, strict=True):
            if after:
                print(f"    after one of {size}: {'; '.join(after.values())} us", flush=True)


if __name__ == "__main__":
    main()
