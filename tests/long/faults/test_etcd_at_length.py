"""What happens to etcd over minutes, and a cluster of 30 workers that changes: real processes, the times users have.

`make test-faults` runs these and prints what it measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynamo.runtime.base.settings import EtcdSettings
from dynamo.runtime.discovery import Put
from dynamo.runtime.discovery.etcd import EtcdDiscovery
from support.discovery_rigs import collect
from support.etcd_server import EtcdServer, three_members
from support.http_client import CHAT, ask, chat
from support.processes import Cluster, Frontend, Worker
from support.scenario_table import Say, record

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(1500),
]

TTL_SECONDS = 10.0
TWO_LEASE_PERIODS = 2 * TTL_SECONDS
FROZEN_SECONDS = 30.0
DOWN_SECONDS = 120.0
BLOCKED_SECONDS = 40.0
TOKENS = 20


@contextmanager
def cluster_on(etcd: EtcdServer, tmp_path: Path, **env: str) -> Iterator[Cluster]:
    with Cluster(tmp_path, "etcd", ETCD_ENDPOINTS=etcd.url, **env) as cluster:
        yield cluster


@dataclass
class Load:
    """What clients got that ask one thing after the other."""

    answers: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0


@asynccontextmanager
async def load(frontends: Sequence[Frontend], clients: int) -> AsyncIterator[Load]:
    """Clients that never pause, spread over the frontends, every other one streaming."""
    found = Load()
    running = True

    async def client(number: int) -> None:
        port = frontends[number % len(frontends)].port
        body = chat("m", max_tokens=TOKENS, stream=bool(number // len(frontends) % 2))
        while running:
            began = time.monotonic()
            try:
                reply = await ask(port, CHAT, body)
                whole = reply.status == 200 and (b'"finish_reason":"length"' in reply.body.replace(b" ", b""))
            except (OSError, asyncio.IncompleteReadError, AssertionError) as error:
                found.failures.append(repr(error))
            else:
                if whole:
                    found.answers += 1
                else:
                    found.failures.append(f"{reply.status} {reply.body[:300]!r}")
            found.slowest_seconds = max(found.slowest_seconds, time.monotonic() - began)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
        try:
            yield found
        finally:
            running = False


async def instances(frontend: Frontend) -> set[int]:
    """The ids that a frontend knows of the model's workers."""
    reply = await ask(frontend.port, "/health", method="GET")
    listed = json.loads(reply.body)["instances"]
    return {each["instance_id"] for each in listed if each["endpoint"] == "generate"}


