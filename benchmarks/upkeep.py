"""What a frontend pays for its fleet beside requests: CPU of each piece of upkeep, and the longest piece on the event loop.

    python benchmarks/upkeep.py
    python benchmarks/upkeep.py fleet --workers 400 --adapters 20

Real objects, the CPU clock; the records of workers come through discovery in memory, and no worker answers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

from dynamo.frontend.app import Frontend
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.http.loops import spare_the_collector
from dynamo.frontend.settings import FrontendSettings
from dynamo.kv.events import BlocksAdded, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.hashing import sequence_hashes
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.kv_query import RankInfo
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.policies.round_robin import RoundRobin
from dynamo.placement.replica_events import BookedPrompt, BookedWorker, BookingEvent, PrefillHint
from dynamo.protocol.records import LoraRecord, ModelRecord, ModelRuntimeConfig
from dynamo.router.dispatch.stall_detector import StallDetector, StallPolicy
from dynamo.router.kv.router import KvRouter
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.peers.replica_sync import ReplicaSync
from dynamo.router.workers.busy_workers import BusyThresholds, BusyWorkers, LoadReport
from dynamo.router.workers.pool import ModelPool
from dynamo.runtime.calls.instances import encode_instance
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS
from dynamo.runtime.discovery.memory import MemoryDiscovery, shared_hub
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.observe.metrics import MetricsRegistry
from dynamo.worker.registration import build_card

PATH: Final = "ns.c.e"
BLOCK: Final = 16


class Pieces:
    """The CPU of every piece of work on the event loop, while this is entered."""

    def __enter__(self) -> Pieces:
        self.longest = self.total = 0.0
        self.count, self.which = 0, ""
        self._run = asyncio.Handle._run

        def run(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            self._run(handle)
            took = time.thread_time() - began
            if took > self.longest:
                self.longest, self.which = took, name_of(handle)
            self.total += took
            self.count += 1

        self._patch = patch.object(asyncio.Handle, "_run", run)
        self._patch.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.stop()

    def __str__(self) -> str:
        return f"{1e3 * self.total:9.1f} ms in all, longest piece {1e3 * self.longest:7.2f} ms: {self.which}"


def name_of(handle: Any) -> str:
    """Return what a piece of work is of: its task, or else its function."""
    task = getattr(handle._callback, "__self__", None)
    return task.get_name() if isinstance(task, asyncio.Task) else getattr(handle._callback, "__qualname__", "")


def cost(work: Callable[[], object], times: int, repeats: int = 3) -> float:
    """Return the least CPU of one call, in microseconds."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(times):
            work()
        best = min(best, (time.process_time() - began) / times)
    return 1e6 * best


LOADS: Final[dict[str, Callable[[int], int]]] = {
    "quiet": lambda turn: 10,
    "busy": lambda turn: 90,
    "turning": lambda turn: 90 * (turn % 2),
}


async def busy(args: argparse.Namespace) -> None:
    """Measure reports of load, of workers that serve one model, and one with adapters."""
    for models in (1, 1 + args.adapters):
        pools = [ModelPool(f"m{number}", {}, RoundRobin()) for number in range(models)]
        for pool in pools:
            pool.set_members((PATH, worker) for worker in range(args.workers))
            pool.runtime_config = ModelRuntimeConfig(total_kv_blocks=100)
        for name in LOADS:
            print(
                f"busy, {models:2} models, {name:8} {reports(pools, name, args.workers):8.1f} us a report", flush=True
            )


