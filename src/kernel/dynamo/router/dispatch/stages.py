"""The stages of a request before the worker that answers it: a list, each of which passes the request on to the next.

A model has at most two: its media are encoded (`router/dispatch/encode.py`), then its prompt is computed (`PrefillStage`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from dynamo.errors import DynamoException, InvalidArgument, Unknown, rule_of
from dynamo.placement import PlacementRequest
from dynamo.placement.kv_transfer import TransferRule
from dynamo.placement.prefill_bypass import BypassRules
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.conditional import ConditionalPrefill
from dynamo.router.dispatch.course import Again
from dynamo.router.dispatch.handoff import Handoff, PrefillAnswer, Renew
from dynamo.router.dispatch.prefill import DispatchTimer, PrefillJob, PrefillRouter, can_fall_back_to_decode
from dynamo.router.dispatch.query_of_death import Suspect
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.workers.pool import ChosenWorker, ModelPool
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import StreamItem

__all__ = ["DispatchStage", "DispatchTimer", "PrefillStage", "Proceed", "StageJob", "StageResult", "run_stages"]

logger = logging.getLogger(__name__)


class AnsweringWorkers(Protocol):
    """The workers that may answer a request."""

    def has_worker_for(self, rule: TransferRule) -> bool:
        """Return whether a worker that was not tried is there for KV blocks that can be sent by this rule only."""
        ...

    def placement(self) -> PlacementRequest:
        """Return what the choice of the next one may use."""
        ...

    def check_room(self) -> None:
        """Raise Overloaded where every worker that may be chosen is busy; nothing is chosen."""
        ...

    def take(self, result: StageResult) -> None:
        """Take over what a stage passes on."""
        ...

    def declined(self, worker: ChosenWorker) -> None:
        """Readmit the worker that a stage had chosen: it does not serve the request as it was sent."""
        ...

    def may_move(self, error: DynamoException) -> bool:
        """Return whether another worker may be tried after `error`."""
        ...


class BeginAgain(Protocol):
    """Prepares that the last stage is done again."""

    async def __call__(self, error: DynamoException, *, readmits_all: bool = False) -> bool:
        """Return whether a worker is there for it, waiting for one if it is expected; False: the request was cancelled.

        Raises `error` where there is none. `readmits_all`: the workers tried so far may be tried again.
        """
        ...


class StageJob(NamedTuple):
    """A request on its way through the stages."""

    body: WorkerRequest
    context: Context
    record: DispatchRecord
    timer: DispatchTimer
    retries: int  # how many other workers a stage may try
    limit_seconds: float | None  # what one worker of a stage may take, where its answer is awaited
    suspect: Suspect  # counts the workers that die on the request
    answering: AnsweringWorkers
    begin_again: BeginAgain
    renew: Renew | None = None  # makes `body` anew for another worker, where one worker only can take it


class StageResult(NamedTuple):
    """What a stage passes on to the next one, or to the worker that answers."""

    body: WorkerRequest
    transfer: TransferRule | None = None  # which workers the KV blocks of its prompt can be sent to; None: all
    worker: ChosenWorker | None = None  # that answers, where a stage has chosen it already
    is_single_use: bool = False  # one worker only can answer `body`, as the blocks of its prompt are given once
    renew: Renew | None = None  # makes `body` anew for another worker, as what was encoded for it is given once


Proceed = Callable[[StageResult], Awaitable[list[StreamItem]]]
"""From the request of the next stage to the first items of the answer."""


class DispatchStage(Protocol):
    """One step before the worker that answers."""

    async def run(self, job: StageJob, proceed: Proceed) -> list[StreamItem]:
        """Do this stage's part, then return what `proceed` returns for the next stage's request.

        A stage that ends the request by itself returns the items of the answer without calling `proceed`.
        """
        ...

    async def advise(self, body: WorkerRequest, record: DispatchRecord) -> StageResult:
        """Note in `record` which worker this stage would take now, and return the next stage's request."""
        ...


async def run_stages(
    stages: Sequence[DispatchStage], job: StageJob, answer: Callable[[], Awaitable[list[StreamItem]]]
) -> list[StreamItem]:
    """Pass the request through `stages` in order, then call `answer`; return the first items of the answer."""

    async def proceed(result: StageResult) -> list[StreamItem]:
        job.answering.take(result)
        if rest := stages[1:]:
            return await run_stages(rest, job._replace(body=result.body, renew=result.renew), answer)
        return await answer()

    return await stages[0].run(job, proceed)


