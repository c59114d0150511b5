"""`--workers N`: several processes on one port look like one; and several frontends of one cluster agree."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from support.http_client import CHAT, Exchange, ask, chat, exchange, script
from support.processes import Cluster, Frontend, Worker, until, wait
from support.serve_command import is_running

PROCESSES = 2
LIMIT = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("group")) as found:
        yield found


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Worker:
    return cluster.worker("worker", "group")


@pytest.fixture(scope="module")
def group(cluster: Cluster, worker: Worker) -> Frontend:
    """A frontend of two processes with six places."""
    found = cluster.frontend("group", f"--workers={PROCESSES}", f"--max-requests-in-flight={LIMIT}")
    cluster.wait_ready(found, worker)
    wait(lambda: len(members(found)) == PROCESSES, lambda: f"both processes; log:\n{found.log}")
    return found


def members(frontend: Frontend) -> dict[int, int]:
    """The processes that serve now: by place, the newest one's id."""
    found = re.findall(r"frontend process (\d+) \(pid (\d+)\) serves", frontend.log)
    return {int(place): int(pid) for place, pid in found}


def metric(frontend: Frontend, name: str) -> float:
    """The sum of a metric's samples over its labels."""
    status, body = frontend.get("/metrics")
    assert status == 200, body
    return sum(map(float, re.findall(rf"^dynamo_frontend_{name}(?:{{[^}}]*}})? (\S+)$", body.decode(), re.MULTILINE)))


