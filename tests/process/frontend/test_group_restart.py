"""The parent of a group over real members: one that dies is started again, also where the system refuses that at first."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.args import parse_args
from dynamo.frontend.http.server import bind
from dynamo.frontend.parts.group.supervisor import Supervisor
from support.http_client import ask
from support.patience import PATIENCE_SECONDS
from support.processes import until

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("refused", [1, 3])
async def test_a_group_outlives_a_start_that_the_system_refuses(
    refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first process of a place is refused (1), or one that takes the place of a process that was killed (3)."""
    started = list[asyncio.subprocess.Process]()
    starts, start = list[int](), asyncio.create_subprocess_exec

    async def start_or_refuse(*args: Any, **named: Any) -> asyncio.subprocess.Process:
        starts.append(len(os.listdir("/proc/self/fd")))
        if len(starts) == refused:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(process := await start(*args, **named))
        return process

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_refuse)
    argv = ["--workers=2", "--http-host=127.0.0.1", "--discovery-backend=file"]
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    listener = bind("127.0.0.1", 0)
    supervisor = Supervisor(parse_args(argv), argv, [listener])
    port = listener.getsockname()[1]
    running = asyncio.create_task(supervisor.run())

    async def processes_serve(count: int) -> None:
        await until(lambda: caplog.text.count(") serves") == count or running.done(), lambda: caplog.text)
        assert not running.done(), caplog.text

    await processes_serve(2)
    if refused > 2:
        started[0].kill()
        await processes_serve(3)
        assert starts[3] == starts[2], "the start that was refused has left descriptors open"
    assert "could not be started; starting it again in" in caplog.text
    assert (await ask(port, "/live")).status == 200
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, PATIENCE_SECONDS) == 0
