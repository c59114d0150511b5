"""The way of one inference request through the frontend: admit, parse, resolve, prepare, generate, answer, report.

`Call.run(exchange, sink)` is the one door. HTTP comes through it (`http/inference_route`), and so can a batch or a caller
in this process: it knows no server and no ASGI.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from dynamo.errors import Overloaded, ResponseTimeout, RouterQueueLimitExceeded, WorkerUnavailable
from dynamo.frontend.admission.model import urgency_of
from dynamo.frontend.admission.process import Admission, NotReady
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.metrics.requests import RequestType
from dynamo.frontend.base.offload import LARGE_ANSWER_TOKENS, LARGE_BODY_BYTES
from dynamo.frontend.base.stage_timer import OVERHEAD_HEADER, QUEUE, StageTimer, wants_stage_times
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.pipeline.api import Api, MediaTaker
from dynamo.frontend.pipeline.exchange import Arrival, Exchange, ExchangeRegister, Phase
from dynamo.frontend.pipeline.failures import FailureLabels, classify, rejection_of
from dynamo.frontend.pipeline.outcome import CLIENT_LEFT, Answering, Hooks, Outcome, Reached, TokensTaken
from dynamo.frontend.pipeline.plan import Plan, WorkRequest
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.reading import CallReader, Resolved
from dynamo.frontend.pipeline.request_records import begin_record
from dynamo.frontend.pipeline.routing_answer import routing_headers
from dynamo.frontend.pipeline.settings import KEEP_ALIVE_SECONDS, PipelineSettings
from dynamo.frontend.pipeline.sink import AnswerSink, HeaderPairs, OpenAnswer
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import ChatRequest, Request
from dynamo.protocol.vectors.requests import ResultRequest
from dynamo.router.dispatch.stall_detector import StallDetector

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What every call of a frontend goes through."""

    settings: PipelineSettings
    admission: Admission
    models: ModelDirectory
    metrics: FrontendMetrics
    preprocessor: Preprocessor
    media: MediaTaker | None
    """What takes the media of requests; None: requests with media are refused."""
    register: ExchangeRegister
    stalls: StallDetector
    hooks: Hooks
    """The listeners to the course of each request."""