@asynccontextmanager
async def streams(frontend: Frontend, count: int, tag: str) -> AsyncIterator[list[Exchange]]:
    """Streams under way, each on its own connection, until they are stopped."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            body = chat("group", stream=True)
            headers = script(["say", "x"], ["wait"], tag=tag)
            one = await stack.enter_async_context(exchange(frontend.port, CHAT, body, headers=headers))
            assert await one.head() == 200
            found.append(one)
        yield found


async def test_the_metrics_are_those_of_all_processes_whoever_is_asked(
    group: Frontend, worker: Worker, tag: str
) -> None:
    before = metric(group, "requests_total")
    async with streams(group, 4, tag):
        # Connections are dealt out evenly, so each process has two of them, and every scrape counts all four.
        assert {metric(group, "inflight_requests") for _ in range(2 * PROCESSES)} == {4}
        assert metric(group, "processes") == PROCESSES
        assert metric(group, "model_context_length") == 1_000_000
    await worker.sees("stopped", tag, 4)
    replies = [await ask(group.port, CHAT, chat("group")) for _ in range(2 * PROCESSES)]
    assert {reply.status for reply in replies} == {200}
    assert metric(group, "requests_total") == before + 4 + 2 * PROCESSES


async def test_the_limit_of_requests_in_flight_is_that_of_all_processes(
    group: Frontend, worker: Worker, tag: str
) -> None:
    async with streams(group, LIMIT, tag):
        declined = [await ask(group.port, CHAT, chat("group")) for _ in range(2 * PROCESSES)]
        assert {reply.status for reply in declined} == {529}
    await worker.sees("stopped", tag, LIMIT)
    await until(lambda: metric(group, "inflight_requests") == 0)
    assert (await ask(group.port, CHAT, chat("group"))).status == 200


async def test_a_threshold_is_set_in_all_processes_and_in_those_that_come_later(group: Frontend) -> None:
    body = {"model": "group", "active_decode_blocks_threshold": 0.75}
    assert (await ask(group.port, "/busy_threshold", body)).status == 200
    for _ in range(2 * PROCESSES):
        assert b'"active_decode_blocks_threshold":0.75' in group.get("/busy_threshold")[1]
    doomed = members(group)[2]
    os.kill(doomed, signal.SIGKILL)
    await until(lambda: members(group)[2] != doomed)
    for _ in range(2 * PROCESSES):
        assert b'"active_decode_blocks_threshold":0.75' in group.get("/busy_threshold")[1]


async def test_the_admin_port_of_a_group_is_answered_by_any_of_its_processes(cluster: Cluster, worker: Worker) -> None:
    frontend = cluster.frontend("admin", f"--workers={PROCESSES}", "--admin-port=0")
    cluster.wait_ready(frontend, worker)
    wait(lambda: len(members(frontend)) == PROCESSES, lambda: frontend.log)
    found = re.findall(r"admin routes at http://127\.0\.0\.1:(\d+)", frontend.log)
    assert len(found) == 1
    admin = int(found[0])
    body = {"model": "group", "active_decode_blocks_threshold": 0.5}
    assert (await ask(frontend.port, "/busy_threshold", body)).status == 404
    assert (await ask(admin, "/busy_threshold", body)).status == 200
    for doomed in members(frontend).values():  # the port outlives every process
        os.kill(doomed, signal.SIGKILL)
        await until(lambda doomed=doomed: doomed not in members(frontend).values())  # type: ignore[misc]
        assert b'"active_decode_blocks_threshold":0.5' in (await ask(admin, "/busy_threshold")).body
    frontend.terminate()
    await frontend.ended()
    with pytest.raises(ConnectionRefusedError):
        await ask(admin, "/busy_threshold")


async def test_a_process_that_is_killed_is_replaced_and_its_counts_stay(group: Frontend) -> None:
    shown = metric(group, "requests_total")
    restarts = metric(group, "process_restarts_total")
    doomed = members(group)[1]
    os.kill(doomed, signal.SIGKILL)
    while members(group)[1] == doomed:  # meanwhile the others answer, and no number falls
        assert (await ask(group.port, CHAT, chat("group"))).status == 200
        assert metric(group, "requests_total") > shown
        shown = metric(group, "requests_total")
    assert metric(group, "process_restarts_total") == restarts + 1
    _, health = group.get("/health")
    assert b'"processes":{"serving":2,"configured":2}' in health


async def test_the_streams_of_a_process_that_is_killed_fail_alone(cluster: Cluster, worker: Worker, tag: str) -> None:
    frontend = cluster.frontend("half", f"--workers={PROCESSES}")
    cluster.wait_ready(frontend, worker)
    wait(lambda: len(members(frontend)) == PROCESSES, lambda: frontend.log)
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(4):  # connections are dealt out evenly, so each process has two of them
            body, headers = chat("group", stream=True), script(["say", "x"], ["wait"], tag=tag)
            one = await stack.enter_async_context(exchange(frontend.port, CHAT, body, headers=headers))
            assert await one.head() == 200
            found.append(one)
        await worker.sees("first", tag, 4)
        os.kill(members(frontend)[2], signal.SIGKILL)
        rests = [asyncio.ensure_future(one.rest()) for one in found]
        await worker.sees("stopped", tag, 2)  # the worker ends what nobody reads any more
        done = [rest for rest in rests if rest.done()]
        assert len(done) == 2
        assert not any(b"[DONE]" in rest.result() for rest in done)
        for rest in rests:
            rest.cancel()
    await worker.sees("stopped", tag, 4)


def test_a_log_record_names_its_process(group: Frontend) -> None:
    wait(
        lambda: {f"frontend_process={place}" in group.log for place in members(group)} == {True},
        lambda: f"records of both processes; log:\n{group.log}",
    )


@pytest.mark.parametrize(("flags", "knows"), [((), True), (("--no-router-replica-sync",), False)])
async def test_each_process_knows_what_the_others_have_booked(
    cluster: Cluster, name: str, tag: str, flags: tuple[str, ...], knows: bool
) -> None:
    """A process that did not know would send half of its requests, 1 to 32 of 32, to the worker that the other has filled."""
    workers = [cluster.worker(f"{name}-{letter}", name) for letter in "ab"]
    frontend = cluster.frontend(f"{name}-kv", f"--workers={PROCESSES}", "--router-mode=kv", *flags)
    cluster.wait_ready(frontend, *workers)
    wait(lambda: len(members(frontend)) == PROCESSES, lambda: frontend.log)
    if not knows:
        assert await sent_to_the_full_worker(frontend, workers, name, tag) > 0
        return
    rounds = itertools.count()
    async with asyncio.timeout(60):  # a booking that is reported before the other process has connected is lost to it
        while await sent_to_the_full_worker(frontend, workers, name, f"{tag}-{next(rounds)}") > 0:
            pass


async def sent_to_the_full_worker(frontend: Frontend, workers: list[Worker], name: str, tag: str) -> int:
    """Fill one worker by way of one process, and send 32 short requests by way of the other one."""
    body = chat(name, stream=True)
    body["messages"][0]["content"] = "word " * 4000
    async with exchange(frontend.port, CHAT, body, headers=script(["wait"], tag=tag)):
        await until(lambda: sum(worker.count("generate", tag) for worker in workers) == 1)
        full = next(worker for worker in workers if worker.count("generate", tag))
        headers = script(["say", "x"], tag=f"{tag}-short")
        for _ in range(32):  # that connection is the only one of its process, so the other process has these
            assert (await ask(frontend.port, CHAT, chat(name), headers=headers)).status == 200
        sent = full.count("generate", f"{tag}-short")
    await full.sees("stopped", tag)
    return sent


async def test_a_group_that_is_asked_to_end_lets_its_streams_end(cluster: Cluster, worker: Worker, tag: str) -> None:
    frontend = cluster.frontend("leaving", f"--workers={PROCESSES}")
    cluster.wait_ready(frontend, worker)
    wait(lambda: len(members(frontend)) == PROCESSES, lambda: frontend.log)
    async with AsyncExitStack() as stack:
        slow = [
            await stack.enter_async_context(
                exchange(
                    frontend.port, CHAT, chat("group", stream=True), headers=script(["say", "abcdef", 0.1], tag=tag)
                )
            )
            for _ in range(4)
        ]
        assert [await one.head() for one in slow] == [200] * 4
        frontend.terminate()
        await until(lambda: frontend.get("/health")[0] == 503)
        assert (await ask(frontend.port, CHAT, chat("group"))).status == 503
        assert [(await one.rest()).count(b"content") >= 6 for one in slow] == [True] * 4
    assert await frontend.ended() == 0
    assert not any(map(is_running, members(frontend).values()))


async def test_members_end_with_their_parent(cluster: Cluster, worker: Worker) -> None:
    frontend = cluster.frontend("orphans", f"--workers={PROCESSES}")
    cluster.wait_ready(frontend, worker)
    wait(lambda: len(members(frontend)) == PROCESSES, lambda: frontend.log)
    pids = members(frontend).values()
    frontend.kill()
    await until(lambda: not any(map(is_running, pids)))


def test_a_group_that_cannot_start_says_why_and_ends(cluster: Cluster) -> None:
    frontend = cluster.frontend("blind", "--workers=2", DYN_TCP_SECRET_PATH="/nowhere")
    assert frontend.exit_code() == 1
    assert "DYN_TCP_SECRET_PATH: cannot read /nowhere" in frontend.log


async def test_frontends_of_one_cluster_agree_within_a_second(cluster: Cluster, group: Frontend, name: str) -> None:
    frontends = [group, *(cluster.frontend(f"{name}-{number}") for number in range(2))]
    for frontend in frontends:
        frontend.wait_ready()

    async def agreed(is_there: bool) -> float:
        """Seconds between the first and the last frontend to see it."""
        seen: list[float] = []

        async def watch(frontend: Frontend) -> None:
            await until(lambda: (name in frontend.models()) == is_there)
            seen.append(time.monotonic())

        async with asyncio.TaskGroup() as tasks:
            for frontend in frontends:
                tasks.create_task(watch(frontend))
        return max(seen) - min(seen)

    late = cluster.worker(name, name)
    assert await agreed(True) < 1.0
    late.terminate()
    assert await agreed(False) < 1.0
    assert late.exit_code() == 0
