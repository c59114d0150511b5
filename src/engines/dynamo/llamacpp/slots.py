"""llama.cpp's process with its slots: as many requests at a time as it has, the others wait here, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from dynamo.errors import EngineShutdown, HttpError, InvalidArgument, Unknown
from dynamo.llamacpp.arguments import LlamaArguments
from dynamo.llamacpp.connection import LlamaConnection, LlamaRefusal
from dynamo.llamacpp.process import LlamaProcess
from dynamo.runtime.calls.context import Context, on_loop

__all__ = ["LlamaSlots", "LoadedLlama", "map_llama_error"]

CLIENT_STATUSES: Final = range(400, 500)


@dataclass(frozen=True, slots=True)
class LoadedLlama:
    """What llama.cpp says of the model it has loaded."""

    context_length: int  # tokens of one slot
    vocab_size: int
    slots: int


class LlamaSlots:
    """One llama.cpp, and who may use it."""

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
