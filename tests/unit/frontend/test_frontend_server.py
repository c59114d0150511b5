from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.http.server import HttpServer, PortInUse, bind
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import Cluster, cluster, say
from support.patience import PATIENCE_SECONDS


@asynccontextmanager
async def served(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, HttpServer]]:
    async with cluster(tmp_path, http_host="127.0.0.1", http_port=0, **settings) as house:
        server = HttpServer(house.frontend)
        await server.start()
        try:
            yield house, server
        finally:
            await server.close()


class Connection:
    """A client that writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, method: str, path: str, body: Any = None, *headers: str) -> None:
        raw = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {path} HTTP/1.1",
            "host: localhost",
            "content-type: application/json",
            f"content-length: {len(raw)}",
        ]
        self.writer.write("\r\n".join([*head, *headers, "", ""]).encode() + raw)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def answer(self) -> tuple[int, bytes]:
        status, headers = await self.head()
        return status, await self.reader.readexactly(int(headers["content-length"]))

    async def close(self) -> None:
        self.writer.close()
        with_error = asyncio.gather(self.writer.wait_closed(), return_exceptions=True)
        await with_error


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[Connection]:
    found = Connection(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield found
    finally:
        await found.close()


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_connection_is_kept_for_the_next_request(tmp_path: Path) -> None:
    async with served(tmp_path) as (house, server), connection(server.port) as client:
        await house.worker()
        for _ in range(3):
            client.send("POST", "/v1/chat/completions", CHAT)
            status, body = await client.answer()
            assert (status, json.loads(body)["object"]) == (200, "chat.completion")


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_a_closed_connection_kills_the_work(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def hold(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()

    async with served(tmp_path) as (house, server):
        worker = await house.worker(hold)
        async with connection(server.port) as client:
            client.send("POST", "/v1/chat/completions", {**CHAT, **fields})
            await worker.started.wait()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.killed.wait()


async def test_a_client_that_never_reads_holds_back_its_worker_and_no_one_else(tmp_path: Path) -> None:
    sent = 0

    async def flood(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        nonlocal sent
        while not context.is_stopped():
            if not sink.has_credit():
                stalled.set()
                await sink.wait_credit()
            sink.send_tokens([97] * 64)
            sent += 64
            await asyncio.sleep(0)

    stalled = asyncio.Event()
    async with served(tmp_path) as (house, server):
        worker = await house.worker(flood)
        async with connection(server.port) as lazy, connection(server.port) as other:
            lazy.writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.writer.transport.pause_reading()  # type: ignore[attr-defined]
            lazy.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
            async with asyncio.timeout(PATIENCE_SECONDS):
                await stalled.wait()
                before = -1
                while before != sent:  # until the whole way is full
                    before = sent
                    await asyncio.sleep(0.05)
            worker.script = say("quick")
            other.send("POST", "/v1/chat/completions", CHAT)
            assert (await other.answer())[0] == 200


async def test_headers_beyond_the_limit_are_declined(tmp_path: Path) -> None:
    async with served(tmp_path, header_limit_bytes=16 * 1024) as (_, server), connection(server.port) as client:
        client.writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n")
        for number in range(100):
            client.writer.write(f"x-{number}: {'v' * 1000}\r\n".encode())
        status, headers = await client.head()
        assert (status, headers["connection"]) == (431, "close")


@pytest.mark.parametrize("header", ["x-big: " + "v" * 40_000, "x" * 40_000 + ": v"])
async def test_headers_that_come_in_one_read_have_the_same_limit(tmp_path: Path, header: str) -> None:
    async with served(tmp_path, header_limit_bytes=16 * 1024) as (_, server), connection(server.port) as client:
        client.send("POST", "/v1/completions", {"model": "m", "prompt": "x"}, header)
        status, headers = await client.head()
        assert (status, headers["connection"]) == (431, "close")
        assert json.loads(await client.reader.read())["message"] == (
            "Request line and headers exceed the limit of 16 KiB set by DYN_HTTP_HEADER_LIMIT_KB"
        )


async def test_a_connection_that_asks_for_nothing_is_closed(tmp_path: Path) -> None:
    async with served(tmp_path, idle_seconds=0.05) as (house, server), connection(server.port) as client:
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await client.reader.read() == b""
        assert house.metric("dynamo_frontend_refusals_total", limit="idle") == 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize("is_reset", [False, True])
async def test_nothing_is_left_of_a_connection_that_ended(
    tmp_path: Path, is_reset: bool, fields: dict[str, Any]
) -> None:
    async with served(tmp_path) as (house, server):
        await house.worker(say("a"))
        connections = server.service.connections
        async with connection(server.port) as client:
            client.send("POST", "/v1/chat/completions", {**CHAT, **fields})
            await client.reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n" if fields else b"}}")
            (protocol,) = [weakref.ref(one) for one in connections]
            if is_reset:
                linger = struct.pack("ii", 1, 0)
                client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while protocol() is not None:
                gc.collect()
                await asyncio.sleep(0.01)


REFUSED = {"model": "m", "messages": [], **{f"key{number}": 1 for number in range(40_000)}}


@pytest.mark.parametrize(
    ("fields", "status"),
    [({}, 200), ({"stream": True}, 200), ({"messages": []}, 400), ({"model": "?"}, 404), (REFUSED, 400)],
)
async def test_nothing_of_a_request_is_left_to_the_collector(
    tmp_path: Path, fields: dict[str, Any], status: int
) -> None:
    async with served(tmp_path, inline=False) as (house, server):
        await house.worker(say("a"))
        async with connection(server.port) as client:
            gc.collect()
            gc.disable()
            try:
                for _ in range(3):
                    client.send("POST", "/v1/chat/completions", {**CHAT, **fields})
                    assert (await client.head())[0] == status
                    await client.reader.readuntil(b"0\r\n\r\n" if "stream" in fields else b"}}")
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while any(type(one) is Exchange for one in gc.get_objects()):
                        await asyncio.sleep(0.001)
            finally:
                gc.enable()


async def test_a_long_answer_is_no_idle_connection(tmp_path: Path) -> None:
    async def slow(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await asyncio.sleep(0.25)
        sink.send_tokens([104, 105], finish_reason="stop")

    async with served(tmp_path, idle_seconds=0.1) as (house, server):
        await house.worker(slow)  # first: a connection that waited for it would be idle meanwhile
        async with connection(server.port) as client:
            client.send("POST", "/v1/completions", {"model": "m", "prompt": "x"})
            assert (await client.answer())[0] == 200
        assert house.metric("dynamo_frontend_refusals_total", limit="idle") == 0


async def test_a_body_may_be_longer_than_the_headers(tmp_path: Path) -> None:
    async with served(tmp_path, header_limit_bytes=16 * 1024) as (house, server), connection(server.port) as client:
        await house.worker()
        for _ in range(2):
            client.send("POST", "/v1/completions", {"model": "m", "prompt": "x" * 100_000})
            assert (await client.answer())[0] == 200


async def test_a_bad_request_line_is_a_400_and_not_a_crash(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, server), connection(server.port) as client:
        client.writer.write(b"\x00\x01nonsense\r\n\r\n")
        assert (await client.head())[0] == 400


async def test_an_overload_status_beyond_599_can_be_sent(tmp_path: Path) -> None:
    settings = {"overload_status": 777, "max_requests_in_flight": 1}
    async with served(tmp_path, **settings) as (house, server), connection(server.port) as client:
        house.frontend.admission.enter()
        client.send("POST", "/v1/chat/completions", CHAT)
        assert (await client.answer())[0] == 777
        house.frontend.admission.leave()


async def test_stopping_finishes_what_is_in_flight(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def wait(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([97])
        await release.wait()
        sink.send_tokens([98], finish_reason="stop")

    async with served(tmp_path) as (house, server), connection(server.port) as client:
        worker = await house.worker(wait)
        client.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
        await worker.started.wait()
        stopping = asyncio.create_task(server.stop())
        async with connection(server.port) as other:  # the listener is open while it drains
            other.send("GET", "/health")
            status, body = await other.answer()
            assert (status, json.loads(body)["stage"]) == (503, "draining")
        async with connection(server.port) as other:
            other.send("POST", "/v1/chat/completions", CHAT)
            assert (await other.answer())[0] == 503
        release.set()
        await stopping
        assert b"[DONE]" in await client.reader.read()
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await asyncio.open_connection("127.0.0.1", server.port)


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_an_answer_of_a_frontend_that_leaves_is_the_last_one_of_its_connection(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with (
        served(tmp_path, grace_period_seconds=60.0) as (house, server),
        connection(server.port) as kept,
        connection(server.port) as begun,
    ):
        release = asyncio.Event()

        async def wait(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
            await release.wait()
            sink.send_tokens([97], finish_reason="stop")

        worker = await house.worker(wait)
        kept.send("GET", "/health")
        assert (await kept.answer())[0] == 200
        begun.send("POST", "/v1/chat/completions", {**CHAT, **fields})
        await worker.started.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        kept.send("GET", "/health")
        status, headers = await kept.head()
        assert (status, headers["connection"]) == (503, "close")
        assert b"leaving" in await kept.reader.read()  # to the end of the connection
        release.set()
        status, headers = await begun.head()
        assert (status, headers["connection"]) == (200, "close")
        assert b'"stop"' in await begun.reader.read()
        stopping.cancel()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse) as error:
            bind("127.0.0.1", port)
    assert str(error.value) == (
        f"Failed to start HTTP server: port {port} already in use. Use --http-port to specify a different port."
    )
