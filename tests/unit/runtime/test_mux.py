"""The mux plane over real sockets: order, credits, large bodies and items, stop, kill, loss, hostile peers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvloop

from dynamo.errors import CannotConnect, Disconnected, DynamoException, InvalidArgument, StreamIncomplete, Unknown
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import (
    INITIAL_CREDITS,
    OBJECT_INDEX,
    Instance,
    ResponseSink,
    split_tcp,
)
from dynamo.runtime.calls.request_plane.core import ServerCore
from dynamo.runtime.calls.request_plane.mux import connection as mux_connection
from dynamo.runtime.calls.request_plane.mux.bodies import LONG_IDS, SLICE_IDS
from dynamo.runtime.calls.request_plane.mux.client import MuxClient, MuxConnection, MuxStream
from dynamo.runtime.calls.request_plane.mux.connection import INLINE_BODY_BYTES
from dynamo.runtime.calls.request_plane.mux.frames import (
    HEADER,
    MAGIC,
    MAX_PAYLOAD,
    FrameDecoder,
    Hello,
    Kind,
    Open,
    decode_items,
    decode_open,
    decode_step,
    frame,
    items_frames,
    pack,
)
from dynamo.runtime.calls.request_plane.mux.server import MAX_CREDIT, MuxHost, MuxServerProtocol
from support.cases import each_case
from support.patience import PATIENCE_SECONDS
from support.streams import read_all

Handler = Callable[[Any, Context, ResponseSink], Awaitable[None]]


class Rig:
    """A listening core, a client, and the wires between them."""

    def __init__(self, core: ServerCore, client: MuxClient, port: int, connections: set[MuxServerProtocol]) -> None:
        self.core, self.client, self.port, self.connections = core, client, port, connections

    def instance(self, path: str = "p") -> Instance:
        return Instance(
            namespace="n", component="c", endpoint="e", instance_id=1,
            transport={"tcp": f"127.0.0.1:{self.port}/{path}"}, mux=1,
        )  # fmt: skip

    async def call(self, body: Any = None, context: Context | None = None) -> MuxStream:
        return await self.client.open(self.instance(), body, context or Context())


@pytest.fixture
async def rig() -> AsyncIterator[Callable[[Handler], Awaitable[Rig]]]:
    async with contextlib.AsyncExitStack() as stack:

        async def build(handler: Handler, **settings: Any) -> Rig:
            core = ServerCore()
            core.register("p", handler)
            host = MuxHost.of(core, RequestPlaneSettings(**settings))
            connections = host.connections
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: MuxServerProtocol(host), "127.0.0.1", 0)
            client = MuxClient()

            async def shut() -> None:
                await client.close()
                await core.close()
                for connection in list(connections):
                    connection.close()
                server.close()
                await server.wait_closed()

            stack.push_async_callback(shut)
            return Rig(core, client, server.sockets[0].getsockname()[1], connections)

        yield build


Build = Callable[[Handler], Awaitable[Rig]]


async def test_items_arrive_in_order_with_their_offsets_and_the_end_is_clean(rig: Build) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        assert body == {"token_ids": [1, 2]}
        sink.send_tokens([5])
        await asyncio.sleep(0)
        sink.send_tokens([6, 7], 1)
        sink.send_tokens([8], 0, "stop", {"completion_usage": {"total_tokens": 4}})

    stream = await (await rig(handler)).call({"token_ids": [1, 2]})
    items = await read_all(stream)
    assert [(i.index, i.offset, i.token_ids, i.finish_reason) for i in items] == [
        (0, 0, [5], None),
        (1, 0, [6, 7], None),
        (0, 1, [8], "stop"),
    ]
    assert items[-1].extra == {"completion_usage": {"total_tokens": 4}}


async def test_a_prompt_of_many_ids_leaves_and_arrives_in_slices(rig: Build) -> None:
    ids = [number % 150_000 for number in range(4 * LONG_IDS)]
    turns = 0

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([int(body["token_ids"] == ids), turns], finish_reason="stop")

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    house = await rig(handler)
    counting = asyncio.create_task(count_turns())
    (item,) = await read_all(await house.call({"token_ids": ids, "model": "m"}))
    counting.cancel()
    assert item.token_ids[0] == 1
    assert item.token_ids[1] >= 2 * len(ids) // SLICE_IDS  # the loop had a turn after each of them


async def test_a_request_that_is_given_up_while_its_ids_are_read_never_starts(rig: Build) -> None:
    started: list[str] = []

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        started.append(context.id())

    house = await rig(handler)
    stream = await house.call({"token_ids": [0] * 40 * LONG_IDS})
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not any(connection._streams for connection in house.connections):
            await asyncio.sleep(0)
        stream.close()
        while any(connection._streams for connection in house.connections):
            await asyncio.sleep(0)
    assert await read_all(await house.call()) == []
    assert len(started) == 1


async def test_everything_of_one_loop_turn_leaves_in_one_frame(rig: Build) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        for token in range(50):
            sink.send_tokens([token])

    r = await rig(handler)
    reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
    hello = frame(Kind.HELLO, pack(Hello(version=1)))
    opens = b"".join(frame(Kind.OPEN, pack((Open(path="p", id=str(i)), pack({}))), stream_id=i) for i in (1, 3))
    writer.write(MAGIC + hello + opens)
    kinds = []
    seen = 0
    while seen < 102:
        length, kind, _, _, _ = HEADER.unpack(await reader.readexactly(HEADER.size))
        payload = await reader.readexactly(length)
        kinds.append(kind)
        if kind == Kind.ITEMS:
            seen += len(decode_items(payload))
    assert kinds == [Kind.HELLO, Kind.ITEMS]
    writer.close()
    await writer.wait_closed()


async def credits_of(built: Rig, hello: Hello, *frames: bytes) -> list[int]:
    """Return the credit of the streams of a caller that has sent `hello`, then a request on stream 1, then `frames`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", built.port)
    request = frame(Kind.OPEN, pack((Open(path="p", id="r"), pack({}))), stream_id=1)
    # The answer to a ping comes behind everything that was sent before it.
    writer.write(MAGIC + frame(Kind.HELLO, pack(hello)) + request + b"".join(frames) + frame(Kind.PING, bytes(8)))
    try:
        kind = None
        while kind != Kind.PONG:
            head = await asyncio.wait_for(reader.readexactly(HEADER.size), PATIENCE_SECONDS)
            length, kind, *_ = HEADER.unpack(head)
            await reader.readexactly(length)
        (connection,) = built.connections
        return [sink.credit for sink in connection._streams.values()]
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("asked", [MAX_CREDIT + 1, 1 << 40])
async def test_a_caller_cannot_make_a_stream_hold_more_than_the_ceiling(rig: Build, asked: int) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()

    built = await rig(handler)
    assert await credits_of(built, Hello(version=1, credits=asked)) == [MAX_CREDIT]


