"""A start that is cancelled at any moment leaves no socket behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dynamo.mocker.bootstrap import HandoffDesk
from dynamo.runtime.base.listening import start_listening

STEPS = 8  # of the event loop; a start takes fewer


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def with_asyncio() -> Callable[[], Awaitable[None]]:
    loop = asyncio.get_running_loop()
    server = await start_listening(loop.create_server(asyncio.Protocol, "127.0.0.1", 0, start_serving=False))

    async def close() -> None:
        server.close()

    return close


async def at_a_desk() -> Callable[[], Awaitable[None]]:
    desk = HandoffDesk(1, 1.0)
    await desk.start("127.0.0.1", 0)
    return desk.close


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("start", [with_asyncio, at_a_desk])
async def test_a_start_that_is_cancelled_leaves_no_socket(
    start: Callable[[], Awaitable[Callable[[], Awaitable[None]]]],
) -> None:
    before, cancelled = open_files(), 0
    for steps in range(STEPS):
        task = asyncio.ensure_future(start())
        for _ in range(steps):
            await asyncio.sleep(0)
        cancelled += task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task)()
        await asyncio.sleep(0)
        assert open_files() == before, steps
    assert 2 <= cancelled < STEPS  # before it began to listen, while, and after
