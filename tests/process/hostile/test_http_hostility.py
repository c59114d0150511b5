"""The frontend's listener against clients that mean no good, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.http.server import HttpServer
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import Cluster, cluster, routes_of, say
from support.patience import PATIENCE_SECONDS

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def served(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, HttpServer]]:
    async with cluster(tmp_path, http_host="127.0.0.1", http_port=0, **settings) as house:
        server = HttpServer(house.frontend)
        await server.start()
        try:
            await house.worker(say("fine"))
            yield house, server
        finally:
            await server.close()


async def shout(port: int, *pieces: bytes, pause: float = 0.0, eof: bool = False) -> bytes:
    """Send the pieces and return everything that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(read_all(reader))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            with suppress(ConnectionError):  # refused in the middle; the answer is there all the same
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    if pause:
                        await asyncio.sleep(pause)
                    if answer.done():
                        break
                if eof:
                    writer.write_eof()
            return await answer
    finally:
        answer.cancel()
        writer.transport.abort()
        await asyncio.sleep(0)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    data = b""
    try:
        while piece := await reader.read(65536):
            data += piece
    except ConnectionError:
        pass
    return data


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and message of the one answer in there, whose body must be our error shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    error = json.loads(body)
    assert error["code"] == status
    assert error["error"]["message"] == error["message"]
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    return status, error["message"]