async def test_grants_add_up_to_the_ceiling_and_no_further(rig: Build) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()

    built = await rig(handler)
    one_below = frame(Kind.CREDIT, pack([[1, MAX_CREDIT - 11]]))
    assert await credits_of(built, Hello(version=1, credits=10), one_below) == [MAX_CREDIT - 1]
    many = [frame(Kind.CREDIT, pack([[1, MAX_CREDIT], [1, 1 << 40]]))] * 2
    assert await credits_of(await rig(handler), Hello(version=1, credits=10), *many) == [MAX_CREDIT]


@pytest.mark.parametrize("capabilities", [[], ["steps"]])
async def test_a_caller_that_reads_steps_gets_single_tokens_in_one_frame_before_all_else(
    rig: Build, capabilities: list[str]
) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        assert sink.send_token(5)
        assert sink.send_token(6)  # the second of this turn: an item, behind the step
        sink.send_tokens([7], finish_reason="stop")

    built = await rig(handler)
    reader, writer = await asyncio.open_connection("127.0.0.1", built.port)
    writer.write(MAGIC + frame(Kind.HELLO, pack(Hello(version=1, capabilities=capabilities))))
    for stream_id in (1, 3):
        writer.write(frame(Kind.OPEN, pack((Open(path="p", id=str(stream_id)), pack(None))), stream_id=stream_id))
    tokens: list[tuple[int, int, int]] = []
    kinds: list[int] = []
    ended = 0
    while ended < 2:
        head = await asyncio.wait_for(reader.readexactly(HEADER.size), PATIENCE_SECONDS)
        length, kind, _, _, _ = HEADER.unpack(head)
        payload = await reader.readexactly(length)
        kinds.append(kind)
        if kind == Kind.STEP:
            tokens += zip(*decode_step(payload), strict=True)
        elif kind == Kind.ITEMS:
            for item in decode_items(payload):
                ended += item.index == -2
                tokens += [(item.stream_id, item.offset, token) for token in item.token_ids]
    writer.close()
    assert sorted(tokens) == [(1, 0, 5), (1, 1, 6), (1, 2, 7), (3, 0, 5), (3, 1, 6), (3, 2, 7)]
    assert (Kind.STEP in kinds) is bool(capabilities)


