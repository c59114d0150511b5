"""A worker of the native wire in a page, written from its description and not from our encoder.

It answers nothing by itself: a test reads a request, says an ACK, calls home, and sends what it likes.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from support.native_caller import read_two_part, two_part


@dataclass
class Home:
    """One call-home connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    codec: str

    async def control(self, value: Any) -> None:
        self.writer.write(two_part(json.dumps(value).encode()))
        await self.writer.drain()

    async def send(self, value: Any) -> None:
        data = msgspec.msgpack.encode(value) if self.codec == "msgpack" else json.dumps(value).encode()
        self.writer.write(two_part(b"", data))
        await self.writer.drain()

    async def item(self, **annotated: Any) -> None:
        await self.send({"data": annotated, "complete_final": False})

    async def chunk(self, *token_ids: int, **members: Any) -> None:
        """A chunk with every member that 1.6 writes."""
        nulls = dict.fromkeys(("tokens", "text", "cum_log_probs", "log_probs", "top_logprobs", "finish_reason"))
        data = {"token_ids": list(token_ids), **nulls, "output_type": "text", "index": 0, **members}
        await self.item(data=data)

    async def final(self, sentinel: bool = True) -> None:
        await self.send({"complete_final": True})
        if sentinel:
            await self.control("sentinel")

    async def heard(self) -> Any:
        """The next control word of the caller; None when it has left."""
        try:
            header, data = await asyncio.wait_for(read_two_part(self.reader), 10)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        assert data == b""
        return json.loads(header)


@dataclass
class Request:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    control: dict[str, Any]
    raw_body: bytes
    writer: asyncio.StreamWriter
    connection: int  # which of the worker's connections it came on
    homes: list[asyncio.StreamWriter]  # of the worker: closed with it

    @property
    def codec(self) -> str:
        return str(self.control.get("payload_codec", "json"))

    @property
    def body(self) -> Any:
        return msgspec.msgpack.decode(self.raw_body) if self.codec == "msgpack" else json.loads(self.raw_body)

    @property
    def info(self) -> dict[str, str]:
        info = self.control["connection_info"]
        assert info["transport"] == "tcp_server"
        return dict(json.loads(info["info"]))

    def ack(self, text: str = "") -> None:
        self.writer.write(struct.pack(">I", len(text.encode())) + text.encode())

    async def dial(self, subject: str | None = None, stream_type: str = "response") -> Home:
        """Connect and say which stream this is, but no prologue."""
        host, _, port = self.info["address"].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.homes.append(writer)
        home = Home(reader, writer, self.codec)
        await home.control({"subject": subject or self.info["subject"], "stream_type": stream_type})
        return home

    async def call_home(self) -> Home:
        self.ack()
        home = await self.dial()
        await home.control({"error": None})
        return home


class NativeWorker:
    """Listens, and hands every request to the test."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.connections: list[asyncio.StreamWriter] = []
        self.homes: list[asyncio.StreamWriter] = []
        self.lost = asyncio.Event()
        self.port = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.connections)
        self.connections.append(writer)
        try:
            while True:
                path = (await reader.readexactly(struct.unpack(">H", await reader.readexactly(2))[0])).decode()
                headers = json.loads(await reader.readexactly(struct.unpack(">H", await reader.readexactly(2))[0]))
                payload = await reader.readexactly(struct.unpack(">I", await reader.readexactly(4))[0])
                header_bytes, data_bytes, checksum = struct.unpack(">QQQ", payload[:24])
                assert (checksum, 24 + header_bytes + data_bytes) == (0, len(payload))
                control = json.loads(payload[24 : 24 + header_bytes])
                request = Request(path, headers, control, payload[24 + header_bytes :], writer, number, self.homes)
                self.requests.put_nowait(request)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.transport.abort()

    async def request(self) -> Request:
        return await asyncio.wait_for(self.requests.get(), 10)


@asynccontextmanager
async def native_worker() -> AsyncIterator[NativeWorker]:
    worker = NativeWorker()
    server = await asyncio.start_server(worker.connected, "127.0.0.1", 0)
    worker.port = server.sockets[0].getsockname()[1]
    try:
        yield worker
    finally:
        server.close()
        for writer in (*worker.connections, *worker.homes):
            writer.transport.abort()
        await asyncio.sleep(0)
