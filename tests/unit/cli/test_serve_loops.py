"""What `dynamo serve` runs beside its processes goes on after a failure, and the failure is counted and shown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.cli.console import Console
from dynamo.cli.local import LocalCluster
from dynamo.cli.many import ModelSetup, Residents
from dynamo.cli.readiness import Address, Announcement
from dynamo.runtime.base.tasks import Background
from dynamo.scaling.decide import ScaleRules
from dynamo.supervise.newcomer import Newcomers
from dynamo.supervise.rolling import RollingRestart
from dynamo.supervise.scaling import LoadReading, Scaling
from support.fails_once import BrokenSteps
from support.ports import free_ports
from support.processes import until

no_workers: Any = SimpleNamespace(workers=[])


async def never(model: str, instance_id: int) -> bool:
    return False


@asynccontextmanager
async def kept(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> AsyncIterator[None]:
    """As `dynamo serve` runs it."""
    background = Background()
    background.keep(work, name)
    try:
        yield
    finally:
        await background.close()


async def test_a_rolling_restart_that_fails_leaves_the_next_request_to_be_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, lines = BrokenSteps(monkeypatch, "dynamo.supervise.rolling:RollingRestart._replace_all"), list[str]()
    restart = RollingRestart(no_workers, Newcomers(never, lines.append, limit_seconds=1.0), lines.append)
    async with kept(restart.run, "rolling restart"):
        restart.request("SIGHUP")
        await until(lambda: steps.counted == 1)
        restart.request("SIGHUP")
        await steps.run_again("rolling restart")
        await until(lambda: "were replaced" in lines[-1])


async def test_scaling_goes_on_after_a_load_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.supervise.scaling.LOOK_SECONDS", 0.01)
    steps, lines = BrokenSteps(monkeypatch, "dynamo.supervise.scaling:Scaling._look"), list[str]()

    async def read() -> LoadReading:
        return LoadReading(0.0)

    newcomers = Newcomers(never, lines.append, limit_seconds=1.0)
    scaling = Scaling(no_workers, newcomers, read, lines.append, ScaleRules(0, 1, 1.0), is_advice_only=True)
    async with kept(scaling.run, "scaling"):
        await steps.run_again("scaling")


async def test_changed_sources_are_followed_after_a_look_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dynamo.cli.local.POLL_SECONDS", 0.01)
    steps, changed = BrokenSteps(monkeypatch, "dynamo.cli.local:source_times"), list[str]()
    command: Any = SimpleNamespace(_console=Console(), _sources_changed=changed.append)
    sources = asyncio.get_running_loop().create_future()
    sources.set_result(tmp_path)
    async with kept(partial(LocalCluster._reload, command, sources), "reload"):
        await steps.run_again("reload")
        (tmp_path / "engine.py").write_text("")
        await until(lambda: changed != [])
        assert "engine.py" in changed[0]


async def test_the_memory_of_models_is_measured_after_a_measure_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.cli.many.MEASURE_SECONDS", 0.01)
    steps, background = BrokenSteps(monkeypatch, "dynamo.cli.many:Residents._measure"), Background()
    ours, theirs = socket.socketpair()
    processes: Any = SimpleNamespace(spawn=background.start)
    residents = Residents((ours, theirs), ModelSetup({}, {}), processes, list[str]().append)
    running = asyncio.create_task(residents.run())
    await steps.run_again("residents: memory")
    theirs.close()
    await running
    assert residents._writer is not None
    residents._writer.close()
    await background.close()


async def test_what_is_to_be_printed_of_the_frontend_is_owed_until_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = BrokenSteps(monkeypatch, "dynamo.cli.readiness:Announcement._announce")
    started = asyncio.Event()
    processes: Any = SimpleNamespace(
        frontend_started=started, missing=lambda: "a worker", frontend=SimpleNamespace(mark_ready=lambda: None)
    )
    address = Address("127.0.0.1", free_ports(1)[0])
    announcement = Announcement(Console(), processes, address, Path(), address.port)
    async with kept(announcement.follow_frontend, "readiness"):
        started.set()
        await steps.run_again("readiness")
