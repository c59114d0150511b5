"""Where a prefill and a decode mocker meet: the decode worker connects to the prefill worker and waits for the prompt.

One connection per request, one line of JSON each way: `{"room": N}`, then `{"ready": true}` or `{"error": TEXT}`. Either
side may come first. A side that leaves before the answer ends the other one. The transport is our own: native mockers
speak another one, and meet ours only without bootstrap.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Final

from dynamo.errors import CannotConnect, Disconnected, InvalidArgument, Overloaded, ResponseTimeout
from dynamo.protocol.openai.shapes import JsonMapping
from dynamo.runtime.base.addresses import bound_socket
from dynamo.runtime.base.listening import start_listening
from dynamo.runtime.base.tasks import first_of

logger = logging.getLogger(__name__)

MEET_SECONDS: Final = 30.0  # until the other side is there
LINE_BYTES: Final = 64 * 1024
MAX_CONNECTIONS: Final = 4096
NO_ID: Final = "disaggregated mocker requires a handoff ID"


def room_of(info: JsonMapping) -> int:
    """Return the number under which the two workers of a request meet. Raises InvalidArgument without one."""
    room = info.get("bootstrap_room")
    if type(room) is not int:
        raise InvalidArgument(f"{NO_ID}: bootstrap_info.bootstrap_room must be an integer, got {room!r}")
    return room


class _Session:
    """One prompt of a prefill worker."""

    __slots__ = ("is_awaited", "is_complete", "lost", "outcome")

    def __init__(self, lost: Callable[[], None]) -> None:
        self.lost = lost
        self.outcome: asyncio.Future[str | None] = (
            asyncio.get_running_loop().create_future()
        )  # None: ready, else why not
        self.is_awaited = False  # a decode worker is there
        self.is_complete = False


class HandoffDesk:
    """The prefill worker's side: prompts that are computed, and the decode workers that wait for them."""

    def __init__(self, max_sessions: int, keep_seconds: float) -> None:
        """`max_sessions` of all ranks; a prompt that no decode worker requests is forgotten after `keep_seconds`."""
        self._max_sessions = max_sessions
        self._keep_seconds = keep_seconds
        self._sessions: dict[int, _Session] = {}
        self._arrivals: dict[int, asyncio.Future[None]] = {}  # decode workers that came first
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port. Raises CannotConnect when it is taken."""
        try:
            sock = bound_socket(host, port)
            self._server = await start_listening(
                asyncio.start_server(self._serve, sock=sock, limit=LINE_BYTES, start_serving=False)
            )
        except OSError as error:
            raise CannotConnect(f"the bootstrap port {port} cannot be bound: {error}") from error
        return int(self._server.sockets[0].getsockname()[1])

    def open(self, room: int, rank: int, lost: Callable[[], None]) -> None:
        """Begin a session; `lost` is called when its decode worker leaves before the prompt is there. Raises Overloaded."""
        if len(self._sessions) >= self._max_sessions:
            raise Overloaded(f"mocker handoff session limit reached for DP rank {rank}")
        if room in self._sessions:
            raise InvalidArgument(f"bootstrap_info.bootstrap_room {room} is in use")
        self._sessions[room] = _Session(lost)
        arrival = self._arrivals.pop(room, None)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def complete(self, room: int) -> None:
        """Let the decode worker begin: the prompt is computed, and its cache has arrived."""
        session = self._sessions[room]
        session.is_complete = True
        if not session.outcome.done():
            session.outcome.set_result(None)
        if not session.is_awaited:
            asyncio.get_running_loop().call_later(self._keep_seconds, self._sessions.pop, room, None)

    def end(self, room: int) -> None:
        """End the session of a prompt; if it was not complete its decode worker gets an error. Idempotent."""
        session = self._sessions.get(room)
        if session is None or session.is_complete:
            return
        del self._sessions[room]
        if not session.outcome.done():
            session.outcome.set_result("the prefill worker did not finish the prompt")

    async def close(self) -> None:
        """Listen no more, and cut what waits; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None or len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            async with asyncio.timeout(MEET_SECONDS):
                room = json.loads(await reader.readline())["room"]
            reason = await self._outcome(room, reader)
            if reason is not _LEFT:
                writer.write(json.dumps({"ready": True} if reason is None else {"error": reason}).encode() + b"\n")
                await writer.drain()
        except (ValueError, KeyError, TypeError, OSError, TimeoutError) as error:
            logger.info(
                "the request of a decode worker for its prompt cannot be answered: %s: %s", type(error).__name__, error
            )
        except asyncio.CancelledError:
            writer.transport.abort()  # close() has cancelled us: no caller is left to pass it on to
        finally:
            self._connections.discard(task)
            writer.close()

    async def _outcome(self, room: int, reader: asyncio.StreamReader) -> str | None:
        """Return None when the prompt is there, else why it will not come; `_LEFT` when no decode worker waits any more."""
        session = self._sessions.get(room)
        if session is None:
            arrival = self._arrivals[room] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(MEET_SECONDS):
                    await arrival
            except TimeoutError:
                return f"no prompt came for the room {room} in {MEET_SECONDS:g} s"
            finally:
                self._arrivals.pop(room, None)
            session = self._sessions[room]
        session.is_awaited = True
        try:
            if await first_of(asyncio.shield(session.outcome), reader.read(1)) == 0:
                return session.outcome.result()
            session.lost()
            return _LEFT
        finally:
            if session.is_complete:
                self._sessions.pop(room, None)


_LEFT: Final = "left"


async def fetch_prompt(info: JsonMapping) -> None:
    """Wait at the prefill worker until the prompt is there. Cancelling the wait reaches the prefill worker.

    Raises CannotConnect, Disconnected, ResponseTimeout.
    """
    room = room_of(info)
    host, port = info.get("bootstrap_host"), info.get("bootstrap_port")
    try:
        async with asyncio.timeout(MEET_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
    except TimeoutError as error:
        raise ResponseTimeout(f"the prefill worker at {host}:{port} did not answer in {MEET_SECONDS:g} s") from error
    except OSError as error:
        raise CannotConnect(f"the prefill worker at {host}:{port} cannot be reached: {error}") from error
    try:
        writer.write(json.dumps({"room": room}).encode() + b"\n")
        line = await reader.readline()
    except OSError as error:
        raise Disconnected(f"the prefill worker at {host}:{port} was lost: {error}") from error
    finally:
        writer.close()
    try:
        answer = json.loads(line)
    except ValueError as error:
        raise Disconnected(f"the prefill worker at {host}:{port} left before the prompt was there") from error
    if "error" in answer:
        raise Disconnected(f"the prompt did not come: {answer['error']}")
