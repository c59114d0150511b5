"""The caller's side of the native wire against a worker that is not ours: every answer it may give, every way to break."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    Unknown,
    WorkerUnavailable,
    http_assertion,
)
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import OBJECT_INDEX, Instance
from dynamo.runtime.calls.request_plane.native import stream as native_stream
from dynamo.runtime.calls.request_plane.native.call_home import KEEPALIVE, LINGER_ZERO, CallHomeListener
from dynamo.runtime.calls.request_plane.native.client import BUSY_REQUESTS, NativeClient
from dynamo.runtime.calls.request_plane.native.stream import NativeStream
from dynamo.runtime.observe.tracing import TraceContext
from support.cases import each_case
from support.native_worker import Home, NativeWorker, Request, native_worker
from support.patience import PATIENCE_SECONDS
from support.streams import read_all

PATH = "1f/ns/c/e"
SETTINGS = RequestPlaneSettings(response_host="127.0.0.1")


@dataclass
class Caller:
    worker: NativeWorker
    client: NativeClient
    home: CallHomeListener

    def instance(self, codec: str | None = "msgpack") -> Instance:
        return Instance(
            namespace="ns",
            component="c",
            endpoint="e",
            instance_id=31,
            transport={"tcp": f"127.0.0.1:{self.worker.port}/{PATH}"},
            request_plane_codec=codec,
        )

    async def open(
        self, body: Any = None, context: Context | None = None, codec: str | None = "msgpack"
    ) -> NativeStream:
        return await self.client.open(self.instance(codec), body, context or Context())

    async def call(self, body: Any = None, context: Context | None = None) -> tuple[NativeStream, Request]:
        stream = await self.open(body, context)
        return stream, await self.worker.request()

    async def answered(self, context: Context | None = None) -> tuple[NativeStream, Home]:
        """A stream whose worker has called home."""
        stream, request = await self.call(context=context)
        return stream, await request.call_home()


@asynccontextmanager
async def calling(settings: RequestPlaneSettings = SETTINGS) -> AsyncIterator[Caller]:
    async with native_worker() as worker, asyncio.timeout(PATIENCE_SECONDS):
        home = CallHomeListener(settings)
        client = NativeClient(settings, home)
        try:
            yield Caller(worker, client, home)
        finally:
            await client.close()


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    async with calling() as opened:
        yield opened
        assert opened.home.streams == 0 or opened.worker.requests.empty()


async def test_a_request_says_what_the_wire_wants(caller: Caller) -> None:
    trace = TraceContext("a" * 32, "b" * 16, True, tracestate="k=v")
    context = Context("r1", {"tenant": "t"}, trace=trace)
    context.prompt_tokens = 7
    _, request = await caller.call({"n": 2}, context)
    assert request.path == PATH
    assert request.raw_body == bytes.fromhex("81a16e02")
    assert request.control["id"] == "r1"
    assert request.control["request_type"] == "single_in"
    assert request.control["response_type"] == "many_out"
    assert request.control["payload_codec"] == "msgpack"
    assert request.control["metadata"] == {"tenant": "t"}
    assert request.info["context"] == "r1"
    assert request.info["stream_type"] == "response"
    assert request.headers["request-id"] == "r1"
    assert request.headers["traceparent"].split("-")[1] == "a" * 32
    assert request.headers["tracestate"] == "k=v"
    assert all(isinstance(value, str) for value in request.headers.values())


async def test_an_accepted_connection_is_probed_and_leaves_no_port_in_time_wait(caller: Caller) -> None:
    stream, home = await caller.answered()
    await home.chunk(5)
    assert await stream.next_batch()  # so it has its connection
    assert stream._transport is not None
    accepted = stream._transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(LINGER_ZERO)) == LINGER_ZERO
    for name, seconds in KEEPALIVE:
        if hasattr(socket, name):
            assert accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == seconds


async def test_a_worker_that_names_no_codec_gets_json(caller: Caller) -> None:
    stream = await caller.open({"raw": b"\x01\x02", "n": [1, 2]}, codec=None)
    request = await caller.worker.request()
    assert request.control.get("payload_codec", "json") == "json"
    assert request.body == {"raw": [1, 2], "n": [1, 2]}
    home = await request.call_home()
    await home.chunk(5)
    await home.final()
    assert [item.token_ids for item in await read_all(stream)] == [[5]]


async def test_a_codec_nobody_knows_is_not_tried(caller: Caller) -> None:
    with pytest.raises(CannotConnect, match="cbor"):
        await caller.open(codec="cbor")


@pytest.mark.parametrize("transport", [{}, {"tcp": "nowhere"}, {"tcp": "127.0.0.1:99999/p"}])
async def test_an_instance_without_a_usable_address_is_unreachable(caller: Caller, transport: dict[str, str]) -> None:
    instance = caller.instance()
    instance.transport = transport
    with pytest.raises(CannotConnect, match="malformed"):
        await caller.client.open(instance, None, Context())


async def test_chunks_of_1_6_become_token_items_without_their_nulls(caller: Caller) -> None:
    stream, home = await caller.answered()
    await home.chunk(1, 2)
    await home.chunk(3, index=None, log_probs=[-0.5])
    await home.chunk(9, index=1)
    await home.chunk(finish_reason="length", completion_usage={"total_tokens": 3}, output_type="text")
    await home.final()
    found = [(i.index, i.offset, i.token_ids, i.finish_reason, i.extra) for i in await read_all(stream)]
    assert found == [
        (0, 0, [1, 2], None, None),
        (0, 2, [3], None, {"log_probs": [-0.5]}),
        (1, 0, [9], None, None),
        (0, 3, [], "length", {"completion_usage": {"total_tokens": 3}}),
    ]


@each_case(
    "annotated",
    [
        {"data": None},
        {"data": "text"},
        {"data": {"token_ids": [1]}},
        {"data": {"token_ids": ["x"], "index": 0}},
        {"data": {"token_ids": [1], "index": -1}},
        {"data": {"token_ids": [1], "index": 0}, "event": "note", "comment": ["c"]},
        {"event": "note"},
        {},
    ],
)
async def test_anything_else_is_an_object_as_it_was_sent(caller: Caller, annotated: dict[str, Any]) -> None:
    stream, home = await caller.answered()
    await home.item(**annotated)
    await home.final()
    (item,) = await read_all(stream)
    assert (item.index, item.extra) == (OBJECT_INDEX, annotated)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Server overloaded: worker at capacity", Overloaded),
        ("Server unavailable: unknown endpoint x", WorkerUnavailable),
        ("Unknown endpoint: x", WorkerUnavailable),  # 1.5 says so, and calls nobody home
    ],
)
async def test_an_ack_with_a_text_declines(caller: Caller, text: str, error: type[Exception]) -> None:
    stream, request = await caller.call()
    request.ack(text)
    with pytest.raises(error, match=text):
        await read_all(stream)


async def test_acks_belong_to_requests_in_their_order(caller: Caller) -> None:
    calls = [await caller.call(number) for number in range(3)]
    assert {request.connection for _, request in calls} == {0}
    for text in ("", "Server overloaded: second", ""):
        calls[0][1].ack(text)
    with pytest.raises(Overloaded, match="second"):
        await read_all(calls[1][0])
    for stream, request in (calls[0], calls[2]):
        home = await request.dial()
        await home.control({"error": None})
        await home.chunk(request.body)
        await home.final()
        assert [item.token_ids for item in await read_all(stream)] == [[request.body]]


async def test_the_answer_may_come_before_the_ack(caller: Caller) -> None:
    stream, request = await caller.call()
    home = await request.dial()
    await home.control({"error": None})
    await home.chunk(4)
    await home.final()
    assert [item.token_ids for item in await read_all(stream)] == [[4]]
    request.ack()


async def test_a_prologue_with_an_error_is_a_worker_that_could_not_begin(caller: Caller) -> None:
    stream, request = await caller.call()
    request.ack()
    home = await request.dial()
    await home.control({"error": "no such engine"})
    with pytest.raises(CannotConnect, match="no such engine"):
        await read_all(stream)


async def leave(home: Home) -> None:
    home.writer.close()


async def no_prologue(home: Home) -> None:
    await home.chunk(1)


async def early_sentinel(home: Home) -> None:
    await home.control("sentinel")


async def nonsense(home: Home) -> None:
    home.writer.write(b"\xff" * 64)


async def no_item(home: Home) -> None:
    home.writer.write(bytes(15) + b"\x03" + bytes(8) + b"abc")


@each_case(
    ("breach", "greeted"),
    [(no_prologue, False), *itertools.product((leave, early_sentinel, nonsense, no_item), (True, False))],
)
async def test_a_stream_that_breaks_is_lost_and_never_an_end(
    caller: Caller, breach: Callable[[Home], Awaitable[None]], greeted: bool
) -> None:
    stream, request = await caller.call()
    request.ack()
    home = await request.dial()
    if greeted:
        await home.control({"error": None})
        await home.chunk(1)
        assert len(await stream.next_batch()) == 1
    await breach(home)
    with pytest.raises(Disconnected, match="Stream ended before generation completed"):
        await read_all(stream)
    assert await home.heard() is None


async def test_each_item_is_handed_on_before_the_next_one_comes(caller: Caller) -> None:
    stream, home = await caller.answered()  # the first token, too, waits for nothing but its own bytes
    for token in (1, 2, 3):
        await home.chunk(token)
        assert [item.token_ids for item in await stream.next_batch()] == [[token]]
    await home.final()
    assert await read_all(stream) == []


async def test_what_came_before_a_loss_can_be_read(caller: Caller) -> None:
    stream, home = await caller.answered()
    await home.chunk(1)
    home.writer.close()
    assert [item.token_ids for item in await stream.next_batch()] == [[1]]
    with pytest.raises(Disconnected):
        await stream.next_batch()
    stream.close()


async def test_a_missing_sentinel_is_no_error(caller: Caller) -> None:
    stream, home = await caller.answered()
    await home.chunk(1)
    await home.final(sentinel=False)
    home.writer.close()
    assert len(await read_all(stream)) == 1


async def test_a_caller_leaves_by_itself_when_no_sentinel_comes(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_stream, "SENTINEL_SECONDS", 0.01)
    stream, home = await caller.answered()
    await home.final(sentinel=False)
    assert await read_all(stream) == []
    assert await home.heard() is None


@each_case(
    ("annotated", "error", "text"),
    [
        ({"error": {"error_type": {"Backend": "EngineShutdown"}, "message": "bye"}}, EngineShutdown, "bye"),
        ({"error": {"error_type": "WorkerOverloaded", "message": "full"}}, Overloaded, "full"),
        ({"error": {"error_type": "Unheard", "message": "odd"}}, Unknown, "odd"),
        ({"comment": ["one", "two"]}, Unknown, "one; two"),
        ({}, Unknown, "without a text"),
        (
            {
                "error": {
                    "error_type": {"Backend": "InvalidArgument"},
                    "message": "ValueError: too long",
                    "public": {"type": "message", "message": "too long"},
                }
            },
            InvalidArgument,
            "^too long$",
        ),
    ],
)
async def test_an_error_item_ends_the_stream_with_its_type(
    caller: Caller, annotated: dict[str, Any], error: type[DynamoException], text: str
) -> None:
    stream, home = await caller.answered()
    await home.chunk(1)
    await home.item(event="error", **annotated)
    await home.final()
    assert len(await stream.next_batch()) == 1
    with pytest.raises(error, match=text):
        await read_all(stream)


async def test_a_status_that_an_engine_asserts_survives_the_wire(caller: Caller) -> None:
    stream, home = await caller.answered()
    message = json.dumps({"message": "teapot", "code": 418})
    await home.item(event="error", error={"error_type": "InvalidArgument", "message": message})
    await home.final()
    with pytest.raises(InvalidArgument) as caught:
        await read_all(stream)
    assert http_assertion(caught.value) == (418, "teapot")


async def test_stop_and_then_kill_reach_the_worker_as_words(caller: Caller) -> None:
    stream, home = await caller.answered()
    await home.chunk(1)
    await stream.next_batch()
    stream.stop()
    stream.stop()
    assert await home.heard() == "stop"
    stream.kill()
    assert await home.heard() in ("kill", None)  # the reset that follows may overtake it
    assert await read_all(stream) == []


async def test_a_stop_before_the_call_home_is_said_then(caller: Caller) -> None:
    context = Context()
    stream, request = await caller.call(context=context)
    context.stop_generating()
    home = await request.call_home()
    assert await home.heard() == "stop"
    home.writer.close()  # 1.6 just closes a stream that was stopped
    assert await read_all(stream) == []


async def test_a_killed_request_turns_the_worker_away(caller: Caller) -> None:
    context = Context()
    stream, request = await caller.call(context=context)
    context.kill()
    assert await read_all(stream) == []
    home = await request.dial()
    assert await home.heard() is None


async def test_a_deadline_is_kept_at_this_end_and_the_worker_is_told(caller: Caller) -> None:
    context = Context(deadline=asyncio.get_running_loop().time() + 0.05)
    stream, home = await caller.answered(context)
    with pytest.raises(ResponseTimeout):
        await read_all(stream)
    assert await home.heard() in ("kill", None)


async def test_a_reader_with_its_answer_leaves_the_worker_to_end(caller: Caller) -> None:
    context = Context()
    stream, home = await caller.answered(context)
    await home.chunk(1, finish_reason="stop")
    await stream.next_batch()
    stream.finish()
    stream.close()
    context.kill()
    await home.chunk(2)
    await home.final()
    assert await home.heard() is None  # no word before the goodbye


@pytest.mark.parametrize("subject", ["", "another"])
async def test_nobody_gets_in_without_the_subject(caller: Caller, subject: str) -> None:
    stream, request = await caller.call()
    request.ack()
    stranger = await request.dial(subject or None, "response" if subject else "request")
    assert await stranger.heard() is None
    if subject:
        home = await request.dial()
        await home.control({"error": None})
        await home.final()
        assert await read_all(stream) == []
    stream.close()


async def test_a_subject_is_good_for_one_connection(caller: Caller) -> None:
    stream, request = await caller.call()
    home = await request.call_home()
    await home.chunk(1)
    await stream.next_batch()
    second = await request.dial()
    assert await second.heard() is None
    await home.final()
    assert await read_all(stream) == []


async def test_whoever_does_not_say_a_subject_in_time_is_dropped() -> None:
    async with calling(replace(SETTINGS, handshake_timeout_seconds=0.05)) as caller:
        stream, _ = await caller.call()
        host, _, port = caller.home.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()
        stream.close()


async def test_no_ack_in_time_loses_the_request_and_the_connection() -> None:
    async with calling(replace(SETTINGS, request_timeout_seconds=0.05)) as caller:
        stream, _ = await caller.call()
        with pytest.raises(ConnectionTimeout, match="DYN_TCP_REQUEST_TIMEOUT"):
            await read_all(stream)
        await caller.worker.lost.wait()
        stream, request = await caller.call()
        assert request.connection == 1
        stream.close()


async def test_a_worker_that_dies_before_it_calls_home_loses_its_requests(caller: Caller) -> None:
    at_home, home = await caller.answered()
    stream, request = await caller.call()
    request.ack()
    caller.worker.connections[0].transport.abort()
    with pytest.raises(Disconnected):
        await read_all(stream)
    await home.final()  # a stream of its own connection goes on
    assert await read_all(at_home) == []


async def test_a_worker_that_is_not_there_is_unreachable(caller: Caller) -> None:
    instance = caller.instance()
    async with native_worker() as gone:
        instance.transport = {"tcp": f"127.0.0.1:{gone.port}/{PATH}"}
    with pytest.raises(CannotConnect, match="cannot be reached"):
        await caller.client.open(instance, None, Context())


async def test_a_pool_grows_while_acks_are_missing_and_no_further_than_its_limit() -> None:
    async with calling(replace(SETTINGS, pool_size=2, pipeline_limit=BUSY_REQUESTS + 1)) as caller:
        streams = [await caller.open() for _ in range(2 * BUSY_REQUESTS + 2)]
        requests = [await caller.worker.request() for _ in streams]
        assert len(caller.worker.connections) == 2
        assert {request.connection for request in requests} == {0, 1}
        with pytest.raises(Overloaded, match="DYN_TCP_CHANNEL_BUFFER"):
            await caller.open()
        for request in requests:
            request.ack()
        for stream in streams:
            stream.close()


async def test_an_idle_connection_is_closed_and_opened_again() -> None:
    async with calling(replace(SETTINGS, idle_host_seconds=0.05)) as caller:
        stream, home = await caller.answered()
        await home.final()
        assert await read_all(stream) == []
        await caller.worker.lost.wait()
        stream, request = await caller.call()
        assert request.connection == 1
        stream.close()


async def test_a_request_that_is_too_long_is_the_callers_error_and_leaves_nothing_open() -> None:
    async with calling(replace(SETTINGS, max_message_bytes=1024)) as caller:
        with pytest.raises(InvalidArgument, match="DYN_TCP_MAX_MESSAGE_SIZE"):
            await caller.open("x" * 1024)
        with pytest.raises(InvalidArgument, match="metadata"):
            await caller.open(None, Context(metadata={"a": "x" * 200_000}))
        with pytest.raises(InvalidArgument, match="limited to"):
            await caller.open(None, Context(trace=TraceContext("a" * 32, "b" * 16, True, tracestate="k" * 70_000)))
        assert caller.home.streams == 0


async def test_a_reader_that_takes_nothing_stops_the_worker_through_its_socket(caller: Caller) -> None:
    stream, home = await caller.answered()
    sent = 0
    home.writer.transport.set_write_buffer_limits(high=0)
    while True:
        sent += 1
        try:
            await asyncio.wait_for(home.item(data="x" * 65_536), 0.3)
        except TimeoutError:
            break
    assert sent * 65_536 < 32 * 1024 * 1024
    received = 0
    while received < sent:
        received += len(await stream.next_batch())
    stream.close()


@each_case("piece", [1, 7, 24, 50])
async def test_an_answer_is_the_same_however_it_is_cut(caller: Caller, piece: int) -> None:
    stream, request = await caller.call()
    request.ack()
    home = await request.dial()
    whole = bytearray()
    home_writer, home.writer = home.writer, _Collector(whole)  # type: ignore[assignment]
    await home.control({"error": None})
    await home.chunk(1)
    await home.chunk(2, finish_reason="stop")
    await home.final()
    for at in range(0, len(whole), piece):
        home_writer.write(bytes(whole[at : at + piece]))
        await asyncio.sleep(0)
    assert [item.token_ids for item in await read_all(stream)] == [[1], [2]]
    home_writer.close()


class _Collector:
    def __init__(self, out: bytearray) -> None:
        self._out = out

    def write(self, data: bytes) -> None:
        self._out += data

    async def drain(self) -> None:
        pass
