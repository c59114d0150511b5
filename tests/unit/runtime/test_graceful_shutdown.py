"""The end of a worker of the lower-level path."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo.common.utils import graceful_shutdown as module
from dynamo.common.utils.graceful_shutdown import (
    get_grace_period_seconds,
    graceful_shutdown_with_discovery,
    install_signal_handlers,
)
from dynamo.errors import CannotConnect
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.calls.request_plane.memory import MemoryPlane
from dynamo.runtime.discovery import MemoryDiscovery, MemoryHub
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

VARIABLE = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"


@pytest.fixture
async def runtime() -> AsyncIterator[DistributedRuntime]:
    async with DistributedRuntime(
        None, None, "mem", discovery=MemoryDiscovery(MemoryHub()), memory_plane=MemoryPlane()
    ) as opened:
        yield opened


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


@each_case(
    ("value", "seconds"), [(None, 5.0), ("", 5.0), ("abc", 5.0), ("nan", 5.0), ("-1", 0.0), ("0.5", 0.5), ("0", 0.0)]
)
def test_the_grace_period_is_read_leniently(monkeypatch: pytest.MonkeyPatch, value: str | None, seconds: float) -> None:
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    assert get_grace_period_seconds() == seconds


async def test_the_steps_come_in_order_and_serving_ends(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint("ns.c.e")
    serving = asyncio.create_task(endpoint.serve_endpoint(echo))
    client = await endpoint.client()
    await client.wait_for_instances()
    event = asyncio.Event()
    steps: list[tuple[str, bool, bool]] = []

    async def note(step: str) -> None:
        steps.append((step, bool(await runtime.discovery.get_prefix("v1/instances")), event.is_set()))

    await graceful_shutdown_with_discovery(
        runtime,
        [endpoint],
        event,
        0.0,
        lambda: note("drain"),
        lambda: note("pre-shutdown"),
        lambda: note("cleanup"),
    )
    await serving
    assert steps == [("drain", False, False), ("pre-shutdown", False, False), ("cleanup", False, True)]


async def test_requests_are_served_during_the_grace_period(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint("ns.c.e")
    serving = asyncio.create_task(endpoint.serve_endpoint(echo))
    client = await endpoint.client()
    instance = client.named((await client.wait_for_instances())[0])
    ending = asyncio.create_task(graceful_shutdown_with_discovery(runtime, [endpoint], grace_period_s=0.05))
    while client.instance_ids():
        await asyncio.sleep(0)
    stream = await client.open(instance, "late", module_context())
    assert (await stream.next_batch())[0].extra == {"data": "late"}
    stream.close()
    await ending
    await serving


async def test_a_step_that_fails_or_hangs_does_not_stop_the_others(
    runtime: DistributedRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CALLBACK_SECONDS", 0.02)
    event = asyncio.Event()

    async def hang() -> None:
        await asyncio.Event().wait()

    def fail() -> None:
        raise RuntimeError("boom")

    async def lost(key: str) -> None:
        raise CannotConnect("the store is lost")

    monkeypatch.setattr(runtime.discovery, "delete", lost)
    await graceful_shutdown_with_discovery(runtime, [runtime.endpoint("ns.c.e")], event, 0, hang, fail, fail)
    assert event.is_set()
    text = caplog.text
    assert "unregister of ns.c.e failed" in text
    assert "drain callback did not end" in text
    assert "pre-shutdown callback failed" in text
    assert "cleanup callback failed" in text


async def test_a_callback_that_awaits_its_own_cancelled_task_does_not_stop_the_others(
    runtime: DistributedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    async def stop_own_task() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task

    event = asyncio.Event()
    await graceful_shutdown_with_discovery(runtime, [], event, 0, stop_own_task, None, stop_own_task)
    assert event.is_set()
    assert "drain callback failed" in caplog.text
    assert "cleanup callback failed" in caplog.text
    await asyncio.wait_for(runtime.aclose(), PATIENCE_SECONDS)  # the shutdown was begun


async def test_a_second_shutdown_does_nothing(runtime: DistributedRuntime) -> None:
    calls: list[int] = []
    for _ in range(2):
        await graceful_shutdown_with_discovery(runtime, [], grace_period_s=0, drain_callback=lambda: calls.append(1))
    assert calls == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_shuts_down_once(runtime: DistributedRuntime, number: signal.Signals) -> None:
    endpoint = runtime.endpoint("ns.c.e")
    serving = asyncio.create_task(endpoint.serve_endpoint(echo))
    await (await endpoint.client()).wait_for_instances()
    calls: list[int] = []
    loop = asyncio.get_running_loop()
    install_signal_handlers(loop, runtime, [endpoint], grace_period_s=0, drain_callback=lambda: calls.append(1))
    try:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        await serving
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
    assert calls == [1]


def module_context() -> Any:
    from dynamo.runtime import Context

    return Context()
