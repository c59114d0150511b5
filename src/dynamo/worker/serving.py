"""One request at the worker: call the engine, check its stream, watch for cancellation, close it promptly.

This is the worker's half of the hot path. Per chunk: one step of the engine's generator, a check of its shape, one
append to the connection's outgoing list. No task, future, log line or span work happens per token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import operator
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from dynamo.contract.engine import BaseEngine, LLMEngine, RawEngine
from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.requests.token_ids import normalize_request_token_ids
from dynamo.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
)
from dynamo.protocol.finish import CANCELLED, EngineFailed, normalise
from dynamo.runtime.context import Context, on_loop
from dynamo.runtime.logging import annotate_log_span
from dynamo.runtime.request_plane.base import ResponseSink
from dynamo.runtime.tasks import forgive_cancellation, is_being_cancelled

logger = logging.getLogger(__name__)

KILL_GRACE_SECONDS: Final = 0.05
"""A killed request's generator may see `is_stopped()` and end by itself for this long; then it is closed where it
stands, so that a vanished client frees its KV blocks now. R10 asks for 100 ms in all."""

STOP_GRACE_SECONDS: Final = 30.0  # a stop is graceful; an engine that ignores one for this long is closed all the same
CHUNKS_PER_TURN: Final = 64  # an engine that never waits hands the loop to the others after this many chunks
CLOSE_SECONDS: Final = 5.0  # how long a generator's `finally` may take before we go on without it
VALIDATE_SECONDS: Final = 1.0  # how long the validator waits for what an engine says after its terminal chunk
MAX_TOKEN_ID: Final = 2**32 - 1

CHUNK_KEYS: Final = frozenset(
    {
        "completion_usage",
        "text",
        "tokens",
        "log_probs",
        "top_logprobs",
        "cum_log_probs",
        "stop_reason",
        "disaggregated_params",
        "encoder_result",
        "engine_data",
        "extra_args",
        "output_type",
        "content_parts",
        "worker_trace_link",
        "routing_data",
    }
)
"""Every key of a chunk that travels; others are ignored, so that an engine may annotate its chunks for itself."""


class RequestSpan(Protocol):
    """What a tracer records about one request (see `telemetry`)."""

    def on_chunk(self, now: float, tokens: int) -> None: ...

    def finish(self, output_tokens: int, finish_reason: str, cancelled: bool) -> None: ...

    def fail(self, kind: str) -> None: ...

    def dropped(self, output_tokens: int = 0) -> None: ...

    def worker_trace_link(self) -> dict[str, str]: ...


SpanFactory = Callable[[Context, Mapping[str, Any]], RequestSpan | None]


class InvalidChunk(Unknown):
    """The engine yielded something that is not a valid chunk: its fault and not the client's. Names what and why."""


