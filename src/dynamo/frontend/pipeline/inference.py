"""The way of one inference request through the frontend: read, admit, look up, prepare, generate, answer, count.

A request holds its place in the admission from the moment its body is complete until the answer has ended. The
client's departure is noticed in every phase by one small task that waits for it and kills the context.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final, NamedTuple

from dynamo.errors import (
    DynamoException,
    Overloaded,
    ResponseTimeout,
    WorkerUnavailable,
    describe,
    http_assertion,
    rule_of,
)
from dynamo.frontend.admission.model import Place, Shed, urgency_of
from dynamo.frontend.admission.process import Admission, NotReady
from dynamo.frontend.apis.surfaces import Answer, ChunkWriter, Surface, UnaryAnswer
from dynamo.frontend.http.asgi import (
    RESPOND_EXTENSION,
    BodyBudget,
    ClientGone,
    Headers,
    Receive,
    Respond,
    Scope,
    Send,
    check_content_type,
    first_headers,
    read_body,
    reply,
    reply_rejected,
)
from dynamo.frontend.http.event_stream import PUSH_EXTENSION, EventStream
from dynamo.frontend.metrics import UNKNOWN_MODEL, FrontendMetrics, RequestMetrics
from dynamo.frontend.models.directory import ModelDirectory, ServedModel
from dynamo.frontend.pipeline.generation import Delta, SingleGeneration, WorkRequest, generate
from dynamo.frontend.pipeline.overhead import PARSE, QUEUE, Overhead, wants_overhead
from dynamo.frontend.pipeline.parsed_answers import ParsedChunkWriter, ParsedUnaryAnswer
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.settings import KEEP_ALIVE_SECONDS, FrontendSettings
from dynamo.frontend.stalls import StallWatch
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import (
    RequestRejected,
    model_not_found,
    model_not_ready,
    not_ready,
    rejection_for,
)
from dynamo.protocol.openai.escaping import json_text
from dynamo.protocol.openai.headers import HeaderEffects, apply_headers
from dynamo.protocol.openai.requests import ChatRequest, Request
from dynamo.protocol.openai.sse import DONE, annotation_event
from dynamo.runtime.context import Context
from dynamo.runtime.tracing import TraceContext

__all__ = ["InFlight", "InferenceRoute"]

logger = logging.getLogger(__name__)

_TRACE_HEADERS: Final = (b"traceparent", b"tracestate", b"x-request-id", b"request-id")
_THREAD_ID: Final = b"thread-id"  # the one header we read that does not begin with "x-"

SILENT_BEATS: Final = 10  # in how many steps an engine's silence is counted; it is noticed at most one of them late


class InFlight:
    """The requests being answered, so that a shutdown can cut them."""

    def __init__(self) -> None:
        self._exchanges: dict[_Exchange, None] = {}  # in order of arrival, which is the order of the cut

    def cut(self) -> int:
        """End every request with a 503 (or an error event); how many there were."""
        exchanges = list(self._exchanges)
        for exchange in exchanges:
            exchange.end_with(WorkerUnavailable("the frontend is stopping"))
        return len(exchanges)


class _Exchange:
    """One request and its client."""

    __slots__ = ("context", "counted", "is_client_gone", "is_over", "name", "place", "reason")

    def __init__(self, context: Context, counted: RequestMetrics, place: Place, client_id: bytes | None) -> None:
        """`client_id`: the client's own `x-request-id`."""
        self.context, self.counted, self.place = context, counted, place
        self.name = context.id() + _said_by_client(client_id)  # in the log
        self.is_client_gone = False
        self.is_over = False  # answered in full: what the connection does now is nobody's concern
        self.reason: DynamoException | None = None  # why we killed it ourselves

    def end_with(self, reason: DynamoException) -> None:
        """Kill the work; the client is told `reason`."""
        if not self.is_over and self.reason is None and not self.is_client_gone:
            self.reason = reason
            self.context.kill()

    async def watch(self, receive: Receive) -> None:
        """Kill the work when the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.is_over:
            self.is_client_gone = True
            self.context.kill()


class _Inactivity:
    """Moves a request whose engine has been silent for too long to another, or ends it where there is none; costs one
    assignment for each wake-up.

    Silence is counted in beats of this very loop. While it was away (a suspended machine, a long block) nobody listened,
    and that is one beat, however long it was.
    """

    __slots__ = ("_beats", "_exchange", "_limit", "_loop", "_seen", "_timer", "_work", "last")

    def __init__(self, exchange: _Exchange, work: WorkRequest, limit_seconds: float) -> None:
        self._exchange, self._work, self._limit = exchange, work, limit_seconds
        self._loop = asyncio.get_running_loop()
        self.last = self._seen = self._loop.time()
        self._beats = 0  # since something was heard
        self._timer = self._loop.call_later(limit_seconds / SILENT_BEATS, self._beat)

    def _beat(self) -> None:
        if self.last != self._seen:
            self._seen, self._beats = self.last, 0
        else:
            self._beats += 1
        if self._beats >= SILENT_BEATS:
            silence = ResponseTimeout(f"no output for {self._limit:g} s")
            if not self._work.give_up_silent_workers(silence):
                self._exchange.end_with(silence)
                return
            self._beats = 0
        self._timer = self._loop.call_later(self._limit / SILENT_BEATS, self._beat)

    def close(self) -> None:
        self._timer.cancel()


class InferenceRoute:
    """One route as an ASGI application."""

    def __init__(
        self,
        surface: Surface[Any],
        *,
        settings: FrontendSettings,
        admission: Admission,
        models: ModelDirectory,
        metrics: FrontendMetrics,
        preprocessor: Preprocessor,
        in_flight: InFlight,
        watch: StallWatch,
        budget: BodyBudget,
    ) -> None:
        self._surface = surface
        self._settings = settings
        self._admission = admission
        self._models = models
        self._metrics = metrics
        self._preprocessor = preprocessor
        self._exchanges = in_flight._exchanges
        self._watch = watch
        self._metadata_prefix = settings.metadata_header_prefix.encode()
        self._budget = budget
        self._limits = BodyLimits(settings.json_depth_limit, settings.messages_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        headers = first_headers(scope)
        request_id = headers.get(b"x-request-id")
        extra = () if request_id is None else ((b"x-request-id", request_id),)
        began = loop.time()
        try:
            check_content_type(headers)
            body = await read_body(headers, receive, self._settings.body_limit_bytes, self._budget)
            began = loop.time()  # how long a client takes to send its request is no time of ours
            overhead = Overhead(is_wanted=wants_overhead(headers))
            self._admission.enter()
            overhead.mark(QUEUE)
        except ClientGone:
            return
        except (RequestRejected, NotReady, Overloaded) as error:
            # Before anything was parsed: a shed request must cost next to nothing.
            rejected = self._rejection(error)
            self._count_early(began, rejected, error)
            await reply_rejected(send, rejected, extra)
            return
        try:
            await self._admitted(scope, headers, body, receive, send, extra, began, overhead)
        finally:
            self._admission.leave()

    # -- one admitted request ----------------------------------------------------------------------------------------

    async def _admitted(
        self,
        scope: Scope,
        headers: Headers,
        body: bytes,
        receive: Receive,
        send: Send,
        extra: tuple[tuple[bytes, bytes], ...],
        began: float,
        overhead: Overhead,
    ) -> None:
        try:
            request, model, effects = self._understand(scope, body)
        except RequestRejected as error:
            self._count_early(began, error, error)
            said = _said_by_client(headers.get(b"x-request-id"))
            logger.info("%s%s declined: %d %s", self._surface.endpoint, said, error.status, error.message)
            await reply_rejected(send, error, extra)
            return
        is_streaming = request.is_streaming
        counted = self._metrics.request(
            model.name, self._surface.endpoint, "stream" if is_streaming else "unary", began
        )
        try:
            place = model.admission.enter(urgency_of(request.nvext), began)
        except Shed as error:  # before the prompt was rendered or tokenised
            self._metrics.shed(model.name, error.reason)
            rejected = self._rejection(error)
            counted.fail(asyncio.get_running_loop().time(), **_classify(error, rejected)._asdict())
            await reply_rejected(send, rejected, extra)
            return
        try:
            await self._placed(
                scope, headers, request, model, effects, counted, place, receive, send, extra, began, overhead
            )
        finally:
            place.leave()

    async def _placed(
        self,
        scope: Scope,
        headers: Headers,
        request: Request,
        model: ServedModel,
        effects: HeaderEffects,
        counted: RequestMetrics,
        place: Place,
        receive: Receive,
        send: Send,
        extra: tuple[tuple[bytes, bytes], ...],
        began: float,
        overhead: Overhead,
    ) -> None:
        loop = asyncio.get_running_loop()
        is_streaming = request.is_streaming
        context = Context(
            self._surface.id_prefix + str(uuid.uuid4()), effects.metadata or None, trace=_trace_of(headers)
        )
        exchange = _Exchange(context, counted, place, headers.get(b"x-request-id"))
        self._exchanges[exchange] = None
        watcher = loop.create_task(exchange.watch(receive), name="frontend: client watch")  # cancelled below
        stream: EventStream | None = None
        if is_streaming:
            stream = EventStream(
                send,
                push=(scope.get("extensions") or {}).get(PUSH_EXTENSION),
                extra=extra,
                late_headers=overhead.headers,
                peek_seconds=self._settings.peek_seconds,
                keep_alive_seconds=_keep_alive(self._settings, request),
            )
        work: WorkRequest | None = None
        expiry: asyncio.TimerHandle | None = None
        if (limit := self._settings.request_timeout_seconds) is not None:
            context.deadline = began + limit  # the worker is told, and keeps it itself where its wire can say it
            late = ResponseTimeout(f"the request was not answered within {limit:g} s")
            expiry = loop.call_at(context.deadline, exchange.end_with, late)
        try:
            work, text = await self._surface.prepare(self._preprocessor, request, effects, model, overhead)
            work.watch = self._watch
            answer = Answer(self._surface, request, model, work, context.id(), time.time() - (loop.time() - began))
            if stream is not None:
                await self._stream(exchange, request, answer, stream, text, began)
            else:
                respond = (scope.get("extensions") or {}).get(RESPOND_EXTENSION)
                await self._unary(exchange, answer, send, respond, extra, began)
            overhead.ended()
            self._metrics.observe_overhead(overhead)
            self._log_end(exchange, model, answer, loop.time() - began)
        except asyncio.CancelledError:
            context.kill()
            prompt_tokens, output_tokens = _used(work)
            counted.cancel(loop.time(), prompt_tokens=prompt_tokens, output_tokens=output_tokens)
            raise
        except Exception as error:  # the boundary: whatever it is, the client gets a well-formed answer
            context.kill()
            await self._failed(exchange, error, send, stream, extra, work)
        finally:
            exchange.is_over = True
            if work is not None and work.moves:
                self._metrics.moved(model.name, work.moves)
            watcher.cancel()
            if expiry is not None:
                expiry.cancel()
            if stream is not None:
                stream.close()
            self._exchanges.pop(exchange, None)

    def _understand(self, scope: Scope, body: bytes) -> tuple[Request, ServedModel, HeaderEffects]:
        """Everything that can be wrong with a request before a model is asked; in the native order of checks."""
        settings = self._settings
        request = self._surface.decode(body, ignore_unsupported=settings.ignore_unsupported_fields, limits=self._limits)
        model = self._models.lookup(request.model)
        if model is None and self._models.is_registered(request.model):
            raise model_not_ready(request.model)
        prefix = self._metadata_prefix
        effects = apply_headers(
            request,
            [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in scope["headers"]
                if name[:2] == b"x-" or name == _THREAD_ID or name.startswith(prefix)
            ],
            metadata_prefix=settings.metadata_header_prefix,
            nvext_enabled=not settings.disable_nvext,
        )
        for warning in effects.warnings:
            logger.warning("%s", warning)
        if request.repaired:
            logger.warning("a request body was not strict JSON and was mended (model %r)", request.model[:128])
        self._surface.validate(request)
        if model is None or not model.surfaces & self._surface.model_type:
            raise model_not_found()
        return request, model, effects

    async def _stream(
        self,
        exchange: _Exchange,
        request: Request,
        answer: Answer,
        stream: EventStream,
        text: str | None,
        began: float,
    ) -> None:
        settings = self._settings
        always = settings.force_include_usage
        writer = self._writer(answer, continuous_usage=request.continuous_usage or always)
        head = _annotations(request, answer, text)
        loop_time = asyncio.get_running_loop().time
        counted = exchange.counted
        overhead = answer.work.overhead
        inactivity = self._inactivity(exchange, answer.work)
        overhead.mark(PARSE)

        def encode(deltas: list[Delta]) -> bytes:
            now = loop_time()
            if inactivity is not None:
                inactivity.last = now
            if writer.first_token_seconds is None:
                writer.first_token_seconds = now - began
                exchange.place.begun(now)
            counted.tokens(deltas[0].tokens if len(deltas) == 1 else sum([delta.tokens for delta in deltas]), now)
            return writer.write(deltas)

        try:
            if answer.work.is_single:
                head = await self._stream_single(exchange, answer, stream, writer, encode, inactivity, head)
            else:
                async with aclosing(generate(answer.model, answer.work, exchange.context)) as batches:
                    async for deltas in batches:
                        if data := head + encode(deltas):
                            head = b""
                            await stream.write(data)
                            overhead.answering()
        finally:
            if inactivity is not None:
                inactivity.close()
        self._check_end(exchange)
        last = writer.usage_chunk() + DONE if request.include_usage or always else DONE
        exchange.is_over = True
        if overhead.is_wanted:
            overhead.ended()
            last = overhead.comment() + last
        await stream.end(head + last)
        self._finish(exchange, answer)

    async def _stream_single(
        self,
        exchange: _Exchange,
        answer: Answer,
        stream: EventStream,
        writer: ChunkWriter,
        encode: Callable[[list[Delta]], bytes],
        inactivity: _Inactivity | None,
        head: bytes,
    ) -> bytes:
        """One choice: the first delta waits for its turn, the others go from socket to socket while the client keeps up.

        Returns what of `head` is still to be sent.
        """
        overhead = answer.work.overhead
        loop_time = asyncio.get_running_loop().time
        count_tokens = exchange.counted.tokens
        refused: list[bytes] = []  # what could not be pushed; at most one entry

        def accept(deltas: list[Delta]) -> bool:
            data = encode(deltas)
            if not data or stream.push(data, loop_time()):
                return True
            refused.append(data)
            return False

        def plain(text: str, count: int) -> bool:
            now = loop_time()
            if inactivity is not None:
                inactivity.last = now
            count_tokens(count, now)
            if not text:
                return True
            data = opening + json_text(text) + closing
            if stream.push(data, now):
                return True
            refused.append(data)
            return False

        async with aclosing(SingleGeneration(answer.model, answer.work, exchange.context)) as single:
            while (deltas := await single.next()) is not None:
                if data := head + encode(deltas):
                    head = b""
                    await stream.write(data)
                    overhead.answering()
                while stream.can_push:
                    opening, closing = writer.plain_ends or (b"", b"")
                    await single.push(accept, plain if closing else None)
                    if not refused:
                        break
                    await stream.write(refused.pop())
        return head

    async def _unary(
        self,
        exchange: _Exchange,
        answer: Answer,
        send: Send,
        respond: Respond | None,
        extra: tuple[tuple[bytes, bytes], ...],
        began: float,
    ) -> None:
        parsing = answer.work.parsing
        gathered = UnaryAnswer(answer) if parsing is None else ParsedUnaryAnswer(answer, parsing)
        loop_time = asyncio.get_running_loop().time
        overhead = answer.work.overhead
        inactivity = self._inactivity(exchange, answer.work)
        overhead.mark(PARSE)
        try:
            async with aclosing(generate(answer.model, answer.work, exchange.context)) as batches:
                async for deltas in batches:
                    now = loop_time()
                    if inactivity is not None:
                        inactivity.last = now
                    is_first = gathered.first_token_seconds is None
                    if is_first:
                        gathered.first_token_seconds = now - began
                        exchange.place.begun(now)
                    exchange.counted.tokens(sum([delta.tokens for delta in deltas]), now)
                    gathered.add(deltas)
                    if is_first:
                        overhead.answering()
        finally:
            if inactivity is not None:
                inactivity.close()
        self._check_end(exchange)
        exchange.is_over = True
        body = gathered.body()
        if overhead.is_wanted:
            overhead.ended()
            extra += overhead.headers()
        await reply(send, 200, body, extra=extra, respond=respond)
        self._finish(exchange, answer)

    def _writer(self, answer: Answer, *, continuous_usage: bool) -> ChunkWriter:
        parsing, settings = answer.work.parsing, self._settings
        if parsing is None:
            return ChunkWriter(answer, continuous_usage=continuous_usage)
        return ParsedChunkWriter(
            answer,
            parsing,
            continuous_usage=continuous_usage,
            reasoning_field=settings.reasoning_field_name,
            dispatches_calls=settings.streaming_tool_dispatch,
            dispatches_reasoning=settings.streaming_reasoning_dispatch,
        )

    def _inactivity(self, exchange: _Exchange, work: WorkRequest) -> _Inactivity | None:
        limit = self._settings.backend_stream_timeout_seconds
        return None if limit is None else _Inactivity(exchange, work, limit)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _check_end(self, exchange: _Exchange) -> None:
        """Generation is over: was it an end, or did somebody end it?"""
        if exchange.is_client_gone:
            raise ClientGone
        if exchange.reason is not None:
            raise exchange.reason

    def _finish(self, exchange: _Exchange, answer: Answer) -> None:
        work = answer.work
        exchange.counted.finish(
            asyncio.get_running_loop().time(),
            prompt_tokens=work.prompt_tokens,
            output_tokens=work.completion_tokens,
            cached_tokens=work.cached_tokens,
        )

    async def _failed(
        self,
        exchange: _Exchange,
        error: Exception,
        send: Send,
        stream: EventStream | None,
        extra: tuple[tuple[bytes, bytes], ...],
        work: WorkRequest | None,
    ) -> None:
        now = asyncio.get_running_loop().time()
        name = exchange.name
        prompt_tokens, output_tokens = _used(work)
        if exchange.is_client_gone:
            exchange.counted.cancel(now, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
            logger.info("request %s: the client left after %d token(s)", name, output_tokens)
            return
        if exchange.reason is not None:
            error = exchange.reason
        rejected = self._rejection(error)
        if isinstance(error, Overloaded) and rejected.retry_after_seconds is not None:
            # The workers are full: how soon that passes is known better here than by the one that refused last.
            rejected.retry_after_seconds = max(rejected.retry_after_seconds, exchange.place.retry_after_seconds(now))
        failure = _classify(error, rejected)
        exchange.counted.fail(now, **failure._asdict(), prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        if not isinstance(error, DynamoException | RequestRejected):
            logger.error("request %s failed inside the frontend", name, exc_info=error)
        elif rejected.status >= 500 and rejected.status != self._settings.overload_status:
            logger.error("request %s failed with %d: %s: %s", name, rejected.status, type(error).__name__, error)
        else:
            logger.info("request %s: %d %s", name, rejected.status, rejected.message)
        exchange.is_over = True
        if stream is not None:
            await stream.settle()
            if stream.is_committed:
                await stream.end(rejected.frame() + DONE)
                return
        await reply_rejected(send, rejected, extra)

    def _rejection(self, error: BaseException) -> RequestRejected:
        if isinstance(error, NotReady):
            return not_ready()
        return rejection_for(error, overload_status=self._settings.overload_status)

    def _count_early(self, began: float, rejected: RequestRejected, error: BaseException) -> None:
        counted = self._metrics.request(UNKNOWN_MODEL, self._surface.endpoint, "unary", began)
        counted.fail(asyncio.get_running_loop().time(), **_classify(error, rejected)._asdict())
        if rejected.limit is not None:
            self._metrics.refused(rejected.limit)

    def _log_end(self, exchange: _Exchange, model: ServedModel, answer: Answer, seconds: float) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "request %s completed: %s, %d + %d tokens, %.3f s",
                exchange.name,
                model.name,
                answer.work.prompt_tokens,
                answer.work.completion_tokens,
                seconds,
            )


class _Failure(NamedTuple):
    """How the metrics name a failure."""

    error_type: str
    failure_class: str
    reason: str


_BY_STATUS: Final = {
    400: _Failure("validation", "InvalidRequest", "request.invalid"),
    404: _Failure("not_found", "NotFound", "request.not_found"),
    501: _Failure("not_implemented", "NotImplemented", "runtime.not_implemented"),
    503: _Failure("unavailable", "Unavailable", "runtime.unavailable"),
    504: _Failure("response_timeout", "DeadlineExceeded", "backend.response_timeout"),
}
_INTERNAL: Final = _Failure("internal", "Internal", "runtime.internal")


def _keep_alive(settings: FrontendSettings, request: Request) -> float | None:
    """How long a stream may be silent. A request that may hold back all output has a limit even where that is off."""
    holds_back = isinstance(request, ChatRequest) and request.template_args.get("force_nonempty_content") is True
    return settings.keep_alive_seconds or (KEEP_ALIVE_SECONDS if holds_back else None)


def _said_by_client(client_id: bytes | None) -> str:
    """The client's id as the log shows it, behind our own."""
    return "" if client_id is None else f" (x-request-id {client_id[:128].decode('latin-1')})"