async def test_objects_of_any_shape_and_size_survive(rig: Build) -> None:
    values = ["text", 7, None, [1, {"a": b"bytes"}], "x" * (5 * MAX_PAYLOAD)]

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        for value in values:
            if not sink.has_credit():
                await sink.wait_credit()
            sink.send_object({"data": value})

    items = await read_all(await (await rig(handler)).call())
    assert {i.index for i in items} == {OBJECT_INDEX}
    assert [(i.extra or {})["data"] for i in items] == values


async def test_a_body_larger_than_a_frame_arrives_whole_while_others_pass_it(rig: Build) -> None:
    order: list[int] = []

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        order.append(len(body))
        sink.send_object({"data": sum(body)})

    r = await rig(handler)
    large = list(range(200_000))
    first = await r.call(large)
    second = await r.call([1])
    assert [(i.extra or {})["data"] for i in await read_all(second)] == [1]
    assert [(i.extra or {})["data"] for i in await read_all(first)] == [sum(large)]
    assert order == [1, 200_000]


class _Socket:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


@pytest.mark.parametrize("size", [*range(INLINE_BODY_BYTES - 40, INLINE_BODY_BYTES + 3), MAX_PAYLOAD, 3 * MAX_PAYLOAD])
async def test_a_request_is_one_frame_where_it_fits_and_never_a_frame_that_is_too_long(size: int) -> None:
    socket, body = _Socket(), b"\xc4" + b"b" * (size - 1)
    connection = MuxConnection("here", on_lost=lambda connection: None)
    connection.connection_made(socket)  # type: ignore[arg-type]
    connection.open("p", body, Context("r"))
    while len(socket.written) < size:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    frames = FrameDecoder(MAGIC).feed(socket.written)  # raises for a frame over the limit
    head, inline = next(decode_open(payload) for kind, _, _, payload in frames if kind == Kind.OPEN)
    rest = b"".join(payload for kind, _, _, payload in frames if kind == Kind.BODY)
    assert (inline, rest, head.size) in [(body, b"", 0), (None, body, size)]
    assert (inline is None) == (len(pack((Open("p", "r"), body))) > INLINE_BODY_BYTES)
    connection.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_the_first_request_of_a_turn_leaves_at_once_and_the_others_together(run: Callable[[Any], None]) -> None:
    async def check() -> None:
        worker, loop = socket.create_server(("127.0.0.1", 0)), asyncio.get_running_loop()
        make = partial(MuxConnection, "here", on_lost=lambda connection: None)
        _, connection = await loop.create_connection(make, *worker.getsockname())
        peer, _ = worker.accept()
        peer.settimeout(PATIENCE_SECONDS)
        decoder, kinds = FrameDecoder(MAGIC), list[int]()
        for _ in range(2):
            for name in range(3):
                connection.open("p", b"\x80", Context(str(name)))
            kinds.clear()
            while Kind.OPEN not in kinds:  # the loop does not turn meanwhile
                kinds += [kind for kind, _, _, _ in decoder.feed(peer.recv(65536))]
            assert kinds.count(Kind.OPEN) == 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            while kinds.count(Kind.OPEN) < 3:
                kinds += [kind for kind, _, _, _ in decoder.feed(peer.recv(65536))]
        for each in (connection, peer, worker):
            each.close()

    run(check())


async def test_metadata_that_fills_a_frame_are_refused() -> None:
    connection = MuxConnection("here", on_lost=lambda connection: None)
    connection.connection_made(_Socket())  # type: ignore[arg-type]
    context = Context("r")
    context.metadata = {"k": "v" * MAX_PAYLOAD}
    with pytest.raises(InvalidArgument, match="does not fit in one frame"):
        connection.open("p", b"\x80", context)