class TokenServing:
    """Serves requests with an `LLMEngine`; `handle` is a runtime `Handler`."""

    def __init__(
        self,
        engine: LLMEngine,
        *,
        mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
        validate: bool = False,
        map_builtin_errors: bool = False,
        start_span: SpanFactory | None = None,
    ) -> None:
        """`validate`: also fail streams that say something after their terminal chunk (DYN_BACKEND_VALIDATE).

        `map_builtin_errors`: give Python's own exceptions the categories the native system gives them
        (DYN_BACKEND_MAP_BUILTIN_ERRORS); otherwise all but `TimeoutError` are `Unknown`, as the guide says.
        """
        self._engine = engine
        self._mode = mode
        self._validate = validate
        self._map_builtin_errors = map_builtin_errors
        self._start_span = start_span

    async def handle(self, body: Any, context: Context, sink: ResponseSink) -> None:
        """Serve one request; everything the client should know goes through `sink`."""
        request = _checked_request(body)
        span = self._start_span(context, request) if self._start_span is not None else None
        watch = CancellationWatch(self._engine, context, defer=self._mode is DisaggregationMode.DECODE)
        stream: AsyncGenerator[Any, None] | None = None
        try:
            stream = self._engine.generate(request, context=context)  # type: ignore[arg-type]
            await self._pump(stream, _choices(request), context, sink, watch, span)
        except BaseException as error:
            failure = _end_failed(error, context, sink, watch, self._map_builtin_errors)
            if span is not None and failure is None:
                span.dropped()
            elif span is not None:
                span.fail(type(failure).__name__ if stream is not None else "setup_failed")
            if not _is_engines(error):
                raise
        finally:
            watch.finished()
            if stream is not None:
                await close_generator(stream, context)
            await watch.settle()

    async def _pump(
        self,
        stream: AsyncGenerator[Any, None],
        choices: int,
        context: Context,
        sink: ResponseSink,
        watch: CancellationWatch,
        span: RequestSpan | None,
    ) -> None:
        send = sink.send_tokens
        awaiting_first = True
        now = asyncio.get_running_loop().time
        began = first_at = now()
        open_choices = choices
        burst = tokens = 0
        link = span.worker_trace_link() if span is not None else None
        async for chunk in stream:
            if link is not None and isinstance(chunk, Mapping) and (chunk.get("token_ids") or "finish_reason" in chunk):
                chunk, link = {**chunk, "worker_trace_link": link}, None
            try:
                ids = chunk["token_ids"]
                index = chunk.get("index") or 0
                # One new token, in a list: nearly every chunk. It is copied because an engine may reuse its list.
                if len(ids) == 1 and type(ids) is list and type(ids[0]) is int and 0 <= ids[0] <= MAX_TOKEN_ID:
                    ids = [ids[0]]
                else:
                    ids = _checked_ids(ids)
                keys = len(chunk)
            except (TypeError, KeyError, AttributeError) as error:
                raise _invalid_chunk(chunk, error) from error
            if type(index) is not int or not 0 <= index < choices:
                raise Unknown(f"invalid choice index {index!r}: this request has {choices} choice(s)")
            tokens += len(ids)
            if awaiting_first and ids:
                awaiting_first = False
                first_at = now()
                if watch.deferring:
                    watch.first_token()
            if span is not None and ids:
                span.on_chunk(now(), len(ids))
            if keys == 1 or (keys == 2 and "index" in chunk):
                send(ids, index)
            else:
                extra = {k: v for k, v in chunk.items() if v is not None and k in CHUNK_KEYS} or None
                reason = chunk.get("finish_reason")
                if reason is None:
                    send(ids, index, None, extra)
                else:
                    try:
                        word = normalise(reason)
                    except TypeError as error:
                        raise InvalidChunk(f"the engine's chunk is invalid: {error}") from error
                    except EngineFailed as error:
                        if ids:
                            send(ids, index, None, extra)
                        raise Unknown(str(error)) from error
                    if word == CANCELLED and not context.is_stopped():
                        raise EngineShutdown("the engine cancelled a request that nobody had cancelled")
                    if self._validate:
                        await _check_silence(stream, chunk, word, self._mode, last=open_choices == 1)
                    send(ids, index, word, extra)
                    open_choices -= 1
                    if open_choices == 0:
                        sink.end()
                        watch.finished()
                        _note_stream(tokens, word, first_at - began, now() - first_at)
                        if span is not None:
                            span.finish(tokens, word, word == CANCELLED)
                        return
            if sink.ended and not watch.deferring:  # killed, lost or cut: whoever did that has told the watch
                _note_stream(tokens, None, first_at - began, now() - first_at)
                if span is not None:
                    span.dropped(tokens)
                return
            burst += 1
            if burst == CHUNKS_PER_TURN:
                burst = 0
                await asyncio.sleep(0)
            if not sink.has_credit():
                await sink.wait_credit()
        if open_choices < choices:  # an engine without n > 1 of its own: the choices it did make are whole
            sink.end()
        elif context.is_stopped():
            send([], 0, CANCELLED)
            sink.end()
        else:
            raise StreamIncomplete("the engine's stream ended without a terminal chunk (one with finish_reason)")
        _note_stream(tokens, CANCELLED if context.is_stopped() else "stop", first_at - began, now() - first_at)
        if span is not None:
            span.finish(tokens, CANCELLED if context.is_stopped() else "stop", context.is_stopped())


class RawServing:
    """Serves requests with a `RawEngine`: objects pass verbatim, the end of the generator is the end."""

    def __init__(self, engine: RawEngine, *, map_builtin_errors: bool = False) -> None:
        self._engine = engine
        self._map_builtin_errors = map_builtin_errors

    async def handle(self, body: Any, context: Context, sink: ResponseSink) -> None:
        """Serve one request."""
        if not isinstance(body, dict):
            raise InvalidArgument(f"the request must be an object, got {type(body).__name__}")
        watch = CancellationWatch(self._engine, context, defer=False)
        stream: AsyncGenerator[Any, None] | None = None
        burst = 0
        try:
            stream = self._engine.generate(body, context=context)
            async for item in stream:
                sink.send_object({"data": item})
                if sink.ended:
                    return
                burst += 1
                if burst == CHUNKS_PER_TURN:
                    burst = 0
                    await asyncio.sleep(0)
                if not sink.has_credit():
                    await sink.wait_credit()
            sink.end()
        except BaseException as error:
            _end_failed(error, context, sink, watch, self._map_builtin_errors)
            if not _is_engines(error):
                raise
        finally:
            watch.finished()
            if stream is not None:
                await close_generator(stream, context)
            await watch.settle()