async def answers_well(port: int) -> None:
    body = json.dumps(CHAT).encode()
    answer = await shout(port, HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"fine" in answer


def refusals(house: Cluster, limit: str) -> float:
    return house.metric("dynamo_frontend_refusals_total", limit=limit)


async def until_idle(house: Cluster, server: HttpServer) -> None:
    """Nothing may be left of those clients: no connection, no task, no place, no body."""
    state = server.service
    async with asyncio.timeout(PATIENCE_SECONDS):
        while state.connections or state.answers or house.frontend.admission.in_flight:
            await asyncio.sleep(0.01)


# -- heads ---------------------------------------------------------------------------------------------------------------

MALFORMED = [
    b"\x00\x01nonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,  # TLS to a plain port
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / SPDY/1.1\r\n\r\n",
    b"get /live HTTP/1.1\r\n\r\n",
    b"GET  HTTP/1.1\r\n\r\n",
    b"GET http:// HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost x\r\n\r\n",
    b"GET / HTTP/1.1\r\n: novalue\r\n\r\n",
    b"GET / HTTP/1.1\r\nho st: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\x00y\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n",
    HEAD + b"content-length: -1\r\n\r\n",
    HEAD + b"content-length: 5, 6\r\n\r\n",
    HEAD + b"content-length: 99999999999999999999999999\r\n\r\n",
    HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
    HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n-5\r\nabc\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("uvloop", [False, True])
def test_what_is_no_http_is_a_400_and_nothing_of_it_stays(tmp_path: Path, uvloop: bool) -> None:
    async def main() -> None:
        async with served(tmp_path) as (house, server):
            for raw in MALFORMED:
                status, message = refusal(await shout(server.port, raw))
                assert (status, message) == (400, "The request is not well-formed HTTP"), raw
            assert refusals(house, "malformed") == len(MALFORMED)
            await answers_well(server.port)
            await until_idle(house, server)

    factory = None
    if uvloop:
        factory = pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


async def test_a_head_cut_anywhere_and_left_there_costs_nothing(tmp_path: Path) -> None:
    body = json.dumps(CHAT).encode()
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    async with served(tmp_path) as (house, server):
        for cut in range(len(whole)):
            assert await shout(server.port, whole[:cut], eof=True) == b""
        await until_idle(house, server)
        await answers_well(server.port)


async def test_headers_without_end_are_a_431_naming_the_setting(tmp_path: Path) -> None:
    async with served(tmp_path, header_limit_bytes=8192, header_count_limit=32) as (house, server):
        many = b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 33 + b"\r\n"
        assert refusal(await shout(server.port, many)) == (
            431,
            "More than 32 headers, the limit set by DYN_HTTP_HEADER_COUNT_LIMIT",
        )
        for endless in (
            [b"GET /live HTTP/1.1\r\n"] + [b"x-%d: " % n + b"v" * 1000 + b"\r\n" for n in range(10_000)],
            [b"GET /live HTTP/1.1\r\nx: "] + [b"v" * 60_000] * 200,
            [b"GET /" + b"a" * 60_000] + [b"a" * 60_000] * 200,
            [b"\r\n" * 30_000] * 200,  # never even a request line
        ):
            status, message = refusal(await shout(server.port, *endless))
            assert status == 431
            assert "DYN_HTTP_HEADER_LIMIT_KB" in message
        assert (refusals(house, "header_count"), refusals(house, "header_size")) == (1, 4)
        await until_idle(house, server)


async def test_slow_headers_are_a_408_however_steadily_they_drip(tmp_path: Path) -> None:
    async with served(tmp_path, header_timeout_seconds=0.2) as (house, server):
        drip = [b"GET /live HTTP/1.1\r\n"] + [b"x: y\r\n"] * 200
        status, message = refusal(await shout(server.port, *drip, pause=0.02))
        assert (status, "DYN_HTTP_HEADER_TIMEOUT_SECS" in message) == (408, True)
        assert refusal(await shout(server.port, b"GET /live HTT"))[0] == 408
        assert refusals(house, "header_time") == 2
        await until_idle(house, server)


# -- bodies --------------------------------------------------------------------------------------------------------------


async def test_slow_bodies_are_a_408_however_steadily_they_drip(tmp_path: Path) -> None:
    async with served(tmp_path, body_timeout_seconds=0.2) as (house, server):
        for head, piece in (
            (b"content-length: 5000\r\n\r\n", b" "),
            (b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        ):
            status, message = refusal(await shout(server.port, HEAD + head, *[piece] * 200, pause=0.02))
            assert (status, "DYN_HTTP_BODY_TIMEOUT_SECS" in message) == (408, True)
        assert refusals(house, "body_time") == 2
        await until_idle(house, server)


async def test_a_body_longer_than_the_limit_is_a_413_that_arrives(tmp_path: Path) -> None:
    """However much the client still sends: closing at once would turn the answer into a reset."""
    async with served(tmp_path, body_limit_bytes=1024 * 1024) as (house, server):
        announced = [HEAD + b"content-length: 50000000\r\n\r\n"] + [b"x" * 65536] * 300
        chunked = [HEAD + b"transfer-encoding: chunked\r\n\r\n"] + [b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 300
        for pieces in (announced, chunked):
            status, message = refusal(await shout(server.port, *pieces))
            assert (status, "DYN_HTTP_BODY_LIMIT_MB" in message) == (413, True)
        assert refusals(house, "body_size") == 2
        await until_idle(house, server)


async def test_a_body_shorter_than_announced_waits_and_one_that_is_longer_is_the_next_request(tmp_path: Path) -> None:
    async with served(tmp_path, body_timeout_seconds=0.2) as (house, server):
        body = json.dumps(CHAT).encode()
        assert (
            refusal(await shout(server.port, HEAD + b"content-length: %d\r\n\r\n" % (len(body) + 1) + body))[0] == 408
        )
        answer = await shout(server.port, HEAD + b"content-length: %d\r\n\r\n" % (len(body) - 1) + body)
        # Cut short, the JSON is no JSON; what is left of it is no request either.
        assert answer.count(b"HTTP/1.1 400 ") == 2
        assert b"Failed to deserialize the JSON body" in answer
        await until_idle(house, server)


@pytest.mark.parametrize("kind", ["extension", "trailer", "trailers"])
async def test_chunk_extensions_and_trailers_without_end_are_a_431(tmp_path: Path, kind: str) -> None:
    begin, more = {
        "extension": (b"1;x=", b"y" * 65536),
        "trailer": (b"1\r\n{\r\n0\r\nx: ", b"y" * 65536),
        "trailers": (b"1\r\n{\r\n0\r\n", b"x: y\r\n" * 10_000),
    }[kind]
    async with served(tmp_path, header_limit_bytes=8192) as (house, server):
        pieces = [HEAD + b"transfer-encoding: chunked\r\n\r\n" + begin] + [more] * 200
        assert refusal(await shout(server.port, *pieces))[0] in (400, 431)  # the parser has a limit of its own
        assert refusals(house, "body_framing") + refusals(house, "malformed") == 1
        await until_idle(house, server)


async def test_bodies_that_arrive_have_one_budget_together(tmp_path: Path) -> None:
    async with served(tmp_path, pending_bodies_limit_bytes=1024 * 1024) as (house, server):
        writers = []
        try:
            for _ in range(4):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writers.append(writer)
                writer.write(HEAD + b"content-length: 500000\r\n\r\n" + b" " * 250_000)
                await writer.drain()
            route = next(route for route in routes_of(house.frontend.asgi) if route.path.endswith("chat/completions"))
            budget = route.endpoint._budget  # type: ignore[attr-defined]
            async with asyncio.timeout(PATIENCE_SECONDS):
                while budget.used_bytes < 1_000_000:
                    await asyncio.sleep(0.01)
            pieces = [HEAD + b"content-length: 500000\r\n\r\n"] + [b" " * 50_000] * 8
            status, message = refusal(await shout(server.port, *pieces))
            assert (status, "DYN_HTTP_PENDING_BODIES_LIMIT_MB" in message) == (503, True)
            await answers_well(server.port)  # a body that comes in one read needs no budget
        finally:
            for writer in writers:
                writer.transport.abort()
        await until_idle(house, server)
        assert budget.used_bytes == 0


# -- many requests -------------------------------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order_up_to_the_limit(tmp_path: Path) -> None:
    async with served(tmp_path, pipeline_limit=4) as (house, server):
        answer = await shout(
            server.port, b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 4 + b"GET /nowhere HTTP/1.0\r\n\r\n"
        )
        assert [part.split()[0] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200"] * 4 + [b"404"]
        answer = await shout(server.port, b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 5000)
        parts = answer.split(b"HTTP/1.1 ")[1:]
        assert [part.split()[0] for part in parts] == [b"200"] * 5 + [b"429"]
        assert b"DYN_HTTP_PIPELINE_LIMIT" in parts[-1]
        assert refusals(house, "pipeline") == 1
        await until_idle(house, server)


async def test_rubbish_behind_a_request_does_not_spoil_its_answer(tmp_path: Path) -> None:
    body = json.dumps({**CHAT, "stream": True}).encode()
    good = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    async with served(tmp_path) as (house, server):
        answer = await shout(server.port, good + b"\x00rubbish\r\n\r\n" * 10)
        stream, _, rest = answer.partition(b"0\r\n\r\n")
        assert b"data: [DONE]" in stream
        assert rest.startswith(b"HTTP/1.1 400 ")
        await until_idle(house, server)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
async def test_an_upgrade_is_answered_as_plain_http(tmp_path: Path, upgrade: bytes) -> None:
    body = json.dumps(CHAT).encode()
    headers = b"connection: upgrade\r\nupgrade: " + upgrade + b"\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with served(tmp_path) as (house, server):
        for cut in (0, 10, len(HEAD + headers) - 1, len(HEAD + headers), len(HEAD + headers) + 5):
            whole = HEAD + headers + body + b"\x00" * 100
            answer = await shout(server.port, whole[:cut], whole[cut:], pause=0.005)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"fine" in answer
        await until_idle(house, server)


async def test_connections_over_the_limit_are_told_so(tmp_path: Path) -> None:
    async with served(tmp_path, max_connections=8) as (house, server):
        with idle_sockets(server.port, 8):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(server.service.connections) < 8:
                    await asyncio.sleep(0.01)
            answer = await shout(server.port, b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            status, message = refusal(answer)
            assert (status, "DYN_HTTP_MAX_CONNECTIONS" in message) == (503, True)
            assert b"retry-after: 1" in answer
        async with asyncio.timeout(PATIENCE_SECONDS):
            while server.service.connections:
                await asyncio.sleep(0.01)
        await answers_well(server.port)
        assert refusals(house, "connections") == 1


@contextmanager
def idle_sockets(port: int, count: int, *, say_first: bytes = b"") -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port))
            opened.append(one)
            if say_first:
                one.sendall(say_first)
        yield opened
    finally:
        for one in opened:
            one.close()


# -- clients that do not read --------------------------------------------------------------------------------------------


async def flood(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    while not context.is_stopped():
        if not sink.has_credit():
            await sink.wait_credit()
        sink.send_tokens([97] * 64)
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_client_that_never_reads_is_cut_and_its_work_ended(tmp_path: Path, is_streaming: bool) -> None:
    async def plenty(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        for _ in range(2800):  # more than kernel buffers hold (4 MiB)
            if not sink.has_credit():
                await sink.wait_credit()
            sink.send_tokens([97] * 2048)
        sink.send_tokens([], finish_reason="stop")

    async with served(tmp_path, write_stall_seconds=0.3) as (house, server):
        worker = house.workers[0]
        worker.script = flood if is_streaming else plenty
        body = json.dumps({**CHAT, "stream": is_streaming}).encode()
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", server.port))
        with lazy:
            lazy.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            if is_streaming:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await worker.killed.wait()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not refusals(house, "write_stall"):
                    await asyncio.sleep(0.01)
            await until_idle(house, server)
        worker.script = say("fine")
        await answers_well(server.port)


async def test_a_client_that_asks_and_asks_and_never_reads_is_cut(tmp_path: Path) -> None:
    async with served(tmp_path, write_stall_seconds=0.3, pipeline_limit=1000) as (house, server):
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", server.port))
        lazy.setblocking(False)
        with lazy:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not refusals(house, "write_stall"):
                    try:
                        lazy.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100)
                    except BlockingIOError:
                        pass
                    except ConnectionError:
                        break
                    await asyncio.sleep(0.005)
        await until_idle(house, server)
        assert refusals(house, "write_stall") == 1


@pytest.mark.parametrize("phase", ["connected", "head", "body", "queued", "streaming", "answered"])
async def test_a_client_that_resets_in_any_phase_leaves_nothing(tmp_path: Path, phase: str) -> None:
    async def hold(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        if phase == "streaming":
            sink.send_tokens([97])
        await context.async_killed_or_stopped()

    async with served(tmp_path) as (house, server):
        worker = house.workers[0]
        if phase in ("queued", "streaming"):
            worker.script = hold
        body = json.dumps({**CHAT, "stream": True}).encode()
        whole = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        sent = {"connected": b"", "head": whole[:40], "body": whole[:-5]}.get(phase, whole)
        for _ in range(20):
            worker.killed.clear()
            worker.started.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.write(sent)
            async with asyncio.timeout(PATIENCE_SECONDS):
                if phase in ("queued", "streaming"):
                    await worker.started.wait()
                if phase == "streaming":
                    await reader.readuntil(b"data: ")
                elif phase == "answered":
                    await reader.readuntil(b"[DONE]")
            writer.transport.abort()
            if phase in ("queued", "streaming"):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await worker.killed.wait()
        await until_idle(house, server)
        worker.script = say("fine")
        await answers_well(server.port)
