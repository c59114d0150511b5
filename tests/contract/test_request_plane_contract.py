"""The promises of `request_plane.base`, held by every plane.

A plane is a `Plane`: how to open a server, a client, and the instance record of a path. To add one, add its opener to
`PLANES`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dynamo.errors import (
    Cancelled,
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
)
from dynamo.runtime.base.settings import NatsSettings, RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.nats_connection import NatsConnection
from dynamo.runtime.calls.request_plane.base import (
    INITIAL_CREDITS,
    OBJECT_INDEX,
    Handler,
    Instance,
    RequestPlaneClient,
    RequestPlaneServer,
    ResponseSink,
    ResponseStream,
    StreamItem,
)
from dynamo.runtime.calls.request_plane.listener import Listener
from dynamo.runtime.calls.request_plane.memory import MemoryPlane
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from dynamo.runtime.calls.request_plane.native.call_home import CallHomeListener
from dynamo.runtime.calls.request_plane.native.client import NativeClient
from dynamo.runtime.calls.request_plane.native.nats_server import NatsServer
from dynamo.runtime.calls.request_plane.native.plane import NatsClient
from dynamo.runtime.observe.tracing import TraceContext
from support.nats_server import NatsServer as NatsServerProcess
from support.nats_server import shared_nats
from support.patience import PATIENCE_SECONDS
from support.streams import read_all

__all__ = ["shared_nats"]

PATH = "1f/ns/c/e"
LIMITS = RequestPlaneSettings(engine_request_limit=2, engine_queue_limit=1)


@dataclass
class Plane:
    server: RequestPlaneServer
    client: RequestPlaneClient
    has_window: bool = True  # False: only full sockets hold a producer up

    def instance(self, path: str = PATH) -> Instance:
        return Instance(namespace="ns", component="c", endpoint="e", instance_id=31, **self.server.transport(path))

    def serve(self, handler: Handler, path: str = PATH) -> None:
        self.server.register(path, handler)

    async def open(self, body: Any = None, context: Context | None = None, path: str = PATH) -> ResponseStream:
        await self.server.start()
        return await self.client.open(self.instance(path), body, context or Context())


@asynccontextmanager
async def memory_plane(settings: RequestPlaneSettings, request: pytest.FixtureRequest) -> AsyncIterator[Plane]:
    plane = MemoryPlane()
    yield Plane(plane.server(settings), plane.client())


@asynccontextmanager
async def mux_plane(settings: RequestPlaneSettings, request: pytest.FixtureRequest) -> AsyncIterator[Plane]:
    yield Plane(Listener("127.0.0.1", settings=settings), MuxClient())


@asynccontextmanager
async def native_plane(settings: RequestPlaneSettings, request: pytest.FixtureRequest) -> AsyncIterator[Plane]:
    home = CallHomeListener(replace(settings, response_host="127.0.0.1"))
    yield Plane(Listener("127.0.0.1", settings=settings), NativeClient(settings, home), has_window=False)


@asynccontextmanager
async def nats_plane(settings: RequestPlaneSettings, request: pytest.FixtureRequest) -> AsyncIterator[Plane]:
    home = CallHomeListener(replace(settings, response_host="127.0.0.1"))
    broker: NatsServerProcess = request.getfixturevalue("shared_nats")
    worker, caller = (NatsConnection(NatsSettings(servers=(broker.url,)), wanted_by="the test") for _ in range(2))
    server = NatsServer(worker, settings)
    await caller.start()
    yield Plane(server, NatsClient(caller, home, request_timeout_seconds=5), has_window=False)
    await worker.close()
    await caller.close()


PLANES: dict[str, Callable[[RequestPlaneSettings, pytest.FixtureRequest], AbstractAsyncContextManager[Plane]]] = {
    "memory": memory_plane,
    "mux": mux_plane,
    "native": native_plane,
    "nats": nats_plane,
}


@asynccontextmanager
async def running(request: pytest.FixtureRequest, settings: RequestPlaneSettings) -> AsyncIterator[Plane]:
    async with PLANES[request.param](settings, request) as plane, asyncio.timeout(PATIENCE_SECONDS):
        await plane.server.start()
        try:
            yield plane
        finally:
            await plane.client.close()
            await plane.server.close()


@pytest.fixture(params=sorted(PLANES))
async def plane(request: pytest.FixtureRequest) -> AsyncIterator[Plane]:
    async with running(request, RequestPlaneSettings()) as opened:
        yield opened


@pytest.fixture(params=sorted(PLANES))
async def small_plane(request: pytest.FixtureRequest) -> AsyncIterator[Plane]:
    """Two requests run, one waits, a fourth is declined."""
    async with running(request, LIMITS) as opened:
        yield opened


async def call(plane: Plane, body: Any = None, context: Context | None = None, path: str = PATH) -> list[StreamItem]:
    """Open and read to the end; a decline may come from either step."""
    return await read_all(await plane.open(body, context, path))


async def half_read(plane: Plane) -> tuple[ResponseStream, asyncio.Future[bool]]:
    """Return a stream that has given its first item and does not end, and whether its request was killed, once it was left."""
    killed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        await context.async_killed_or_stopped()
        killed.set_result(context.is_killed())

    plane.serve(handler)
    stream = await plane.open()
    await stream.next_batch()
    return stream, killed


def plain(item: StreamItem) -> tuple[Any, ...]:
    return item.index, item.offset, list(item.token_ids), item.finish_reason, item.extra


async def test_items_arrive_in_order_with_choice_offset_and_extras(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1, 2])
        sink.send_tokens([7], index=1)
        sink.send_tokens([3], extra={"log_probs": [-0.5], "text": "c"})
        sink.send_tokens([], finish_reason="stop", extra={"completion_usage": {"total_tokens": 3}})
        sink.send_tokens([8], index=1, finish_reason={"error": "x"})

    plane.serve(handler)
    assert [plain(item) for item in await call(plane)] == [
        (0, 0, [1, 2], None, None),
        (1, 0, [7], None, None),
        (0, 2, [3], None, {"log_probs": [-0.5], "text": "c"}),
        (0, 3, [], "stop", {"completion_usage": {"total_tokens": 3}}),
        (1, 1, [8], {"error": "x"}, None),
    ]


VALUES = [None, True, 0, -1, 2**63, 1.5, "text", "", b"bytes", [], [1, [2]], {}, {"a": {"b": None}}, "ü" * 70_000]


async def test_any_value_travels_both_ways(plane: Plane) -> None:
    async def echo(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_object({"data": body})

    plane.serve(echo)
    for value in VALUES:
        (item,) = await call(plane, value)
        assert (item.index, item.extra) == (OBJECT_INDEX, {"data": value}), repr(value)[:40]


async def test_an_object_item_keeps_every_member_of_its_envelope(plane: Plane) -> None:
    envelope = {"data": {"x": 1}, "event": "note", "comment": ["a", "b"], "id": "7"}

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_object(envelope)
        sink.send_object({})

    plane.serve(handler)
    assert [item.extra for item in await call(plane)] == [envelope, {}]


async def test_neither_side_can_change_what_the_other_holds(plane: Plane) -> None:
    body = {"list": [1]}
    ids = [1]
    envelope: dict[str, Any] = {"data": [1]}

    async def handler(received: Any, context: Context, sink: ResponseSink) -> None:
        received["list"].append(2)
        sink.send_tokens(ids)
        sink.send_object(envelope)
        await asyncio.sleep(0)  # what was sent in a turn may be encoded at its end, and not later
        ids.append(2)
        envelope["data"].append(2)

    plane.serve(handler)
    tokens, item = await call(plane, body)
    assert body == {"list": [1]}
    assert list(tokens.token_ids) == [1]
    assert item.extra == {"data": [1]}


async def test_a_request_that_cannot_be_encoded_is_the_callers_error(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None: ...

    plane.serve(handler)
    with pytest.raises(InvalidArgument, match="encoded"):
        await call(plane, object())


async def test_an_item_that_cannot_be_encoded_fails_its_own_stream_only(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_object({"data": object() if body == "bad" else "good"})

    plane.serve(handler)
    results = await asyncio.gather(call(plane, "bad"), call(plane, "good"), return_exceptions=True)
    assert isinstance(results[0], DynamoException)
    assert isinstance(results[1], list)


async def test_an_error_arrives_typed_with_its_causes_after_the_items_before_it(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        try:
            raise EngineShutdown("inner")
        except EngineShutdown as error:
            raise InvalidArgument("too long") from error

    plane.serve(handler)
    stream = await plane.open()
    (item,) = await stream.next_batch()
    assert list(item.token_ids) == [1]
    with pytest.raises(InvalidArgument, match="too long") as caught:
        await stream.next_batch()
    assert isinstance(caught.value.__cause__, EngineShutdown)
    with pytest.raises(InvalidArgument):  # and it stays so
        await stream.next_batch()
    stream.close()


async def test_an_exception_without_a_type_is_unknown_and_names_its_class(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        raise KeyError("k")

    plane.serve(handler)
    with pytest.raises(Unknown, match="KeyError"):
        await call(plane)


async def test_a_sink_keeps_what_it_was_ended_with(plane: Plane) -> None:
    sinks: list[Any] = []
    failure = InvalidArgument("too long")

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sinks.append(sink)
        sink.end(failure)

    plane.serve(handler)
    with pytest.raises(InvalidArgument):
        await call(plane)
    assert sinks[0].failure is failure


async def test_a_clean_end_without_items_is_an_empty_stream(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None: ...

    plane.serve(handler)
    assert await call(plane) == []


async def test_the_first_end_wins_and_later_items_are_dropped(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        sink.end()
        assert sink.ended
        sink.end(Unknown("late"))
        sink.send_tokens([2])
        raise Unknown("later")

    plane.serve(handler)
    assert [list(item.token_ids) for item in await call(plane)] == [[1]]


async def test_items_of_one_turn_are_read_in_one_batch(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        for number in range(10):
            sink.send_tokens([number])

    plane.serve(handler)
    stream = await plane.open()
    assert len(await stream.next_batch()) == 10
    assert await stream.next_batch() == []
    stream.close()


async def test_identity_metadata_trace_and_prompt_length_travel(plane: Plane) -> None:
    seen: list[Context] = []

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        seen.append(context)
        context.metadata["worker"] = "wrote this"

    trace = TraceContext("a" * 32, "b" * 16, True, tracestate="k=v", x_request_id="x")
    context = Context("request-1", {"tenant": "t"}, trace=trace)
    context.prompt_tokens = 17
    plane.serve(handler)
    await call(plane, None, context)
    (remote,) = seen
    assert remote.id() == "request-1"
    assert remote.metadata.copy() == {"tenant": "t", "worker": "wrote this"}
    assert context.metadata.copy() == {"tenant": "t"}
    assert remote.trace_id == "a" * 32
    assert (remote.trace_headers() or {})["tracestate"] == "k=v"
    assert remote.prompt_tokens == 17


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("by", ["stream", "context"])
async def test_stop_and_kill_reach_the_worker(plane: Plane, killed: bool, by: str) -> None:
    seen: asyncio.Future[tuple[bool, bool]] = asyncio.get_running_loop().create_future()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        await context.async_killed_or_stopped()
        seen.set_result((context.is_stopped(), context.is_killed()))
        sink.send_tokens([2], finish_reason="cancelled")

    context = Context()
    plane.serve(handler)
    stream = await plane.open(None, context)
    assert len(await stream.next_batch()) == 1
    if by == "stream":
        (stream.kill if killed else stream.stop)()
    else:
        (context.kill if killed else context.stop_generating)()
    # A stop lets what the worker still says through, a kill delivers nothing more.
    rest = await read_all(stream)
    assert [list(item.token_ids) for item in rest] == ([] if killed else [[2]])
    assert await seen == (True, killed)


async def test_a_context_stopped_before_the_call_stops_the_request(plane: Plane) -> None:
    started: list[Context] = []

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        started.append(context)
        await context.async_killed_or_stopped()

    context = Context()
    context.stop_generating()
    plane.serve(handler)
    with suppress(Cancelled):
        assert await call(plane, None, context) == []
    assert all(context.is_stopped() for context in started)


async def test_closing_a_stream_that_has_not_ended_kills_it(plane: Plane) -> None:
    stream, killed = await half_read(plane)
    stream.close()
    stream.close()
    assert await killed


async def test_closing_a_stream_that_has_ended_kills_nothing(plane: Plane) -> None:
    contexts: list[Context] = []

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        contexts.append(context)
        sink.send_tokens([1])

    plane.serve(handler)
    caller = Context()
    await call(plane, None, caller)
    await call(plane)  # a whole round trip later nothing can be under way any more
    caller.kill()  # the registration was taken back
    await call(plane)
    assert not any(context.is_killed() for context in contexts)


async def test_a_producer_waits_for_its_reader(plane: Plane) -> None:
    sent = 0

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        nonlocal sent
        for number in range(4 * INITIAL_CREDITS):
            if not sink.has_credit():
                await sink.wait_credit()
            sink.send_tokens([number])
            sent += 1

    plane.serve(handler)
    stream = await plane.open()
    other = await plane.open(None, path=serve_ping(plane))
    assert await read_all(other)  # a stalled stream does not hold up another one
    assert sent <= INITIAL_CREDITS + 1 or not plane.has_window
    items = await read_all(stream)
    assert [item.token_ids[0] for item in items] == list(range(4 * INITIAL_CREDITS))


async def test_objects_cost_credit_by_their_size(plane: Plane) -> None:
    sent = 0

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        nonlocal sent
        while sent < 100:
            if not sink.has_credit():
                await sink.wait_credit()
            sink.send_object({"data": b"x" * 6400})
            sent += 1

    plane.serve(handler)
    stream = await plane.open()
    await read_all(await plane.open(None, path=serve_ping(plane)))
    assert sent <= INITIAL_CREDITS // 100 + 1 or not plane.has_window
    assert len(await read_all(stream)) == 100


async def test_a_kill_frees_a_producer_that_waits_for_credit(plane: Plane) -> None:
    freed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    full = asyncio.Event()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        while not sink.ended:
            while sink.has_credit():
                sink.send_tokens([0] * 64)
            full.set()
            await sink.wait_credit()
        freed.set_result(sink.ended)

    plane.serve(handler)
    stream = await plane.open()
    await full.wait()
    stream.kill()
    assert await freed
    stream.close()


async def test_an_unknown_path_is_declined(plane: Plane) -> None:
    serve_ping(plane)
    with pytest.raises((WorkerUnavailable, CannotConnect)):
        await call(plane, path="1f/ns/c/other")


async def test_unregistering_declines_the_new_and_keeps_the_old(plane: Plane) -> None:
    go_on = asyncio.Event()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        await go_on.wait()
        sink.send_tokens([2])

    plane.serve(handler)
    stream = await plane.open()
    await stream.next_batch()
    plane.server.unregister(PATH)
    with pytest.raises(WorkerUnavailable):
        await call(plane)
    go_on.set()
    assert [list(item.token_ids) for item in await read_all(stream)] == [[2]]


async def test_a_path_is_served_once(plane: Plane) -> None:
    serve_ping(plane)
    with pytest.raises(ValueError, match="already served"):
        serve_ping(plane)


async def test_more_than_the_limits_allow_is_declined_at_once_and_the_rest_is_served(small_plane: Plane) -> None:
    go_on = asyncio.Event()
    running_now = 0

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        nonlocal running_now
        running_now += 1
        sink.send_tokens([1])
        await go_on.wait()
        running_now -= 1

    small_plane.serve(handler)
    accepted = [await small_plane.open() for _ in range(3)]
    with pytest.raises(Overloaded):
        await call(small_plane)
    while running_now < 2:
        await asyncio.sleep(0)
    assert running_now == 2
    go_on.set()
    for stream in accepted:
        assert len(await read_all(stream)) == 1
    assert len(await call(small_plane)) == 1  # the connection serves on


async def test_a_deadline_ends_the_stream_and_the_request(plane: Plane) -> None:
    ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()
        ended.set_result(context.is_killed())

    plane.serve(handler)
    context = Context(deadline=asyncio.get_running_loop().time() + 0.05)
    with pytest.raises(ResponseTimeout):
        await call(plane, None, context)
    assert await ended


async def test_a_deadline_that_has_passed_is_not_sent(plane: Plane) -> None:
    serve_ping(plane)
    with pytest.raises(ResponseTimeout):
        await call(plane, None, Context(deadline=asyncio.get_running_loop().time() - 1), path="1f/ping")


async def test_a_server_that_closes_ends_its_streams_with_a_retryable_error(plane: Plane) -> None:
    stream, killed = await half_read(plane)
    instance = plane.instance()
    await plane.server.close()
    with pytest.raises((EngineShutdown, Disconnected)):
        await read_all(stream)
    assert await killed
    # ConnectionTimeout: a broker that had not yet heard of the end took the request for nobody.
    with pytest.raises((CannotConnect, ConnectionTimeout, Disconnected, WorkerUnavailable)):
        await read_all(await plane.client.open(instance, None, Context()))


async def test_a_client_that_closes_breaks_its_streams_and_kills_their_requests(plane: Plane) -> None:
    stream, killed = await half_read(plane)
    await plane.client.close()
    with pytest.raises(Disconnected):
        await stream.next_batch()
    assert await killed
    with pytest.raises(CannotConnect):
        await plane.open()


async def test_the_size_of_the_body_is_known_to_the_worker(plane: Plane) -> None:
    sizes: list[int] = []

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sizes.append(sink.request_bytes)

    plane.serve(handler)
    await call(plane, {"n": 2})
    assert sizes == [4]  # 81 a1 6e 02


async def test_many_streams_at_once_do_not_mix(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        for number in range(20):
            sink.send_tokens([body, number])
            await asyncio.sleep(0)

    plane.serve(handler)
    results = await asyncio.gather(*(call(plane, number) for number in range(50)))
    for number, items in enumerate(results):
        assert [list(item.token_ids) for item in items] == [[number, step] for step in range(20)]


def serve_ping(plane: Plane) -> str:
    async def ping(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([0])

    plane.serve(ping, "1f/ping")
    return "1f/ping"


async def test_finishing_with_the_terminal_chunk_lets_the_worker_end_in_its_own_time(plane: Plane) -> None:
    go, ended = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1], finish_reason="stop")
        await go.wait()  # a generator's `finally`
        ended.set_result(context.is_stopped())

    plane.serve(handler)
    context = Context()
    stream = await plane.open(context=context)
    assert [item.finish_reason for item in await stream.next_batch()] == ["stop"]
    stream.finish()
    stream.close()
    context.kill()  # the request is over: what happens to its context concerns nobody
    go.set()
    assert await ended is False


async def test_a_worker_that_does_not_end_after_its_terminal_chunk_is_told(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.runtime.calls.request_plane.stream.FINISH_SECONDS", 0.01)
    killed = asyncio.Event()

    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1], finish_reason="stop")
        await context.async_killed_or_stopped()
        killed.set()

    plane.serve(handler)
    stream = await plane.open()
    await stream.next_batch()
    stream.finish()
    await killed.wait()


async def listened(stream: ResponseStream) -> tuple[list[StreamItem], BaseException | None]:
    """Read by listening, one take for each call; what came, and the error at the end."""
    items: list[StreamItem] = []
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def arrived() -> None:
        try:
            batch = stream.take()
        except DynamoException as error:
            done.set_result(error)
            stream.listen(None)
        else:
            items.extend(batch or ())
            if batch is None:
                done.set_result(None)
                stream.listen(None)

    stream.listen(arrived)
    error = await done
    stream.listen(None)
    stream.close()
    return items, error


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("turns", [0, 1])
async def test_a_listener_hears_what_a_reader_would_read(plane: Plane, fails: bool, turns: int) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        for token in range(3 * INITIAL_CREDITS):
            if not sink.has_credit():
                await sink.wait_credit()
            sink.send_tokens([token])
        for _ in range(turns):
            await asyncio.sleep(0)
        if fails:
            raise InvalidArgument("no more")

    plane.serve(handler)
    items, error = await listened(await plane.open())
    assert [item.token_ids for item in items] == [[token] for token in range(3 * INITIAL_CREDITS)]
    assert (str(error) if error else None) == ("no more" if fails else None)


async def test_a_reader_with_a_lane_gets_every_token_once_and_in_order_whether_the_plane_has_one_or_not(
    plane: Plane,
) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        for token in range(6):
            if token == 3:
                sink.send_tokens([token], extra={"text": "x"})
            elif token % 2:
                assert sink.send_token(token)
            else:
                sink.send_tokens([token])
            if token != 4:  # two of one turn
                await asyncio.sleep(0)

    plane.serve(handler)
    stream = await plane.open()
    seen: list[int] = []
    by_lane: list[int] = []
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    class Lane:
        def take_token(self, token_id: int, now: float) -> bool:
            return self.take_tokens([token_id])

        def take_tokens(self, ids: list[int]) -> bool:
            seen.extend(ids)
            by_lane.extend(ids)
            return True

    def arrived() -> None:
        batch = stream.take()
        for item in batch or ():
            seen.extend(item.token_ids)
        if batch is None and not done.done():
            done.set_result(None)

    stream.listen(arrived)
    has_lane = stream.open_lane(Lane(), lambda error: None)
    await done
    stream.close()
    assert seen == [0, 1, 2, 3, 4, 5]
    assert 3 not in by_lane
    assert has_lane or not by_lane


async def test_a_listener_that_comes_late_hears_what_is_there(plane: Plane) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        sink.send_tokens([2])

    plane.serve(handler)
    stream = await plane.open()
    assert await stream.next_batch()
    items, error = await listened(stream)
    assert error is None
    assert len(items) <= 1


@pytest.mark.parametrize("how", ["kill", "server"])
async def test_a_listener_is_told_of_a_stream_that_is_lost(plane: Plane, how: str) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        await context.async_killed_or_stopped()

    plane.serve(handler)
    stream = await plane.open()
    await stream.next_batch()
    reading = asyncio.create_task(listened(stream))
    await asyncio.sleep(0)
    if how == "kill":
        stream.kill()
    else:
        await plane.server.close()
    items, error = await reading
    assert items == []
    assert (error is None) == (how == "kill")
