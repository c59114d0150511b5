"""The worker's side of the native wire over real sockets, spoken to by a caller that shares no code with it."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from dynamo.errors import EngineShutdown, HttpError, InvalidArgument
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Handler, ResponseSink
from dynamo.runtime.calls.request_plane.listener import Listener
from dynamo.runtime.calls.request_plane.native import sink as sink_module
from dynamo.runtime.calls.request_plane.native.outbox import NativeOutbox
from support.cases import each_case
from support.native_caller import NativeCaller, native_caller, request_frame, two_part
from support.patience import PATIENCE_SECONDS

PATH = "1f/ns/c/e"


@asynccontextmanager
async def worker(handler: Handler, **settings: Any) -> AsyncIterator[tuple[Listener, NativeCaller]]:
    listener = Listener("127.0.0.1", settings=RequestPlaneSettings(**settings))
    await listener.start()
    try:
        listener.register(PATH, handler)
        async with native_caller(listener.address) as caller:
            yield listener, caller
    finally:
        await listener.close()


async def count(body: Any, context: Context, sink: ResponseSink) -> None:
    for n in range(body["n"]):
        sink.send_tokens([n])
        await asyncio.sleep(0)
    sink.send_tokens([], 0, "stop")


class Watcher:
    """A handler that sends one token and then tells what becomes of its context."""

    def __init__(self, *, finish: bool = False) -> None:
        self.finish = finish
        self.started = asyncio.Event()
        self.stopped = asyncio.Event()
        self.killed = asyncio.Event()
        self.leave = asyncio.Event()
        self.left = asyncio.Event()
        self.context: Context | None = None
        self.sink: ResponseSink | None = None

    async def handle(self, body: Any, context: Context, sink: ResponseSink) -> None:
        self.context, self.sink = context, sink
        context.on_cancel(lambda killed: (self.killed if killed else self.stopped).set())
        sink.send_tokens([1], 0, "stop" if self.finish else None)
        self.started.set()
        try:
            for event in asyncio.as_completed([self.killed.wait(), self.leave.wait()]):
                await event
                break
        finally:
            self.left.set()


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE_SECONDS)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not is_true():
            await asyncio.sleep(0.001)


# -- requests and ACKs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["msgpack", "json", None])
async def test_a_stream_is_prologue_items_final_and_sentinel(codec: str | None) -> None:
    async with worker(count) as (_, caller):
        answer = await caller.call(PATH, {"n": 2}, codec=codec)
        assert await answer.everything() == [
            {"error": None},
            {"data": {"data": {"token_ids": [0], "index": 0}}, "complete_final": False},
            {"data": {"data": {"token_ids": [1], "index": 0}}, "complete_final": False},
            {"data": {"data": {"token_ids": [], "index": 0, "finish_reason": "stop"}}, "complete_final": False},
            {"complete_final": True},
            "sentinel",
        ]


async def test_two_pipelined_requests_get_two_acks_in_order_one_byte_at_a_time() -> None:
    async with worker(count) as (_, caller):
        unknown, _ = caller.frame("nowhere", {"n": 1})
        known, answer = caller.frame(PATH, {"n": 1})
        for byte in unknown + known:
            caller.writer.write(bytes([byte]))
        assert [await caller.ack(), await caller.ack()] == ["Server unavailable: unknown endpoint nowhere", ""]
        assert (await answer.everything())[-1] == "sentinel"


async def test_many_requests_on_one_connection_are_all_answered() -> None:
    async with worker(count) as (listener, caller):
        frames = [caller.frame(PATH, {"n": 1}) for _ in range(200)]
        caller.writer.write(b"".join(frame for frame, _ in frames))
        assert {await caller.ack() for _ in frames} == {""}
        for _, answer in frames:
            assert len(await answer.everything()) == 5
        assert listener.core.running == 0


async def test_the_context_carries_id_metadata_and_trace() -> None:
    seen: list[Context] = []

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        seen.append(context)

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with worker(handle) as (_, caller):
        answer = await caller.call(PATH, None, metadata={"k": "v"}, headers={"traceparent": trace, "request-id": "x"})
        await answer.everything()
        await (await caller.call(PATH, None, headers={})).everything()
    first, second = seen
    assert (first.id(), first.metadata.copy()) == (answer.request_id, {"k": "v"})
    assert first.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert (second.metadata.copy(), second.trace) == ({}, None)


@each_case("codec", ["msgpack", "json"])
@each_case("value", ["text", 7, None, [1, "two", None], {"deep": [{}]}, True])
async def test_any_body_and_any_item_survive(codec: str, value: Any) -> None:
    async def echo(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_object({"data": body, "event": "e", "comment": ["c"], "id": "i"})

    async with worker(echo) as (_, caller):
        answer = await caller.call(PATH, value, codec=codec)
        _, item, *_ = await answer.everything()
        assert item["data"] == {"data": value, "event": "e", "comment": ["c"], "id": "i"}


async def test_a_declined_request_leaves_the_connection_usable() -> None:
    watcher = Watcher()
    async with worker(watcher.handle, engine_request_limit=1, engine_queue_limit=1) as (listener, caller):
        rejected: list[int] = []
        listener.core.observe(waited=lambda _: None, rejected=lambda: rejected.append(1))
        first = await caller.call(PATH, 1)
        second = await caller.call(PATH, 2)
        third, _ = caller.frame(PATH, 3)
        caller.writer.write(third)
        assert await caller.ack() == "Server overloaded: worker at capacity"
        assert rejected == [1]
        watcher.leave.set()
        assert (await first.everything())[-1] == "sentinel"
        assert (await second.everything())[-1] == "sentinel"
        assert (await (await caller.call(PATH, 4)).everything())[-1] == "sentinel"


async def test_an_over_limit_message_closes_its_connection_and_no_other() -> None:
    async with worker(count, max_message_bytes=4096) as (listener, caller):
        async with native_caller(listener.address) as greedy:
            frame, _ = greedy.frame(PATH, {"n": 1, "padding": "x" * 5000})
            greedy.writer.write(frame[:3000])
            assert (await greedy.ack()).startswith("Read error: message of")
            assert await greedy.reader.read() == b""
        assert (await (await caller.call(PATH, {"n": 1})).everything())[-1] == "sentinel"


async def test_garbage_closes_its_connection() -> None:
    async with worker(count) as (_, caller):
        caller.writer.write(b"\x00\x01p\x00\x02[]\x00\x00\x00\x00")
        assert (await caller.ack()).startswith("Read error: headers are not")
        assert await caller.reader.read() == b""


@each_case(
    ("control", "complaint"),
    [
        ({"request_type": "many_in"}, "many_in"),
        ({"payload_codec": "xml"}, "xml"),
        ({"connection_info": {"transport": "quic-response", "info": "{}"}}, "quic-response"),
        ({"connection_info": {"transport": "tcp_server", "info": "{}"}}, "address"),
        ({"id": "another"}, "another"),
        ({"metadata": {"k": 1}}, "metadata"),
    ],
)
async def test_a_request_that_cannot_be_served_is_declined_with_the_reason(
    control: dict[str, Any], complaint: str
) -> None:
    async with worker(count) as (_, caller):
        frame, _ = caller.frame(PATH, {"n": 1}, **control)
        caller.writer.write(frame)
        reply = await caller.ack()
        assert reply.startswith("Server unavailable: malformed request:")
        assert complaint in reply
        assert (await (await caller.call(PATH, {"n": 1})).everything())[-1] == "sentinel"


async def test_a_body_that_is_not_its_codec_is_declined() -> None:
    async with worker(count) as (_, caller):
        for payload in (two_part(b"{}", b""), b"", two_part(b"", b"data")):
            caller.writer.write(request_frame(PATH, {}, payload))
            assert (await caller.ack()).startswith("Server unavailable: malformed request:")


async def test_a_caller_that_reads_no_acks_is_not_read_either() -> None:
    async with worker(count) as (_, caller):
        frame, _ = caller.frame("x" * 60_000, None)  # each ACK repeats the path
        caller.writer.transport.set_write_buffer_limits(high=1)

        async def send() -> None:
            for _ in range(1000):  # 60 MB, far more than all socket buffers
                caller.writer.write(frame)
                await caller.writer.drain()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send(), 1)


# -- errors -------------------------------------------------------------------------------------------------------


@each_case(
    ("error", "expected"),
    [
        (InvalidArgument("no"), {"Backend": "InvalidArgument"}),
        (EngineShutdown("bye"), {"Backend": "EngineShutdown"}),
        (RuntimeError("broken"), {"Backend": "Unknown"}),
        (HttpError(418, "teapot"), "InvalidArgument"),
    ],
)
async def test_an_error_is_the_last_item_before_the_final(error: Exception, expected: Any) -> None:
    async def fail(body: Any, context: Context, sink: ResponseSink) -> None:
        if body:
            sink.send_tokens([1])
        raise error

    async with worker(fail) as (_, caller):
        for tokens_first in (False, True):
            prologue, *items = await (await caller.call(PATH, tokens_first)).everything()
            assert prologue == {"error": None}
            assert len(items) == 3 + tokens_first
            envelope = items[-3]["data"]
            assert (envelope["event"], envelope["error"]["error_type"]) == ("error", expected)
            assert items[-2:] == [{"complete_final": True}, "sentinel"]


async def test_a_value_that_cannot_travel_is_that_streams_error() -> None:
    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        sink.send_tokens([2], 0, None, {"odd": object()})

    async with worker(handle) as (_, caller):
        _, first, error, *_ = await (await caller.call(PATH, None)).everything()
        assert first["data"]["data"]["token_ids"] == [1]
        assert error["data"]["error"]["message"].startswith("TypeError: ")


# -- cancellation -------------------------------------------------------------------------------------------------


async def test_stop_is_graceful_and_the_rest_still_arrives() -> None:
    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()
        assert not context.is_killed()
        sink.send_tokens([5], 0, "cancelled")

    async with worker(handle) as (_, caller):
        answer = await caller.call(PATH, None)
        await answer.say("stop")
        _, item, final, sentinel = await answer.everything()
        assert item["data"]["data"] == {"token_ids": [5], "index": 0, "finish_reason": "cancelled"}
        assert (final, sentinel) == ({"complete_final": True}, "sentinel")


async def leave_by_kill(caller: NativeCaller, answer: Any) -> None:
    await answer.say("kill")


async def leave_by_eof(caller: NativeCaller, answer: Any) -> None:
    await answer.leave()


async def leave_by_reset(caller: NativeCaller, answer: Any) -> None:
    await answer.leave(abort=True)


async def leave_by_garbage(caller: NativeCaller, answer: Any) -> None:
    await answer.say("sentinel")


async def leave_by_data(caller: NativeCaller, answer: Any) -> None:
    _, writer = await answer.streams()
    writer.write(two_part(b"", b"data"))


async def leave_by_huge_frame(caller: NativeCaller, answer: Any) -> None:
    _, writer = await answer.streams()
    writer.write(struct.pack(">QQQ", 2**40, 0, 0))


async def leave_after_stop(caller: NativeCaller, answer: Any) -> None:
    await answer.say("stop")
    await answer.say("kill")


LEAVES = [
    leave_by_kill,
    leave_by_eof,
    leave_by_reset,
    leave_by_garbage,
    leave_by_data,
    leave_by_huge_frame,
    leave_after_stop,
]


@each_case("leave", LEAVES)
async def test_a_caller_that_leaves_is_a_kill_and_the_stream_closes(leave: Any) -> None:
    watcher = Watcher()
    async with worker(watcher.handle) as (listener, caller):
        answer = await caller.call(PATH, None)
        assert await answer.prologue() == {"error": None}
        assert (await answer.item())["complete_final"] is False
        await leave(caller, answer)
        await soon(watcher.killed)
        await soon(watcher.left)
        assert watcher.sink is not None
        assert watcher.sink.ended
        reader, _ = await answer.streams()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # no final, no sentinel: it just closes
            await asyncio.wait_for(reader.readexactly(1), PATIENCE_SECONDS)
        await until(lambda: listener.core.running == 0)


@pytest.mark.parametrize("leave", [leave_by_kill, leave_by_eof, leave_by_reset])
async def test_a_caller_that_leaves_after_the_finish_reason_is_no_cancellation(leave: Any) -> None:
    watcher = Watcher(finish=True)
    async with worker(watcher.handle) as (_, caller):
        answer = await caller.call(PATH, None)
        await answer.prologue()
        await answer.item()
        await leave(caller, answer)
        assert watcher.sink is not None
        gone = watcher.sink
        await until(lambda: gone.ended)
        watcher.leave.set()
        await soon(watcher.left)
        assert watcher.context is not None
        assert not watcher.context.is_stopped()


async def test_a_handler_that_goes_on_after_its_finished_caller_left_is_killed_after_a_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_module, "FINISHED_GRACE_SECONDS", 0.01)
    watcher = Watcher(finish=True)
    async with worker(watcher.handle) as (_, caller):
        answer = await caller.call(PATH, None)
        await answer.prologue()
        await answer.item()
        await answer.leave(abort=True)
        await soon(watcher.killed)


async def test_one_finished_choice_of_two_does_not_make_a_kill_a_success() -> None:
    started, killed = asyncio.Event(), asyncio.Event()

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1], 1)
        sink.send_tokens([1], 0, "stop")
        started.set()
        await context.async_killed_or_stopped()
        killed.set()

    async with worker(handle) as (_, caller):
        answer = await caller.call(PATH, None)
        await soon(started)
        await answer.say("kill")
        await soon(killed)


async def test_a_caller_that_leaves_while_its_request_waits_frees_the_queue() -> None:
    watcher = Watcher()
    async with worker(watcher.handle, engine_request_limit=1, engine_queue_limit=1) as (listener, caller):
        await caller.call(PATH, 1)
        waiting = await caller.call(PATH, 2)
        assert listener.core.queued == 1
        await waiting.leave()
        await until(lambda: listener.core.queued == 0)
        assert listener.core.running == 1
        watcher.leave.set()


async def test_a_call_home_that_cannot_connect_is_a_kill() -> None:
    watcher = Watcher()
    async with worker(watcher.handle) as (listener, caller):
        info = {"address": "127.0.0.1:1", "subject": "s", "context": "r", "stream_type": "response"}
        frame, _ = caller.frame(
            PATH, None, id="r", connection_info={"transport": "tcp_server", "info": json.dumps(info)}
        )
        caller.writer.write(frame)
        assert await caller.ack() == ""
        await soon(watcher.killed)
        await until(lambda: listener.core.running == 0)


async def test_a_kill_inside_the_process_breaks_the_stream() -> None:
    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        context.kill()
        sink.send_tokens([2])

    async with worker(handle) as (_, caller):
        answer = await caller.call(PATH, None)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await answer.everything()


# -- backpressure -------------------------------------------------------------------------------------------------


async def test_a_caller_that_does_not_read_stops_its_producer_and_gets_everything_in_the_end() -> None:
    count_sent = 0
    stalled = asyncio.Event()

    async def flood(body: Any, context: Context, sink: ResponseSink) -> None:
        nonlocal count_sent
        for n in range(2000):
            if not sink.has_credit():
                stalled.set()
                await sink.wait_credit()
            sink.send_object({"data": [n, "x" * 10_000]})
            count_sent = n + 1

    async with worker(flood) as (_, caller):
        answer = await caller.call(PATH, None)
        await answer.streams()
        await soon(stalled)
        for _ in range(20):
            await asyncio.sleep(0.001)
        held_back = count_sent
        assert held_back < 2000
        _, *items = await answer.everything()
        assert [item["data"]["data"][0] for item in items[:-2]] == list(range(2000))


async def test_a_producer_that_waits_for_credit_wakes_when_the_caller_leaves() -> None:
    stalled, woke = asyncio.Event(), asyncio.Event()

    async def flood(body: Any, context: Context, sink: ResponseSink) -> None:
        while not sink.ended:
            while sink.has_credit() and not sink.ended:
                sink.send_object({"data": "x" * 10_000})
                await asyncio.sleep(0)
            stalled.set()
            await sink.wait_credit()
        woke.set()

    async with worker(flood) as (_, caller):
        answer = await caller.call(PATH, None)
        await answer.streams()
        await soon(stalled)
        await answer.leave(abort=True)
        await soon(woke)


async def test_everything_of_one_loop_turn_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    flush = NativeOutbox.flush

    def counted(self: Any) -> None:
        writes.append(len(self._out))
        flush(self)

    connected = asyncio.Event()

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        await connected.wait()
        writes.clear()
        for n in range(100):
            sink.send_tokens([n])

    monkeypatch.setattr(NativeOutbox, "flush", counted)
    async with worker(handle) as (_, caller):
        answer = await caller.call(PATH, None)
        await answer.prologue()
        connected.set()
        for _ in range(100):
            await answer.item()
        assert (await answer.item(), await answer.item()) == ({"complete_final": True}, "sentinel")
        assert len([size for size in writes if size]) == 1


# -- the end of a stream and of the server ------------------------------------------------------------------------


async def test_a_caller_that_never_closes_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "LINGER_SECONDS", 0.01)
    async with worker(count) as (listener, caller):
        answer = await caller.call(PATH, {"n": 0})
        while await answer.item() != "sentinel":
            pass
        reader, _ = await answer.streams()
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""
        assert listener.core.running == 0


async def test_close_ends_open_streams_with_a_shutdown() -> None:
    watcher = Watcher()
    async with worker(watcher.handle) as (listener, caller):
        answer = await caller.call(PATH, None)
        await soon(watcher.started)
        await answer.streams()
        closing = asyncio.create_task(listener.close())
        *_, error, final, sentinel = await answer.everything()
        assert error["data"]["error"]["error_type"] == {"Backend": "EngineShutdown"}
        assert (final, sentinel) == ({"complete_final": True}, "sentinel")
        await closing
        assert watcher.left.is_set()
        assert await caller.reader.read() == b""
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the system likes
            await asyncio.open_connection("127.0.0.1", int(listener.address.rpartition(":")[2]))


async def test_close_does_not_wait_for_a_caller_that_neither_reads_nor_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.runtime.calls.request_plane.native.server.GOODBYE_SECONDS", 0.05)

    async def flood(body: Any, context: Context, sink: ResponseSink) -> None:
        while sink.has_credit() and not sink.ended:
            sink.send_object({"data": "x" * 10_000})
            await asyncio.sleep(0)

    async with worker(flood) as (listener, caller):
        answer = await caller.call(PATH, None)
        await answer.streams()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await listener.close()
