"""A small OpenAI server with real sockets that answers, is slow, refuses, or breaks off, as it is set to."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

USAGE: Final = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


@dataclass
class FakeUpstream:
    """`behaviour`: "well", "slow" (nothing ever), a status (429, 500 ...), "cut" (after two pieces), "first" (cut at once),
    "stall" (after one piece), "error" (an error event after one piece)."""

    words: tuple[str, ...] = ("one", " two", " three")
    behaviour: str | int = "well"
    then: str | int | None = None  # the behaviour after one request; None: the same
    retry_after: str | None = None
    key: str = ""
    gap_seconds: float = 0.0
    port: int = 0
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    checks: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A client closed its connection in the middle of an answer."""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def listen(self, tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Close the listener and every connection, in the middle of whatever it does."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                found = dict(line.split(": ", 1) for line in lines)
                headers = {name.lower(): value for name, value in found.items()}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(first.split()[1], headers, body, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has no further request
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Answer one request; whether the connection may be used again."""
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            message = f"Incorrect API key: {headers.get('authorization')}"
            return await self._reply(writer, 401, {"error": {"message": message}})
        if path.endswith("/models"):
            self.checks += 1
            return await self._reply(writer, 200, {"object": "list", "data": []})
        self.bodies.append(json.loads(body))
        self.headers.append(headers)
        behaviour, self.behaviour = self.behaviour, self.behaviour if self.then is None else self.then
        if isinstance(behaviour, int):
            return await self._reply(writer, behaviour, {"error": {"message": f"upstream says {behaviour}"}})
        if behaviour == "first":
            writer.transport.abort()
            return False
        if behaviour != "slow":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        sending = asyncio.ensure_future(self._send(behaviour, path, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            self.left.set()
            sending.cancel()
            return False
        leaving.cancel()
        writer.transport.abort() if behaviour == "cut" else writer.close()
        return False

    async def _send(self, behaviour: str, path: str, writer: asyncio.StreamWriter) -> None:
        if behaviour == "slow":
            await asyncio.Event().wait()
        is_chat = path.endswith("/chat/completions")
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        most = {"cut": 2, "stall": 1, "error": 1}.get(behaviour, len(self.words))
        for number, word in enumerate(self.words[:most]):
            is_last = number == len(self.words) - 1
            piece = {"delta": {"content": word}} if is_chat else {"text": word}
            choice = {"index": 0, **piece, "finish_reason": "stop" if is_last else None}
            await self._event(writer, {"id": "theirs", "object": kind, "model": "theirs", "choices": [choice]})
            if self.gap_seconds:
                await asyncio.sleep(self.gap_seconds)
        if behaviour == "stall":
            await asyncio.Event().wait()
        if behaviour == "error":
            await self._event(writer, {"error": {"message": "it broke", "code": 500}})
        if behaviour == "well":
            await self._event(
                writer, {"id": "theirs", "object": kind, "model": "theirs", "choices": [], "usage": USAGE}
            )
            await self._event(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    async def _event(self, writer: asyncio.StreamWriter, data: Any) -> None:
        event = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()

    async def _reply(self, writer: asyncio.StreamWriter, status: int, body: Any) -> bool:
        content = json.dumps(body).encode()
        again = f"Retry-After: {self.retry_after}\r\n" if self.retry_after is not None else ""
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{again}Content-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        return True


@asynccontextmanager
async def fake_upstream(*, tls: ssl.SSLContext | None = None, **members: Any) -> AsyncIterator[FakeUpstream]:
    """Run one until the end of the block."""
    fake = FakeUpstream(**members)
    await fake.listen(tls)
    try:
        yield fake
    finally:
        await fake.die()
