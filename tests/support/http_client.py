"""HTTP by hand, one request per connection: tests decide when to read, when to stop reading and how to leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from support.patience import PATIENCE_SECONDS

SMALL_BUFFER_BYTES = 4096

CHAT: Final = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

DONE = "[DONE]"


@dataclass
class Reply:
    """An answer read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a whole event stream; its `[DONE]` is checked and left out."""
        # Not `splitlines`: a text may hold other ends of lines (U+2028), which are none of an event stream.
        lines = self.body.decode().split("\n")
        lines = [line.removeprefix("data: ").rstrip("\r") for line in lines if line.startswith("data: ")]
        assert lines[-1] == DONE, self.body
        return [json.loads(line) for line in lines[:-1]]

    @property
    def text(self) -> str:
        """What the first choice said, streamed or not."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return _said(self.json()["choices"][0])
        return "".join(_said(choice) for event in self.events for choice in event["choices"] if choice["index"] == 0)


def _said(choice: Mapping[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content") or part.get("text") or ""


@dataclass
class Exchange:
    """One request on its own connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    async def head(self, *, patience: float = PATIENCE_SECONDS) -> int:
        """Read the status line and the headers; the status."""
        async with asyncio.timeout(patience):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").strip().split("\r\n")
        self.status = int(first.split(" ", 2)[1])
        pairs = (line.split(":", 1) for line in lines)
        self.headers = {name.lower(): value.strip() for name, value in pairs}
        return self.status

    async def event(self) -> Any:
        """The data of the next event: an object, or `DONE`. Comments are skipped."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                # The events of this server are never split over lines of a chunk; chunk sizes are no event lines.
                line = (await self.reader.readuntil(b"\n")).decode().rstrip("\r\n")
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    return DONE if data == DONE else json.loads(data)

    async def rest(self, *, patience: float = PATIENCE_SECONDS) -> bytes:
        """What is left, as it comes over the wire; for an answer that was read in part."""
        async with asyncio.timeout(patience):
            return await self.reader.read()

    async def reply(self, *, patience: float = PATIENCE_SECONDS) -> Reply:
        """Read everything; nothing of the body may have been read before."""
        if not self.status:
            await self.head(patience=patience)
        rest = await self.rest(patience=patience)
        if self.headers.get("transfer-encoding") == "chunked":
            rest = _dechunked(rest)
        return Reply(self.status, self.headers, rest)

    def leave(self, *, politely: bool = True) -> None:
        """Close the connection now: with a FIN, or with a reset."""
        if politely:
            self.writer.close()
        else:
            self.writer.transport.abort()


def _dechunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole, body = whole + body[:length], body[length + 2 :]
    return whole


@asynccontextmanager
async def exchange(
    port: int,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    small_buffers: bool = False,
) -> AsyncIterator[Exchange]:
    """Send a request; nothing is read yet. `body`: an object for JSON, bytes as they are, None for no body (a GET).

    `small_buffers`: what is not read soon stays at the server.
    """
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    fields = {"host": "localhost", "connection": "close", "content-type": "application/json"}
    fields |= {"content-length": str(len(data))} | dict(headers or {})
    connection = socket.socket()
    connection.setblocking(False)
    if small_buffers:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    limit = SMALL_BUFFER_BYTES if small_buffers else 2**16
    reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    try:
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        yield Exchange(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)  # the transport lets go of its socket at the next turn


async def ask(
    port: int,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One request and its whole answer."""
    async with exchange(port, path, body, method=method, headers=headers) as opened:
        return await opened.reply()


def chat(model: str, **more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}


def script(*steps: Any, tag: str = "") -> dict[str, str]:
    """The headers that bring a script to the scripted engine."""
    return {"x-dynamo-meta-script": json.dumps(steps), "x-dynamo-meta-tag": tag}