class PrefillStage:
    """Has the prompt computed by a prefill worker, or by the decode worker where no prefill worker can and that is allowed."""

    __slots__ = ("_condition", "_decoders", "router")

    def __init__(self, router: PrefillRouter, decoders: ModelPool, rules: BypassRules | None = None) -> None:
        """`decoders`: the workers of the next stage. `rules`: which prompts they compute themselves; None: none of them."""
        self.router, self._decoders = router, decoders
        self._condition = None if rules is None else ConditionalPrefill(rules, router, decoders)

    async def advise(self, body: WorkerRequest, record: DispatchRecord) -> StageResult:
        """Note the prefill worker. See `DispatchStage.advise`."""
        router = self.router
        if self._condition is not None:
            sessions = self._decoders.sessions
            bound = None if sessions is None else sessions.bound_rank(body)
            request = PlacementRequest(pinned_instance_id=_pinned(body), bound=bound)
            bypass = await self._condition.decide(body, record, request, self._can_receive)
            if bypass is not None:
                return StageResult(bypass.body, worker=bypass.worker)
        try:
            handoff = await router.advise(body, record, self._can_receive)
        except DynamoException as error:
            if router.is_enforced or not can_fall_back_to_decode(error):
                raise
            return StageResult(body)
        return StageResult(handoff.body, handoff.transfer)

    async def run(self, job: StageJob, proceed: Proceed) -> list[StreamItem]:
        """Request the prefill and pass on where to fetch the result. See `DispatchStage.run`.

        The prompt is computed again where the prefill worker fails beside its decode worker, where that one is lost with the
        blocks, and where the last decode worker in reach is lost.
        """
        if self._condition is not None and (items := await self._bypass(self._condition, job, proceed)) is not None:
            return items
        router, context = self.router, job.context
        job.answering.check_room()  # before a prompt is computed that no decode worker could take
        course = _prefill_job(job).course(job.retries)
        while True:
            try:
                handoff = await router.prefill(_prefill_job(job), course)
            except DynamoException as error:
                if router.is_enforced or context.is_stopped() or not can_fall_back_to_decode(error):
                    raise
                router.fallback_log.note(error)
                try:
                    return await proceed(StageResult(job.body, renew=job.renew))
                except (InvalidArgument, Unknown) as refusal:
                    raise error from refusal  # an engine that only decodes: it is not the client's request that is wrong
            router.fallback_log.note(None)
            job.record.prefill_instance_id = handoff.instance.instance_id
            if isinstance(handoff, PrefillAnswer):
                job.record.instances.append(handoff.instance)
                return handoff.items
            if context.is_stopped():
                router.release_blocks(handoff, self._decoders, context)
                return []
            try:
                onward = StageResult(handoff.body, handoff.transfer, is_single_use=handoff.is_concurrent)
                return await handoff.join_decode(proceed(onward))
            except DynamoException as error:
                why = None if context.is_stopped() else _why_again(job, handoff, error)
                if why is None:
                    raise handoff.failure or error from None
                last = handoff.failure or error
                # A prefill worker whose decode worker was lost has done nothing wrong.
                course.step(Again(last, uncounts_last=why is _DECODE_LOST))
                logger.warning(
                    "request %s: %s with the prompt of prefill worker %x (%s: %s); having it computed again",
                    context.id(),
                    why,
                    handoff.instance.instance_id,
                    type(last).__name__,
                    last,
                )
                if not await job.begin_again(last, readmits_all=handoff.failure is not None):
                    return []
                if job.renew is not None:
                    body = await job.renew()
                    if body is None:
                        return []
                    job = job._replace(body=body)

    async def _bypass(self, condition: ConditionalPrefill, job: StageJob, proceed: Proceed) -> list[StreamItem] | None:
        """Return the first items of an answer without prefill workers; None: one of them is to compute the prompt."""
        answering = job.answering
        bypass = await condition.decide(job.body, job.record, answering.placement(), answering.has_worker_for)
        if bypass is None:
            return None
        try:
            return await proceed(StageResult(bypass.body, worker=bypass.worker))
        except (InvalidArgument, Unknown) as refusal:  # of an engine that only decodes; or the prefill worker's, too
            logger.info("request %s: the decode worker does not compute the prompt: %s", job.context.id(), refusal)
            answering.declined(bypass.worker)
            job.record.bypass = None
            return None

    def _can_receive(self, rule: TransferRule) -> bool:
        return self._decoders.has_worker(PlacementRequest(transfer=rule))


_DECODE_LOST: Final = "the decode worker was lost"


def _prefill_job(job: StageJob) -> PrefillJob:
    return PrefillJob(
        job.body, job.context, job.timer, job.record, job.limit_seconds, job.suspect, job.answering.has_worker_for,
        job.renew,
    )  # fmt: skip


def _pinned(body: WorkerRequest) -> int | None:
    """Return the id of the decode worker that a request names; None: any may serve it."""
    routing = body.get("routing") or {}
    return routing.get("backend_instance_id", routing.get("decode_worker_id"))


def _why_again(job: StageJob, handoff: Handoff, error: DynamoException) -> str | None:
    """Return why the prompt is to be computed again after `error`; None: that would not help."""
    is_named = (job.body.get("routing") or {}).get("prefill_worker_id") is not None
    if (failure := handoff.failure) is not None:
        if is_named or not rule_of(failure).retryable:
            return None
        return "the prefill failed"  # and a decode worker that failed because it had no prompt is as good as any
    if handoff.is_concurrent and job.answering.may_move(error):
        return _DECODE_LOST
    rule = handoff.transfer
    if rule is None or not rule.is_required or is_named or not rule_of(error).retryable:
        return None
    return None if job.answering.has_worker_for(rule) else "no decode worker in reach is left"
