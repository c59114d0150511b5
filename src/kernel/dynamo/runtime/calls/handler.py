"""A Python async generator as a request handler: what it yields, what it raises, how it is stopped."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from dynamo.errors import (
    Cancelled,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    RouterQueueLimitExceeded,
    Unknown,
)
from dynamo.runtime.base.tasks import is_being_cancelled, take_back_cancellation
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.runtime.calls.request_plane.base import Handler, RequestStream, ResponseSink
from dynamo.runtime.observe.known_failures import LOGGED

logger = logging.getLogger(__name__)

PythonHandler = Callable[..., object]
"""`async def handler(request)` or `(request, context)` with `yield`; a coroutine that returns an async iterator also."""

CANCEL_GRACE_SECONDS: Final = 1.0  # a handler whose caller has gone may read its context and clean up for this long
CLOSE_SECONDS: Final = 5.0  # how long a generator's `finally` may take before we go on without it
ITEMS_PER_TURN: Final = 64  # a handler that never waits hands the loop to the others after this many items

ANNOTATED_MARK: Final = "_dynamo_annotated"
ENVELOPE_KEYS: Final = ("data", "id", "event", "comment", "error")


def serve_python(handler: PythonHandler, *, cancel_grace_seconds: float = CANCEL_GRACE_SECONDS) -> Handler:
    """Return the runtime's form of a user's handler. Raises TypeError for something that is not callable.

    A handler whose caller has gone finds its context stopped; after `cancel_grace_seconds` it is cancelled where it stands.
    """
    if not callable(handler):
        raise TypeError(f"an endpoint's handler must be an async generator function, got {type(handler).__name__}")
    with_context = takes_context(handler)

    async def handle(body: object, context: Context, sink: ResponseSink) -> None:
        if context.is_stopped():
            return  # its caller has gone
        # A context of its own, so that a handler that stops itself can be distinguished from a caller that stops it.
        own = context.detached(context.id())
        own.prompt_tokens = context.prompt_tokens
        unlink = context.link_child(own)
        closer = _Closer(context, cancel_grace_seconds)
        stream: AsyncIterator[object] | None = None
        try:
            stream = await _begin(handler(body, own) if with_context else handler(body))
            await _pump(stream, context, sink)
            if own.is_stopped() and not context.is_stopped():
                raise Disconnected("Stream ended before generation completed")  # a part must not pass for the whole
        except asyncio.CancelledError as error:
            if closer.forced:
                take_back_cancellation()
                return
            if is_being_cancelled():
                raise  # the process is shutting down
            raise map_error(error) from error
        except (Exception, GeneratorExit) as error:
            failure = map_error(error)
            if failure is error:
                raise
            if not isinstance(error, DynamoException | HttpError):
                LOGGED.log_failure(logger, context.id(), error, is_expected=sink.ended)
            raise failure from error
        finally:
            closer.done()
            unlink()
            if stream is not None:
                await _close(stream, context)

    return handle


def serve_python_stream(handler: PythonHandler, *, cancel_grace_seconds: float = CANCEL_GRACE_SECONDS) -> Handler:
    """Do the same for `async def handler(requests)` or `(requests, context)`, where `requests` is a `RequestStream`."""
    serve = serve_python(handler, cancel_grace_seconds=cancel_grace_seconds)

    async def handle(body: object, context: Context, sink: ResponseSink) -> None:
        if not isinstance(body, RequestStream):
            raise InvalidArgument(
                "this endpoint takes a stream of requests (many_in over the native wire), not one request"
            )
        try:
            await serve(body, context, sink)
        finally:
            body.close()

    return handle


async def _pump(stream: AsyncIterator[object], context: Context, sink: ResponseSink) -> None:
    burst = 0
    async for item in stream:
        sink.send_object(envelope(item))
        if sink.ended and not context.is_killed():
            return
        # Killed, lost or cut: what follows is dropped, and the handler has its grace to read its context.
        burst += 1
        if burst == ITEMS_PER_TURN:
            burst = 0
            await asyncio.sleep(0)
        if not sink.ended and not sink.has_credit():
            await sink.wait_credit()


class _Closer:
    """Unblocks a handler whose caller is gone: first it may notice by itself, then its task is cancelled."""

    __slots__ = ("_forget", "_grace_seconds", "_loop", "_task", "_timer", "forced")

    def __init__(self, context: Context, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self.forced = False
        self._forget = context.on_cancel(on_loop(self._loop, self._cancelled))

    def _cancelled(self, killed: bool) -> None:
        if killed and self._timer is None and self._task is not None:
            self._timer = self._loop.call_later(self._grace_seconds, self._force)

    def _force(self) -> None:
        if self._task is not None:
            self.forced = True
            self._task.cancel()

    def done(self) -> None:
        self._forget()
        self._task = None
        if self._timer is not None:
            self._timer.cancel()


async def _begin(made: object) -> AsyncIterator[object]:
    if inspect.isawaitable(made):
        made = await made
    if not hasattr(made, "__aiter__"):
        raise Unknown(f"the endpoint's handler must be an async generator function; it returned {type(made).__name__}")
    stream: AsyncIterator[object] = aiter(made)
    return stream


async def _close(stream: AsyncIterator[object], context: Context) -> None:
    """Run the generator's `finally` now."""
    close: Callable[[], Awaitable[None]] | None = getattr(stream, "aclose", None)
    if close is None:
        return
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await close()
    except TimeoutError:
        logger.warning("the handler of request %s did not close in %g s", context.id(), CLOSE_SECONDS)
    except Exception:
        logger.warning("closing the handler of request %s failed", context.id(), exc_info=True)


def takes_context(handler: PythonHandler) -> bool:
    """Return whether a handler takes `(request, context)`: its second parameter has no default, or is called
    `context`.
    """
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2 and (positional[1].default is positional[1].empty or positional[1].name == "context")


def envelope(item: object) -> dict[str, object]:
    """Return what travels for a yielded value: the value as `data`, or the envelope that it is marked as."""
    if isinstance(item, Mapping) and item.get(ANNOTATED_MARK) is True:
        return {key: item[key] for key in ENVELOPE_KEYS if item.get(key) is not None}
    if isinstance(item, set | frozenset):
        return {"data": list(item)}
    return {"data": item}


def map_error(error: BaseException) -> DynamoException:
    """Map an exception of a bare handler to the error for its caller (engines have the guide's own rule)."""
    if isinstance(error, RouterQueueLimitExceeded):
        return Unknown(str(error))
    if isinstance(error, DynamoException):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, HttpError):
        return _private(json.dumps({"message": error.message, "code": error.code}))
    if isinstance(error, ValueError | TypeError):
        return _private(text)
    if isinstance(error, TimeoutError):
        return ConnectionTimeout(text)
    if isinstance(error, ConnectionError):
        return Disconnected(text)
    if isinstance(error, asyncio.CancelledError):
        return Cancelled(text)
    if isinstance(error, GeneratorExit):
        return EngineShutdown("engine shutting down")
    return Unknown(text)


def _private(message: str) -> InvalidArgument:
    """Make an error whose message clients do not receive: it was not written for them."""
    error = InvalidArgument(message)
    error.public = False
    return error