def _note_stream(tokens: int, finish_reason: str | None, first_seconds: float, other_seconds: float) -> None:
    """Give the request's log records what its stream was like; the second time is that from the first token on."""
    annotate_log_span(
        output_tokens=tokens,
        finish_reason=finish_reason,
        ttft_ms=round(first_seconds * 1000, 3) if tokens else None,
        avg_itl_ms=round(other_seconds / (tokens - 1) * 1000, 3) if tokens > 1 else None,
    )


class CancellationWatch:
    """Calls `engine.abort` exactly once when a request is cancelled, and never after it ended by itself.

    It costs one callback registration per request: tasks exist only once a request really is cancelled. On a decode
    worker both the abort and the forced end wait for the first token, because the prefill peer's KV transfer needs a
    receiver until then.
    """

    __slots__ = (
        "_abort",
        "_context",
        "_deferred_kill",
        "_done",
        "_engine",
        "_forget",
        "_metadata",
        "_task",
        "_timer",
        "deferring",
        "forced",
    )

    def __init__(self, engine: BaseEngine, context: Context, *, defer: bool) -> None:
        self._engine = engine
        self._context = context
        self._metadata = context.metadata.copy() if context.has_metadata else None
        self._task = asyncio.current_task()
        self._abort: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deferred_kill: bool | None = None
        self._done = False
        self.deferring = defer
        self.forced = False
        loop = asyncio.get_running_loop()
        if defer:  # an engine may say so from the thread that moves the KV blocks
            context.on_first_token(partial(on_loop(loop, lambda _: self.first_token()), False))
        self._forget = context.on_cancel(on_loop(loop, self._cancelled))

    def first_token(self) -> None:
        """The first token is there (or the engine says the transfer is): what waited for it happens now."""
        if not self.deferring:
            return
        self.deferring = False
        self._context.on_first_token(None)
        if self._deferred_kill is not None and not self._done:
            self._cancelled(self._deferred_kill)

    def _cancelled(self, killed: bool) -> None:
        if self._done:
            return
        if self.deferring:
            self._deferred_kill = killed or bool(self._deferred_kill)
            return
        loop = asyncio.get_running_loop()
        if self._abort is None:
            logger.debug("request %s cancelled; telling the engine", self._context.id())
            # Awaited in `settle`, which the serving coroutine calls on every path.
            self._abort = loop.create_task(self._tell_engine(), name=f"abort {self._context.id()}")
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(KILL_GRACE_SECONDS if killed else STOP_GRACE_SECONDS, self._force)

    async def _tell_engine(self) -> None:
        twin = Context(self._context.id(), self._metadata, trace=self._context.trace)
        twin.stop_generating()
        try:
            await self._engine.abort(twin)
        except Exception:
            logger.debug("abort of request %s failed", self._context.id(), exc_info=True)

    def _force(self) -> None:
        if not self._done and self._task is not None:
            self.forced = True
            self._task.cancel()

    def finished(self) -> None:
        """The stream ended: from here on a cancellation is no business of the engine's. Idempotent."""
        self._done = True
        self._forget()
        self._context.on_first_token(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def settle(self) -> None:
        """Wait for an abort that was begun, at most `CLOSE_SECONDS`."""
        if self._abort is not None and not self._abort.done():
            done, _ = await asyncio.wait({self._abort}, timeout=CLOSE_SECONDS)
            if not done:
                logger.warning("abort of request %s did not return in %g s", self._context.id(), CLOSE_SECONDS)
                self._abort.cancel()


async def close_generator(stream: AsyncGenerator[Any, None], context: Context) -> None:
    """Run the generator's `finally` now. Its failure, or its refusal to end, is logged and not passed on."""
    close = getattr(stream, "aclose", None)
    if close is None:  # an engine may hand out any async iterator; only generators have something to close
        return
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await close()
    except TimeoutError:
        logger.warning("the generator of request %s did not close in %g s", context.id(), CLOSE_SECONDS)
    except Exception:
        logger.debug("closing the generator of request %s failed", context.id(), exc_info=True)


def _end_failed(
    error: BaseException, context: Context, sink: ResponseSink, watch: CancellationWatch, map_builtin_errors: bool
) -> DynamoException | None:
    """End a stream whose generator raised. Returns the typed failure, or None when nothing failed: the request or the
    whole task was cancelled."""
    if isinstance(error, asyncio.CancelledError):
        if watch.forced:
            # The watch gave up waiting and cancelled this task to unblock the generator; that is an end, not a failure.
            forgive_cancellation()
            sink.end(Cancelled("request cancelled"))
            return None
        if is_being_cancelled():
            sink.end(EngineShutdown("the worker is shutting down"))
            return None
    if isinstance(error, asyncio.CancelledError) and not context.is_stopped():
        failure: DynamoException = EngineShutdown("the engine cancelled a request that nobody had cancelled")
        failure.__cause__ = error
    else:
        failure = wrap_error(error, map_builtin_errors=map_builtin_errors)
    sink.end(failure)
    log_failure(context, error, failure)
    return failure


def _is_engines(error: BaseException) -> bool:
    """Whether an exception ends with its request; the others end the task or the process, too."""
    if isinstance(error, asyncio.CancelledError):
        return not is_being_cancelled()
    return isinstance(error, Exception | GeneratorExit)


def wrap_error(error: BaseException, *, map_builtin_errors: bool = False) -> DynamoException:
    """An exception that left engine code, as a typed error; the original stays reachable as its cause."""
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


def log_failure(context: Context, error: BaseException, failure: DynamoException) -> None:
    """ERROR with id and traceback for what the engine did wrong, DEBUG for what a caller did."""
    fields = {"request_id": context.id()}
    if isinstance(failure, InvalidArgument | Cancelled):
        logger.debug("request %s: %s", context.id(), failure, extra=fields)
    elif isinstance(error, DynamoException) and error.__cause__ is None and not isinstance(error, Unknown):
        logger.error("request %s: %s: %s", context.id(), type(error).__name__, error, extra=fields)
    else:
        logger.error("request %s failed in the engine", context.id(), exc_info=error, extra=fields)


async def _check_silence(
    stream: AsyncGenerator[Any, None], chunk: Mapping[str, Any], word: str, mode: DisaggregationMode, *, last: bool
) -> None:
    """Validator: nothing may follow a terminal chunk, and an encode terminal must carry its result."""
    if mode is DisaggregationMode.ENCODE and word != CANCELLED and not isinstance(chunk.get("encoder_result"), dict):
        raise Unknown("Encode-mode contract violation: the terminal chunk has no object-shaped encoder_result")
    if not last:
        return
    try:
        async with asyncio.timeout(VALIDATE_SECONDS):
            await anext(stream)
    except (StopAsyncIteration, TimeoutError):
        return
    except Exception as error:
        raise Unknown("item yielded after terminal item (an exception)") from error
    raise Unknown("item yielded after terminal item")


def _checked_request(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise InvalidArgument(f"the request must be an object, got {type(body).__name__}")
    if type(body.get("token_ids")) is not list:
        if "token_ids" not in body:
            raise InvalidArgument("the request has no token_ids")
        try:
            normalize_request_token_ids(body)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"token_ids: {error}") from error
    if (info := body.get("bootstrap_info")) is not None:
        _check_bootstrap(info)
    return body


def _check_bootstrap(info: Any) -> None:
    """The native wire carries the id of a hand-over as 16 bytes; engines get text, as from every other wire."""
    handoff_id = info.get("handoff_id") if isinstance(info, dict) else None
    if isinstance(handoff_id, bytes):
        try:
            info["handoff_id"] = str(uuid.UUID(bytes=handoff_id))
        except ValueError as error:
            raise InvalidArgument(f"bootstrap_info.handoff_id: {error}") from error


def _choices(request: Mapping[str, Any]) -> int:
    options = request.get("sampling_options")
    count = options.get("n") if isinstance(options, dict) else None
    return count if isinstance(count, int) and count > 1 else 1


def _checked_ids(ids: Any) -> list[int]:
    """A fresh list of u32s from a list, tuple or array. Raises TypeError saying what is wrong."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple):
        raise TypeError(f"token_ids must be a list of integers, got {type(ids).__name__}")
    checked = []
    for position, value in enumerate(ids):
        try:
            token = operator.index(value)
        except TypeError:
            raise TypeError(f"token_ids[{position}] must be an integer, got {type(value).__name__}") from None
        if isinstance(value, bool) or not 0 <= token <= MAX_TOKEN_ID:
            raise TypeError(f"token_ids[{position}] must be an unsigned 32-bit integer, got {value!r}")
        checked.append(token)
    return checked


def _invalid_chunk(chunk: Any, error: Exception) -> InvalidChunk:
    if not isinstance(chunk, Mapping):
        return InvalidChunk(f"the engine's chunk is invalid: expected a mapping, got {type(chunk).__name__}")
    if "token_ids" not in chunk:
        return InvalidChunk(f"the engine's chunk is invalid: no token_ids (keys: {sorted(map(str, chunk))})")
    return InvalidChunk(f"the engine's chunk is invalid: {error}")
