"""HTTP/2 and gRPC as the picker serves them: headers by the examples of the standard, and peers that break the rules."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from hypothesis import given, strategies

from dynamo.picker.grpc import connection
from dynamo.picker.grpc.calls import CallHandler, CallTable, GrpcCall
from dynamo.picker.grpc.connection import PREFACE, Http2Connection, frame
from dynamo.picker.grpc.hpack import _LENGTHS, BadHeaders, HeaderReader, read_huffman, write_headers
from support.patience import PATIENCE_SECONDS

SETTINGS = frame(4, 0, 0)
CALL = write_headers([(b":method", b"POST"), (b":path", b"/t.T/Echo"), (b"content-type", b"application/grpc")])


def test_headers_are_read_as_the_standard_has_them() -> None:
    reader = HeaderReader()  # appendix C.4: three requests on one connection, with Huffman codes
    for block, path, extra in (
        ("828684418cf1e3c2e5f23a6ba0ab90f4ff", b"/", []),
        ("828684be5886a8eb10649cbf", b"/", [(b"cache-control", b"no-cache")]),
        ("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf", b"/index.html", [(b"custom-key", b"custom-value")]),
    ):
        found = reader.read(bytes.fromhex(block))
        assert found[0] == (b":method", b"GET")
        assert (found[2], found[3]) == ((b":path", path), (b":authority", b"www.example.com"))
        assert found[4:] == extra


def huffman_codes() -> list[str]:
    """The code of each symbol as bits, by appendix B: codes rise with their length, and within a length with the symbol."""
    found, code, before = [""] * 257, 0, 0
    for bits, symbol in sorted((ord(letter) - ord("a") + 5, symbol) for symbol, letter in enumerate(_LENGTHS)):
        code <<= bits - before
        found[symbol], code, before = f"{code:0{bits}b}", code + 1, bits
    return found


CODES = huffman_codes()


def as_bytes(bits: str) -> bytes:
    return int(bits or "0", 2).to_bytes(len(bits) // 8, "big")


@given(strategies.binary(max_size=40))
def test_each_text_comes_back_from_its_huffman_code(text: bytes) -> None:
    bits = "".join(CODES[byte] for byte in text)
    padding = -len(bits) % 8
    assert read_huffman(as_bytes(bits + "1" * padding)) == text
    for wrong in (bits + "1" * (padding + 8), bits + CODES[256] + "1" * (-len(bits + CODES[256]) % 8)):
        with pytest.raises(BadHeaders):  # a whole byte of padding; the end of a text within it
            read_huffman(as_bytes(wrong))
    if padding:
        with pytest.raises(BadHeaders):
            read_huffman(as_bytes(bits + "1" * (padding - 1) + "0"))


def test_a_block_that_came_before_means_what_the_table_says_now() -> None:
    reader, newest = HeaderReader(), b"\xbe"
    for value in (b"one", b"two", b"two"):
        reader.read(b"\x40" + write_headers([(b"name", value)])[1:])
        assert reader.read(newest) == reader.read(newest) == [(b"name", value)]
    reader.read(b"\x20")  # a table of no bytes
    with pytest.raises(BadHeaders):
        reader.read(newest)


@pytest.mark.parametrize(
    "block", ["c0", "40", "4005", "ff", "ffffffffffff", "3fe2ff0f", "80", "0085ff", "4083ffffffff"]
)
def test_a_block_that_is_broken_is_refused(block: str) -> None:
    with pytest.raises(BadHeaders):
        HeaderReader().read(bytes.fromhex(block))


def test_noise_is_read_or_refused_and_nothing_else() -> None:
    for seed in range(2000):
        noise = os.urandom(seed % 40)
        for read in (HeaderReader().read, read_huffman):
            with suppress(BadHeaders):
                read(noise)


async def echo(call: GrpcCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


@asynccontextmanager
async def server(most: int = 8 << 20, serve: CallHandler = echo) -> AsyncIterator[tuple[int, set[Http2Connection]]]:
    calls, open_ = CallTable({"/t.T/Echo": serve}, most), set[Http2Connection]()

    def opened(connection: Http2Connection) -> bool:
        open_.add(connection)
        return True

    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Http2Connection(calls.open, opened, open_.discard), "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1], open_
    finally:
        listening.close()
        await calls.aclose()
        for each in list(open_):
            each.close()


async def test_messages_longer_than_every_window_pass_both_ways() -> None:
    async with server() as (port, _), grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]
    ) as channel:  # fmt: skip
        for size in (0, 1, 16_379, 70_000, 5_000_000):
            sent = os.urandom(size)
            stream = channel.stream_stream("/t.T/Echo")()
            await stream.write(sent)
            assert await stream.read() == sent
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
        many = [channel.stream_stream("/t.T/Echo")() for _ in range(50)]

        async def talk(at: int, stream: grpc.aio.StreamStreamCall) -> bool:
            for turn in range(20):
                await stream.write(b"%d %d" % (at, turn) * 500)
                if await stream.read() != b"%d %d" % (at, turn) * 500:
                    return False
            await stream.done_writing()
            return await stream.read() is grpc.aio.EOF

        assert all(await asyncio.gather(*(talk(at, each) for at, each in enumerate(many))))


async def test_a_message_that_is_too_long_and_a_method_that_is_not_there_have_their_status() -> None:
    async with server(most=1000) as (port, _), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for path, sent, code in (
            ("/t.T/Echo", b"x" * 1001, grpc.StatusCode.RESOURCE_EXHAUSTED),
            ("/t.T/Other", b"x", grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.stream_unary(path)(iter([sent]))
            assert raised.value.code() is code
        assert await channel.stream_unary("/t.T/Echo")(iter([b"on"])) == b"on", "the connection goes on"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        PREFACE + frame(0, 0, 0, b"data without a stream"),
        PREFACE + frame(0, 0, 5, b"data before its headers"),
        PREFACE + frame(1, 4, 2, CALL),
        PREFACE + frame(9, 4, 1, CALL),
        PREFACE + frame(1, 0, 1, CALL) + frame(6, 0, 0, b"8 bytes."),
        PREFACE + frame(1, 4, 1, b"\xff\xff\xff"),
        PREFACE + frame(4, 0, 0, b"12345"),
        PREFACE + frame(4, 0, 0, struct.pack("!HI", 4, 2**31)),
        PREFACE + frame(8, 0, 0, struct.pack("!I", 0)),
        PREFACE + frame(8, 0, 0, struct.pack("!I", 2**31 - 1)),
        PREFACE + b"\xff\xff\xff\0\0\0\0\0\1",
        PREFACE + b"".join(frame(1 if at == 0 else 9, 0, 1, b"\0" * 16_000) for at in range(6)),
    ],
)
async def test_a_peer_that_breaks_the_rules_loses_its_connection_and_no_other_does(sent: bytes) -> None:
    async with server() as (port, open_), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = channel.stream_stream("/t.T/Echo")()
        await stream.write(b"before")
        assert await stream.read() == b"before"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.read()  # to its end
        writer.close()
        await stream.write(b"after")
        assert await stream.read() == b"after"
        assert len(open_) == 1
        stream.cancel()


async def test_a_peer_that_does_not_read_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 100_000)
    async with server() as (port, open_), asyncio.timeout(PATIENCE_SECONDS):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(PREFACE)
        while not open_:
            await asyncio.sleep(0)
        (one,) = open_
        assert one._transport is not None
        one._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while open_:
            writer.write(frame(6, 0, 0, b"8 bytes.") * 1000)
            await asyncio.sleep(0)
        writer.close()
    assert "does not read" in caplog.text


async def test_what_can_be_answered_at_once_does_not_wait_for_a_task_of_the_same_read() -> None:
    unsent: list[list[bytes]] = []

    async def look(call: GrpcCall) -> None:
        unsent.append([*call._stream.connection._out])

    async with server(serve=look) as (port, _), asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + frame(1, 4, 1, CALL) + frame(6, 0, 0, b"8 bytes."))
        await reader.readuntil(frame(1, 5, 1)[3:])
        writer.close()
    assert unsent == [[]]


async def test_streams_that_are_reset_end_their_calls() -> None:
    async with server() as (port, open_):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + SETTINGS)
        for number in range(1, 401, 2):
            writer.write(frame(1, 4, number, CALL) + frame(3, 0, number, b"\0\0\0\x08"))
        writer.write(frame(6, 0, 0, b"8 bytes."))
        async with asyncio.timeout(PATIENCE_SECONDS):
            found = b""
            while b"8 bytes." not in found:
                found += await reader.read(65536)
            (connection,) = open_
            while connection.streams:
                await asyncio.sleep(0)
        writer.close()
