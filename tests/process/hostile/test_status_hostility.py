"""A worker's status server against clients that mean no good."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from dynamo.runtime.base.settings import StatusLimits, SystemSettings
from dynamo.runtime.calls.health import HealthState
from dynamo.runtime.http.status_server import StatusServer
from dynamo.runtime.observe.metrics import MetricsRegistry
from support.patience import PATIENCE_SECONDS

POST = b"POST /engine/echo HTTP/1.1\r\nhost: localhost\r\n"


class Site:
    def __init__(self, server: StatusServer, metrics: MetricsRegistry) -> None:
        self.server, self.metrics = server, metrics

    def refusals(self, limit: str) -> float:
        name = f'dynamo_system_refusals_total{{limit="{limit}"}}'
        return next(
            float(line.split()[1]) for line in self.metrics.expose().decode().splitlines() if line.startswith(name)
        )

    async def shout(self, *pieces: bytes, pause: float = 0.0, eof: bool = False) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        answer = b""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                with suppress(ConnectionError):
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(pause)
                    if eof:
                        writer.write_eof()
                with suppress(ConnectionError):
                    while piece := await reader.read(65536):
                        answer += piece
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)
        return answer

    async def until_idle(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.server.connections:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    async def echo(body: Any) -> Any:
        return body

    metrics = MetricsRegistry()
    server = StatusServer(
        HealthState(), metrics, settings=SystemSettings(port=0, host="127.0.0.1", limits=StatusLimits(**settings))
    )
    server.register_route("echo", echo)
    await server.start()
    try:
        yield Site(server, metrics)
    finally:
        await server.close()


async def test_what_is_no_http_is_a_400() -> None:
    async with site() as status:
        for raw in (
            b"\x00\x01nonsense\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET /live HTTP/9.9\r\n\r\n",
            b"CONNECT a:1 HTTP/1.1\r\n\r\n",
            POST + b"content-length: -1\r\n\r\n",
            POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
            POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        ):
            assert (await status.shout(raw)).startswith(b"HTTP/1.1 400 "), raw
        await status.until_idle()


async def test_an_upgrade_is_answered_as_plain_http_or_declined_and_never_hangs() -> None:
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n"
    async with site() as status:
        answer = await status.shout(b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + upgrade + b"\r\n\x00\x00rubbish")
        assert answer.startswith(b"HTTP/1.1 503 ")  # not ready
        answer = await status.shout(POST + upgrade + b"content-length: 2\r\n\r\n{}", eof=True)
        assert answer.startswith(b"HTTP/1.1 200 ")
        await status.until_idle()


async def test_a_request_cut_anywhere_costs_nothing() -> None:
    whole = POST + b"content-length: 2\r\n\r\n{}"
    async with site() as status:
        for cut in range(len(whole)):
            assert await status.shout(whole[:cut], eof=True) == b""
        await status.until_idle()


@pytest.mark.parametrize(
    ("limit", "settings", "raw", "expected"),
    [
        ("header_count", {"header_count_limit": 8}, b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 10, 431),
        ("header_size", {"header_limit_bytes": 2048}, b"GET /live HTTP/1.1\r\nx: " + b"y" * 100_000, 431),
        ("header_size", {"header_limit_bytes": 2048}, b"GET /" + b"y" * 100_000, 431),
        ("header_size", {}, POST + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 10_000, 431),
        ("body_size", {"body_limit_bytes": 1024}, POST + b"content-length: 1025\r\n\r\n", 413),
        ("body_size", {"body_limit_bytes": 8}, POST + b"transfer-encoding: chunked\r\n\r\n9\r\n123456789\r\n", 413),
        ("request_time", {"header_timeout_seconds": 0.1, "body_timeout_seconds": 0.1}, b"GET /live HTT", 408),
        (
            "request_time",
            {"header_timeout_seconds": 0.1, "body_timeout_seconds": 0.1},
            POST + b"content-length: 3\r\n\r\n{",
            408,
        ),
    ],
)
async def test_a_limit_is_answered_and_counted(limit: str, settings: dict[str, Any], raw: bytes, expected: int) -> None:
    async with site(**settings) as status:
        answer = await status.shout(raw)
        assert answer.startswith(b"HTTP/1.1 %d " % expected)
        assert b"DYN_SYSTEM_" in answer
        assert status.refusals(limit) == 1
        await status.until_idle()


async def test_json_of_any_depth_is_a_400_and_never_a_500() -> None:
    async with site() as status:
        for body in (
            b"[" * 100_000,
            b'{"a":' * 129 + b"1" + b"}" * 129,
            b"[" * 129 + b"]" * 129,
            b"{",
            b"\xff",
            b"nul",
        ):
            raw = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            assert (await status.shout(raw)).startswith(b"HTTP/1.1 400 "), body[:20]
        assert status.refusals("json_depth") == 3
        body = b"[" * 128 + b"]" * 128
        raw = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        assert (await status.shout(raw)).endswith(body)


async def test_connections_over_the_limit_and_idle_ones_are_closed() -> None:
    async with site(max_connections=4, idle_seconds=0.3) as status:
        held = [await asyncio.open_connection("127.0.0.1", status.server.port) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while status.server.connections < 4:
                await asyncio.sleep(0.005)
        answer = await status.shout(b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"DYN_SYSTEM_MAX_CONNECTIONS" in answer
        await status.until_idle()
        assert (status.refusals("connections"), status.refusals("idle")) == (1, 4)
        for _, writer in held:
            writer.transport.abort()


async def test_a_client_that_asks_and_never_reads_is_cut() -> None:
    async with site(write_stall_seconds=0.2, pipeline_limit=100_000) as status:
        for number in range(300):
            status.metrics.gauge(f"padding_{number}", "x" * 500)
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", status.server.port))
        lazy.setblocking(False)
        with lazy:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not status.refusals("write_stall"):
                    with suppress(BlockingIOError):
                        lazy.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20)
                    await asyncio.sleep(0.01)
        await status.until_idle()


async def test_pipelined_requests_over_the_limit_are_refused() -> None:
    async with site(pipeline_limit=4) as status:
        answer = await status.shout(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500)
        assert status.refusals("pipeline") == 1
        assert answer.count(b"HTTP/1.1 ") <= 6
        await status.until_idle()
        assert json.loads((await status.shout(b"GET /live HTTP/1.0\r\n\r\n")).split(b"\r\n\r\n")[1])
