"""Viewers that read slowly, or not at all: nothing queues up for them, and they get a whole picture afterwards."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.http.server import HttpServer
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import cluster
from support.http_client import exchange
from support.inspecting import Lens, messages_of
from support.patience import PATIENCE_SECONDS

STREAMS = 100
SMALL_BYTES = 4096  # of the buffers of the kernel, so that they are soon full


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.frontend.parts.inspector.watching.PERIOD_SECONDS", 0.01)
    monkeypatch.setattr("dynamo.frontend.parts.inspector.watching.SLOW_SECONDS", 0.05)
    monkeypatch.setattr("dynamo.frontend.parts.inspector.watching.CPU_SHARE", 1e9)  # however dear a picture is here


async def test_no_picture_is_taken_for_a_viewer_that_does_not_read(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker()
        lens = Lens(house)
        watch = lens.watch(views="recent")
        reads, blocked, send = asyncio.Event(), asyncio.Event(), watch._send
        reads.set()

        async def slow(message: dict[str, Any]) -> None:
            if not reads.is_set():
                blocked.set()
                await reads.wait()
            await send(message)

        watch._send = slow  # type: ignore[method-assign]
        await watch.until(lambda each: len(each.events) == 1)
        reads.clear()
        await house.client.chat()
        await blocked.wait()
        watching = house.frontend.parts["inspector"].inspector.watching
        seq = watching._seq
        for _ in range(20):  # each of them would be a patch
            await house.client.chat()
            await asyncio.sleep(0.01)
        assert watching._seq == seq
        reads.set()
        await watch.until(lambda each: len(each.events) >= 3)
        names = [name for name, _, _ in messages_of(watch)]
        assert names[:3] == ["snapshot", "patch", "snapshot"]
        assert len(messages_of(watch)[2][2]["recent"]) == 21


async def talks(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    while not context.is_stopped():
        sink.send_tokens([97])
        await asyncio.sleep(0.01)


async def test_what_waits_for_a_viewer_at_its_socket_does_not_grow(tmp_path: Path) -> None:
    async with cluster(tmp_path, http_host="127.0.0.1", http_port=0) as house, AsyncExitStack() as stack:
        server = HttpServer(house.frontend)
        await server.start()
        stack.push_async_callback(server.close)
        await house.worker(talks)
        lens = Lens(house)
        requests = [house.client.begin_chat(stream=True) for _ in range(STREAMS)]
        for request in requests:
            await request.until(lambda each: b"content" in each.body)
        path = "/admin/v1/watch?views=streams&limit=1000"
        async with exchange(server.port, path, headers=lens.headers, small_buffers=True) as viewer:
            assert await viewer.head() == 200
            (connection,) = server.service.connections
            raw = connection.transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
            watching = house.frontend.parts["inspector"].inspector.watching
            await until_still(lambda: (watching._seq, connection.transport.get_write_buffer_size()))
            waiting, seq = connection.transport.get_write_buffer_size(), watching._seq
            assert waiting > 0
            made = [len(request.body) for request in requests]
            await asyncio.sleep(0.5)  # in which fifty patches would be due
            for request, before in zip(requests, made, strict=True):
                await request.until(lambda each, before=before: len(each.body) > before)
            assert (connection.transport.get_write_buffer_size(), watching._seq) == (waiting, seq)
            assert waiting < 256 * 1024
            read = b""
            async with asyncio.timeout(PATIENCE_SECONDS):
                while read.count(b"event: snapshot\n") < 2:
                    read += await viewer.reader.read(65_536)
        events = [part.partition(b"\n")[0] for part in read.split(b"event: ")[1:]]
        assert (events[0], events[-1], set(events[1:-1])) == (b"snapshot", b"snapshot", {b"patch"})
        for request in requests:
            request.disconnect()


async def until_still(figure: Any) -> None:
    """Wait until a figure has not changed for a while."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        last, times = figure(), 0
        while times < 20:
            await asyncio.sleep(0.02)
            times = times + 1 if figure() == last else 0
            last = figure()