class Call:
    """One inference API of a frontend, whatever its answers are made of."""

    def __init__(self, api: Api[object], pipeline: Pipeline) -> None:
        self._api = api
        self.dialect = api.dialect
        self.response_id = api.response_id
        """Returns the `id` of the answer to a request, by the id of the request."""
        self._pipeline = pipeline
        self._settings = pipeline.settings
        self._reader = CallReader(api, pipeline.settings, pipeline.models, pipeline.preprocessor.offload)

    def open(self, id: str, arrival: Arrival) -> Exchange:
        """Return the exchange of a request that has just come in; its stage times begin now."""
        arrival.endpoint = self._api.endpoint
        timer = StageTimer(is_wanted=OVERHEAD_HEADER in arrival.headers and wants_stage_times(arrival.headers))
        return Exchange(id, arrival, timer, self._api.response_id(id))

    async def run(self, exchange: Exchange, sink: AnswerSink) -> None:
        """Answer `exchange`, whatever happens: every failure is an answer, too. Its end is reported once, to every listener.

        Raises only what `sink` raises, and `CancelledError`.
        """
        pipeline = self._pipeline
        try:
            for arrived in pipeline.hooks.arrived:
                arrived(exchange)
            pipeline.admission.enter()
        except (NotReady, Overloaded, RequestRejected) as error:
            # Before anything was parsed: a request that is shed must cost next to nothing.
            await self.refuse(exchange, error, sink)
            return
        exchange.early_end.task = asyncio.current_task()
        pipeline.register.add(exchange)
        is_large = len(exchange.arrival.body) > LARGE_BODY_BYTES
        opened = OpenAnswer(sink)
        try:
            if not pipeline.admission.slices.takes():
                await pipeline.admission.slices.turn(len(exchange.arrival.body))
            exchange.timer.mark(QUEUE)
            # No local name holds an outcome: its error has a traceback with this frame, and the two would be a circle.
            await self._serve(exchange, opened)
        except asyncio.CancelledError:
            aborted = exchange.take_interruption()
            if aborted is None:
                exchange.context.kill()
                exchange.early_end.is_client_gone = True
                self._report(exchange, self._left(exchange))
                raise
            await self._close(exchange, self._failed(exchange, aborted), opened)
        except Exception as error:  # the boundary: whatever it is, the client gets a well-formed answer
            await self._close(exchange, self._failed(exchange, error), opened)
        else:
            exchange.timer.ended()
            exchange.end()
            try:
                # uvloop writes at the end of its turn: the last bytes of answers that end together go out before their records are made.
                await asyncio.sleep(0)
            finally:
                self._report(exchange, self._ended(exchange, 200, ""))
        finally:
            self._give_back(exchange, opened)
            if is_large or (exchange.work is not None and exchange.work.tally.completion_tokens >= LARGE_ANSWER_TOKENS):
                pipeline.preprocessor.offload.return_memory_soon()

    async def refuse(self, exchange: Exchange, error: Exception, sink: AnswerSink) -> None:
        """Answer a request of which nothing was read, and report its end."""
        await self._close(exchange, self._failed(exchange, error), OpenAnswer(sink))

    def _give_back(self, exchange: Exchange, opened: OpenAnswer) -> None:
        """Give back what a request held. A place that is not given back is lost for good, so nothing keeps a later step."""
        try:
            opened.close()
        finally:
            try:
                if exchange.slot is not None:
                    exchange.slot.leave()
            finally:
                self._pipeline.register.remove(exchange)
                self._pipeline.admission.leave()
        exchange.arrival.kept.clear()

    # -- ends ----------------------------------------------------------------------------------------------------

    async def _close(self, exchange: Exchange, outcome: Outcome, opened: OpenAnswer) -> None:
        """Report the end of a request, and answer it where it failed."""
        self._report(exchange, outcome)
        if outcome.rejected is not None:
            await opened.reject(outcome.rejected, self.dialect, exchange.request_id)

    def _report(self, exchange: Exchange, outcome: Outcome) -> None:
        """Call every listener with the end of a request. None of them keeps the others, or the client, from theirs."""
        exchange.end()
        for ended in self._pipeline.hooks.ended:
            try:
                ended(exchange, outcome)
            except Exception:
                logger.exception("a listener failed at the end of request %s", exchange.name)

    def _failed(self, exchange: Exchange, error: Exception) -> Outcome:
        """Return the outcome of a request that cannot be answered."""
        exchange.context.kill()
        if exchange.phase >= Phase.ADMITTED:
            if exchange.is_client_gone:
                return self._left(exchange)
            if exchange.reason is not None:
                error = exchange.reason
        rejected = rejection_of(error, overload_status=self._settings.overload_status)
        if isinstance(error, WorkerUnavailable) and error.is_reported:
            name = exchange.model or ""
            if not self._pipeline.models.names.is_expected(name):  # an adapter that was unloaded meanwhile
                rejected = self.dialect.unknown_model(name)
        _hint_return(exchange, error, rejected)
        failure = classify(error, rejected)
        return self._ended(exchange, rejected.status, failure.error_type, failure, rejected, error)

    def _left(self, exchange: Exchange) -> Outcome:
        """Return the outcome of a request whose client left."""
        return self._ended(exchange, CLIENT_LEFT, "cancelled")

    def _ended(
        self,
        exchange: Exchange,
        status: int,
        error_type: str,
        failure: FailureLabels | None = None,
        rejected: RequestRejected | None = None,
        why: Exception | None = None,
    ) -> Outcome:
        work = exchange.work
        reached = Reached.ADMITTED if exchange.slot is not None else _reached(exchange)
        if work is None:
            return Outcome(self._api.endpoint, exchange.now(), reached, status, error_type, failure, rejected, why)
        tally = work.tally
        usage = TokensTaken(
            tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens, tally.reasoning_tokens, tally.images_made
        )
        return Outcome(
            self._api.endpoint, exchange.now(), reached, status, error_type, failure, rejected, why, usage,
            exchange.timer.seconds, tally.instances, tally.moves,
        )  # fmt: skip

    # -- one request that is in ----------------------------------------------------------------------------------

    async def _serve(self, exchange: Exchange, opened: OpenAnswer) -> None:
        """Serve a request that has a place in this process. Raises what goes wrong."""
        arrival, pipeline, settings = exchange.arrival, self._pipeline, self._settings
        on_demand = pipeline.hooks.on_demand
        resolved = await self._reader.read(
            arrival,
            None if on_demand is None else partial(on_demand, exchange, partial(self._open_early, exchange, opened)),
        )
        arrival.body = b""
        request, model, effects = resolved.request, resolved.model, resolved.effects
        fallbacks, answer = pipeline.hooks.fallbacks, None
        exchange.model = name = (
            exchange.fallbacks[0].model if fallbacks is not None and exchange.fallbacks else model.name
        )
        kind: RequestType = "stream" if request.is_streaming else "unary"
        exchange.counters = pipeline.metrics.requests.begin(name, self._api.endpoint, kind, arrival.at)
        for began in pipeline.hooks.began:
            began(exchange, resolved)
        if fallbacks is not None:
            answer = await fallbacks.admitted(exchange, resolved, self._answer)
        if answer is None:  # before the prompt is rendered or tokenised
            owner = None if arrival.identity is None else arrival.identity.owner
            exchange.slot = model.admission.enter(urgency_of(request.nvext), arrival.at, owner)
            answer = self._answer
        exchange.enter(Phase.ADMITTED, exchange.now())
        if effects.metadata:
            exchange.context.metadata = effects.metadata
        begin_record(exchange, request, effects)
        if request.is_streaming and opened.stream is None:
            opened.stream = opened.sink.open_stream(
                peek_seconds=settings.peek_seconds,
                keep_alive_seconds=_keep_alive(settings, request),
                late_headers=partial(_late_headers, exchange) if effects.explains_routing else exchange.timer.headers,
            )
        if (limit := settings.request_timeout_seconds) is None:
            await answer(exchange, resolved, opened)
        else:
            await self._answer_within(limit, exchange, resolved, opened, answer)

    def _open_early(self, exchange: Exchange, opened: OpenAnswer, request: Request | ResultRequest) -> None:
        """Open the stream of a request whose model is loaded first, so that its client is sent comments meanwhile."""
        if request.is_streaming and opened.stream is None:
            opened.stream = opened.sink.open_stream(
                peek_seconds=self._settings.peek_seconds,
                keep_alive_seconds=self._settings.keep_alive_seconds or KEEP_ALIVE_SECONDS,
                late_headers=exchange.timer.headers,
            )

    async def _answer_within(
        self, limit: float, exchange: Exchange, resolved: Resolved, opened: OpenAnswer, answer: Answering
    ) -> None:
        context = exchange.context
        # Workers get the deadline, too, and keep it themselves where their wire can carry it.
        context.deadline = exchange.arrival.at + limit
        late = ResponseTimeout(f"the request was not answered within {limit:g} s")
        expiry = asyncio.get_running_loop().call_at(context.deadline, exchange.end_with, late)
        try:
            await answer(exchange, resolved, opened)
        finally:
            expiry.cancel()

    def _work(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> WorkRequest:
        """Return the work of a request whose prompt is known. Raises RequestRejected where a listener refuses it."""
        for planned in self._pipeline.hooks.planned:
            planned(exchange, resolved, plan)
        exchange.work = work = WorkRequest(plan, exchange.timer, self._pipeline.stalls)
        if (identity := exchange.arrival.identity) is not None:
            work.tally.tenant = identity.owner
        return work

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        """Prepare the request, have workers serve it, and send the answer. Raises what went wrong on the way."""
        raise NotImplementedError


def _reached(exchange: Exchange) -> Reached:
    """Return how far a request has come that has no place of its model."""
    if exchange.model is not None:
        return Reached.RESOLVED
    return Reached.DOOR if exchange.early_end.task is None else Reached.READ


def _keep_alive(settings: PipelineSettings, request: Request | ResultRequest) -> float | None:
    """Return how long a stream may be silent. A request that may hold back all output has a limit even if others do not."""
    holds_back = isinstance(request, ChatRequest) and request.fills_content
    return settings.keep_alive_seconds or (KEEP_ALIVE_SECONDS if holds_back else None)


def _late_headers(exchange: Exchange) -> HeaderPairs:
    """Return the headers of a stream whose client has the decision shown."""
    placement = None if exchange.tally is None else exchange.tally.placement
    return (*exchange.timer.headers(), *routing_headers(placement))


def _hint_return(exchange: Exchange, error: Exception, rejected: RequestRejected) -> None:
    """Add when to come again, where the workers are full.

    How soon that passes is known better here than by the worker that refused last.
    """
    is_full = isinstance(error, Overloaded | RouterQueueLimitExceeded)
    if is_full and rejected.retry_after_seconds is not None and exchange.slot is not None:
        now = exchange.now()
        rejected.retry_after_seconds = max(rejected.retry_after_seconds, exchange.slot.retry_after_seconds(now))
