"""llama.cpp's process with its slots: as many requests at a time as it has, the others wait here, in order."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import httptools
import msgspec

from dynamo.errors import EngineShutdown, HttpError, InvalidArgument, Unknown
from dynamo.llamacpp.arguments import LlamaArguments
from dynamo.runtime.base.process_guard import private_directory
from dynamo.runtime.calls.context import Context, on_loop

# HTTP to llama.cpp's own server over a socket: one connection per request, whose end ends the request. It closes the connection
# of a stream at its end, also where its headers announce the contrary (xllamacpp 2026.10).

PAUSE_BYTES: Final = 256 * 1024  # answers that wait for their reader; beyond, the socket is not read
DATA: Final = b"data: "
DONE: Final = b"[DONE]"


class LlamaRefusal(Exception):
    """llama.cpp's own error of one request."""

    def __init__(self, status: int, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


class LlamaConnection(asyncio.Protocol):
    """One request and its answer: a JSON object, or a stream of objects as server-sent events."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._is_stream = False
        self._is_complete = False
        self._is_lost = False
        self._body = bytearray()  # not yet cut into events
        self._events: deque[Any] = deque()
        self._waiting_bytes = 0
        self._wake: asyncio.Future[None] | None = None

    # -- the socket's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of a class of its own

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._waiting_bytes > PAUSE_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._notify()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._notify()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        self._body += data
        if not self._is_stream:
            return
        while (end := self._body.find(b"\n\n")) >= 0:
            event = bytes(self._body[:end])
            del self._body[: end + 2]
            for line in event.split(b"\n"):
                if line.startswith(DATA) and line[len(DATA) :] != DONE:
                    self._events.append(msgspec.json.decode(line[len(DATA) :]))
                    self._waiting_bytes += len(line)

    def on_message_complete(self) -> None:
        if not self._is_stream and self._body:
            self._events.append(msgspec.json.decode(self._body))
        self._is_complete = True

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # -- the engine's side --------------------------------------------------------------------------------------------

    def send(self, method: str, path: str, key: str, body: Any = None) -> None:
        """Send the one request of this connection."""
        assert self._transport is not None
        content = b"" if body is None else msgspec.json.encode(body)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._transport.write(head.encode() + content)

    async def next(self) -> Any:
        """Return the next object of the answer, or None after the last one and after `close`.

        Raises LlamaRefusal for an error that llama.cpp reports, EngineShutdown when its process is gone.
        """
        while not self._events:
            if self._is_complete or self._transport is None:
                return None
            if self._is_lost:
                raise EngineShutdown("llama.cpp ended the connection in the middle of an answer")
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        event = self._events.popleft()
        if not self._events:
            self._waiting_bytes = 0
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        status = self._parser.get_status_code()
        error = event.get("error") if isinstance(event, dict) else None
        if isinstance(error, dict):
            raise LlamaRefusal(
                int(error.get("code") or status or 500),
                str(error.get("message") or error),
                str(error.get("type") or ""),
            )
        if status >= 400:
            raise LlamaRefusal(status, f"llama.cpp answered with status {status}")
        return event

    def close(self) -> None:
        """End the connection: llama.cpp stops working on the request when it writes next. Safe twice."""
        transport, self._transport = self._transport, None
        self._events.clear()
        if transport is not None:
            transport.abort()
        self._notify()


async def open_llama(socket: Path) -> LlamaConnection:
    """Connect. Raises EngineShutdown when nothing listens."""
    try:
        _, connection = await asyncio.get_running_loop().create_unix_connection(LlamaConnection, str(socket))
    except OSError as error:
        raise EngineShutdown(f"llama.cpp is not running: {error}") from error
    return connection


async def call_llama(socket: Path, method: str, path: str, key: str, body: Any = None) -> Any:
    """Return the answer of one plain call. Raises as `LlamaConnection.next` does."""
    connection = await open_llama(socket)
    try:
        connection.send(method, path, key, body)
        return await connection.next()
    finally:
        connection.close()


logger = logging.getLogger(__name__)

# Starts and ends the process that holds llama.cpp.


END_SECONDS: Final = 2.0  # for the process to end by itself; then it is killed
SOCKET: Final = "llama.sock"


class LlamaProcess:
    """One running llama.cpp. It listens on a socket in a private directory, and requires a key besides."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Path | None = None
        self._key = secrets.token_hex(16)

    async def start(self, settings: Mapping[str, Any]) -> None:
        """Load the model. Raises EngineShutdown when that fails; llama.cpp's own lines are on standard error."""
        self._directory = private_directory("llama")
        began = time.perf_counter()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dynamo.llamacpp.server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        own: dict[str, Any] = {"hostnames": [str(self._directory / SOCKET)], "api_keys": [self._key], "ui": False}
        own["slot_save_path"] = f"{self._directory}/"  # without one llama.cpp erases no slot, either
        self._process.stdin.write(json.dumps({**settings, **own}).encode() + b"\n")
        line = await self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"its process ended with status {await self._process.wait()}"}
        if "error" in answer:
            raise EngineShutdown(f"llama.cpp did not start: {answer['error']} (its own lines, above, say more)")
        logger.info("llama.cpp has loaded the model in %.1f s", time.perf_counter() - began)

    async def open(self, path: str, body: Any) -> LlamaConnection:
        """Begin a request. Raises EngineShutdown when llama.cpp is gone. The caller closes the connection."""
        connection = await open_llama(self._socket)
        connection.send("POST", path, self._key, body)
        return connection

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer to a plain question. Raises EngineShutdown when llama.cpp is gone."""
        return await call_llama(self._socket, method, path, self._key, body)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def _socket(self) -> Path:
        if self._directory is None:
            raise EngineShutdown("llama.cpp is not running")
        return self._directory / SOCKET

    async def wait_ended(self) -> str:
        """Return how the process ended, once it has. Never returns for one that was not started."""
        if self._process is None:
            return str(await asyncio.get_running_loop().create_future())
        status = await self._process.wait()
        return f"the process of llama.cpp ended with status {status}"

    async def close(self) -> None:
        """End the process and remove its directory. Safe twice."""
        process, self._process = self._process, None
        directory, self._directory = self._directory, None
        if process is not None:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)  # a process that is halted would not end by itself
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


Walk = Callable[[LlamaConnection, LlamaProcess, Any], AsyncGenerator[Any, None]]
"""Yields the events of a connection; it has the process for further questions, and the body of the request."""


async def walk_events(connection: LlamaConnection, _process: LlamaProcess, _body: Any) -> AsyncGenerator[Any, None]:
    """Yield the events as they are."""
    while (event := await connection.next()) is not None:
        yield event


CLIENT_STATUSES: Final = range(400, 500)


@dataclass(frozen=True, slots=True)
class LoadedLlama:
    """What llama.cpp reports of the model it has loaded."""

    context_length: int  # tokens of one slot
    vocab_size: int
    slots: int


class LlamaSlots:
    """One llama.cpp, and the requests that use it."""

    def __init__(self, arguments: LlamaArguments) -> None:
        self._arguments = arguments
        self._process = LlamaProcess()
        self._free = arguments.slots
        self._waiting: deque[asyncio.Future[bool]] = deque()  # true: a slot is theirs; one entry per request that waits
        self._was_closed = False

    async def start(self) -> LoadedLlama:
        """Load the model. Raises EngineShutdown when it cannot be loaded, or was closed meanwhile."""
        await self._process.start(self._arguments.settings)
        if self._was_closed:
            await self._process.close()
            raise EngineShutdown("this engine was cleaned up while it started")
        models, properties = await self._process.call("GET", "/v1/models"), await self._process.call("GET", "/props")
        return LoadedLlama(
            context_length=int(properties["default_generation_settings"]["n_ctx"]),
            vocab_size=int(models["data"][0]["meta"]["n_vocab"]),
            slots=int(properties["total_slots"]),
        )

    @asynccontextmanager
    async def events(
        self, path: str, body: Any, context: Context, walk: Walk = walk_events
    ) -> AsyncIterator[AsyncGenerator[Any, None]]:
        """Provide the events of one request; none once the context is stopped, also while the request waits for a slot.

        Raises LlamaRefusal for llama.cpp's errors, EngineShutdown when its process is gone.
        """
        if not await self._take(context):
            async with aclosing(_nothing()) as nothing:
                yield nothing
            return
        try:
            connection = await self._process.open(path, body)
            forget = context.on_cancel(on_loop(asyncio.get_running_loop(), lambda _killed: connection.close()))
            try:
                async with aclosing(walk(connection, self._process, body)) as events:
                    yield events
            finally:
                forget()
                connection.close()
        finally:
            self._release()

    async def _take(self, context: Context) -> bool:
        """Wait for a slot; False when the request was stopped first."""
        if context.is_stopped():
            return False
        if self._free:
            self._free -= 1
            return True
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(turn)
        forget = context.on_cancel(on_loop(loop, lambda _killed: _settle(turn)))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():  # in the moment in which the slot came
                self._release()
            raise
        finally:
            forget()
            with suppress(ValueError):
                self._waiting.remove(turn)

    def _release(self) -> None:
        """Give a slot to the request that has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1

    def halt(self) -> None:
        """Stop all computing where it is, until `go_on`."""
        self._process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a halt; nothing happens where there is none."""
        self._process.signal(signal.SIGCONT)

    async def erase(self) -> None:
        """Forget what the slots hold of earlier prompts; a slot that is in use does so at the end of its request."""
        for slot in range(self._arguments.slots):
            await self._process.call("POST", f"/slots/{slot}?action=erase", {})

    async def wait_ended(self) -> str:
        """Return how the process ended, once it has."""
        return await self._process.wait_ended()

    async def close(self) -> None:
        """End llama.cpp. Safe twice."""
        self._was_closed = True
        await self._process.close()


def _settle(turn: asyncio.Future[bool]) -> None:
    """End the wait of a request that was stopped."""
    if not turn.done():
        turn.set_result(False)


async def _nothing() -> AsyncGenerator[Any, None]:
    return
    yield


def map_llama_error(error: Exception) -> Exception | None:
    """Return what to report in place of an error of llama.cpp; None for others."""
    if not isinstance(error, LlamaRefusal):
        return None
    if error.status in (400, 422):
        return InvalidArgument(error.message)
    if error.status in CLIENT_STATUSES or error.status == 501:
        return HttpError(error.status, error.message)
    if error.status == 503:
        return EngineShutdown(f"llama.cpp: {error.message}")
    return Unknown(f"llama.cpp: {error.message}")
