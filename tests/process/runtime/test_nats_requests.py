"""Requests over NATS: what is on the wire, what a worker that is not ours may do, and a server that goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from dynamo.errors import CannotConnect, Disconnected, InvalidArgument, WorkerUnavailable
from dynamo.runtime.base.settings import NatsSettings, RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.nats_connection import NatsConnection
from dynamo.runtime.calls.request_plane.base import Handler, Instance, ResponseSink
from dynamo.runtime.calls.request_plane.native import plane
from dynamo.runtime.calls.request_plane.native.call_home import CallHomeListener
from dynamo.runtime.calls.request_plane.native.nats_server import NatsServer, subject_of
from dynamo.runtime.calls.request_plane.native.plane import NatsClient
from dynamo.runtime.calls.request_plane.native.stream import NativeStream
from support.native_caller import NativeCaller, two_part
from support.native_worker import Request
from support.nats_server import NatsServer as NatsProcess
from support.nats_server import nats_server, shared_nats
from support.patience import PATIENCE_SECONDS

__all__ = ["shared_nats"]

PATH = "2040a1f8376e9f29/wirens/pyw/gen"
SUBJECT = "wirens_pyw.gen-2040a1f8376e9f29"
SETTINGS = RequestPlaneSettings(response_host="127.0.0.1")


@pytest.mark.parametrize(
    ("path", "subject"),
    [
        (PATH, SUBJECT),
        ("1/My.Space/Comp/ep", "my_space_comp.ep-1"),
        ("1/_a/b/ep", "a_b.ep-1"),
        ("1/ping", "dynamo.ping-1"),
    ],
)
def test_a_subject_is_the_slug_of_the_names_and_the_endpoint_of_one_instance(path: str, subject: str) -> None:
    assert subject_of(path) == subject


@dataclass
class Caller:
    client: NatsClient
    connection: NatsConnection

    async def open(self, body: Any = None, context: Context | None = None, subject: str = SUBJECT) -> NativeStream:
        instance = Instance(
            namespace="wirens",
            component="pyw",
            endpoint="gen",
            instance_id=1,
            transport={"nats_tcp": subject},
            request_plane_codec="msgpack",
        )
        return await self.client.open(instance, body, context or Context())


@asynccontextmanager
async def calling(url: str, request_timeout_seconds: float = 5.0) -> AsyncIterator[Caller]:
    connection = NatsConnection(NatsSettings(servers=(url,)), wanted_by="the test")
    await connection.start()
    client = NatsClient(connection, CallHomeListener(SETTINGS), request_timeout_seconds=request_timeout_seconds)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield Caller(client, connection)
    finally:
        await client.close()
        await connection.close()


@asynccontextmanager
async def serving(
    url: str, handler: Handler, refused: Callable[[str], None] = lambda limit: None
) -> AsyncIterator[NatsServer]:
    connection = NatsConnection(NatsSettings(servers=(url,)), wanted_by="the test")
    server = NatsServer(connection, replace(SETTINGS, engine_request_limit=1, engine_queue_limit=0), refused=refused)
    await server.start()
    server.register(PATH, handler)
    await server.start()
    try:
        yield server
    finally:
        await server.close()
        await connection.close()


@asynccontextmanager
async def stranger(url: str) -> AsyncIterator[Nats]:
    """A client that knows nothing of us."""
    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def take_requests(worker: Nats, take: Callable[[Msg], Awaitable[None]]) -> None:
    """Subscribe to the requests, and return once the server knows."""
    await worker.subscribe(SUBJECT, queue="q", cb=take)
    await worker.flush()  # its PING may overtake the subscription, which a task of the client writes
    await worker.flush()  # this one comes behind it


async def echo(body: Any, context: Context, sink: ResponseSink) -> None:
    sink.send_object({"data": body})


async def read_all(stream: NativeStream) -> list[Any]:
    items: list[Any] = []
    try:
        while batch := await stream.next_batch():
            items += [item.extra if item.extra is not None else item.token_ids for item in batch]
    finally:
        stream.close()
    return items


async def test_a_request_is_a_message_with_headers_and_the_native_frame(shared_nats: NatsProcess) -> None:
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    async with calling(shared_nats.url) as caller, stranger(shared_nats.url) as worker:
        await take_requests(worker, arrived.put)
        opening = asyncio.create_task(caller.open({"n": 2}, Context("r1")))
        message = await arrived.get()
        assert (message.headers or {})["request-id"] == "r1"
        header_bytes, data_bytes = (int.from_bytes(message.data[at : at + 8], "big") for at in (0, 8))
        control = json.loads(message.data[24 : 24 + header_bytes])
        assert message.data[24 + header_bytes :] == bytes.fromhex("81a16e02")
        assert (data_bytes, message.data[16:24]) == (4, bytes(8))
        await message.respond(b"")
        stream = await opening
        request = Request(PATH, {}, control, b"", None, 0, [])  # type: ignore[arg-type]
        home = await request.dial()
        await home.control({"error": None})
        await home.chunk(7)
        await home.final()
        assert await read_all(stream) == [[7]]
        home.writer.close()


@asynccontextmanager
async def native_caller(url: str) -> AsyncIterator[tuple[NativeCaller, Nats]]:
    caller = NativeCaller("")
    async with stranger(url) as client:
        await caller.listen()
        try:
            yield caller, client
        finally:
            await caller.close()


async def test_a_native_caller_gets_an_empty_reply_and_its_answer_over_tcp(shared_nats: NatsProcess) -> None:
    async with serving(shared_nats.url, echo), native_caller(shared_nats.url) as (caller, client):
        payload, answer = caller.payload({"x": 1})
        reply = await client.request(SUBJECT, payload, timeout=5, headers={"request-id": answer.request_id})
        assert reply.data == b""
        found = await answer.everything()
        assert found[1]["data"] == {"data": {"x": 1}}
        assert found[-1] == "sentinel"


async def test_a_declined_request_is_told_so_on_its_stream(shared_nats: NatsProcess) -> None:
    go = asyncio.Event()

    async def wait(body: Any, context: Context, sink: ResponseSink) -> None:
        await go.wait()

    async with serving(shared_nats.url, wait), native_caller(shared_nats.url) as (caller, client):
        first, _ = caller.payload(None)
        second, answer = caller.payload(None)
        await client.request(SUBJECT, first, timeout=5)
        assert (await client.request(SUBJECT, second, timeout=5)).data == b""
        found = await answer.everything()
        assert found[1]["data"]["error"]["error_type"] == "WorkerOverloaded"
        go.set()


@pytest.mark.parametrize("payload", [b"", b"\xff" * 40, two_part(b"{}")])
async def test_what_is_no_request_is_answered_with_a_text_and_counted(shared_nats: NatsProcess, payload: bytes) -> None:
    refused: list[str] = []
    async with serving(shared_nats.url, echo, refused.append), stranger(shared_nats.url) as client:
        reply = await client.request(SUBJECT, payload, timeout=5)
    assert reply.data.startswith(b"Server unavailable: malformed request")
    assert refused == ["malformed"]


async def test_an_unregistered_path_declines_and_another_worker_may_be_tried(shared_nats: NatsProcess) -> None:
    async with serving(shared_nats.url, echo) as server, calling(shared_nats.url) as caller:
        server.unregister(PATH)
        with pytest.raises(WorkerUnavailable, match="unknown endpoint"):
            await read_all(await caller.open())


async def test_a_subject_that_nobody_serves_is_unreachable_at_once(shared_nats: NatsProcess) -> None:
    async with calling(shared_nats.url) as caller:
        with pytest.raises(CannotConnect, match="nobody serves"):
            await caller.open(subject="nobody.here-1")


async def test_a_request_over_the_servers_limit_is_the_callers_error(shared_nats: NatsProcess) -> None:
    async with serving(shared_nats.url, echo), calling(shared_nats.url) as caller:
        with pytest.raises(InvalidArgument, match="max_payload"):
            await caller.open("x" * 1_100_000)
        assert await read_all(await caller.open("x" * 900_000)) == [{"data": "x" * 900_000}]


async def test_a_worker_that_takes_a_request_and_vanishes_is_lost(
    shared_nats: NatsProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "HOME_SECONDS", 0.05)

    async def take(message: Msg) -> None:
        await message.respond(b"")

    async with calling(shared_nats.url) as caller, stranger(shared_nats.url) as worker:
        await take_requests(worker, take)
        with pytest.raises(Disconnected, match="did not call home"):
            await read_all(await caller.open())


async def open_when_back(caller: Caller, waiting: asyncio.Task[NativeStream]) -> NativeStream:
    """What the waiting request gets, or a later one: the caller may be back before the worker."""
    while True:
        try:
            return await waiting
        except CannotConnect:
            await asyncio.sleep(0.05)
            waiting = asyncio.create_task(caller.open())


async def test_streams_outlive_the_server_and_new_requests_wait_for_it() -> None:
    go = asyncio.Event()

    async def slow(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_object({"data": 1})
        await go.wait()
        sink.send_object({"data": 2})

    with nats_server() as broker:
        async with serving(broker.url, slow), calling(broker.url) as caller:
            stream = await caller.open()
            assert len(await stream.next_batch()) == 1
            broker.kill()
            while caller.connection.is_connected:
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(caller.open())
            go.set()
            assert await read_all(stream) == [{"data": 2}]
            broker.start()
            answer = await open_when_back(caller, waiting)
            assert await read_all(answer) == [{"data": 1}, {"data": 2}]


async def test_a_server_that_stays_away_is_a_worker_that_cannot_be_reached() -> None:
    with nats_server() as broker:
        async with calling(broker.url, request_timeout_seconds=0.1) as caller:
            broker.kill()
            while caller.connection.is_connected:
                await asyncio.sleep(0.01)
            with pytest.raises(CannotConnect, match="DYN_NATS_REQUEST_TIMEOUT_SECS"):
                await caller.open()
