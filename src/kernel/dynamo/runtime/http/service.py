"""What the connections of one HTTP listener share, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from dynamo.runtime.base.http_limits import HttpLimits
from dynamo.runtime.base.listening import start_listening
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.http.connection import HttpConnection
from dynamo.runtime.http.cycle import Application, Cycle
from dynamo.runtime.http.limits import RenderRejection

CANCEL_SECONDS: Final = 1.0  # for the handlers that were cancelled at the end


class _CountedSet(set["HttpConnection"]):
    """The open connections; reports its size."""

    def __init__(self, changed: Callable[[int], None] | None) -> None:
        super().__init__()
        self._changed = changed

    def add(self, connection: HttpConnection) -> None:
        super().add(connection)
        if self._changed is not None:
            self._changed(len(self))

    def discard(self, connection: object) -> None:
        super().discard(connection)
        if self._changed is not None:
            self._changed(len(self))


class HttpService:
    """Serves one ASGI application. A socket is given to it, or single connections are."""

    def __init__(
        self,
        app: Application,
        limits: HttpLimits,
        *,
        render: RenderRejection,
        refused: Callable[[str], None],
        changed: Callable[[int], None] | None = None,
    ) -> None:
        """`refused` counts; `changed` gets the number of open connections whenever that changes."""
        self.app, self.limits = app, limits
        self.render, self.refused = render, refused
        self.default_headers: list[tuple[bytes, bytes]] = []  # of every answer that begins from now on
        self.connections: set[HttpConnection] = _CountedSet(changed)
        self.answers = Background()
        self._servers: list[asyncio.Server] = []

    def connection(self) -> HttpConnection:
        """Make a protocol for one accepted connection."""
        return HttpConnection(self)

    async def listen(self, listener: socket.socket, backlog: int) -> None:
        """Accept the connections of a bound socket, which belongs to the service from now on."""
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"sock": listener, "backlog": backlog, "start_serving": False}
        create: Callable[..., Awaitable[asyncio.Server]] = loop.create_server
        if listener.family == socket.AF_UNIX:
            create = loop.create_unix_server
            if sys.version_info >= (3, 13):
                options["cleanup_socket"] = False  # the path belongs to the process that has bound it
        self._servers.append(await start_listening(create(self.connection, **options)))

    async def listen_at(self, host: str, port: int) -> None:
        """Listen at an address. Raises OSError."""
        loop = asyncio.get_running_loop()
        made = loop.create_server(self.connection, host, port, start_serving=False)
        self._servers.append(await start_listening(made))

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """What it listens on."""
        return tuple(one for server in self._servers for one in server.sockets)

    def run(self, cycle: Cycle, app: Application) -> None:
        """Answer a request. `close` waits for it."""
        self.answers.start(cycle.run(app), "answer", is_awaited=True)  # it logs its failure itself

    async def close(self, seconds: float) -> None:
        """Stop listening, let answers under way end within `seconds`, then drop what is left. Idempotent."""
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.answers:
                    await self.answers.wait()
                while self.connections:  # what was written is on its way
                    await asyncio.sleep(0.01)
        self.answers.cancel()
        for connection in list(self.connections):
            connection.transport.abort()
        await self.answers.close(CANCEL_SECONDS)
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()