async def since(condition: Callable[[], Awaitable[bool]], patience: float = 60.0) -> float:
    """Seconds until the condition holds."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < patience, "it never came"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


# -- etcd, lost -----------------------------------------------------------------------------------------------------------


async def test_requests_and_processes_outlive_everything_that_happens_to_etcd(
    etcd: EtcdServer, tmp_path: Path, say: Say
) -> None:
    with cluster_on(etcd, tmp_path) as cluster:
        frontends = [cluster.frontend(f"frontend-{number}") for number in range(2)]
        workers = [cluster.sample(f"worker-{number}", "m", "--delay", "0.02") for number in range(3)]
        for frontend in frontends:
            cluster.wait_ready(frontend, *workers)
        records = etcd.keys()
        known = await instances(frontends[0])
        assert len(known) == 3

        async def is_as_before() -> bool:
            return etcd.keys() == records and all([await instances(frontend) == known for frontend in frontends])

        async def all_the_same(seconds: float) -> None:
            ends_at = time.monotonic() + seconds
            while time.monotonic() < ends_at:
                for frontend in frontends:
                    assert await instances(frontend) == known
                await asyncio.sleep(0.5)

        async with load(frontends, clients=8) as found:
            etcd.freeze()
            await all_the_same(FROZEN_SECONDS)
            etcd.thaw()
            frozen = await since(is_as_before, TWO_LEASE_PERIODS)
            await all_the_same(TWO_LEASE_PERIODS)

            etcd.kill()
            await all_the_same(DOWN_SECONDS)
            await asyncio.to_thread(etcd.start)
            killed = await since(is_as_before, TWO_LEASE_PERIODS)
            await all_the_same(TWO_LEASE_PERIODS)

            etcd.kill()
            etcd.wipe()
            await all_the_same(TTL_SECONDS)
            await asyncio.to_thread(etcd.start)
            wiped = await since(is_as_before, TWO_LEASE_PERIODS)
            await all_the_same(TWO_LEASE_PERIODS)

            newcomer = cluster.sample("newcomer", "m", "--delay", "0.02")  # and all still works
            newcomer.wait_ready()
            assert await since(lambda: everywhere(frontends, 4)) < TTL_SECONDS
            workers[0].terminate()
            assert await workers[0].ended() == 0
            assert await since(lambda: everywhere(frontends, 3)) < TTL_SECONDS
        say(
            f"etcd frozen {FROZEN_SECONDS:g} s, killed {DOWN_SECONDS:g} s, wiped: {found.answers} answers, "
            f"{len(found.failures)} failures, slowest {found.slowest_seconds:.2f} s; converged after "
            f"{frozen:.2f}, {killed:.2f}, {wiped:.2f} s"
        )
        counts = {"sent": found.answers + len(found.failures), "lost": len(found.failures)}
        record(
            f"R6 etcd frozen {FROZEN_SECONDS:g} s, killed {DOWN_SECONDS:g} s, wiped",
            **counts,
            recovery_ms=[1000 * seconds for seconds in (frozen, killed, wiped)],
            note="recovery: from its return until records and views are as before, for each of the three",
        )
        assert found.failures == []
        assert not any(process.has_ended for process in (*frontends, *workers[1:], newcomer))


async def everywhere(frontends: Sequence[Frontend], count: int) -> bool:
    return all([len(await instances(frontend)) == count for frontend in frontends])


BLOCKING = """
import asyncio, sys, time
from dynamo.runtime import DistributedRuntime
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
    async def handler(body, context, sink): ...
    await runtime.endpoint("ns.blocking.generate").start_serving(handler)
    print(runtime.connection_id(), flush=True)
    time.sleep(float(sys.argv[1]))
    print("awake", flush=True)
    await runtime.aclose()
