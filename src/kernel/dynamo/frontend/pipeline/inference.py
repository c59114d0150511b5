"""The way of one inference request through the frontend: admit, parse, resolve, prepare, generate, answer, count.

`Call.run(exchange, sink)` is the one door. HTTP comes through it (`http/inference_route`), and so can a batch or a caller
in this process: it knows no server and no ASGI.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from msgspec import Struct

from dynamo.errors import DynamoException, Overloaded, ResponseTimeout, RouterQueueLimitExceeded, WorkerUnavailable
from dynamo.frontend.admission.model import Shed, cap_priority, urgency_of
from dynamo.frontend.admission.process import Admission, NotReady
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.metrics.requests import UNKNOWN_MODEL, RequestType
from dynamo.frontend.base.offload import LARGE_BODY_BYTES, takes_long
from dynamo.frontend.base.stage_timer import QUEUE, StageTimer, wants_stage_times
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.key_store import KeyStore
from dynamo.frontend.parts.keys.metering import UsageMeter
from dynamo.frontend.parts.keys.quotas import Quotas
from dynamo.frontend.parts.media.intake import MediaIntake
from dynamo.frontend.parts.recording.bundles import FailureNotes
from dynamo.frontend.parts.recording.recorder import RequestRecorder, open_tap
from dynamo.frontend.parts.recording.recording import Recording
from dynamo.frontend.pipeline.api import Answer, Api, FailureRenderer, GenerationApi, Renderer, RenderOptions
from dynamo.frontend.pipeline.charging import close_charge, reserve_tokens
from dynamo.frontend.pipeline.delivery import StreamDelivery, UnaryDelivery, annotation_events, send_placement
from dynamo.frontend.pipeline.exchange import Arrival, Exchange, ExchangeRegister, Phase
from dynamo.frontend.pipeline.failures import classify, rejection_of
from dynamo.frontend.pipeline.idle_timeout import IdleTimeout
from dynamo.frontend.pipeline.plan import Tally, WorkRequest
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.request_records import CLIENT_LEFT, begin_record, end_record, log_declined
from dynamo.frontend.pipeline.routing_answer import routing_headers
from dynamo.frontend.pipeline.sink import AnswerSink, AnswerStream, HeaderPairs
from dynamo.frontend.settings import KEEP_ALIVE_SECONDS, FrontendSettings
from dynamo.protocol.dialect import Dialect
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import RequestRejected, model_not_ready
from dynamo.protocol.openai.headers import HeaderEffects, apply_headers
from dynamo.protocol.openai.requests import ChatRequest, Request
from dynamo.protocol.vectors.requests import ResultRequest
from dynamo.router.stall_detector import StallDetector
from dynamo.runtime.observe.tracing import exports_content

__all__ = ["Call", "GenerationCall", "OpenAnswer", "Pipeline", "Resolved", "bind_key"]

logger = logging.getLogger(__name__)

_X: Final = b"x-"
_THREAD_ID: Final = b"thread-id"  # the one header we read that does not begin with "x-"

UNSUSPECTED_BODY_BYTES: Final = 16 * 1024 * 1024  # more than the longest embeddings, tools and schemas take


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The parts of a frontend that every call goes through."""

    settings: FrontendSettings
    admission: Admission
    models: ModelDirectory
    metrics: FrontendMetrics
    preprocessor: Preprocessor
    media: MediaIntake
    register: ExchangeRegister
    stalls: StallDetector
    keys: KeyStore | None = None
    """The keys in service; None where no route needs one."""
    quotas: Quotas | None = None
    """Their limits and budgets."""
    meter: UsageMeter | None = None
    """What they use."""
    recording: Recording | None = None
    """What is kept of requests; None: nothing."""

    @property
    def failures(self) -> FailureNotes | None:
        """Where requests that failed are noted; None: nowhere."""
        return None if self.recording is None else self.recording.failures

    @property
    def recorder(self) -> RequestRecorder | None:
        """What records requests; None: they are not recorded."""
        return None if self.recording is None else self.recording.recorder


