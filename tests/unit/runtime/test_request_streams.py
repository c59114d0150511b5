"""Bidirectional endpoints: a stream of requests in, a stream of answers out, for callers of the native wire."""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from dynamo.runtime import Context, DistributedRuntime, PyAsyncRequestStream
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub
from dynamo.runtime.endpoint import Endpoint
from support.cases import each_case
from support.native_caller import Answer, NativeCaller, two_part
from support.patience import PATIENCE_SECONDS

_numbers = itertools.count(1)


@dataclass
class Call:
    """One bidirectional call: what is sent, and the answer."""

    answer: Answer
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    def send(self, *values: Any) -> None:
        for value in values:
            self.writer.write(two_part(b"", msgspec.msgpack.encode(value)))

    def say(self, word: str) -> None:
        self.writer.write(two_part(json.dumps(word).encode()))

    async def data(self) -> list[Any]:
        """The data of every item up to the end."""
        found = await self.answer.everything()
        return [item["data"]["data"] for item in found[1:-2]]


class Caller(NativeCaller):
    def __init__(self, address: str, route: str) -> None:
        super().__init__(address)
        self.route = route

    async def begin(self) -> Call:
        subject = f"in{next(_numbers)}"
        connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.request_streams[subject] = connected
        request_id = f"bidi-{subject}"
        frame, answer = self.frame(
            self.route,
            None,
            id=request_id,
            request_type="many_in",
            connection_info=self.info(f"out-{subject}", request_id, "response"),
            request_stream_connection_info=self.info(subject, request_id, "request"),
        )
        self.rename(answer, f"out-{subject}")
        self.writer.write(frame)
        assert await self.ack() == ""
        reader, writer = await asyncio.wait_for(connected, PATIENCE_SECONDS)
        self._writers.append(writer)
        return Call(answer, writer, reader)


@dataclass
class Served:
    caller: Caller
    endpoint: Endpoint


@asynccontextmanager
async def serving(handler: Any, *, bidirectional: bool = True) -> AsyncIterator[Served]:
    runtime = DistributedRuntime(None, None, "tcp", discovery=MemoryDiscovery(MemoryHub()))
    async with runtime, asyncio.timeout(PATIENCE_SECONDS):
        endpoint = runtime.endpoint("ns.c.e")
        serve = endpoint.serve_bidirectional_endpoint if bidirectional else endpoint.serve_endpoint
        task = asyncio.create_task(serve(handler))
        client = await endpoint.client()
        await client.wait_for_instances()
        address, _, route = client.instances()[0].transport.address.partition("/")
        caller = Caller(address, route)
        await caller.open()
        try:
            yield Served(caller, endpoint)
        finally:
            await caller.close()
            task.cancel()
            await asyncio.wait({task})


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")


async def double(requests: PyAsyncRequestStream) -> AsyncIterator[Any]:
    async for request in requests:
        yield request * 2
    yield "that was all"


async def test_answers_come_while_requests_go_and_the_end_of_the_input_is_no_cancellation() -> None:
    async with serving(double) as served:
        call = await served.caller.begin()
        call.send(1)
        assert await call.answer.prologue() == {"error": None}
        assert (await call.answer.item())["data"] == {"data": 2}
        call.send(3, "x")
        call.say("sentinel")
        rest = [await call.answer.item() for _ in range(5)]
        assert [item["data"]["data"] for item in rest[:3]] == [6, "xx", "that was all"]
        assert rest[3:] == [{"complete_final": True}, "sentinel"]


async def test_a_handler_may_take_the_context_and_hear_a_stop() -> None:
    async def until_stopped(requests: PyAsyncRequestStream, context: Context) -> AsyncIterator[Any]:
        seen = [request async for request in requests]
        yield {"seen": seen, "stopped": context.is_stopped(), "killed": context.is_killed()}

    async with serving(until_stopped) as served:
        call = await served.caller.begin()
        call.send(1, 2)
        call.say("stop")
        assert await call.data() == [{"seen": [1, 2], "stopped": True, "killed": False}]


@each_case("end", ["kill", "lost", "nonsense", "odd word"])
async def test_an_input_that_breaks_off_kills_the_request(end: str) -> None:
    killed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def wait(requests: PyAsyncRequestStream, context: Context) -> AsyncIterator[Any]:
        try:
            async for request in requests:
                yield request
            await context.async_killed_or_stopped()
        finally:
            killed.set_result(context.is_killed())

    async with serving(wait) as served:
        call = await served.caller.begin()
        call.send(1)
        assert await call.answer.prologue() == {"error": None}
        await call.answer.item()
        match end:
            case "kill":
                call.say("kill")
            case "lost":
                call.writer.transport.abort()
            case "nonsense":
                call.writer.write(struct.pack(">QQQ", 0, 1, 0) + b"\xc1")
            case _:
                call.say("pardon")
        assert await killed
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await call.answer.item()


async def test_a_handler_that_does_not_read_holds_its_caller_up_and_loses_nothing() -> None:
    go = asyncio.Event()

    async def late(requests: PyAsyncRequestStream) -> AsyncIterator[Any]:
        await go.wait()
        count = 0
        async for _ in requests:
            count += 1
        yield count

    async with serving(late) as served:
        call = await served.caller.begin()
        call.writer.transport.set_write_buffer_limits(high=0)
        sent = 0
        while True:
            call.send("x" * 65_536)
            sent += 1
            try:
                await asyncio.wait_for(call.writer.drain(), 0.2)
            except TimeoutError:
                break
        assert sent * 65_536 < 32 * 1024 * 1024
        go.set()
        call.say("sentinel")
        assert await call.data() == [sent]


async def test_a_handler_that_ends_first_lets_go_of_its_caller() -> None:
    async def once(requests: PyAsyncRequestStream) -> AsyncIterator[Any]:
        yield await anext(requests)

    async with serving(once) as served:
        call = await served.caller.begin()
        call.send("first", "second")
        assert await call.data() == ["first"]
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await call.reader.readexactly(1)


async def test_one_request_is_not_a_stream_and_a_stream_is_not_one_request() -> None:
    async with serving(double) as served:
        answer = await served.caller.call(served.caller.route, {"x": 1})
        found = await answer.everything()
        assert "takes a stream of requests" in found[1]["data"]["error"]["message"]
        client = await served.endpoint.client()
        with pytest.raises(Exception, match="takes a stream of requests"):
            async for _ in await client.generate({"x": 1}):
                pass

    async def one(request: Any) -> AsyncIterator[Any]:
        yield request

    async with serving(one, bidirectional=False) as served:
        frame, _ = served.caller.frame(served.caller.route, None, request_type="many_in")
        served.caller.writer.write(frame)
        assert "takes one request, not a stream" in await served.caller.ack()


async def test_a_call_without_a_place_to_fetch_its_requests_is_declined() -> None:
    async with serving(double) as served:
        frame, _ = served.caller.frame(served.caller.route, None, request_type="many_in")
        served.caller.writer.write(frame)
        assert "request_stream_connection_info is missing" in await served.caller.ack()
