"""The HTTP connections under the frontend and the status server, with applications of a few lines."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo.runtime.base.http_limits import HttpLimits, Rejection
from dynamo.runtime.http import flow as flow_module
from dynamo.runtime.http.connection import KNOWN_URL_BYTES
from dynamo.runtime.http.cycle import LEAVE_EXTENSION, PUSH_EXTENSION, RESPOND_EXTENSION
from dynamo.runtime.http.head import status_line
from dynamo.runtime.http.service import HttpService
from support.patience import PATIENCE_SECONDS

LIMITS = HttpLimits(
    max_connections=64,
    header_limit_bytes=16 * 1024,
    header_count_limit=32,
    header_timeout_seconds=10,
    body_limit_bytes=1024 * 1024,
    body_timeout_seconds=10,
    pipeline_limit=8,
    idle_seconds=30,
    write_stall_seconds=10,
)


def render(rejection: Rejection, request_headers: Any) -> tuple[dict[bytes, bytes], bytes]:
    return {b"content-type": b"text/plain"}, rejection.text.encode()


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[HttpService, Counter[str]]]:
    counts: Counter[str] = Counter()

    def refused(limit: str) -> None:
        counts[limit] += 1

    service = HttpService(app, LIMITS, render=render, refused=refused)
    await service.listen_at("127.0.0.1", 0)
    try:
        yield service, counts
    finally:
        await service.close(0)


async def ask(service: HttpService, data: bytes, *, ends: bytes | None = None) -> bytes:
    """Send, then read to the end of the connection, or until `ends` has come."""
    reader, writer = await asyncio.open_connection(*service.sockets[0].getsockname())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(data)
            return await (reader.read() if ends is None else reader.readuntil(ends))
    finally:
        writer.transport.abort()


def get(path: str = "/", version: str = "1.1", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "host: x", *headers, "", ""]).encode()


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Kind", b"t")]})
    await send({"type": "http.response.body", "body": b"hel", "more_body": True})
    await send({"type": "http.response.body", "body": b"lo"})


async def test_an_answer_without_a_length_is_chunked_and_the_connection_is_kept() -> None:
    async with serving(hello) as (service, _):
        answer = await ask(service, get() + get("/", "1.1", "connection: close"))
        head = b"HTTP/1.1 200 OK\r\nx-kind: t\r\ntransfer-encoding: chunked\r\n"
        body = b"\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
        assert answer == head + body + head + b"connection: close\r\n" + body


async def test_an_old_client_gets_the_bytes_and_the_end_of_the_connection() -> None:
    async with serving(hello) as (service, _):
        assert await ask(service, get("/", "1.0")) == b"HTTP/1.1 200 OK\r\nx-kind: t\r\nconnection: close\r\n\r\nhello"


async def test_the_scope_is_that_of_the_request() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope))
        await hello(scope, receive, send)

    async with serving(app) as (service, _):
        await ask(service, get("/a%20b/c?d=%20e", "1.0", "X-A: 1", "x-a: 2"))
    scope = seen[0]
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b/c", b"/a%20b/c", b"d=%20e")
    assert scope["headers"] == [(b"host", b"x"), (b"x-a", b"1"), (b"x-a", b"2")]
    assert (scope["method"], scope["http_version"], scope["scheme"]) == ("GET", "1.0", "http")
    assert scope["client"][0] == scope["server"][0] == "127.0.0.1"


@pytest.mark.parametrize("name", ["c", "c" * KNOWN_URL_BYTES])
async def test_a_url_that_was_seen_before_is_read_the_same_way(name: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], scope["raw_path"], scope["query_string"]))
        await hello(scope, receive, send)

    async with serving(app) as (service, _):
        for query in ("d", "e", "d"):
            await ask(service, get(f"/%C3%A4/{name}?{query}", "1.0"))
    assert seen == [(f"/ä/{name}", f"/%C3%A4/{name}".encode(), query) for query in (b"d", b"e", b"d")]


async def test_a_body_is_asked_for_only_when_the_application_wants_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        assert scope["extensions"][RESPOND_EXTENSION](200, [(b"content-length", b"%d" % len(body))], body)

    async with serving(app) as (service, _):
        reader, writer = await asyncio.open_connection(*service.sockets[0].getsockname())
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"body")
            assert await reader.readuntil(b"body") == b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody"
        writer.transport.abort()


async def test_pushed_chunks_are_those_that_send_would_write() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        push = scope["extensions"][PUSH_EXTENSION]
        assert not push(b"too early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert push(b"one")
        assert push(b"two")
        await send({"type": "http.response.body", "body": b""})
        assert not push(b"too late")

    async with serving(app) as (service, _):
        answer = await ask(service, get("/", "1.1", "connection: close"))
        assert answer.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_nothing_is_pushed_to_a_client_that_has_left_or_to_a_body_that_is_not_chunked() -> None:
    pushed: dict[str, bool] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        push = scope["extensions"][PUSH_EXTENSION]
        headers = [(b"content-length", b"3")] if scope["path"] == "/sized" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/left":
            while (await receive())["type"] != "http.disconnect":
                pass
        pushed[scope["path"]] = push(b"one")
        await send({"type": "http.response.body", "body": b"one"})

    async with serving(app) as (service, _):
        await ask(service, get("/sized", "1.1", "connection: close"))
        await ask(service, get("/old", "1.0"))
        _, writer = await asyncio.open_connection(*service.sockets[0].getsockname())
        writer.write(get("/left", "1.1"))
        await writer.drain()
        writer.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while "/left" not in pushed:
                await asyncio.sleep(0)
    assert pushed == {"/sized": False, "/old": False, "/left": False}


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_no_body_follows_where_none_may(method: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        status = 200 if scope["method"] == "HEAD" else 204
        headers = [(b"content-length", b"5")] if status == 200 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello" if status == 200 else b""})

    async with serving(app) as (service, _):
        answer = await ask(service, get("/", "1.1", "connection: close").replace(b"GET", method.encode(), 1))
        assert answer.endswith(b"connection: close\r\n\r\n")
        assert b"chunked" not in answer


async def fails(scope: Any, receive: Any, send: Any) -> None:
    raise ValueError("a defect")


async def says_nothing(scope: Any, receive: Any, send: Any) -> None:
    return


async def forges_a_header(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b\r\nset-cookie: c")]})


@pytest.mark.parametrize("app", [fails, says_nothing, forges_a_header])
async def test_an_application_that_fails_is_a_500(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(app) as (service, _):
        answer = await ask(service, get())
        assert answer.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
        assert answer.endswith(b"\r\n\r\nInternal Server Error")
        assert b"set-cookie" not in answer
        assert len(caplog.records) == 1


@pytest.mark.parametrize("body", [b"too long", b"s"])
async def test_a_body_of_another_length_than_announced_cuts_the_connection(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": body})

    async with serving(app) as (service, _):
        answer = await ask(service, get())
        assert len(answer.split(b"\r\n\r\n", 1)[1]) < 4
        assert "content-length" in str(caplog.records[0].exc_info)


async def test_receiving_ends_with_a_disconnect() -> None:
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        await send({"type": "http.response.start", "status": 200, "headers": []})  # goes nowhere, and raises nothing
        left.set()

    async with serving(app) as (service, _):
        _, writer = await asyncio.open_connection(*service.sockets[0].getsockname())
        writer.write(get())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not service.answers:
                await asyncio.sleep(0)
            writer.transport.abort()
            await left.wait()
            while service.connections or service.answers:
                await asyncio.sleep(0)


@pytest.mark.parametrize("is_reset", [False, True])
async def test_nothing_of_a_connection_is_left_to_the_collector(is_reset: bool) -> None:
    async with serving(hello) as (service, _):
        gc.collect()
        gc.disable()
        try:
            reader, writer = await asyncio.open_connection(*service.sockets[0].getsockname())
            writer.write(get())
            async with asyncio.timeout(PATIENCE_SECONDS):
                await reader.readuntil(b"0\r\n\r\n")
                (connection,) = [weakref.ref(each) for each in service.connections]
                if is_reset:
                    sock: socket.socket = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                writer.close()
                while connection() is not None:
                    await asyncio.sleep(0.001)
        finally:
            gc.enable()


def test_a_status_has_a_line_whether_or_not_it_has_a_phrase() -> None:
    assert (status_line(404), status_line(799)) == (b"HTTP/1.1 404 Not Found\r\n", b"HTTP/1.1 799 \r\n")


async def test_answers_under_way_end_before_the_service_closes() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"whole"})

    service = HttpService(app, LIMITS, render=render, refused=lambda limit: None)
    await service.listen_at("127.0.0.1", 0)
    asking = asyncio.create_task(ask(service, get()))
    while not service.answers:
        await asyncio.sleep(0)
    closing = asyncio.create_task(service.close(PATIENCE_SECONDS))
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert (await asking).endswith(b"5\r\nwhole\r\n0\r\n\r\n")


async def test_a_client_that_leaves_before_its_answer_is_complete_is_reported_once() -> None:
    left: list[str] = []
    begun, gone = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        on_leave = scope["extensions"][LEAVE_EXTENSION]

        def note() -> None:
            left.append(scope["path"])
            gone.set()

        on_leave(note)
        if scope["path"] == "/left":
            begun.set()
            await gone.wait()
            on_leave(lambda: left.append("late"))  # it has left: called at once
            return
        await hello(scope, receive, send)

    async with serving(app) as (service, _):
        await ask(service, get("/answered", "1.1", "connection: close"))
        _, writer = await asyncio.open_connection(*service.sockets[0].getsockname())
        writer.write(get("/answered") + get("/left"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await begun.wait()
            writer.close()
            await gone.wait()
    assert left == ["/left", "late"]


UPGRADE = ("connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AA")


@pytest.mark.parametrize("count", [1, 2, 3, 8])
async def test_pipelined_requests_that_ask_for_another_protocol_are_answered_as_they_are(count: int) -> None:
    async with serving(hello) as (service, counts):
        answer = await ask(service, get("/", "1.1", *UPGRADE) * count + get("/", "1.1", "connection: close"))
        assert (answer.count(b"HTTP/1.1 200 OK"), counts) == (count + 1, Counter())


async def test_more_of_them_than_may_wait_are_refused_by_the_limit() -> None:
    async with serving(hello) as (service, counts):
        await ask(service, get("/", "1.1", *UPGRADE) * 200)
        assert counts == Counter({"pipeline": 1})


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.0\r\nhost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: user@a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n",
    ],
)
async def test_a_request_names_one_host(head: bytes) -> None:
    async with serving(hello) as (service, counts):
        assert (await ask(service, head)).startswith(b"HTTP/1.1 400 ")
        assert counts == Counter({"malformed": 1})


@pytest.mark.parametrize("host", ["", "a", "a.b:8000", "[::1]:8000", "10.0.0.7", "my_service.ns.svc:80", "x-y.z."])
async def test_usual_hosts_are_taken(host: str) -> None:
    async with serving(hello) as (service, _):
        head = f"GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
        assert (await ask(service, head)).startswith(b"HTTP/1.1 200 ")


async def _refused(service: HttpService, seconds: float) -> bytes:
    """Return what a client reads that sends for so long beyond its refusal, and reads only then."""
    reader, writer = await asyncio.open_connection(*service.sockets[0].getsockname())
    loop = asyncio.get_running_loop()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-long: ")
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            until = loop.time() + seconds
            while loop.time() < until:
                writer.write(b"x" * 65536)
                await writer.drain()
            return await reader.read()
    finally:
        writer.transport.abort()


async def test_a_refusal_waits_for_a_client_that_is_still_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "LINGER_SECONDS", 0.05)
    async with serving(hello) as (service, _):
        assert (await _refused(service, 0.5)).startswith(b"HTTP/1.1 431 ")


async def test_a_client_that_never_stops_sending_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(flow_module, "LINGER_LIMIT_SECONDS", 0.2)
    async with serving(hello) as (service, _):
        with pytest.raises(ConnectionError):
            await _refused(service, PATIENCE_SECONDS)