async def test_a_producer_stops_at_the_credit_and_goes_on_when_the_reader_reads(rig: Build) -> None:
    sent = 0
    stalled = asyncio.Event()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        nonlocal sent
        for token in range(5 * INITIAL_CREDITS):
            if not sink.has_credit():
                stalled.set()
                await sink.wait_credit()
            sink.send_tokens([token])
            sent += 1

    stream = await (await rig(handler)).call()
    await stalled.wait()
    assert sent == INITIAL_CREDITS
    items = await read_all(stream)
    assert [i.token_ids[0] for i in items] == list(range(5 * INITIAL_CREDITS))


async def test_a_stalled_reader_does_not_hold_up_another_stream(rig: Build) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        while not sink.ended:
            if not sink.has_credit():
                await sink.wait_credit()
            sink.send_tokens([1])
            if sink.ended or body == "short":
                return

    r = await rig(handler)
    stalled = await r.call("long")
    assert len(await read_all(await r.call("short"))) == 1
    stalled.close()


@pytest.mark.parametrize("kill", [False, True])
async def test_stop_and_kill_of_the_callers_context_reach_the_handler(rig: Build, kill: bool) -> None:
    seen: asyncio.Future[tuple[bool, bool]] = asyncio.get_running_loop().create_future()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        await context.async_killed_or_stopped()
        seen.set_result((context.is_stopped(), context.is_killed()))
        sink.send_tokens([2], 0, "cancelled")

    context = Context()
    stream = await (await rig(handler)).call(None, context)
    await stream.next_batch()
    (context.kill if kill else context.stop_generating)()
    rest = await read_all(stream)
    assert await seen == (True, kill)
    assert [i.token_ids for i in rest] == ([] if kill else [[2]])


async def test_closing_a_half_read_stream_is_a_kill(rig: Build) -> None:
    killed = asyncio.Event()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        await context.async_killed_or_stopped()
        if context.is_killed():
            killed.set()

    stream = await (await rig(handler)).call()
    await stream.next_batch()
    stream.close()
    await killed.wait()


async def test_closing_a_finished_stream_is_no_kill(rig: Build) -> None:
    contexts: list[Context] = []

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        contexts.append(context)
        sink.send_tokens([1], 0, "stop")

    r = await rig(handler)
    await read_all(await r.call())
    await read_all(await r.call())  # a round trip later, whatever the first close sent has been seen
    assert [c.is_stopped() for c in contexts] == [False, False]


@pytest.mark.parametrize("error", [InvalidArgument("too long"), Unknown("boom"), StreamIncomplete("no end")])
async def test_an_error_arrives_typed_with_its_cause_after_the_items_before_it(
    rig: Build, error: DynamoException
) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        raise error from KeyError("inner")

    stream = await (await rig(handler)).call()
    assert [i.token_ids for i in await stream.next_batch()] == [[1]]
    with pytest.raises(type(error), match=str(error)) as caught:
        await stream.next_batch()
    assert "inner" in str(caught.value.__cause__)


async def test_a_lost_connection_is_an_error_here_and_a_kill_there(rig: Build) -> None:
    killed = asyncio.Event()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        await context.async_killed_or_stopped()
        if context.is_killed():
            killed.set()

    r = await rig(handler)
    stream = await r.call()
    await stream.next_batch()
    for connection in r.connections.copy():
        connection._transport.abort()  # type: ignore[union-attr]  # the fault itself: a cut wire
    with pytest.raises(Disconnected, match="ended before generation completed"):
        await stream.next_batch()
    await killed.wait()
    assert [i.token_ids for i in await (await r.call()).next_batch()] == [[1]]  # it dials again


async def test_an_unreachable_worker_is_cannot_connect() -> None:
    client = MuxClient()
    instance = Instance(
        namespace="n", component="c", endpoint="e", instance_id=1, transport={"tcp": "127.0.0.1:1/p"}, mux=1
    )
    with pytest.raises(CannotConnect, match=r"127.0.0.1:1"):
        await client.open(instance, {}, Context())
    await client.close()