def reports(pools: Sequence[ModelPool], load: str, count: int) -> float:
    """Return the CPU of one report."""
    limits, turn = BusyThresholds("", 0.5), 0
    workers = BusyWorkers(lambda: pools, lambda name: limits)

    def one() -> None:
        nonlocal turn
        turn += 1
        workers.report(LoadReport(turn % count, 0, LOADS[load](turn // count)))

    try:
        return cost(one, count)
    finally:
        workers.close()


async def stalls(args: argparse.Namespace) -> None:
    """Measure the detector with streams that go on."""
    streams = 10 * args.workers
    detector = StallDetector(StallPolicy(), lambda kind: None)
    made = [Stream(number % args.workers) for number in range(streams)]
    for each in made:
        detector.add(cast(Any, each))
    with Pieces() as pieces:
        began = time.process_time()
        for _ in range(4):
            for each in made:
                each.tokens += 10
            await asyncio.sleep(detector.policy.tick_seconds)
        took = (time.process_time() - began) / 4
    detector.close()
    print(f"stalls, {streams} streams: {1e3 * took:.1f} ms a tick, {pieces}", flush=True)


class Stream:
    """A stream that goes on."""

    def __init__(self, worker: int) -> None:
        self.is_reading, self.tokens, self.attempts, self.instance_id = True, 0, 1, worker


async def series(args: argparse.Namespace) -> None:
    """Measure gauges of workers that leave."""
    metrics = FrontendMetrics(MetricsRegistry(), env={})
    roles = dict.fromkeys(range(args.workers), "aggregated")
    metrics.workers.keep_only(roles)
    for worker in roles:
        metrics.workers.answered(worker, 0.1, 10, 0.01)
        metrics.workers.loaded(worker, 0, 1, 1)
    began = time.process_time()
    metrics.workers.keep_only({0: "aggregated"})
    print(f"series, {args.workers - 1} workers leave: {1e3 * (time.process_time() - began):8.2f} ms", flush=True)


async def replicas(args: argparse.Namespace) -> None:
    """Measure bookings of other frontends."""
    for frontends in (1, 4, 16):
        took = bookings(args.workers, frontends)
        print(f"replicas, {frontends:2} peers: {took:8.1f} us a booking with its three events", flush=True)


def bookings(workers: int, frontends: int) -> float:
    """Return the CPU of one booking of a peer, its first token and its end."""
    prompt = BookedPrompt(sequence_hashes(list(range(100))), True, None, PrefillHint(1600))
    load, number = ActiveLoad(BLOCK), 0
    ranks = {WorkerRank(number) for number in range(workers)}
    sync = ReplicaSync(cast(Any, None), load, router_id=99_999, block_size=BLOCK, is_live=ranks.__contains__)

    def take(request: int, data: Any) -> None:
        peer = request % frontends
        sync.take(
            BookingEvent(f"request-{request}", BookedWorker(request % workers, 0), data, peer), number / 1000, peer
        )

    def one() -> None:
        nonlocal number
        number += 1
        take(number, prompt)
        take(number, "MarkPrefillCompleted")
        take(number - 3000, "Free")

    for _ in range(3000):
        one()
    return cost(one, 2000)


async def index(args: argparse.Namespace) -> None:
    """Measure the index, where each rank holds blocks of its own and some that others hold as well."""

    def filled() -> PrefixIndex:
        made = PrefixIndex()
        rng = random.Random(1)
        for worker in range(args.workers):
            made.set_capacity(WorkerRank(worker), 4096)
            for turn in range(args.runs):
                start = rng.randrange(64) if turn % 4 == 0 else worker * 1000 + turn + 100
                blocks = [HeldBlock(h, t) for t, h in _chain(start)]
                made.apply(RouterEvent(worker, KvChange(turn, BlockUpdate(stored=BlocksAdded(blocks)), 0)))
        return made

    made = filled()
    print(f"index, {made.blocks()} blocks of {args.workers} ranks in {made._device.holders.run_count} runs", flush=True)
    longest = total = 0.0
    for worker in range(100):
        began = time.process_time()
        made.forget(worker, 0)
        took = time.process_time() - began
        longest, total = max(longest, took), total + took
    print(f"index, a rank is forgotten: {10 * total:8.2f} ms, at most {1e3 * longest:.2f} ms", flush=True)


def _chain(start: int) -> list[tuple[int, int]]:
    tokens = [start * 100_000 + at for at in range(20)]
    return list(zip(tokens, sequence_hashes(tokens), strict=True))


async def ranks(args: argparse.Namespace) -> None:
    """Measure the records of ranks when one joins and when one is lost."""
    router = KvRouter(block_size=BLOCK, policy=kv_policy("time"), rng=random.Random(1), index=PrefixIndex())
    infos = {
        WorkerRank(number): RankInfo(total_kv_blocks=4096, max_num_batched_tokens=8192)
        for number in range(args.workers)
    }
    router.set_ranks(infos)
    router.records()
    turn = 0

    def one() -> None:
        nonlocal turn
        turn += 1
        if turn % 2:
            infos.pop(WorkerRank(turn % args.workers))
        else:
            infos[WorkerRank((turn - 1) % args.workers)] = RankInfo(total_kv_blocks=4096, max_num_batched_tokens=8192)
        router.set_ranks(dict(infos))
        router.records()

    print(f"ranks, {args.workers}: {cost(one, 20):10.1f} us for one that joins or leaves", flush=True)


class Fleet:
    """Records of workers in the store that a frontend watches."""

    def __init__(self, adapters: int, *, managed: bool) -> None:
        self._managed = managed
        self._store = MemoryDiscovery(shared_hub(asyncio.get_running_loop()))
        self._adapters = adapters
        self._records: dict[int, dict[str, bytes]] = {}

    async def start(self) -> None:
        await self._store.start()

    async def join(self, worker: int) -> None:
        found = {
            f"{INSTANCES}/ns/c/e/{worker:x}": encode_instance(
                "ns", "c", "e", worker, {"transport": {"mem": f"{worker}"}}
            )
        }
        for number in range(1 + self._adapters):
            config = ModelRuntimeConfig(total_kv_blocks=4096, max_num_batched_tokens=8192, max_num_seqs=64)
            card = build_card("m" if not number else f"a{number}", runtime_config=config)
            if number:
                card.lora = LoraRecord(f"a{number}", source="hf://x" if self._managed else None)
            record = ModelRecord(
                namespace="ns",
                component="c",
                endpoint="e",
                instance_id=worker,
                card_json=card.to_json(),
                **({"model_suffix": f"a{number}"} if number else {}),
            )
            found[f"{MODEL_CARDS}/{record.key}"] = record.encode()
        for key, value in found.items():
            await self._store.put(key, value)
        self._records[worker] = found

    async def leave(self, worker: int) -> None:
        for key in self._records.pop(worker):
            await self._store.delete(key)

    async def close(self) -> None:
        await self._store.close()


async def fleet(args: argparse.Namespace) -> None:
    """Measure a whole frontend: a fleet that is there, a worker that joins, one that leaves, and many that do at once."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "mem")
    with tempfile.TemporaryDirectory() as folder:
        settings = FrontendSettings(
            model_cache_dir=Path(folder),
            router_mode="kv",
            kv_router=KvRouterSettings(),
            replacement_wait_seconds=0.0,
            max_models=5000,
        )
        workers = Fleet(args.adapters, managed=args.managed)
        await workers.start()
        async with Frontend(settings, runtime) as frontend:
            models = frontend.models

            async def settle(count: int) -> None:
                def is_there() -> bool:
                    found = models.served()
                    return len(found) == 1 + args.adapters and all(pool.workers == count for pool in found)

                async with asyncio.timeout(100):
                    while not is_there():
                        await asyncio.sleep(0.05)
                await asyncio.sleep(0.3)

            async def measured(what: str, work: Callable[[], Any], count: int) -> None:
                gc.collect()
                with Pieces() as pieces:
                    await work()
                    await settle(count)
                print(f"fleet, {args.workers} x {args.adapters}: {what:24} {pieces}", flush=True)

            async def all_join() -> None:
                for worker in range(1, args.workers + 1):
                    await workers.join(worker)

            async def many_leave() -> None:
                for worker in range(1, 101):
                    await workers.leave(worker)

            last = args.workers + 1
            await measured("all join", all_join, args.workers)
            await measured("one joins", lambda: workers.join(last), last)
            await measured("one leaves", lambda: workers.leave(last), args.workers)
            await measured("100 leave", many_leave, args.workers - 100)
            with Pieces() as pieces:
                await asyncio.sleep(3)
            print(
                f"fleet, idle: {100 * pieces.total / 3:.2f} % of a core, longest {1e3 * pieces.longest:.2f} ms",
                flush=True,
            )
        await workers.close()
    await runtime.aclose()


CASES: Final = {each.__name__: each for each in (busy, stalls, series, replicas, index, ranks, fleet)}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="CPU of the upkeep of a fleet")
    parser.add_argument("cases", nargs="*", default=[*CASES], help=f"of {', '.join(CASES)}")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=20)
    parser.add_argument("--managed", action="store_true", help="the adapters have a source, so frontends bring them")
    parser.add_argument("--runs", type=int, default=40, help="events of each rank, for the index")
    args = parser.parse_args()
    spare_the_collector()
    for name in args.cases:
        asyncio.run(CASES[name](args))


if __name__ == "__main__":
    main()
