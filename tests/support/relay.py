"""A TCP relay on this machine that can be cut, and that can go silent: a network between a client and a server."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Relay:
    """Passes bytes between its own port and `target_port` until told otherwise."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()  # from the client to the server
        self._flows_back = asyncio.Event()
        self.speak()
        self.port = 0
        self.connections = 0  # so far

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.restore()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.cut()

    async def cut(self) -> None:
        """End every connection and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def restore(self) -> None:
        """Accept connections, on the same port as before."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def silence(self) -> None:
        """Accept and read, but pass nothing on: what a peer looks like that is frozen."""
        self._flows.clear()
        self._flows_back.clear()

    def silence_back(self) -> None:
        """Pass on what the client says, and nothing of what the server answers."""
        self._flows_back.clear()

    def speak(self) -> None:
        """Pass everything on, also what was held back."""
        self._flows.set()
        self._flows_back.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass(reader, far_writer, self._flows))
                    group.create_task(self._pass(far_reader, writer, self._flows_back))
            finally:
                far_writer.close()
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # cut, or one side left: the end of a connection either way
        finally:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
        while data := await reader.read(65536):
            await flows.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # one side ended: so does the other