async def test_an_instance_without_mux_is_declined_by_name() -> None:
    instance = Instance(namespace="n", component="c", endpoint="e", instance_id=1, transport={"tcp": "127.0.0.1:1/p"})
    with pytest.raises(CannotConnect, match="does not speak mux"):
        await MuxClient().open(instance, {}, Context())


async def test_a_value_that_cannot_travel_fails_its_own_stream_only(rig: Build) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        if body == "bad":
            sink.send_tokens([1], 0, None, {"engine_data": object()})
        sink.send_tokens([2], 0, "stop")

    r = await rig(handler)
    good, bad = await r.call("good"), await r.call("bad")
    assert [i.token_ids for i in await read_all(good)] == [[2]]
    with pytest.raises(InvalidArgument, match="cannot be encoded"):
        await read_all(bad)


HELLO = MAGIC + frame(Kind.HELLO, pack(Hello(version=1)))
HOSTILE = {
    "wrong magic": b"\xffDYNMUY\n" + bytes(64),
    "no hello": MAGIC + frame(Kind.PING, bytes(8)),
    "garbage hello": MAGIC + frame(Kind.HELLO, b"\xc1"),
    "version 0": MAGIC + frame(Kind.HELLO, pack({"version": 0})),
    "hello twice": HELLO + frame(Kind.HELLO, pack(Hello(version=1))),
    "huge frame": HELLO + HEADER.pack(MAX_PAYLOAD + 1, Kind.OPEN, 0, 0, 1),
    "stream zero": HELLO + frame(Kind.OPEN, pack((Open(path="p", id="x"), b"\xc0"))),
    "open twice": HELLO + 2 * frame(Kind.OPEN, pack((Open(path="slow", id="x"), b"\xc0")), stream_id=1),
    "open garbage": HELLO + frame(Kind.OPEN, b"\x93", stream_id=1),
    "ping short": HELLO + frame(Kind.PING, b"1"),
    "cancel garbage": HELLO + frame(Kind.CANCEL, b"\x02", stream_id=1),
    "negative credit": HELLO
    + frame(Kind.OPEN, pack((Open(path="slow", id="x"), b"\xc0")), stream_id=1)
    + frame(Kind.CREDIT, pack([[1, -5]])),
    "body too long": HELLO
    + frame(Kind.OPEN, pack((Open(path="p", id="x", size=3), None)), stream_id=1)
    + frame(Kind.BODY, b"12345", stream_id=1, flags=1),
    "body too short": HELLO
    + frame(Kind.OPEN, pack((Open(path="p", id="x", size=3), None)), stream_id=1)
    + frame(Kind.BODY, b"1", stream_id=1, flags=1),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_peer_that_breaks_the_wire_is_told_why_and_closed_and_others_go_on(rig: Build, name: str) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1], 0, "stop")

    async def slow(body: Any, context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()

    r = await rig(handler)
    r.core.register("slow", slow)
    reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
    writer.write(HOSTILE[name])
    answer = await reader.read()
    assert frame(Kind.ERROR, b"")[4:5] in answer
    assert b"message" in answer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert len(await read_all(await r.call())) == 1


@pytest.mark.parametrize("cut", range(0, 120, 7))
async def test_a_peer_that_leaves_in_the_middle_of_anything_leaves_nothing_behind(rig: Build, cut: int) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()

    r = await rig(handler)
    wire = HELLO + frame(Kind.OPEN, pack((Open(path="p", id="x" * 40), b"\xc0")), stream_id=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
    writer.write(wire[:cut])
    writer.write_eof()
    await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await drain_core(r)
    assert r.core.running == 0
    assert not r.connections


async def drain_core(rig: Rig) -> None:
    """Let the loop turn until the core is idle; bounded by the test's own time limit."""
    while rig.core.running or rig.connections:
        await asyncio.sleep(0)


# -- what a caller must survive ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def worker_that_says(*answer: bytes) -> AsyncIterator[Instance]:
    """A worker that reads the request, answers with these very bytes, and waits for the caller to leave."""

    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
            writer.writelines(answer)
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        left.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield Instance(
            namespace="n", component="c", endpoint="e", instance_id=1, transport={"tcp": f"127.0.0.1:{port}/p"}, mux=1
        )
        await asyncio.wait_for(left.wait(), PATIENCE_SECONDS)


HELLO = frame(Kind.HELLO, pack(Hello(version=1)))
GAPS: dict[str, list[tuple[Any, ...]]] = {
    "first": [(1, 0, 5, [1])],
    "later": [(1, 0, 0, [1]), (1, 0, 2, [2])],
    "overlap": [(1, 0, 0, [1, 2]), (1, 0, 1, [2])],
    "end counts more": [(1, 0, 0, [1]), (1, -2, 2, [], None, None)],
}


@each_case("gap", GAPS)
async def test_a_stream_with_a_gap_is_incomplete_and_never_a_clean_end(gap: str) -> None:
    async with worker_that_says(HELLO, *items_frames(GAPS[gap])) as instance:
        client = MuxClient()
        stream = await client.open(instance, {}, Context())
        with pytest.raises(StreamIncomplete):
            await asyncio.wait_for(read_all(stream), PATIENCE_SECONDS)
        stream.close()
        await client.close()


async def test_a_caller_that_only_listens_is_not_silent(
    rig: Callable[..., Awaitable[Rig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slow stream alone on its connection: something is heard all the time, and there are credits for an hour.
    monkeypatch.setattr(mux_connection, "PING_SECONDS", 0.2)
    silence = 0.6

    async def drip(body: Any, context: Context, sink: ResponseSink) -> None:
        ends_at = time.monotonic() + 2.5 * silence
        while time.monotonic() < ends_at:
            sink.send_tokens([1])
            await asyncio.sleep(0.01)
        sink.send_tokens([2], finish_reason="stop")

    house = await rig(drip, handshake_timeout_seconds=silence, silence_seconds=silence)
    items = await asyncio.wait_for(read_all(await house.call()), PATIENCE_SECONDS)
    assert items[-1].token_ids == [2]


@pytest.mark.parametrize("silence_of", ["caller", "worker"])
async def test_a_process_that_stood_still_takes_nobody_for_silent(
    rig: Callable[..., Awaitable[Rig]], monkeypatch: pytest.MonkeyPatch, silence_of: str
) -> None:
    # Its timers are late, and what the other side said is yet to be read.
    monkeypatch.setattr(mux_connection, "PING_SECONDS", 0.05)
    settings: dict[str, Any] = (
        {"handshake_timeout_seconds": 0.4, "silence_seconds": 0.4} if silence_of == "caller" else {}
    )
    if silence_of == "worker":
        monkeypatch.setattr(mux_connection, "SILENCE_SECONDS", 0.4)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(body: Any, context: Context, sink: ResponseSink) -> None:
        begun.set()
        await go_on.wait()
        sink.send_tokens([2], finish_reason="stop")

    house = await rig(wait, **settings)
    stream = await house.call()
    await begun.wait()
    for _ in range(2):
        time.sleep(0.6)  # noqa: ASYNC251 - the loop stands still for longer than the silence, as in a stopped process
        await asyncio.sleep(0.05)
    go_on.set()
    items = await asyncio.wait_for(read_all(stream), PATIENCE_SECONDS)
    assert items[-1].token_ids == [2]


async def test_a_connection_that_is_lost_before_it_is_used_opens_nothing() -> None:
    async with worker_that_says() as instance:
        host, port, _ = split_tcp(instance.transport["tcp"])
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: MuxConnection("there", on_lost=lambda _: None), host, port
        )
        transport.abort()
        while connection.usable:
            await asyncio.sleep(0)
        with pytest.raises(CannotConnect, match="there closed the connection"):
            connection.open("p", b"", Context())


async def test_a_call_that_waits_for_a_connection_ends_typed_when_the_client_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialling = asyncio.Event()

    async def never(*args: Any) -> None:
        dialling.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    client = MuxClient()
    instance = Instance(
        namespace="n", component="c", endpoint="e", instance_id=1, transport={"tcp": "127.0.0.1:1/p"}, mux=1
    )
    call = asyncio.create_task(client.open(instance, {}, Context()))
    await dialling.wait()
    await client.close()
    with pytest.raises(CannotConnect, match="closed"):
        await asyncio.wait_for(call, PATIENCE_SECONDS)
