"""What an exception that left engine code means: the typed error that the caller gets, and the line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from dynamo.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    Unknown,
)
from dynamo.runtime.base.tasks import is_being_cancelled, take_back_cancellation
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.observe.known_failures import LOGGED
from dynamo.worker.cancellation import CancellationWatch

if TYPE_CHECKING:
    from dynamo.contract.engine import BaseEngine

logger = logging.getLogger(__name__)


class ErrorMapping:
    """Maps what leaves one engine to typed errors: the engine's own mapping first, then the rules of `wrap_error`."""

    def __init__(
        self,
        engine: BaseEngine,
        *,
        map_builtin_errors: bool = False,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`map_builtin_errors`: give Python's own exceptions the categories the native system gives them
        (DYN_BACKEND_MAP_BUILTIN_ERRORS); otherwise all but `TimeoutError` are `Unknown`, as the guide requires.

        `is_stopping`: whether a stop of the worker was requested.
        """
        self._engine = engine
        self.is_stopping = is_stopping
        self._map_builtin_errors = map_builtin_errors

    def typed(self, error: BaseException) -> DynamoException:
        """Convert an exception; the original stays reachable as the cause of what is returned."""
        reported = error
        if isinstance(error, Exception) and not isinstance(error, DynamoException):
            reported = self._engine_says(error)
        if reported is not error and reported.__cause__ is None:
            reported.__cause__ = error
        return wrap_error(reported, map_builtin_errors=self._map_builtin_errors)

    def _engine_says(self, error: Exception) -> Exception:
        try:
            mapped: object = self._engine.map_error(error)
        except Exception:
            logger.warning("map_error(%s) failed; the error is reported as it is", type(error).__name__, exc_info=True)
            return error
        if mapped is None:
            return error
        if isinstance(mapped, Exception):
            return mapped
        logger.warning("map_error(%s) returned %s; return an exception or None", type(error).__name__, type(mapped))
        return error


def end_failed(
    error: BaseException, context: Context, sink: ResponseSink, watch: CancellationWatch, mapping: ErrorMapping
) -> DynamoException | None:
    """End a stream whose generator raised. Returns the typed failure, or None when nothing failed: the request or the
    whole task was cancelled."""
    if isinstance(error, asyncio.CancelledError):
        if watch.forced:
            # The watch gave up waiting and cancelled this task to unblock the generator; that is an end, not a failure.
            take_back_cancellation()
            sink.end(Cancelled("request cancelled"))
            return None
        if is_being_cancelled():
            sink.end(EngineShutdown("the worker is shutting down"))
            return None
    if isinstance(error, asyncio.CancelledError) and not context.is_stopped():
        failure: DynamoException = EngineShutdown("the engine cancelled a request that nobody had cancelled")
        failure.__cause__ = error
    else:
        failure = mapping.typed(error)
    is_expected = sink.ended or mapping.is_stopping()
    sink.end(failure)
    log_failure(context, error, failure, is_expected=is_expected)
    return failure


def is_engine_failure(error: BaseException) -> bool:
    """Return whether an exception ends with its request; other exceptions end the task or the process, too."""
    if isinstance(error, asyncio.CancelledError):
        return not is_being_cancelled()
    return isinstance(error, Exception | GeneratorExit)


def wrap_error(error: BaseException, *, map_builtin_errors: bool = False) -> DynamoException:
    """Convert an exception that left engine code to a typed error; the original stays reachable as its cause."""
    if isinstance(error, DynamoException):
        return error
    typed: DynamoException
    code = getattr(error, "code", None)
    if not isinstance(code, int) or isinstance(code, bool):
        code = getattr(error, "status", None)
    message = getattr(error, "message", None)
    if isinstance(code, int) and not isinstance(code, bool) and isinstance(message, str):
        text = json.dumps({"message": message, "code": code})
        typed = InvalidArgument(text) if 400 <= code < 500 else Unknown(text)
    elif isinstance(error, asyncio.CancelledError):
        typed = Cancelled(str(error) or "request cancelled")
    elif isinstance(error, GeneratorExit):
        typed = EngineShutdown("engine shutting down")
    else:
        kind = _native_kind(error) if map_builtin_errors or isinstance(error, TimeoutError) else Unknown
        typed = kind(f"{type(error).__name__}: {error}")
    typed.__cause__ = error
    return typed


def _native_kind(error: BaseException) -> type[DynamoException]:
    match error:
        case ConnectionRefusedError():
            return CannotConnect
        case ConnectionError():
            return Disconnected
        case TimeoutError():
            return ConnectionTimeout
        case ValueError() | TypeError():
            return InvalidArgument
        case _:
            return Unknown


def log_failure(context: Context, error: BaseException, failure: DynamoException, *, is_expected: bool = False) -> None:
    """ERROR with id and traceback for what the engine did wrong, DEBUG for what a caller did.

    `is_expected`: a line without either. The stream was cut, or a stop is planned, and what that interrupts may raise
    anything.
    """
    fields = {"request_id": context.id()}
    if isinstance(failure, InvalidArgument | Cancelled):
        logger.debug("request %s: %s", context.id(), failure, extra=fields)
    elif (
        not is_expected
        and isinstance(error, DynamoException)
        and error.__cause__ is None
        and not isinstance(error, Unknown)
    ):
        logger.error("request %s: %s: %s", context.id(), type(error).__name__, error, extra=fields)
    else:
        LOGGED.log_failure(logger, context.id(), error, what="request %s failed in the engine", is_expected=is_expected)
