"""A caller of the native wire in a page, written from its description and not from our encoder.

One call-home listener, one pooled request connection. Frames are read with `struct` alone, so that a mistake in our own
codec cannot hide itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

_ids = itertools.count(1)


def two_part(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">QQQ", len(header), len(data), 0) + header + data


def request_frame(path: str, headers: dict[str, str], payload: bytes) -> bytes:
    raw_path, raw_headers = path.encode(), json.dumps(headers, separators=(",", ":")).encode()
    return (
        struct.pack(">H", len(raw_path))
        + raw_path
        + struct.pack(">H", len(raw_headers))
        + raw_headers
        + struct.pack(">I", len(payload))
        + payload
    )


async def read_two_part(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    header_bytes, data_bytes, checksum = struct.unpack(">QQQ", await reader.readexactly(24))
    assert checksum == 0
    return await reader.readexactly(header_bytes), await reader.readexactly(data_bytes)


@dataclass
class Answer:
    """One response stream as the caller sees it."""

    request_id: str
    codec: str
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(repr=False)

    async def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.shield(self.connected), 10)

    async def prologue(self) -> Any:
        reader, _ = await self.streams()
        header, data = await read_two_part(reader)
        assert data == b""
        return json.loads(header)

    async def item(self) -> Any:
        """The next item, decoded; "sentinel" as that word. Raises IncompleteReadError or ConnectionError at a break."""
        reader, _ = await self.streams()
        header, data = await read_two_part(reader)
        if header:
            assert data == b""
            return json.loads(header)
        return msgspec.msgpack.decode(data) if self.codec == "msgpack" else json.loads(data)

    async def everything(self) -> list[Any]:
        """Prologue, items and sentinel, in order; then closes, as a caller does."""
        found = [await self.prologue()]
        while found[-1] != "sentinel":
            found.append(await self.item())
        (await self.streams())[1].close()
        return found

    async def say(self, word: str) -> None:
        _, writer = await self.streams()
        writer.write(two_part(json.dumps(word).encode()))
        await writer.drain()

    async def leave(self, *, abort: bool = False) -> None:
        _, writer = await self.streams()
        if abort:
            writer.transport.abort()
        else:
            writer.close()


class NativeCaller:
    """Sends requests to one worker and awaits its answers."""

    def __init__(
        self, address: str, *, calls: ssl.SSLContext | None = None, listens: ssl.SSLContext | None = None
    ) -> None:
        """`calls`, `listens`: TLS of its call, and of the listener for its answers."""
        self.address, self._calls, self._listens = address, calls, listens
        self._awaited: dict[str, Answer] = {}
        self.request_streams: dict[str, asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._writers: list[asyncio.StreamWriter] = []

    async def _called_home(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        header, data = await read_two_part(reader)
        hello = json.loads(header)
        assert data == b""
        if hello["stream_type"] == "request":
            self.request_streams[hello["subject"]].set_result((reader, writer))
            return
        assert hello["stream_type"] == "response"
        answer = self._awaited.get(hello["subject"])
        if answer is None:
            writer.close()
        else:
            answer.connected.set_result((reader, writer))

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._called_home, "127.0.0.1", 0, backlog=1024, ssl=self._listens)
        self.listening = self._server.sockets
        self.port = self.listening[0].getsockname()[1]

    async def open(self) -> None:
        await self.listen()
        host, _, port = self.address.rpartition(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port), ssl=self._calls)
        self._writers.append(self.writer)

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    def frame(
        self,
        path: str,
        body: Any,
        *,
        codec: str | None = "msgpack",
        headers: dict[str, str] | None = None,
        **control: Any,
    ) -> tuple[bytes, Answer]:
        """A request frame and where its answer will arrive; `codec` None leaves the field out (json)."""
        payload, answer = self.payload(body, codec=codec, **control)
        return request_frame(path, {"request-id": answer.request_id} if headers is None else headers, payload), answer

    def payload(self, body: Any, *, codec: str | None = "msgpack", **control: Any) -> tuple[bytes, Answer]:
        """What a request carries, on whatever it travels, and where its answer will arrive."""
        number = next(_ids)
        request_id, subject = f"r{number}", f"s{number}"
        answer = Answer(request_id, codec or "json", asyncio.get_running_loop().create_future())
        self._awaited[subject] = answer
        info = self.info(subject, request_id, "response")
        message: dict[str, Any] = {
            "id": request_id,
            "request_type": "single_in",
            "response_type": "many_out",
            "connection_info": info,
        }
        if codec is not None:
            message["payload_codec"] = codec
        message.update(control)
        data = msgspec.msgpack.encode(body) if codec == "msgpack" else json.dumps(body).encode()
        return two_part(json.dumps(message).encode(), data), answer

    def rename(self, answer: Answer, subject: str) -> None:
        """Await an answer under a subject of the test's own."""
        self._awaited[subject] = answer

    def info(self, subject: str, request_id: str, stream_type: str) -> dict[str, str]:
        where = {
            "address": f"127.0.0.1:{self.port}",
            "subject": subject,
            "context": request_id,
            "stream_type": stream_type,
        }
        return {"transport": "tcp_server", "info": json.dumps(where)}

    async def ack(self) -> str:
        (length,) = struct.unpack(">I", await asyncio.wait_for(self.reader.readexactly(4), 10))
        return (await self.reader.readexactly(length)).decode()

    async def call(self, path: str, body: Any, **options: Any) -> Answer:
        """Send one request that must be accepted."""
        frame, answer = self.frame(path, body, **options)
        self.writer.write(frame)
        assert await self.ack() == ""
        return answer


@asynccontextmanager
async def native_caller(
    address: str, *, calls: ssl.SSLContext | None = None, listens: ssl.SSLContext | None = None
) -> AsyncIterator[NativeCaller]:
    caller = NativeCaller(address, calls=calls, listens=listens)
    await caller.open()
    try:
        yield caller
    finally:
        await caller.close()
