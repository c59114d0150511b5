"""What both ends of the request plane measure of a request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dynamo.runtime import Client, Context, DistributedRuntime
from dynamo.runtime.calls.handler import serve_python
from dynamo.runtime.calls.request_plane.memory import MemoryPlane
from dynamo.runtime.calls.request_plane.stream import StreamBuffer
from dynamo.runtime.discovery import MemoryDiscovery, MemoryHub
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS

PATH = "ns.c.e"


@pytest.fixture(params=["mem", "tcp"])
def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    return str(request.param)


def make(plane: str) -> DistributedRuntime:
    return DistributedRuntime(None, None, plane, discovery=MemoryDiscovery(MemoryHub()), memory_plane=MemoryPlane())


async def connect(runtime: DistributedRuntime, handler: Any) -> Client:
    await runtime.endpoint(PATH).start_serving(serve_python(handler))
    client = await runtime.endpoint(PATH).client()
    await client.wait_for_instances()
    return client


def values(runtime: DistributedRuntime, *names: str) -> list[float]:
    found = dict(
        line.rsplit(" ", 1) for line in runtime.metrics.expose().decode().splitlines() if not line.startswith("#")
    )
    return [float(found[name]) for name in names]


@contextmanager
def no_garbage() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what there is now is looked at no more: millions of objects, in a process that ran other tests
    gc.disable()
    try:
        yield
        assert not [item for item in gc.get_objects() if isinstance(item, StreamBuffer)]
    finally:
        gc.enable()


async def test_a_request_is_timed_on_its_way(plane: str) -> None:
    async def slow(request: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.05)
        for number in range(3):
            yield number

    async with make(plane) as runtime, asyncio.timeout(PATIENCE_SECONDS):
        client = await connect(runtime, slow)
        for _ in range(2):
            assert [item async for item in await client.generate({}, annotated=False)] == [0, 1, 2]
        prefix = "dynamo_request_plane"
        sent, answered, seconds = values(
            runtime,
            f"{prefix}_send_seconds_count",
            f"{prefix}_roundtrip_ttft_seconds_count",
            f"{prefix}_roundtrip_ttft_seconds_sum",
        )
        assert (sent, answered) == (2, 2)
        assert 0.1 <= seconds < PROMPT_SECONDS  # seconds, not milliseconds
        waits = values(runtime, "dynamo_work_handler_permit_wait_seconds_count")
        assert waits == [2]
        name = "dynamo_work_handler_time_to_first_response_seconds"
        answered, after = values(runtime, f"{name}_count", f"{name}_sum")
        assert (answered, 0.1 <= after < PROMPT_SECONDS) == ((2, True) if plane == "tcp" else (0, False))
        connections = values(runtime, f"{prefix}_queue_seconds_count", f"{prefix}_queue_seconds_sum")
        if plane == "tcp":
            assert connections[0] == 2
            assert connections[1] > 0  # the first one had to connect
        else:
            assert connections == [0, 0]  # there is nothing to wait for


async def test_a_declined_request_is_counted(plane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ENGINE_REQUEST_LIMIT", "1")
    monkeypatch.setenv("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", "0")
    entered, leave = asyncio.Event(), asyncio.Event()

    async def hold(request: Any) -> AsyncIterator[Any]:
        entered.set()
        await leave.wait()
        yield 1

    async with make(plane) as runtime, asyncio.timeout(PATIENCE_SECONDS):
        client = await connect(runtime, hold)
        first = await client.generate({})
        await entered.wait()
        with pytest.raises(Exception, match="Server overloaded"):
            _ = [item async for item in await client.generate({})]
        leave.set()
        assert len([item async for item in first]) == 1
        names = ("dynamo_rejection_request_total", "dynamo_work_handler_enqueue_rejected_total")
        assert values(runtime, *names) == [1, 1]
        assert values(runtime, "dynamo_request_plane_roundtrip_ttft_seconds_count") == [1]


@pytest.mark.parametrize("way", ["finished", "left", "never read"])
async def test_a_stream_leaves_nothing_to_the_collector(plane: str, way: str) -> None:
    async def answer(request: Any) -> AsyncIterator[Any]:
        yield 1
        yield 2

    async with make(plane) as runtime, asyncio.timeout(PATIENCE_SECONDS):
        client = await connect(runtime, answer)
        with no_garbage():
            stream = await client.open(client.pick(Context()), {}, Context())
            if way != "never read":
                await stream.next_batch()
            if way == "finished":
                stream.finish()
            else:
                stream.close()
            del stream
            for _ in range(10):  # the other side lets go of it in the next turns of the loop
                await asyncio.sleep(0)