asyncio.run(main())
"""


async def test_an_engine_that_blocks_its_loop_keeps_its_lease(etcd: EtcdServer, say: Say) -> None:
    env = {**os.environ, "ETCD_ENDPOINTS": etcd.url, "DYN_TCP_RPC_HOST": "127.0.0.1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BLOCKING, str(BLOCKED_SECONDS), env=env, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        lease_id = int(await process.stdout.readline())
        key = f"v1/instances/ns/blocking/generate/{lease_id:x}"
        before = etcd.versions()[key]
        checks = 0
        while process.returncode is None and not (reading := process.stdout).at_eof():
            try:
                async with asyncio.timeout(1.0):
                    assert await reading.readline() == b"awake\n"
                break
            except TimeoutError:
                assert etcd.versions()[key] == before  # never gone, never written again
                checks += 1
        say(f"event loop blocked {BLOCKED_SECONDS:g} s: the lease was there in all of {checks} looks")
        record(
            f"R7 engine blocks its loop for {BLOCKED_SECONDS:g} s, lease kept",
            sent=0,
            note=f"there in all of {checks} looks",
        )
        assert checks > BLOCKED_SECONDS / 2
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# -- thirty workers -------------------------------------------------------------------------------------------------------

WORKERS = 30
FRONTENDS = 3


async def test_thirty_workers_are_restarted_in_turn_under_load(etcd: EtcdServer, tmp_path: Path, say: Say) -> None:
    with cluster_on(etcd, tmp_path, DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="1") as cluster:
        frontends = [cluster.frontend(f"frontend-{number}") for number in range(FRONTENDS)]
        workers: list[Worker] = []
        for number in range(WORKERS):  # one after the other: the machine has other things to do
            worker = cluster.sample(f"worker-{number}", "m", "--delay", "0.02")
            workers.append(worker)
            if number % 5 == 4:
                for each in workers[-5:]:
                    each.wait_ready()
        for frontend in frontends:
            frontend.wait_ready()
        await since(lambda: everywhere(frontends, WORKERS))

        async def watch(instance_id: int, *, there: bool, delays: list[float]) -> None:
            """How long after etcd has it (or not) each frontend knows."""
            key = next_key(instance_id)
            await since(lambda: ready(lambda: (key in etcd.keys("v1/instances/")) == there))

            async def one(frontend: Frontend) -> None:
                async def knows() -> bool:
                    return (instance_id in await instances(frontend)) == there

                delays.append(await since(knows))

            await asyncio.gather(*(one(frontend) for frontend in frontends))

        joins: list[float] = []
        leaves: list[float] = []
        async with load(frontends, clients=6) as found:
            for number, worker in enumerate(workers):
                before = set(etcd.keys("v1/instances/"))
                leaving = leases_of(before)
                worker.terminate()
                await since(lambda before=before: ready(lambda: len(etcd.keys("v1/instances/")) < len(before)))  # type: ignore[misc]
                (gone,) = leaving - leases_of(etcd.keys("v1/instances/"))
                await watch(gone, there=False, delays=leaves)
                assert await worker.ended() == 0
                rest = leases_of(etcd.keys("v1/instances/"))
                new = cluster.sample(f"worker-{WORKERS + number}", "m", "--delay", "0.02")
                await since(lambda rest=rest: ready(lambda: leases_of(etcd.keys("v1/instances/")) > rest))  # type: ignore[misc]
                (come,) = leases_of(etcd.keys("v1/instances/")) - rest
                await watch(come, there=True, delays=joins)
                assert not new.has_ended
        say(
            f"{WORKERS} workers, {FRONTENDS} frontends: a join is known everywhere after p50 {milli(joins, 0.5)}, "
            f"p99 {milli(joins, 0.99)}; a leave after p50 {milli(leaves, 0.5)}, p99 {milli(leaves, 0.99)}; all "
            f"restarted in turn: {found.answers} answers, {len(found.failures)} failures"
        )
        assert found.failures == []
        assert percentile(joins, 0.99) < TTL_SECONDS
        assert percentile(leaves, 0.99) < TTL_SECONDS


def leases_of(keys: object) -> set[int]:
    return {int(str(key).rsplit("/", 1)[1], 16) for key in keys if "/generate/" in str(key)}  # type: ignore[attr-defined]


def next_key(instance_id: int) -> str:
    return f"v1/instances/dynamo/m/generate/{instance_id:x}"


async def ready(condition: Callable[[], bool]) -> bool:
    return await asyncio.to_thread(condition)


def milli(values: Sequence[float], part: float) -> str:
    return f"{percentile(values, part) * 1000:.0f} ms"


# -- a cluster of etcd ----------------------------------------------------------------------------------------------------

KEY, OTHER = "v1/instances/ns/c/e/1f", "v1/instances/ns/c/e/2a"


async def elected(member: EtcdServer) -> None:
    """Wait until the others have chosen a leader without the one that was lost."""
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(member.answers):
            await asyncio.sleep(0.05)


async def test_a_cluster_of_three_may_lose_one_member_and_all_but_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with three_members(tmp_path / "members") as members:
        first, second, third = members
        endpoints = ",".join(member.url for member in members)
        store = EtcdDiscovery(EtcdSettings(endpoints=endpoints, lease_ttl_seconds=TTL_SECONDS))
        await store.start()
        await store.put(KEY, b"1")
        async with store.watch("v1/instances") as changes:
            assert await anext(changes) == [Put(KEY, b"1")]
            first.freeze()  # the one that is asked
            await elected(second)
            await asyncio.to_thread(second.put, OTHER, b"1")
            assert await collect(changes, Put(OTHER, b"1")) == [Put(OTHER, b"1")]
            await asyncio.sleep(TTL_SECONDS)
            assert (await asyncio.to_thread(third.keys))[KEY] == (b"1", store.lease_id)
            assert "taking it again" not in caplog.text
            first.kill()
            second.kill()
            await asyncio.sleep(TTL_SECONDS)
            assert await store.get_prefix("v1/instances") == {KEY: b"1", OTHER: b"1"}  # the last view
            await store.put(KEY, b"2")
            await asyncio.to_thread(second.start)
            assert await collect(changes, Put(KEY, b"2")) == [Put(KEY, b"2")]
            assert (await asyncio.to_thread(third.keys))[KEY] == (b"2", store.lease_id)
        await store.close()
