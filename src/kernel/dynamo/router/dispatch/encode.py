"""Encode workers, seen from the caller: have the media of a request encoded, then hand the result to the worker that computes
the prompt.

The result is an object of the engines (`encoder_result`), mostly a handle to embeddings that the encode worker holds until
they are fetched. So each result goes to one worker: a request that moves on to another worker is encoded again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol

from dynamo.errors import (
    DynamoException,
    Overloaded,
    ResponseTimeout,
    Unknown,
    WorkerUnavailable,
    rule_of,
)
from dynamo.placement import PlacementRequest
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.course import Choose, Chosen, Course, CourseRules, Event, Lost, NoWorker, Tick
from dynamo.router.dispatch.drive import CANCELLED, ITEMS, OPENED, drive
from dynamo.router.dispatch.fallback_log import FallbackLog
from dynamo.router.dispatch.handoff import read_reply
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stages import Proceed, StageJob, StageResult
from dynamo.router.workers.pool import ChosenWorker, ModelPool
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import StreamItem

logger = logging.getLogger(__name__)

OTHER_ENCODERS: Final = 1  # that a request may try after a failure; the engines' own encoder is the next way out
_RULES: Final = CourseRules("encode", OTHER_ENCODERS, readmits_full=False)
TAKE_OVER_SECONDS: Final = 5.0
"""How long a worker gets to take, and thereby free, what was encoded for a client that has left."""

EncodeOutcome = str
"""`success`, `cancelled`, `failed`: of one request to an encode worker; or `fallback`: a request went on without one."""

Receiver = Callable[[WorkerRequest, Context], Awaitable[None]]
"""Sends a request whose client has left to a worker that takes what was encoded, under a context of its own."""


class _Encoded(NamedTuple):
    """What an encode worker answered."""

    result: dict[str, object]
    link: object  # of its span; None: none


class OutcomeCounter(Protocol):
    """Counts what became of the requests to encode workers."""

    def __call__(self, outcome: EncodeOutcome, /) -> None: ...


class EncodeRouter:
    """The encode workers of one model in one namespace, each in turn."""

    def __init__(self, workers: ModelPool, count: OutcomeCounter = lambda outcome: None) -> None:
        """`count` gets the outcome of each request to an encode worker."""
        self.workers, self.count = workers, count
        self._running = Background()  # at most one for each request whose client has left, and for a moment
        self.fallback_log = FallbackLog(
            workers.name,
            away="no encode worker can take a request, its other workers encode the media",
            back="media go to encode workers again",
        )

    async def aclose(self) -> None:
        """End what still runs in the background."""
        await self._running.close()

    async def encode(self, body: WorkerRequest, job: StageJob) -> WorkerRequest | None:
        """Return `body` with the result of an encode worker, trying one other worker after a failure that depends on it.

        None: the request was cancelled first. Raises why the last worker failed.
        """
        leg = _EncodeLeg(self, body, job)
        job.record.courses.append(leg.course)
        await drive(leg.course, leg)
        if (found := leg.encoded) is None:
            return None
        encoded: WorkerRequest = {**body, "encoder_result": found.result}
        if found.link is not None:
            encoded["migration_link"] = found.link
        return encoded

    def hand_on(self, body: WorkerRequest, context: Context, receiver: Receiver) -> None:
        """Let a worker take what was encoded for a client that has left, so that the encode worker can free it.

        That happens in the background and takes at most `TAKE_OVER_SECONDS`; failures are logged.
        """
        if not self._running.is_closed:  # else the workers are gone, or free it when its time is up
            self._running.start(_take_over(body, context, receiver), f"take over {context.id()}")


class _EncodeLeg:
    """The attempts of one request at encode workers (`drive.Leg`)."""

    __slots__ = ("_body", "_job", "_router", "_worker", "course", "encoded")

    def __init__(self, router: EncodeRouter, body: WorkerRequest, job: StageJob) -> None:
        self._router, self._body, self._job = router, body, job
        self.course = Course(_RULES)
        self._worker: ChosenWorker | None = None
        self.encoded: _Encoded | None = None  # None: no worker has answered yet

    async def choose(self, order: Choose) -> Event:
        """Choose one that was not tried."""
        request = PlacementRequest(token_ids=(), excluded=order.excluded, healthy_only=True)
        self._worker = worker = self._router.workers.choose(request)
        return Chosen(worker.key)

    def no_worker(self, error: WorkerUnavailable) -> NoWorker:
        """Let the request wait for none: the engines' own encoder is the next way out."""
        return NoWorker(error)

    async def attempt(self) -> Event:
        """Send the media to the worker, and count the outcome."""
        router, job, worker = self._router, self._job, self._worker
        assert worker is not None
        try:
            found = await self._encoded()
        except DynamoException as error:
            if not job.context.is_stopped():
                router.count("failed")
                return Lost(error)
            found = None
        if found is None:
            router.count("cancelled")
            return CANCELLED
        router.count("success")
        job.record.encode_instance_id = worker.instance.instance_id
        self.encoded = found
        return ITEMS

    async def again(self, error: DynamoException) -> bool:
        """Log the failure."""
        worker = self._worker
        assert worker is not None
        logger.info(
            "request %s: encode worker %x failed (%s: %s); trying another",
            self._job.context.id(), worker.instance.instance_id, type(error).__name__, error,
        )  # fmt: skip
        return True

    async def wait(self, seconds: float) -> Event:
        """Return at once: no request waits for an encode worker."""
        return Tick()

    async def _encoded(self) -> _Encoded | None:
        """Return what the worker answers; None: it ended the request because it was cancelled."""
        job, worker, workers = self._job, self._worker, self._router.workers
        context, timer = job.context, job.timer
        assert worker is not None
        job.suspect.sent(worker.instance.instance_id)
        timer.routed()
        sent_at, late = _now(), False
        try:
            try:
                async with asyncio.timeout(job.limit_seconds):
                    stream = await worker.open(self._body, context)
                    self.course.step(OPENED)
                    timer.dispatched()
                    reply = await read_reply(stream, context, "encode")
            except TimeoutError:
                if job.limit_seconds is None:
                    raise
                late = True  # a limit of ours, which is no failure of the connection
                raise ResponseTimeout(f"the media were not encoded within {job.limit_seconds:g} s") from None
        except DynamoException as error:
            timer.arrived(failed=True)
            job.record.note_failure("encode", worker.placement, error, _now())
            if not late:
                worker.record_failure(error)
                job.suspect.count_failure(workers, worker, error, sent_at=sent_at, now=_now())
            raise
        timer.arrived(failed=True)  # what was awaited is only the first part: the answer is still to come
        job.suspect.passed(workers)
        if isinstance(reply.encoder_result, dict):
            return _Encoded(reply.encoder_result, reply.link)
        if context.is_stopped():
            return None
        raise Unknown(f"encode worker {worker.instance.instance_id:x} sent no encoder_result")


