"""A worker's listener against peers that break either wire, stop in the middle, or do not read."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, ResponseSink
from dynamo.runtime.calls.request_plane.core import STARTS_PER_TURN
from dynamo.runtime.calls.request_plane.listener import LIMITS, Listener
from dynamo.runtime.calls.request_plane.mux import MAGIC, MuxClient, MuxServerProtocol
from dynamo.runtime.calls.request_plane.mux.frames import HEADER, Hello, Kind, Open, fragments, frame, pack
from support.doc_pages import code, rows
from support.native_caller import native_caller, request_frame, two_part
from support.patience import PATIENCE_SECONDS

PATH = "1f/ns/c/e"
HELLO = MAGIC + frame(Kind.HELLO, pack(Hello(version=1)))


class Site:
    def __init__(self, listener: Listener, refusals: Counter[str]) -> None:
        self.listener, self.refusals = listener, refusals
        self.contexts: list[Context] = []

    async def handle(self, body: Any, context: Context, sink: ResponseSink) -> None:
        self.contexts.append(context)
        if body == "flood":
            while not context.is_stopped():
                if not sink.has_credit():
                    await sink.wait_credit()
                sink.send_tokens([7] * 64)
                await asyncio.sleep(0)
        elif body == "much":  # more in one turn of the loop than any socket takes at once
            for _ in range(24):
                sink.send_tokens([7], 0, None, {"engine_data": {"blob": "x" * 1_000_000}})
        elif body == "hold":
            await context.async_killed_or_stopped()
        sink.send_tokens([1], 0, "stop")

    async def connect(self, *, small: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.listener.address.rpartition(":")
        raw = socket.socket()
        if small:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
        return await asyncio.open_connection(sock=raw, limit=4096 if small else 65536)

    async def send(self, data: bytes, *, eof: bool = True) -> bytes:
        """Send everything, then read until the worker closes."""
        reader, writer = await self.connect()
        answer = b""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                with suppress(ConnectionError):
                    writer.write(data)
                    await writer.drain()
                    if eof:
                        writer.write_eof()
                with suppress(ConnectionError):
                    answer = await reader.read()
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)
        return answer

    async def serves(self) -> None:
        """Both wires still work for somebody else."""
        record: dict[str, Any] = dict(self.listener.transport(PATH))
        instance = Instance(namespace="ns", component="c", endpoint="e", instance_id=31, **record)
        client = MuxClient()
        try:
            stream = await client.open(instance, "x", Context())
            tokens = []
            while batch := await stream.next_batch():
                tokens += [token for item in batch for token in item.token_ids]
            stream.close()
            assert tokens == [1]
        finally:
            await client.close()
        async with native_caller(self.listener.address) as caller:
            assert (await (await caller.call(PATH, "x")).everything())[-1] == "sentinel"

    async def until_idle(self) -> None:
        listener = self.listener
        async with asyncio.timeout(PATIENCE_SECONDS):
            while listener.connections or listener.core.running or listener.core.queued or listener._native.streams:  # type: ignore[attr-defined]
                await asyncio.sleep(0.005)
        assert listener.pending.used == 0


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    refusals: Counter[str] = Counter()

    def refused(limit: str) -> None:
        assert limit in LIMITS
        refusals[limit] += 1

    listener = Listener("127.0.0.1", settings=RequestPlaneSettings(**settings), refused=refused)
    await listener.start()
    found = Site(listener, refusals)
    listener.register(PATH, found.handle)
    try:
        yield found
    finally:
        await listener.close()


def mux_request(body: Any = "x", *, stream_id: int = 1) -> bytes:
    return frame(Kind.OPEN, pack((Open(path=PATH, id="r"), pack(body))), stream_id=stream_id)


MUX = HELLO + mux_request() + frame(Kind.CREDIT, pack([[1, 5]])) + frame(Kind.PING, bytes(8))
LONG = frame(Kind.OPEN, pack((Open(path=PATH, id="r", size=6), None)), stream_id=3) + frame(
    Kind.BODY, b"\xa5xxxxx", stream_id=3, flags=1
)


async def native_request(caller: Any, body: Any = "x") -> bytes:
    return caller.frame(PATH, body)[0]


async def test_mux_frames_cut_at_every_byte_leave_nothing() -> None:
    whole = MUX + LONG
    async with site() as worker:
        for cut in range(len(whole) + 1):
            await worker.send(whole[:cut])
        await worker.until_idle()
        await worker.serves()


async def test_mux_length_fields_that_lie_end_their_connection_only() -> None:
    parts = [frame(Kind.HELLO, pack(Hello(version=1))), mux_request(), frame(Kind.CREDIT, pack([[1, 5]])), LONG]
    async with site(handshake_timeout_seconds=0.2, silence_seconds=0.3, message_timeout_seconds=0.2) as worker:
        for position, part in enumerate(parts):
            (length,) = struct.unpack(">I", part[:4])
            for lie in {0, 1, length - 1, length + 1, 64 * 1024, 64 * 1024 + 1, 2**31, 2**32 - 1} - {length}:
                lying = struct.pack(">I", lie) + part[4:]
                await worker.send(MAGIC + b"".join([*parts[:position], lying, *parts[position + 1 :]]))
        await worker.until_idle()
        await worker.serves()
        assert worker.refusals["malformed"] > 0


@pytest.mark.parametrize("kind", [*range(14), 255])
async def test_any_mux_frame_with_any_payload_is_survived(kind: int) -> None:
    async with site() as worker:
        for payload in (b"", b"\x00", b"\xc1", b"\x90", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, bytes(64 * 1024)):
            for stream_id in (0, 1, 2**32 - 1):
                raw = HEADER.pack(len(payload), kind, 0xFF, 0xFFFF, stream_id) + payload
                await worker.send(HELLO + mux_request("hold", stream_id=1) + raw)
        await worker.until_idle()


async def test_native_frames_cut_at_every_byte_leave_nothing() -> None:
    async with site() as worker:
        async with native_caller(worker.listener.address) as caller:
            whole = await native_request(caller)
            for cut in range(len(whole)):
                assert await worker.send(whole[:cut]) == b""
        await worker.until_idle()
        await worker.serves()


async def test_native_length_fields_that_lie_are_declined_or_time_out() -> None:
    async with site(message_timeout_seconds=0.1, handshake_timeout_seconds=0.1, idle_seconds=0.1) as worker:
        async with native_caller(worker.listener.address) as caller:
            whole = await native_request(caller)
            (path_bytes,) = struct.unpack_from(">H", whole)
            (header_bytes,) = struct.unpack_from(">H", whole, 2 + path_bytes)
            payload_at = 4 + path_bytes + header_bytes
            fields = [
                (0, ">H"),
                (2 + path_bytes, ">H"),
                (payload_at, ">I"),
                (payload_at + 4, ">Q"),
                (payload_at + 12, ">Q"),
            ]
            answers: Counter[bytes] = Counter()
            for offset, kind in fields:
                (right,) = struct.unpack_from(kind, whole, offset)
                top = 256 ** struct.calcsize(kind) - 1
                for lie in {0, 1, right - 1, right + 1, right + 1000, top // 2, top} - {right}:
                    lying = bytearray(whole)
                    struct.pack_into(kind, lying, offset, lie)
                    answers[(await worker.send(bytes(lying), eof=False))[4:24]] += 1
            # Not one was taken for a request, and all but what waited for more bytes were told why.
            assert worker.contexts == []
            assert sum(answers.values()) - answers[b""] > len(fields)
        await worker.until_idle()
        await worker.serves()


async def test_a_native_payload_of_any_rubbish_is_declined_with_a_reason() -> None:
    rubbish = [b"", b"{", b"[" * 100_000, b"null", b"\xff" * 100, b'{"id":1}', b'{"id":"a","connection_info":[]}']
    async with site() as worker:
        frames = [request_frame(PATH, {}, two_part(one, b"\xc1")) for one in rubbish]
        frames += [request_frame(PATH, {}, one) for one in rubbish]
        frames += [request_frame("", {}, b""), request_frame("no/such/path", {}, two_part(b"{}", b""))]
        for one in frames:
            answer = await worker.send(one)
            assert answer[4:].startswith((b"Server unavailable: malformed request", b"Read error"))
        await worker.until_idle()
        await worker.serves()


# -- time and room -------------------------------------------------------------------------------------------------------


async def test_half_a_request_is_waited_for_so_long_and_no_longer() -> None:
    async with site(message_timeout_seconds=0.2, handshake_timeout_seconds=0.2) as worker:
        async with native_caller(worker.listener.address) as caller:
            half = (await native_request(caller))[:-1]
        answer = await worker.send(half, eof=False)
        assert b"DYN_TCP_MESSAGE_TIMEOUT_SECS" in answer
        reader, writer = await worker.connect()
        writer.write(HELLO + frame(Kind.OPEN, pack((Open(path=PATH, id="r", size=9), None)), stream_id=1))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.readuntil(b"DYN_TCP_MESSAGE_TIMEOUT_SECS")
        writer.transport.abort()
        assert b"DYN_TCP_HANDSHAKE_TIMEOUT_SECS" in await worker.send(MAGIC, eof=False)
        assert await worker.send(b"", eof=False) == b""
        assert worker.refusals == {"message_time": 2, "handshake_time": 2}
        await worker.until_idle()


async def test_requests_that_arrive_have_one_budget_together() -> None:
    async with site(pending_bytes=100_000, max_message_bytes=1 << 20) as worker:
        async with native_caller(worker.listener.address) as caller:
            whole = await native_request(caller, "x" * 90_000)
        one = await worker.connect()
        one[1].write(whole[:80_000])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while worker.listener.pending.used < 80_000:
                await asyncio.sleep(0.005)
        assert b"DYN_TCP_PENDING_BODIES_LIMIT_MB" in await worker.send(whole[:80_000], eof=False)
        reader, writer = await worker.connect()
        opened = frame(Kind.OPEN, pack((Open(path=PATH, id="r", size=60_000), None)), stream_id=1)
        writer.write(HELLO + opened + frame(Kind.BODY, bytes(60_000), stream_id=1))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.readuntil(b"DYN_TCP_PENDING_BODIES_LIMIT_MB")
        one[1].transport.abort()
        writer.transport.abort()
        await worker.until_idle()
        assert worker.refusals == {"pending_bodies": 2}
        await worker.serves()


async def test_callers_over_the_limit_of_connections_are_told_so_on_their_own_wire() -> None:
    async with site(max_connections=2) as worker:
        idle = [await worker.connect() for _ in range(2)]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while worker.listener.connections < 2:
                await asyncio.sleep(0.005)
        assert b"DYN_TCP_MAX_CONNECTIONS" in await worker.send(HELLO, eof=False)
        async with native_caller(worker.listener.address) as caller:
            raw = await native_request(caller)
            assert (await worker.send(raw, eof=False))[4:].startswith(b"Server overloaded: more than 2 connections")
        for _, writer in idle:
            writer.transport.abort()
        await worker.until_idle()
        await worker.serves()


# -- peers that do not read ----------------------------------------------------------------------------------------------


async def test_a_mux_caller_that_never_reads_is_cut_and_its_slots_freed() -> None:
    async with site(write_stall_seconds=0.3) as worker:
        _, writer = await worker.connect(small=True)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        credit = frame(Kind.CREDIT, pack([[n, 1 << 20] for n in range(1, 5)]))
        writer.write(HELLO + b"".join([mux_request("flood", stream_id=n) for n in range(1, 5)]) + credit)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not worker.refusals["write_stall"]:
                await asyncio.sleep(0.01)
        await worker.until_idle()
        assert [context.is_killed() for context in worker.contexts] == [True] * 4
        writer.transport.abort()
        await worker.serves()


async def test_a_mux_stream_whose_credit_never_comes_gives_its_slot_back() -> None:
    async with site(credit_stall_seconds=0.2) as worker:
        _, writer = await worker.connect()
        writer.write(HELLO + mux_request("flood"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not worker.refusals["credit_stall"]:
                await asyncio.sleep(0.01)
            while worker.listener.core.running:
                await asyncio.sleep(0.01)
        assert worker.contexts[0].is_killed()
        assert worker.listener.connections == 1  # only the stream ended
        writer.transport.abort()
        await worker.until_idle()


async def test_a_mux_caller_that_gets_much_at_once_is_not_taken_for_one_that_does_not_read() -> None:
    async with site() as worker:
        record: dict[str, Any] = dict(worker.listener.transport(PATH))
        instance = Instance(namespace="ns", component="c", endpoint="e", instance_id=31, **record)
        client = MuxClient()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                stream = await client.open(instance, "much", Context())
                tokens = []
                while batch := await stream.next_batch():
                    tokens += [token for item in batch for token in item.token_ids]
                stream.close()
        finally:
            await client.close()
        assert tokens == [7] * 24 + [1]
        assert not worker.refusals


@pytest.mark.parametrize("what", ["pings", "requests"])
async def test_a_mux_caller_that_asks_and_asks_and_never_reads_is_cut(what: str) -> None:
    more = frame(Kind.PING, bytes(8)) * 2000
    async with site(write_stall_seconds=0.5) as worker:
        _, writer = await worker.connect(small=True)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HELLO)
        stream_id = 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            with suppress(ConnectionError):
                while not (worker.refusals["backlog"] or worker.refusals["write_stall"]):
                    if what == "requests":
                        more = b"".join([mux_request("x", stream_id=stream_id + n) for n in range(500)])
                        stream_id += 500
                    writer.write(more)
                    await writer.drain()
                    await asyncio.sleep(0)
        await worker.until_idle()
        writer.transport.abort()
        await worker.serves()


async def test_a_native_caller_that_never_reads_its_stream_or_its_acks_is_cut() -> None:
    async with site(write_stall_seconds=0.3) as worker:
        async with native_caller(worker.listener.address) as caller:
            answer = await caller.call(PATH, "flood")
            reader, _ = await answer.streams()
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not worker.refusals["write_stall"]:
                    await asyncio.sleep(0.01)
                while worker.listener.core.running:
                    await asyncio.sleep(0.01)
            assert worker.contexts[0].is_killed()
            _, writer = await worker.connect(small=True)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            declined = request_frame("no/such/path", {}, b"") * 1000
            async with asyncio.timeout(PATIENCE_SECONDS):
                with suppress(ConnectionError):
                    while worker.refusals["write_stall"] < 2:
                        if writer.transport.get_write_buffer_size() < 1 << 20:
                            writer.write(declined)
                        await asyncio.sleep(0.001)
            writer.transport.abort()
        await worker.until_idle()
        await worker.serves()


# -- shares ----------------------------------------------------------------------------------------------------------------


def sent_by(transport: Mock) -> bytes:
    parts = [call.args[0] for call in transport.write.call_args_list]
    parts += [b"".join(call.args[0]) for call in transport.writelines.call_args_list]
    return b"".join(parts)


def mux_connection(worker: Site) -> tuple[MuxServerProtocol, Mock]:
    """A connection whose bytes are handed over by the test, so that nothing depends on the network."""
    transport = Mock(spec=asyncio.Transport)
    transport.is_closing.return_value = False
    connection = MuxServerProtocol(worker.listener._mux)
    connection.connection_made(transport)
    connection.data_received(HELLO)
    return connection, transport


async def test_a_flood_on_one_connection_delays_a_request_of_another_by_two_turns() -> None:
    async with site() as worker:
        flooding, flooding_transport = mux_connection(worker)
        other, _ = mux_connection(worker)
        flood = b"".join([mux_request("hold", stream_id=n) for n in range(1, 5001)])
        flooding.data_received(flood)
        other.data_received(frame(Kind.OPEN, pack((Open(path=PATH, id="other"), pack("hold"))), stream_id=1))
        while not any(context.id() == "other" for context in worker.contexts):
            await asyncio.sleep(0)
        assert len(worker.contexts) <= 2 * STARTS_PER_TURN + 1
        assert flooding_transport.pause_reading.called  # the rest of the flood waits in the kernel
        while len(worker.contexts) < 5001:
            await asyncio.sleep(0)
        reading = (flooding_transport.pause_reading.call_count, flooding_transport.resume_reading.call_count)
        assert reading == (5000 // 64, 1)
        for connection in (flooding, other):
            connection.connection_lost(None)


async def test_a_full_queue_takes_a_place_from_the_connection_that_has_most() -> None:
    async with site(engine_request_limit=1, engine_queue_limit=4) as worker:
        flooding, flooding_transport = mux_connection(worker)
        other, other_transport = mux_connection(worker)
        flooding.data_received(b"".join([mux_request("hold", stream_id=n) for n in range(1, 12)]))
        other.data_received(mux_request("hold") + mux_request("hold", stream_id=2) + mux_request("hold", stream_id=3))
        await asyncio.sleep(0)
        assert (worker.listener.core.running, worker.listener.core.queued) == (1, 4)
        assert sent_by(flooding_transport).count(b"worker at capacity") == 6 + 2
        assert sent_by(other_transport).count(b"worker at capacity") == 1  # each has two of the four places
        for connection in (flooding, other):
            connection.connection_lost(None)


async def test_half_sent_requests_are_bounded_per_connection_and_give_way_to_a_connection_with_fewer() -> None:
    async with site(pending_bytes=100_000, connection_pending_bytes=70_000, max_message_bytes=60_000) as worker:
        half_sent = [
            frame(Kind.OPEN, pack((Open(path=PATH, id="r", size=50_000), None)), stream_id=n)
            + frame(Kind.BODY, bytes(30_000), stream_id=n)
            for n in (1, 2, 3)
        ]
        first, first_transport = mux_connection(worker)
        first.data_received(b"".join(half_sent))
        await asyncio.sleep(0)
        assert sent_by(first_transport).count(b"DYN_TCP_CONNECTION_BODIES_LIMIT_MB") == 1
        assert worker.listener.pending.used == 60_000
        second, second_transport = mux_connection(worker)
        second.data_received(half_sent[0])
        third, third_transport = mux_connection(worker)
        third.data_received(half_sent[0])
        await asyncio.sleep(0)
        assert worker.listener.pending.used == 90_000  # one of the first's made room for the third's
        assert sent_by(first_transport).count(b"DYN_TCP_CONNECTION_BODIES_LIMIT_MB") == 2
        assert b"DYN_TCP" not in sent_by(second_transport) + sent_by(third_transport)
        assert worker.refusals == {"pending_bodies": 2}
        for connection in (first, second, third):
            connection.connection_lost(None)
        assert worker.listener.pending.used == 0


@pytest.mark.parametrize("wire", ["mux", "native"])
async def test_a_body_that_expands_beyond_its_limit_is_declined_before_it_is_decoded(wire: str) -> None:
    count = 4 * 1024 * 1024
    body = b"\xdd" + struct.pack(">I", count) + b"\x90" * count  # 4 MiB of empty arrays: 300 MiB of lists
    async with site() as worker:
        if wire == "mux":
            opened = frame(Kind.OPEN, pack((Open(path=PATH, id="r", size=len(body)), None)), stream_id=1)
            reader, writer = await worker.connect()
            writer.write(HELLO + opened + b"".join(fragments(Kind.BODY, body, 1)))
            async with asyncio.timeout(PATIENCE_SECONDS):
                await reader.readuntil(b"DYN_TCP_MAX_DECODED_MB")
            writer.transport.abort()
        else:
            async with native_caller(worker.listener.address) as caller:
                payload, _ = caller.payload("x")
                (header_bytes,) = struct.unpack_from(">Q", payload)
                raw = request_frame(PATH, {}, two_part(payload[24 : 24 + header_bytes], body))
                reader, writer = await worker.connect()
                writer.write(raw)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await reader.readuntil(b"DYN_TCP_MAX_DECODED_MB")
                writer.transport.abort()
        assert (worker.contexts, worker.refusals) == ([], {"decoded_size": 1})
        await worker.until_idle()
        await worker.serves()


async def test_a_native_caller_gets_its_answer_only_at_its_own_address(caplog: pytest.LogCaptureFixture) -> None:
    async with site() as worker:
        async with native_caller(worker.listener.address) as caller:
            elsewhere = "192.0.2.7:80"  # of the documentation network: nothing may be sent there
            payloads = []
            for _ in range(300):
                payload, _ = caller.payload("x")
                (header_bytes,) = struct.unpack_from(">Q", payload)
                control = msgspec.json.decode(payload[24 : 24 + header_bytes])
                info = msgspec.json.decode(control["connection_info"]["info"])
                control["connection_info"]["info"] = msgspec.json.encode(info | {"address": elsewhere}).decode()
                body = payload[24 + header_bytes :]
                payloads.append(request_frame(PATH, {}, two_part(msgspec.json.encode(control), body)))
            answers = await worker.send(b"".join(payloads))
        assert answers.count(b"DYN_TCP_CALL_HOME_NETWORKS allows further networks") == 300
        assert (worker.contexts, worker.refusals) == ([], {"call_home": 300})
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
        await worker.until_idle()
        await worker.serves()


async def test_answers_are_brought_to_the_networks_that_were_allowed() -> None:
    async with site(call_home_networks=("127.0.0.0/8",)) as worker:
        await worker.serves()


def test_the_limits_of_the_docs_are_those_of_the_listeners() -> None:
    from dynamo.frontend.http.server import LIMITS as FRONTEND
    from dynamo.runtime.http.status_server import LIMITS as STATUS

    documented = Counter(name for row in rows("settings.md", "Limit", "What happens") for name in code(row[0]))
    assert documented == Counter([*FRONTEND, *LIMITS, *STATUS])
