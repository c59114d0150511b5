"""llama.cpp's process with its slots: as many requests at a time as it has, the others wait here, in order."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.errors import EngineShutdown, HttpError, InvalidArgument, Unknown
from dynamo.llamacpp.arguments import LlamaArguments
from dynamo.llamacpp.connection import LlamaConnection, LlamaRefusal, call_llama, open_llama
from dynamo.runtime.base.process_guard import private_directory
from dynamo.runtime.calls.context import Context, on_loop

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
        own = {"hostnames": [str(self._directory / SOCKET)], "api_keys": [self._key], "ui": False}
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

    async def call(self, method: str, path: str) -> Any:
        """Return the answer to a plain question. Raises EngineShutdown when llama.cpp is gone."""
        return await call_llama(self._socket, method, path, self._key)

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
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


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
    async def events(self, path: str, body: Any, context: Context) -> AsyncIterator[AsyncGenerator[Any, None]]:
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
                async with aclosing(_walk(connection)) as walk:
                    yield walk
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


async def _walk(connection: LlamaConnection) -> AsyncGenerator[Any, None]:
    while (event := await connection.next()) is not None:
        yield event


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
