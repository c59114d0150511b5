"""What docs/keys.md promises of a budget, by the count of the server behind: never passed, whatever is cut or killed."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.access import bearer, key, write_keys
from support.counted_upstream import MODEL, PROMPT, PROMPT_TOKENS, CountedUpstream, counted_upstream
from support.http_client import CHAT, DONE, exchange
from support.processes import Cluster, Frontend, get, until, wait

ANSWER = 40
NEED = PROMPT_TOKENS + ANSWER
RESERVED = len(PROMPT) + ANSWER  # bytes are the most tokens that a text can be
BUDGET = 8 * NEED
CLIENTS = 24


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def start(cluster: Cluster) -> Frontend:
    """A frontend with one key; it goes on where the last one was."""
    keys = write_keys(cluster.root / "keys.toml", key("k", budget={"period": "total", "tokens": BUDGET}))
    frontend = cluster.frontend("frontend", "--keys", str(keys), "--usage-db", str(cluster.root / "usage.sqlite"))
    frontend.wait_ready()
    path = f"/v1/models/{MODEL}/ready"
    wait(lambda: get(frontend.port, path, headers=bearer("k"))[0] == 200, lambda: f"the model; log:\n{frontend.log}")
    return frontend


async def begin(cluster: Cluster, upstream: CountedUpstream) -> Frontend:
    own = ["--discovery-backend", "file", "--upstream", f"http://127.0.0.1:{upstream.port}/v1", "--model", MODEL]
    cluster.process("worker", [sys.executable, "-m", "dynamo.upstream", *own])
    return await asyncio.to_thread(start, cluster)


async def stream(port: int, *, leaves_after: int = 0) -> str:
    """One request; how it ended."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": ANSWER, "stream": True}
    try:
        async with exchange(port, CHAT, body, headers=bearer("k")) as found:
            if await found.head() != 200:
                assert b"insufficient_quota" in await found.rest()
                return "refused"
            events = 0
            while await found.event() != DONE:
                events += 1
                if events == leaves_after:
                    return "left"
            return "answered"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "broken"


async def booked(cluster: Cluster, frontend: Frontend) -> int:
    """What the budget has given, once the frontend has ended."""
    frontend.terminate()
    assert await frontend.ended() == 0
    with closing(sqlite3.connect(cluster.root / "usage.sqlite")) as database:
        return int(database.execute("SELECT units FROM spent").fetchone()[0])


async def test_a_frontend_that_is_killed_in_mid_load_never_lets_a_budget_be_passed(cluster: Cluster) -> None:
    async with counted_upstream(0.02) as upstream:
        frontend = await begin(cluster, upstream)
        first = [asyncio.create_task(stream(frontend.port)) for _ in range(CLIENTS)]
        await until(lambda: upstream.made > BUDGET // 8, lambda: f"{upstream.made} tokens")
        frontend.signal(signal.SIGKILL)
        ends = [await task for task in first]
        assert "broken" in ends
        held = ends.count("broken") * RESERVED
        frontend = await asyncio.to_thread(start, cluster)
        await until(lambda: upstream.running == 0, lambda: f"{upstream.running} answers")
        while await stream(frontend.port) != "refused":
            pass
        spent = upstream.spent
        counted = await booked(cluster, frontend)
        assert spent <= counted <= BUDGET
        # No more is lost than what the requests that were cut had reserved, and a rest that is too small for one.
        assert BUDGET - spent < held + RESERVED


async def test_streams_that_clients_leave_cost_no_more_than_they_had_reserved(cluster: Cluster) -> None:
    async with counted_upstream(0.005) as upstream:
        frontend = await begin(cluster, upstream)
        ends = await asyncio.gather(*[stream(frontend.port, leaves_after=ANSWER // 2) for _ in range(CLIENTS)])
        while (last := await stream(frontend.port, leaves_after=ANSWER // 2)) == "left":
            ends.append(last)
        assert last == "refused"
        assert ends.count("left") >= BUDGET // RESERVED
        await until(lambda: upstream.running == 0, lambda: f"{upstream.running} answers")
        spent = upstream.spent
        counted = await booked(cluster, frontend)
        assert spent <= counted <= BUDGET
        assert counted <= ends.count("left") * RESERVED
