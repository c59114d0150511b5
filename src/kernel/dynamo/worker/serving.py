"""One request at the worker: call the engine, check its stream, watch for cancellation, close it promptly.

This is the worker's half of the hot path. Per chunk: one step of the engine's generator, a check of its shape, one
append to the connection's outgoing list. No task, future, log line or span work happens per token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dynamo.contract.engine import LLMEngine, RawEngine
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import EngineShutdown, InvalidArgument, StreamIncomplete, Unknown
from dynamo.protocol.finish import CANCELLED, EngineFailed, normalise
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.observe.logging import annotate_log_span
from dynamo.worker.cancellation import CancellationWatch, close_generator
from dynamo.worker.chunk_checks import (
    CHUNK_KEYS,
    MAX_TOKEN_ID,
    InvalidChunk,
    check_silence,
    checked_ids,
    checked_request,
    choice_count,
    invalid_chunk,
)
from dynamo.worker.engine_failures import ErrorMapping, end_failed, is_engine_failure, wrap_error
from dynamo.worker.running_requests import RunningRequest, RunningRequests

__all__ = ["CHUNKS_PER_TURN", "RawServing", "SpanRecorder", "TokenServing", "wrap_error"]

logger = logging.getLogger(__name__)

CHUNKS_PER_TURN: Final = 64  # an engine that never waits hands the loop to the others after this many chunks


class SpanRecorder(Protocol):
    """What a tracer records about one request (see `telemetry`)."""

    def on_chunk(self, now: float, tokens: int) -> None: ...

    def finish(self, output_tokens: int, finish_reason: str, cancelled: bool) -> None: ...

    def fail(self, kind: str) -> None: ...

    def dropped(self, output_tokens: int = 0) -> None: ...

    def worker_trace_link(self) -> dict[str, str]: ...


SpanFactory = Callable[[Context, Mapping[str, object]], SpanRecorder | None]


@dataclass(slots=True)
class _Call:
    """One request while it is served."""

    context: Context
    sink: ResponseSink
    watch: CancellationWatch
    span: SpanRecorder | None
    running: RunningRequest | None
    at_terminal: bool = False  # the engine's generator stands at the `yield` of its last chunk


class TokenServing:
    """Serves requests with an `LLMEngine`; `handle` is a runtime `Handler`."""

    def __init__(
        self,
        engine: LLMEngine,
        *,
        mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
        validate: bool = False,
        errors: ErrorMapping | None = None,
        start_span: SpanFactory | None = None,
        running: RunningRequests | None = None,
    ) -> None:
        """`validate`: also fail streams that go on after their terminal chunk (DYN_BACKEND_VALIDATE)."""
        self._engine = engine
        self._mode = mode
        self._validate = validate
        self._errors = errors or ErrorMapping(engine)
        self._start_span = start_span
        self._running = running

    async def handle(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Serve one request; everything the client should know goes through `sink`."""
        request = checked_request(body)
        span = self._start_span(context, request) if self._start_span is not None else None
        watch = CancellationWatch(self._engine, context, defer=self._mode is DisaggregationMode.DECODE)
        call = _Call(context, sink, watch, span, self._running.begin(request) if self._running is not None else None)
        stream: AsyncGenerator[object, None] | None = None
        try:
            stream = self._engine.generate(request, context=context)  # type: ignore[arg-type]
            await self._pump(stream, choice_count(request), call)
        except BaseException as error:
            failure = end_failed(error, context, sink, watch, self._errors)
            if span is not None and failure is None:
                span.dropped()
            elif span is not None:
                span.fail(type(failure).__name__ if stream is not None else "setup_failed")
            if not is_engine_failure(error):
                raise
        finally:
            watch.finished()
            try:
                if stream is not None:
                    await close_generator(stream, context, at_terminal=call.at_terminal)
                await watch.settle()
            finally:
                if self._running is not None and call.running is not None:
                    self._running.end(call.running)

    def _on_first_token(self, call: _Call) -> None:
        call.watch.first_token()
        if self._running is not None and call.running is not None:
            self._running.first_token(call.running)

    async def _pump(self, stream: AsyncGenerator[Any, None], choices: int, call: _Call) -> None:
        context, sink, watch, span, running = call.context, call.sink, call.watch, call.span, call.running
        send, send_token = sink.send_tokens, sink.send_token
        awaiting_first = True
        now = asyncio.get_running_loop().time
        began = first_at = now()
        open_choices = choices
        burst = tokens = 0
        link = span.worker_trace_link() if span is not None else None
        is_plain = False  # whether only the sink has a use for each single token
        async for chunk in stream:
            if (
                is_plain
                and type(chunk) is dict
                and type(ids := chunk.get("token_ids")) is list
                and len(ids) == 1
                and type(token_id := ids[0]) is int
                and 0 <= token_id <= MAX_TOKEN_ID
                and (len(chunk) == 1 or (len(chunk) == 2 and type(index := chunk.get("index")) is int and index == 0))
            ):  # one new token of the first choice and nothing else: nearly every chunk, past all the rest
                tokens += 1
                if running is not None:
                    running.tokens = tokens
                if send_token(token_id) and burst < CHUNKS_PER_TURN - 1:
                    burst += 1
                    continue
            else:
                if (
                    link is not None
                    and isinstance(chunk, Mapping)
                    and (chunk.get("token_ids") or "finish_reason" in chunk)
                ):
                    chunk, link = {**chunk, "worker_trace_link": link}, None
                try:
                    ids = chunk["token_ids"]
                    index = chunk.get("index") or 0
                    # One new token, in a list: nearly every chunk. It is copied because an engine may reuse its list.
                    if len(ids) == 1 and type(ids) is list and type(ids[0]) is int and 0 <= ids[0] <= MAX_TOKEN_ID:
                        ids = [ids[0]]
                    else:
                        ids = checked_ids(ids)
                    keys = len(chunk)
                except (TypeError, KeyError, AttributeError) as error:
                    raise invalid_chunk(chunk, error) from error
                if type(index) is not int or not 0 <= index < choices:
                    raise Unknown(f"invalid choice index {index!r}: this request has {choices} choice(s)")
                tokens += len(ids)
                if awaiting_first and ids:
                    awaiting_first = False
                    is_plain = span is None
                    first_at = now()
                    self._on_first_token(call)
                if running is not None:
                    running.tokens = tokens
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
                            call.at_terminal = True
                            if ids:
                                send(ids, index, None, extra)
                            raise Unknown(str(error)) from error
                        if word == CANCELLED and not context.is_stopped():
                            call.at_terminal = True
                            raise EngineShutdown("the engine cancelled a request that nobody had cancelled")
                        if self._validate:
                            await check_silence(stream, chunk, word, self._mode, last=open_choices == 1)
                        send(ids, index, word, extra)
                        open_choices -= 1
                        if open_choices == 0:
                            call.at_terminal = True
                            sink.end()
                            watch.finished()
                            _note_stream(tokens, word, first_at - began, now() - first_at)
                            if span is not None:
                                span.finish(tokens, word, word == CANCELLED)
                            return
            if sink.ended and not watch.deferring:  # killed, lost or cut, and the watch knows of it
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

    def __init__(self, engine: RawEngine, *, errors: ErrorMapping | None = None) -> None:
        self._engine = engine
        self._errors = errors or ErrorMapping(engine)

    async def handle(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Serve one request."""
        if not isinstance(body, dict):
            raise InvalidArgument(f"the request must be an object, got {type(body).__name__}")
        watch = CancellationWatch(self._engine, context, defer=False)
        stream: AsyncGenerator[object, None] | None = None
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
            end_failed(error, context, sink, watch, self._errors)
            if not is_engine_failure(error):
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