def _used(work: WorkRequest | None) -> tuple[int, int]:
    """(prompt tokens, output tokens) of an answer that may not have begun."""
    return (0, 0) if work is None else (work.prompt_tokens, work.completion_tokens)


def _classify(error: BaseException, rejected: RequestRejected) -> _Failure:
    status = rejected.status
    if isinstance(error, RequestRejected | NotReady) or not isinstance(error, DynamoException):
        found = _BY_STATUS.get(status)
        return found or (_BY_STATUS[400] if 400 <= status < 500 else _INTERNAL)
    record = describe(error)
    if rule_of(error).status == 529:
        error_type = "overload"
    elif status == 499:
        error_type = "cancelled"
    elif 400 <= status < 500:
        error_type = "validation" if status != 404 else "not_found"
    elif status in (503, 504):
        error_type = _BY_STATUS[status].error_type
    else:
        error_type = "internal"
    if http_assertion(error) is not None and 400 <= status < 500:
        return _Failure(error_type, "InvalidRequest", "backend.invalid_argument")
    return _Failure(error_type, record["class"], record["reason"])


def _trace_of(headers: Headers) -> TraceContext | None:
    if b"traceparent" not in headers:
        return None
    return TraceContext.from_headers(
        {name.decode(): headers[name].decode("latin-1") for name in _TRACE_HEADERS if name in headers}
    )


def _annotations(request: Request, answer: Answer, text: str | None) -> bytes:
    """The annotation events that come before any data; the rest are the worker's to answer."""
    events = []
    for name in request.annotations:
        if name == "request_id":
            events.append(annotation_event(name, answer.id))
        elif name == "token_ids":
            ids = [token for prompt in answer.work.prompts for token in prompt]
            events.append(annotation_event(name, "[" + ",".join(map(str, ids)) + "]"))
        elif name == "formatted_prompt" and text is not None:
            events.append(annotation_event(name, text))
    return b"".join(events)
