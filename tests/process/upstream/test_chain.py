"""A chain local -> upstream A -> upstream B, each of them dead, slow, full, broken or cut: what a client sees. As processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from support.fake_upstream import FakeUpstream, fake_upstream
from support.http_client import CHAT, exchange
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS
from support.processes import Cluster, Frontend, until

NAMES = ("local", "a", "b")
# One further attempt: a connection of the pool may have been closed by its server meanwhile.
FLAGS = ("--upstream-retries", "1", "--upstream-check", "0.2", "--upstream-timeout", "20")
AFTER_MS = int(
    PROMPT_SECONDS * 1000 / 3
)  # only the rows with a slow server wait for it, and no load of the machine does

# What the first, or the first two, do; which model serves a streamed and a whole answer, or the status of the failure.
TABLE: list[tuple[tuple[str | int, ...], str | int, str | int]] = [
    (("well",), "local", "local"),
    (("dead",), "a", "a"),
    (("slow",), "a", "a"),
    ((429,), "a", "a"),
    ((500,), "a", "a"),
    ((503,), "a", "a"),
    (("first",), "a", "a"),
    (("cut",), "cut", "a"),  # the client of a stream has its first pieces
    ((404,), 404, 404),  # which would be so anywhere
    (("dead", "dead"), "b", "b"),
    (("dead", "slow"), "b", "b"),
    (("slow", 429), "b", "b"),
    ((429, 500), "b", "b"),
    ((500, "cut"), "cut", "b"),
    (("dead", "dead", "dead"), 503, 503),
    ((429, 429, 429), 529, 529),
    ((500, 500, 500), 500, 500),
]


@asynccontextmanager
async def chain(tmp_path: Path) -> AsyncIterator[tuple[tuple[Frontend, Frontend], dict[str, FakeUpstream]]]:
    """A worker for each of the three, the first of which stands for a model of this machine, and two frontends: the second one
    waits so long for a first token."""
    async with (
        fake_upstream(words=("from", " local", "")) as local,
        fake_upstream(words=("from", " a", "")) as a,
        fake_upstream(words=("from", " b", "")) as b,
    ):
        fakes = dict(zip(NAMES, (local, a, b), strict=True))
        with Cluster(tmp_path) as cluster:
            flags = ("--fallback", "local=a,b", "--migration-limit", "0", "--replacement-wait-seconds", "0")
            frontend = cluster.frontend("frontend", *flags)
            waiting = cluster.frontend("waiting", *flags, "--fallback-after-ms", str(AFTER_MS))
            for name, fake in fakes.items():
                own = ["--upstream", fake.url, "--model", name, "--component", name]
                planes = ["--discovery-backend", "file"]
                cluster.process(name, [sys.executable, "-m", "dynamo.upstream", *planes, *own, *FLAGS])
            for each in (frontend, waiting):
                await asyncio.to_thread(each.wait_ready)
            await wait_for_models((frontend, waiting), set(NAMES))
            yield (frontend, waiting), fakes


def has_models(frontend: Frontend, names: set[str]) -> bool:
    return frontend.models() == names


async def sees(port: int, *, stream: bool) -> str | int:
    """What a client sees: the model that served, the status of a failure, or "cut"."""
    body: dict[str, Any] = {"model": "local", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    async with asyncio.timeout(PATIENCE_SECONDS), exchange(port, CHAT, body) as found:
        reply = await found.reply()
    if reply.status != 200:
        return reply.status
    if stream and b'"error"' in reply.body:
        return "cut"
    served = reply.text.removeprefix("from ")
    # The headers of a stream that waited for long are sent, with a comment, before it is known which model serves; or just
    # then, where that comes to be known in the same moment.
    may_lack = {"local"} if stream and reply.body.startswith(b": ") else set[str]()
    assert reply.headers.get("x-dynamo-fallback", "local") in {served} | may_lack
    assert (reply.events[0] if stream else reply.json())["model"] == "local"
    return served


async def test_what_a_client_sees_of_a_chain(tmp_path: Path) -> None:
    async with chain(tmp_path) as (frontends, fakes):
        found = []
        for behaviours, *_ in TABLE:
            for name, behaviour in zip(NAMES, behaviours, strict=False):
                if behaviour == "dead":
                    await fakes[name].die()
                else:
                    fakes[name].behaviour = behaviour
            port = frontends["slow" in behaviours].port
            seen = await asyncio.gather(sees(port, stream=True), sees(port, stream=False))
            found.append((behaviours, *seen))
            for fake in fakes.values():
                fake.behaviour = "well"
            dead = [name for name, behaviour in zip(NAMES, behaviours, strict=False) if behaviour == "dead"]
            # Both frontends learn that the dead models left before they come back: else a late loss would disturb the next row.
            await wait_for_models(frontends, set(NAMES) - set(dead))
            for name in dead:
                await fakes[name].listen()
            await wait_for_models(frontends, set(NAMES))
    assert found == TABLE


async def wait_for_models(frontends: tuple[Frontend, Frontend], names: set[str]) -> None:
    """Wait until both frontends have exactly these models."""
    for each in frontends:
        await until(partial(has_models, each, names), partial(str, f"{each.name} to have {sorted(names)}"))
