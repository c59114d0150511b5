"""An operator drains a worker over its admin listener: what is safe to delete, and what a deletion costs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from support.http_client import CHAT, Reply, ask, chat, script
from support.patience import PATIENCE_SECONDS
from support.ports import free_ports
from support.processes import Frontend, Stack, Worker

SENTENCE = "abcdefghijklmnopqrst"
STREAMS = 50
ROUNDS = int(os.environ.get("DRAIN_ROUNDS", "3"))
"""How often a worker is deleted when it is safe to; 100 and more for a longer look."""


async def status(worker: Worker) -> dict[str, Any]:
    reply = await ask(worker.system_port, "/engine/status")
    assert reply.status == 200
    found: dict[str, Any] = reply.json()
    return found


async def order(worker: Worker, name: str) -> Reply:
    return await ask(worker.system_port, f"/engine/{name}", {})


async def reaches(worker: Worker, state: str) -> dict[str, Any]:
    """Return the first status with a state."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (found := await status(worker))["state"] != state:
            await asyncio.sleep(0.01)
    return found


def streams_of(frontend: Frontend, model: str, tag: str, paces: Sequence[float]) -> list[asyncio.Task[Reply]]:
    """Begin a stream for each of the times between two tokens."""
    return [
        asyncio.create_task(
            ask(frontend.port, CHAT, chat(model, stream=True), headers=script(["say", SENTENCE, pace], tag=tag))
        )
        for pace in paces
    ]


@pytest.fixture
def frontend(stack: Stack, name: str) -> Frontend:
    return stack.cluster.frontend(f"{name}-frontend")


async def test_a_drained_worker_is_safe_to_delete_after_its_last_stream_and_not_before(
    stack: Stack, frontend: Frontend, name: str, tag: str
) -> None:
    first, second = (stack.cluster.worker(f"{name}-{letter}", name) for letter in "ab")
    stack.cluster.wait_ready(frontend, first, second)
    streams = streams_of(frontend, name, tag, [0.03 + 0.001 * number for number in range(2 * STREAMS)])
    await asyncio.gather(first.sees("first", tag, STREAMS), second.sees("first", tag, STREAMS))

    drained = (await order(first, "drain")).json()
    assert (drained["state"], drained["discovery_registered"]) == ("draining", False)
    later = streams_of(frontend, name, f"{tag}-later", [0.0] * 10)
    running = set()
    while (found := await status(first))["state"] == "draining":
        assert not found["safe_to_delete"]
        running.add(found["inflight_requests"])
        await asyncio.sleep(0.02)
    assert (found["state"], found["safe_to_delete"], found["inflight_requests"]) == ("drained", True, 0)
    assert len(running) > 1
    first.kill()  # what is safe to delete may be deleted in any way
    await first.ended()

    for reply in await asyncio.gather(*streams, *later):
        assert (reply.status, reply.text) == (200, SENTENCE)
    finished = [event for event in first.events(tag) if event["event"] == "finally"]
    assert [event["sent"] for event in finished] == [len(SENTENCE)] * STREAMS
    assert second.count("generate", f"{tag}-later") == 10


async def test_a_worker_deleted_before_that_costs_nothing_either(
    stack: Stack, frontend: Frontend, name: str, tag: str
) -> None:
    first, second = (stack.cluster.worker(f"{name}-{letter}", name) for letter in "ab")
    stack.cluster.wait_ready(frontend, first, second)
    streams = streams_of(frontend, name, tag, [0.05] * 20)
    await asyncio.gather(first.sees("first", tag, 10), second.sees("first", tag, 10))
    await order(first, "drain")
    assert not (await status(first))["safe_to_delete"]
    first.kill()
    for reply in await asyncio.gather(*streams):
        assert (reply.status, reply.text) == (200, SENTENCE)
    assert frontend.log.count("moves to worker") == 10


async def test_a_worker_that_is_resumed_serves_again(stack: Stack, frontend: Frontend, name: str, tag: str) -> None:
    only = stack.cluster.worker(f"{name}-a", name)
    stack.cluster.wait_ready(frontend, only)
    await order(only, "drain")
    await reaches(only, "drained")
    assert (await ask(only.system_port, "/health")).status == 503
    resumed = (await order(only, "resume")).json()
    assert (resumed["state"], resumed["discovery_registered"], resumed["safe_to_delete"]) == ("serving", True, False)
    assert (await ask(only.system_port, "/health")).status == 200
    reply = await ask(frontend.port, CHAT, chat(name), headers=script(["say", SENTENCE], tag=tag))
    assert (reply.status, reply.text) == (200, SENTENCE)
    assert only.count("generate", tag) == 1


