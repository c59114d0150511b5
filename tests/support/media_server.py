"""A server that answers as a test says, byte by byte, and remembers who came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from dynamo.runtime.base.tasks import first_of

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def ok(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """A whole answer with its length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(location: str, status: int = 302) -> bytes:
    return ok(b"", f"Location: {location}", status=f"{status} Found")


class MediaServer:
    """Answers by path; what is asked for is in `heads`."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.heads: list[str] = []
        self.came = asyncio.Event()
        self.left = asyncio.Event()  # a client closed its connection before its answer was complete
        self.host, self.port = "", 0

    @property
    def hits(self) -> list[str]:
        """The paths that were asked for."""
        return [head.split(" ", 2)[1] for head in self.heads]

    def url(self, path: str, host: str | None = None) -> str:
        return f"http://{host or self.host}:{self.port}{path}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.heads.append(head)
            self.came.set()
            answer = self.answers.get(head.split(" ", 2)[1], ok(b"", status="404 Not Found"))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            elif await first_of(answer(writer), reader.read(1)) == 1:
                self.left.set()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def media_server(host: str = "127.0.0.1") -> AsyncIterator[MediaServer]:
    made = MediaServer()
    server = await asyncio.start_server(made.handle, host, 0)
    made.host, made.port = server.sockets[0].getsockname()[:2]
    async with server:
        yield made