class EncodeStage:
    """Has the media of a request encoded before its prompt is computed."""

    __slots__ = ("_is_required", "_receiver", "router")

    def __init__(self, router: EncodeRouter, receiver: Receiver, *, is_required: bool) -> None:
        """`receiver`: takes what was encoded for a client that has left. `is_required`: the next workers encode no media
        themselves."""
        self.router, self._receiver, self._is_required = router, receiver, is_required

    async def advise(self, body: WorkerRequest, record: DispatchRecord) -> StageResult:
        """Return the request as it is: encode workers take turns, whatever the request. See `DispatchStage.advise`."""
        return StageResult(body)

    async def run(self, job: StageJob, proceed: Proceed) -> list[StreamItem]:
        """Pass on the request with the result of an encode worker. See `DispatchStage.run`.

        Raises:
            InvalidArgument: the encode worker refused the media.
            Overloaded: every encode worker is full.
            WorkerUnavailable: the encode workers failed, and the workers that compute prompts encode nothing themselves.
        """
        if not carries_media(job.body):
            return await proceed(StageResult(job.body))
        context = job.context
        job.answering.check_room()  # before anything is encoded that no worker could take

        async def encode_again() -> WorkerRequest | None:
            body = await self._encode(job)
            if body is not None and context.is_stopped() and "encoder_result" in body:
                self.router.hand_on(body, context, self._receiver)
                return None
            return body

        body = await encode_again()
        return [] if body is None else await proceed(StageResult(body, renew=encode_again))

    async def _encode(self, job: StageJob) -> WorkerRequest | None:
        """Return the encoded request, or the request as it was where the next workers encode; None: it was cancelled."""
        router = self.router
        try:
            body = await router.encode(job.body, job)
        except DynamoException as error:
            if self._is_required:
                raise _named(error, router.workers.name) from error
            if not rule_of(error).retryable and not isinstance(error, Unknown):
                raise  # the request is wrong, wherever it is encoded
            router.fallback_log.note(error)
            router.count("fallback")
            return job.body
        if body is not None:
            router.fallback_log.note(None)
        return body


def carries_media(body: WorkerRequest) -> bool:
    """Return whether a request has media that no encode worker has seen yet."""
    media = body.get("multi_modal_data") or {}
    return any(media.values()) and body.get("encoder_result") is None


def _named(error: DynamoException, model: str) -> DynamoException:
    """Return the error of a request that cannot do without an encode worker."""
    if isinstance(error, Overloaded) or not (rule_of(error).retryable or isinstance(error, Unknown)):
        return error
    return WorkerUnavailable(
        f"no encode worker of model {model} could encode the media ({type(error).__name__}: {error})"
    )


async def _take_over(body: WorkerRequest, context: Context, receiver: Receiver) -> None:
    stops = body.get("stop_conditions") or {}
    last: WorkerRequest = {**body, "stop_conditions": {**stops, "max_tokens": 1}}
    try:
        async with asyncio.timeout(TAKE_OVER_SECONDS):
            await receiver(last, context.detached(context.id()))
    except (DynamoException, TimeoutError) as error:
        logger.info(
            "request %s: what was encoded for it was not taken, and expires (%s: %s)",
            context.id(),
            type(error).__name__,
            error,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