async def test_a_drained_worker_ends_without_a_further_grace(stack: Stack, frontend: Frontend, name: str) -> None:
    only = stack.cluster.worker(f"{name}-a", name, DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="0.3")
    stack.cluster.wait_ready(frontend, only)
    await order(only, "drain")
    await reaches(only, "drained")
    only.terminate()
    await only.ended()
    assert "Grace period" not in only.log
    assert "Engine cleanup complete" in only.log


async def drain_command(*arguments: str, **env: str) -> tuple[int, str, str]:
    """Run `dynamo drain`; its exit status and what it printed."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dynamo.cli.main", "drain", *arguments, env={**plain, **env},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_command_waits_until_the_worker_is_safe_to_delete(
    stack: Stack, frontend: Frontend, name: str, tag: str
) -> None:
    only = stack.cluster.worker(f"{name}-a", name)
    stack.cluster.wait_ready(frontend, only)
    gate = stack.cluster.root / f"{name}-gate"
    waiting = ["until", str(gate)]
    stream = asyncio.create_task(
        ask(frontend.port, CHAT, chat(name, stream=True), headers=script(["say", "ab"], waiting, ["say", "c"], tag=tag))
    )
    await only.sees("first", tag)
    assert await drain_command("--timeout", "0.3", DYN_SYSTEM_PORT=str(only.system_port)) == (
        1,
        "1 request runs\n",
        "dynamo drain: not safe to delete after 0.3 s: 1 request runs\n",
    )
    command = asyncio.create_task(drain_command("--url", f"http://127.0.0.1:{only.system_port}"))
    gate.touch()
    code, out, err = await command
    assert (code, out.splitlines()[-1:], err) == (0, ["the worker is safe to delete"], "")
    assert (await stream).text == "abc"
    assert await drain_command("--resume", DYN_ADMIN_PORT=str(only.system_port)) == (0, "the worker serves again\n", "")
    only.kill()
    await only.ended()
    code, _, err = await drain_command("--url", f"http://127.0.0.1:{only.system_port}")
    assert (code, "no answer from" in err) == (2, True)
    assert "which worker?" in (await drain_command())[2]


async def test_a_worker_whose_status_port_is_open_to_a_network_is_drained_at_its_admin_port(
    stack: Stack, frontend: Frontend, name: str
) -> None:
    """As in deploy/kubernetes/worker.yaml."""
    admin = str(free_ports(1)[0])
    only = stack.cluster.worker(f"{name}-a", name, DYN_SYSTEM_HOST="0.0.0.0", DYN_ADMIN_PORT=admin)
    stack.cluster.wait_ready(frontend, only)
    code, _, err = await drain_command(DYN_SYSTEM_PORT=str(only.system_port))
    assert (code, "a worker takes this at its DYN_ADMIN_PORT" in err) == (2, True)
    code, out, err = await drain_command(DYN_SYSTEM_PORT=str(only.system_port), DYN_ADMIN_PORT=admin)
    assert (code, out.splitlines()[-1:], err) == (0, ["the worker is safe to delete"], "")


async def test_deletions_when_it_is_safe_lose_nothing(stack: Stack, frontend: Frontend, name: str, tag: str) -> None:
    """Under load all the time: of two workers one is drained, killed when it says that it may be, and replaced."""
    workers = [stack.cluster.worker(f"{name}-{letter}", name) for letter in "ab"]
    stack.cluster.wait_ready(frontend, *workers)
    replies: list[Reply] = []
    is_over = False

    async def client(number: int) -> None:
        while not is_over:
            body = chat(name, stream=bool(number % 2))
            replies.append(await ask(frontend.port, CHAT, body, headers=script(["say", SENTENCE, 0.005], tag=tag)))

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(client(number))
        for number in range(ROUNDS):
            old = workers.pop(0)
            await old.sees("first", tag)
            assert (await order(old, "drain")).status == 200
            await reaches(old, "drained")
            old.kill()
            await old.ended()
            workers.append(stack.cluster.worker(f"{name}-{number}", name))
            await asyncio.to_thread(workers[-1].wait_ready)
            await workers[-1].sees("first", tag)
        is_over = True
    assert len(replies) > 8 * ROUNDS
    assert {(reply.status, reply.text) for reply in replies} == {(200, SENTENCE)}