class Resolved(Struct, frozen=True):
    """A request that keeps every rule, and the model that serves it."""

    request: Request | ResultRequest
    model: ServedModel
    effects: HeaderEffects


class OpenAnswer:
    """Where one answer goes: its sink, its stream if it is streamed, and what writes the stream once that is known."""

    __slots__ = ("renderer", "sink", "stream")

    def __init__(self, sink: AnswerSink) -> None:
        self.sink = sink
        self.stream: AnswerStream | None = None
        self.renderer: FailureRenderer | None = None  # None: the dialect of the API writes the end of a failed stream


class Call:
    """One inference API of a frontend, whatever its answers are made of."""

    def __init__(self, api: Api[Any], pipeline: Pipeline) -> None:
        self._api = api
        self.dialect = api.dialect
        self.response_id = api.response_id
        """Returns the `id` of the answer to a request, by the id of the request."""
        self._pipeline = pipeline
        self._settings = settings = pipeline.settings
        prefix = settings.metadata_header_prefix.encode()
        self._metadata_prefix = (
            prefix if prefix[:2] != _X else None
        )  # None: its headers are read as all of that kind are
        self._surface_bit = api.model_type.value
        self._limits = BodyLimits(
            settings.json_depth_limit,
            settings.messages_limit,
            settings.json_members_limit,
            settings.json_items_limit,
        )

    def open(self, id: str, arrival: Arrival) -> Exchange:
        """Return the exchange of a request, whose id is a UUID, that has just come in; its stage times begin now."""
        if arrival.identity is not None and self._pipeline.quotas is not None:
            arrival.charge = self._pipeline.quotas.open(arrival.identity, self._api.endpoint)
        return Exchange(id, arrival, StageTimer(is_wanted=wants_stage_times(arrival.headers)), self.response_id(id))

    async def run(self, exchange: Exchange, sink: AnswerSink) -> None:
        """Answer `exchange`, whatever happens: every failure is an answer, too.

        Raises only what `sink` raises, and `CancelledError`.
        """
        pipeline = self._pipeline
        try:
            pipeline.admission.enter()
        except (NotReady, Overloaded) as error:
            # Before anything was parsed: a request that is shed must cost next to nothing.
            rejected = self._rejection(error)
            self.decline_early(rejected, error, exchange.arrival.at)
            exchange.end()
            close_charge(exchange)
            await sink.reject(rejected)
            return
        exchange.timer.mark(QUEUE)
        exchange.early_end.task = asyncio.current_task()
        pipeline.register.add(exchange)
        is_large = len(exchange.arrival.body) > LARGE_BODY_BYTES
        try:
            await self._serve(exchange, sink)
        finally:
            if exchange.phase is not Phase.ENDED:
                exchange.end()
            if exchange.arrival.charge is not None:
                close_charge(exchange)
            pipeline.register.remove(exchange)
            pipeline.admission.leave()
            exchange.arrival.held = b""
            if is_large:
                pipeline.preprocessor.offload.return_memory_soon()

    def decline_early(self, rejected: RequestRejected, error: BaseException, began: float) -> None:
        """Count and note a request that was rejected before anything of it was read."""
        error_type = self._count_early(rejected, error, began)
        if self._pipeline.failures is not None:
            self._pipeline.failures.declined(self._api.endpoint, rejected, error_type)

    def _count_early(self, rejected: RequestRejected, error: BaseException, began: float) -> str:
        """Count a request that was rejected before its model was known; return its error type."""
        metrics = self._pipeline.metrics
        counters = metrics.requests.begin(UNKNOWN_MODEL, self._api.endpoint, "unary", began)
        labels = classify(error, rejected)
        counters.fail(asyncio.get_running_loop().time(), **labels._asdict())
        if rejected.limit is not None:
            metrics.refused(rejected.limit)
        return labels.error_type

    # -- one request that is in ----------------------------------------------------------------------------------

    async def _serve(self, exchange: Exchange, sink: AnswerSink) -> None:
        metrics, arrival, began = self._pipeline.metrics, exchange.arrival, exchange.arrival.at
        recording = self._pipeline.recording
        if recording is not None:
            arrival.body_bytes = len(arrival.body)
            if recording.holds(arrival.body):
                arrival.held = arrival.body
        try:
            try:
                resolved = await self._parse_and_resolve(arrival)
            except asyncio.CancelledError:
                if (aborted := exchange.take_interruption()) is None:
                    raise
                raise self._rejection(aborted) from None
        except RequestRejected as error:
            exchange.early_end.outcome = error
            error_type = self._count_early(error, error, began)
            log_declined(exchange, self._api.endpoint, error.status, error_type, error.message)
            if recording is not None:
                recording.failed(exchange, self._api.endpoint, error, error, error_type)
            exchange.end()
            await sink.reject(error)
            return
        arrival.body = b""
        request, model = resolved.request, resolved.model
        exchange.model = model.name
        kind: RequestType = "stream" if request.is_streaming else "unary"
        exchange.counters = counters = metrics.requests.begin(model.name, self._api.endpoint, kind, began)
        charge = arrival.charge
        try:
            if charge is not None:
                charge.enter(model.name)
            exchange.slot = slot = model.admission.enter(urgency_of(request.nvext), began)
        except (Shed, RequestRejected) as error:  # before the prompt was rendered or tokenised
            if isinstance(error, Shed):
                metrics.requests.shed(model.name, error.reason)
                if charge is not None:
                    charge.forgive()
            exchange.early_end.outcome = rejected = self._rejection(error)
            labels = classify(error, rejected)
            counters.fail(asyncio.get_running_loop().time(), **labels._asdict())
            if recording is not None:
                recording.failures.declined(self._api.endpoint, rejected, labels.error_type, model.name)
            exchange.end()
            await sink.reject(rejected)
            return
        try:
            await self._serve_admitted(exchange, resolved, sink)
        finally:
            slot.leave()

    async def _parse_and_resolve(self, arrival: Arrival) -> Resolved:
        """Check everything that can be wrong with a request before a worker gets it; in the native order of checks."""
        settings, models, api = self._settings, self._pipeline.models, self._api
        decode = partial(
            api.decode, arrival.body, ignore_unsupported=settings.ignore_unsupported_fields, limits=self._limits
        )
        # Off the loop where it takes long: other requests wait for the loop, and none for a thread of the executor.
        is_large = takes_long(arrival.body)
        if is_large and not api.takes_media:
            _check_plausible(len(arrival.body), settings.body_bytes_per_token, models.longest_context)
        offload = self._pipeline.preprocessor.offload
        request = await offload(decode) if is_large else decode()
        if is_large:
            request.__dict__["is_large"] = True
        model = models.lookup(request.model)
        if arrival.identity is not None:
            bind_key(request, arrival.identity, self.dialect)
        if model is None and models.is_registered(request.model):
            raise model_not_ready(request.model)
        prefix = self._metadata_prefix
        effects = apply_headers(
            request,
            [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in arrival.header_pairs
                if name[:2] == _X or name == _THREAD_ID or (prefix is not None and name.startswith(prefix))
            ],
            metadata_prefix=settings.metadata_header_prefix,
            nvext_enabled=not settings.disable_nvext,
        )
        if arrival.identity is not None:
            cap_priority(request, arrival.identity.record.priority)
        for warning in effects.warnings:
            logger.warning("%s", warning)
        if request.repaired:
            logger.warning("a request body was not strict JSON and was mended (model %r)", request.model[:128])
        if is_large:
            await offload(partial(api.validate, request))
        else:
            api.validate(request)
        if model is None or not model.surface_bits & self._surface_bit:
            raise self.dialect.unknown_model(request.model)
        return Resolved(request, model, effects)

    async def _serve_admitted(self, exchange: Exchange, resolved: Resolved, sink: AnswerSink) -> None:
        loop = asyncio.get_running_loop()
        settings, request, context = self._settings, resolved.request, exchange.context
        effects = resolved.effects
        assert exchange.counters is not None
        exchange.enter(Phase.ADMITTED, loop.time())
        if effects.metadata:
            context.metadata = effects.metadata
        begin_record(exchange, request, effects)
        opened = OpenAnswer(sink)
        if request.is_streaming:
            opened.stream = sink.open_stream(
                peek_seconds=settings.peek_seconds,
                keep_alive_seconds=_keep_alive(settings, request),
                late_headers=partial(_late_headers, exchange) if effects.explains_routing else exchange.timer.headers,
            )
        expiry: asyncio.TimerHandle | None = None
        if (limit := settings.request_timeout_seconds) is not None:
            # Workers get the deadline, too, and keep it themselves where their wire can carry it.
            context.deadline = exchange.arrival.at + limit
            late = ResponseTimeout(f"the request was not answered within {limit:g} s")
            expiry = loop.call_at(context.deadline, exchange.end_with, late)
        try:
            await self._answer(exchange, resolved, opened)
            served = exchange.work
            assert served is not None
            self._count_end(exchange, served.tally)
        except asyncio.CancelledError:
            context.kill()
            if (aborted := exchange.take_interruption()) is not None:
                await self._fail(exchange, aborted, opened)
                return
            exchange.early_end.is_client_gone = True
            prompt_tokens, output_tokens = _used(exchange)
            exchange.counters.cancel(loop.time(), prompt_tokens=prompt_tokens, output_tokens=output_tokens)
            self._end_cancelled(exchange, loop.time())
            raise
        except Exception as error:  # the boundary: whatever it is, the client gets a well-formed answer
            context.kill()
            await self._fail(exchange, error, opened)
        finally:
            if exchange.phase is not Phase.ENDED:
                exchange.end()
            if (work := exchange.work) is not None and work.tally.moves:
                self._pipeline.metrics.requests.moved(resolved.model.name, work.tally.moves)
            if expiry is not None:
                expiry.cancel()
            if opened.stream is not None:
                opened.stream.close()

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        """Prepare the request, have workers serve it, and send the answer. Raises what went wrong on the way."""
        raise NotImplementedError

    # -- ends ----------------------------------------------------------------------------------------------------

    def _count_end(self, exchange: Exchange, tally: Tally) -> None:
        """Count and log a request that was answered in full."""
        now = exchange.now()
        assert exchange.counters is not None
        exchange.counters.finish(
            now,
            prompt_tokens=tally.prompt_tokens,
            output_tokens=tally.completion_tokens,
            cached_tokens=tally.cached_tokens,
        )
        if exchange.arrival.charge is not None:
            exchange.arrival.charge.has_succeeded = True
        exchange.timer.ended()
        self._pipeline.metrics.requests.observe_stages(exchange.timer)
        first = exchange.counters.first_token_seconds
        if tally.instances and first is not None and tally.completion_tokens:
            gaps = tally.completion_tokens - 1 if tally.completion_tokens > 1 else 1
            pace = exchange.counters.generating_seconds / gaps
            worker_id = tally.instances[-1].instance_id
            self._pipeline.metrics.workers.answered(worker_id, first, tally.prompt_tokens, pace)
        end_record(exchange, now)
        if (recorder := self._pipeline.recorder) is not None:
            recorder.ended(exchange, self._api.endpoint, 200)

    async def _fail(self, exchange: Exchange, error: Exception, opened: OpenAnswer) -> None:
        """Answer a request that failed, count it and log it."""
        now, name, counters = asyncio.get_running_loop().time(), exchange.name, exchange.counters
        prompt_tokens, output_tokens = _used(exchange)
        assert counters is not None
        if exchange.is_client_gone:
            counters.cancel(now, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
            self._end_cancelled(exchange, now)
            return
        if exchange.reason is not None:
            error = exchange.reason
        rejected = self._rejection(error)
        if isinstance(error, WorkerUnavailable) and error.is_reported:
            name = exchange.model or ""
            if not self._pipeline.models.is_registered(name):  # an adapter that was unloaded meanwhile
                rejected = self.dialect.unknown_model(name)
        _hint_return(exchange, error, rejected, now)
        exchange.early_end.outcome = rejected
        failure = classify(error, rejected)
        counters.fail(now, **failure._asdict(), prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        if not isinstance(error, DynamoException | RequestRejected):
            logger.error("request %s failed inside the frontend", name, exc_info=error)
        elif rejected.status >= 500 and rejected.status != self._settings.overload_status:
            logger.error("request %s failed with %d: %s: %s", name, rejected.status, type(error).__name__, error)
        end_record(exchange, now, rejected.status, failure.error_type, rejected.message)
        if self._pipeline.recording is not None:
            self._pipeline.recording.failed(exchange, self._api.endpoint, error, rejected, failure.error_type)
        exchange.end()
        if (stream := opened.stream) is not None:
            await stream.settle()
            if stream.is_committed:
                last = None if opened.renderer is None else opened.renderer.failed(rejected)
                if last is None:
                    last = self.dialect.stream_failure(rejected, exchange.request_id)
                await stream.end(last)
                return
        await opened.sink.reject(rejected)

    def _end_cancelled(self, exchange: Exchange, now: float) -> None:
        """Log and record a request whose client left."""
        end_record(exchange, now, CLIENT_LEFT, "cancelled")
        if (recorder := self._pipeline.recorder) is not None:
            recorder.ended(exchange, self._api.endpoint, CLIENT_LEFT, "cancelled")

    def _rejection(self, error: BaseException) -> RequestRejected:
        return rejection_of(error, overload_status=self._settings.overload_status)


class GenerationCall(Call):
    """One inference API whose answers are generated token by token."""

    def __init__(self, api: GenerationApi[Any], pipeline: Pipeline) -> None:
        super().__init__(api, pipeline)
        self._generating = api
        settings = pipeline.settings
        self._options, self._continuous = [
            RenderOptions(
                continuous_usage=is_continuous or settings.force_include_usage,
                reasoning_field=settings.reasoning_field_name,
                dispatches_calls=settings.streaming_tool_dispatch,
                dispatches_reasoning=settings.streaming_reasoning_dispatch,
            )
            for is_continuous in (False, True)
        ]

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        request: Request = resolved.request  # type: ignore[assignment]  # its API decodes nothing else
        try:
            answer, text = await self._prepare(exchange, resolved, request)
            options = self._continuous if request.continuous_usage else self._options
            opened.renderer = renderer = self._generating.renderer(answer, options)
            if answer.work.plan.is_query:
                await send_placement(answer, renderer, opened.sink, opened.stream)
            else:
                await self._deliver(answer, renderer, opened.sink, opened.stream, text)
        finally:
            if request.media is not None:
                request.media.end()

    async def _prepare(self, exchange: Exchange, resolved: Resolved, request: Request) -> tuple[Answer, str | None]:
        """Return what is to be answered, and the text that was tokenised."""
        pipeline, timer, model, media = self._pipeline, exchange.timer, resolved.model, request.media
        if media is not None:
            if any(part.file_id is not None for part in media.parts):
                await pipeline.media.take_files(media, request.key_owner)
            pipeline.media.check_model(model, media)
        plan, text = await self._generating.prepare(pipeline.preprocessor, request, resolved.effects, model, timer)
        if exchange.arrival.charge is not None:
            reserve_tokens(exchange.arrival.charge, plan, model.length_limits)
        exchange.work = work = WorkRequest(plan, timer, pipeline.stalls)
        if pipeline.recorder is not None or exports_content():
            work.tap = open_tap(pipeline.recorder, exchange, request, resolved.effects)
        if media is not None:
            await pipeline.media.fill(media, model, work, text, exchange.context)
            timer.mark(QUEUE)
        exchange.enter(Phase.PREPROCESSED, exchange.now())
        answer = Answer(exchange, request, model, work, explains_routing=resolved.effects.explains_routing)
        return answer, text

    async def _deliver(
        self, answer: Answer, renderer: Renderer, sink: AnswerSink, stream: AnswerStream | None, text: str | None
    ) -> None:
        """Generate and answer; `text` is what was tokenised. Raises what went wrong on the way."""
        request, limit = answer.request, self._settings.backend_stream_timeout_seconds
        idle = None if limit is None else IdleTimeout(answer.exchange, answer.work.fail_over_idle_streams, limit)
        if stream is None:
            await UnaryDelivery(answer, renderer, idle).send(sink)
        else:
            head = annotation_events(request, answer, text)
            with_usage = request.include_usage or self._settings.force_include_usage
            await StreamDelivery(answer, renderer, idle).send(stream, head, with_usage=with_usage)


def bind_key(request: Request | ResultRequest, identity: Identity, dialect: Dialect) -> None:
    """Note the owner of a request. Raises the 404 of a model that its key may not use, which is that of an unknown one."""
    if not identity.allows_model(request.model):
        raise dialect.unknown_model(request.model)
    request.__dict__["key_owner"] = identity.owner


def _check_plausible(body_bytes: int, per_token: int, longest: int | None) -> None:
    """Refuse a body that is too long for a prompt of any model, before it is decoded: that is done in one piece.

    `per_token`: bytes that a token may take; `longest`: the longest context, None: not known.
    """
    if not per_token or longest is None or body_bytes <= UNSUSPECTED_BODY_BYTES + per_token * longest:
        return
    raise RequestRejected(
        400,
        f"A body of {body_bytes} bytes cannot be a prompt for any model here: the longest maximum context length is "
        f"{longest} tokens, and {UNSUSPECTED_BODY_BYTES} bytes and {per_token} for each token are read "
        "(DYN_HTTP_BODY_BYTES_PER_TOKEN)",
        code="context_length_exceeded",
        limit="body_tokens",
    )


def _keep_alive(settings: FrontendSettings, request: Request | ResultRequest) -> float | None:
    """Return how long a stream may be silent. A request that may hold back all output has a limit even if others do not."""
    holds_back = isinstance(request, ChatRequest) and request.fills_content
    return settings.keep_alive_seconds or (KEEP_ALIVE_SECONDS if holds_back else None)


def _late_headers(exchange: Exchange) -> HeaderPairs:
    """Return the headers of a stream whose client wants to know why its worker was chosen."""
    placement = None if exchange.tally is None else exchange.tally.placement
    return (*exchange.timer.headers(), *routing_headers(placement))


def _hint_return(exchange: Exchange, error: Exception, rejected: RequestRejected, now: float) -> None:
    """Tell a client when to come again, where the workers are full.

    How soon that passes is known better here than by the worker that refused last.
    """
    is_full = isinstance(error, Overloaded | RouterQueueLimitExceeded)
    if is_full and rejected.retry_after_seconds is not None and exchange.slot is not None:
        rejected.retry_after_seconds = max(rejected.retry_after_seconds, exchange.slot.retry_after_seconds(now))


def _used(exchange: Exchange) -> tuple[int, int]:
    """Return (prompt tokens, output tokens) of an answer that may not have begun."""
    tally = exchange.tally
    return (0, 0) if tally is None else (tally.prompt_tokens, tally.completion_tokens)
