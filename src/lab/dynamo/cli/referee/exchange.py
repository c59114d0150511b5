"""Requests and answers of the referee: HTTP/1.1 on asyncio streams, kept as they came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import httptools

from dynamo.cli.bench.targets import Target

MAX_ANSWER_BYTES: Final = 8 << 20
READ_BYTES: Final = 65536

Json: TypeAlias = Any
"""Parsed JSON of a server that is not trusted: nothing is known of its types before it is checked."""


@dataclass(slots=True)
class ServerAnswer:
    """One whole answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    keeps_alive: bool = True
    was_continued: bool = False  # an interim 100 came before it

    def json(self) -> Json:
        """Return the parsed body, or None where it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def events(self) -> list[str]:
        """Return the data of the server-sent events. Raises UnicodeDecodeError."""
        text = self.body.decode().replace("\r\n", "\n")
        return [
            "\n".join(line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:"))
            for block in text.split("\n\n")
            if any(line.startswith("data:") for line in block.split("\n"))
        ]

    def chunks(self) -> list[Json]:
        """Return the parsed events but for the last mark. Raises ValueError."""
        return [json.loads(data) for data in self.events() if data != "[DONE]"]

    def named_events(self) -> list[tuple[str, Json]]:
        """Return the name and the parsed data of each event, as far as both can be read; data that is not JSON is None."""
        found = []
        for block in self.body.decode(errors="replace").replace("\r\n", "\n").split("\n\n"):
            lines = [line.partition(":") for line in block.split("\n")]
            data = "\n".join(value.removeprefix(" ") for name, _, value in lines if name == "data")
            if not data or data == "[DONE]":
                continue
            name = next((value.strip() for key, _, value in lines if key == "event"), "")
            try:
                found.append((name, json.loads(data)))
            except ValueError:
                found.append((name, None))
        return found

    @property
    def message(self) -> str:
        """The server's own words for a refusal."""
        found = member(self.json(), "error", "message") or member(self.json(), "message")
        return f"HTTP {self.status}" + (f": {found}" if isinstance(found, str) else "")


def member(value: Json, *path: str | int) -> Json:
    """Return what lies at `path` in parsed JSON, or None."""
    for step in path:
        if isinstance(step, str) and isinstance(value, dict):
            value = value.get(step)
        elif isinstance(step, int) and isinstance(value, list) and len(value) > step:
            value = value[step]
        else:
            return None
    return value


class _Reading:
    """Callbacks of the parser for one answer."""

    def __init__(self, *, is_head: bool) -> None:
        self.answer = ServerAnswer()
        self.is_complete = False
        self._body = bytearray()
        self._is_head = is_head
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.answer.status = self.parser.get_status_code()
        self.answer.keeps_alive = self.parser.should_keep_alive()
        self.is_complete = self._is_head and self.answer.status >= 200

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > MAX_ANSWER_BYTES:
            raise ConnectionError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")

    def on_message_complete(self) -> None:
        if self.answer.status < 200:  # an interim answer; the real one follows
            self.answer = ServerAnswer(was_continued=True)
            return
        self.end()

    def end(self) -> None:
        """Take the body as whole."""
        self.answer.body = bytes(self._body)
        self.is_complete = True


class Line:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, is_head: bool = False) -> ServerAnswer:
        """Read one answer. Raises ConnectionError where it is cut off or not HTTP."""
        reading = _Reading(is_head=is_head)
        try:
            while not reading.is_complete:
                data = await self.reader.read(READ_BYTES)
                if not data:
                    headers = reading.answer.headers
                    if reading.answer.status and not {"content-length", "transfer-encoding"} & headers.keys():
                        reading.answer.keeps_alive = False
                        reading.end()
                        break
                    raise ConnectionError("the connection was closed before the end of the answer")
                reading.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(f"the answer is not HTTP/1.1: {error}") from error
        return reading.answer


class Server:
    """The server under judgement."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.target, self.timeout = target, timeout

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Line]:
        """Open a connection for one use. Raises OSError and TimeoutError."""
        async with asyncio.timeout(self.timeout):
            reader, writer = await asyncio.open_connection(self.target.host, self.target.port, ssl=self.target.tls)
            try:
                yield Line(reader, writer)
            finally:
                writer.transport.abort()

    def request(
        self, method: str, path: str, body: bytes | None = None, more: Mapping[str, str] | None = None
    ) -> bytes:
        """Build the bytes of a request."""
        lines = dict(more or {})
        if body is not None:
            lines = {"Content-Type": "application/json", "Content-Length": str(len(body)), **lines}
        head = f"{method} {self.target.prefix}{path} HTTP/1.1\r\n".encode() + self.target.headers
        head += "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        return head + b"\r\n" + (body or b"")
