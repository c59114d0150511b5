"""What becomes of a request whose worker failed: whether another worker may be tried, which one, and the wait for one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from dynamo.errors import DynamoException, WorkerUnavailable
from dynamo.kv.overlap import WorkerRank
from dynamo.placement import PlacementRequest, WorkerKey
from dynamo.placement.kv_query import KvQuery
from dynamo.placement.kv_transfer import TransferRule
from dynamo.protocol.worker_request import RoutingHints, WorkerRequest
from dynamo.router.dispatch.course import (
    Choose,
    Chosen,
    Course,
    CourseRules,
    Declined,
    Event,
    Lost,
    NoWorker,
    StageDone,
    WorkerFound,
    may_be_taken,
)
from dynamo.router.dispatch.drive import CANCELLED
from dynamo.router.dispatch.migration import migration_blocker, tokens_left
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.replacement import NO_WAIT, ReplacementWait, WorkerWait
from dynamo.router.dispatch.stages import DispatchStage, DispatchTimer, StageResult
from dynamo.router.dispatch.stall_detector import StallDetector
from dynamo.router.kv.sessions import SessionHold
from dynamo.router.workers.pool import ChosenWorker
from dynamo.runtime.calls.context import Context

if TYPE_CHECKING:
    from dynamo.router.dispatch.stream import Dispatcher

__all__ = [
    "DEFAULT_RETRIES",
    "NO_WAIT",
    "DispatchLimits",
    "DispatchRequest",
    "Failover",
    "WorkerWait",
    "pinned_instance",
]

logger = logging.getLogger(__name__)

DEFAULT_RETRIES: Final = 3  # other workers that a request may need


class DispatchLimits(Struct, frozen=True):
    """What a request may cost when workers fail."""

    retries: int = DEFAULT_RETRIES
    longest_movable_tokens: int | None = None  # a longer request is not moved once it has begun to answer

    @classmethod
    def of(
        cls, prompt_tokens: int, *, retries: int | None, longest_movable_tokens: int | None, card_retries: int
    ) -> DispatchLimits:
        """Return the limits of a request whose longest prompt has `prompt_tokens`.

        `retries` (--migration-limit) wins over `card_retries`, what the workers request on their card; None: unset.
        """
        if longest_movable_tokens is not None and prompt_tokens > longest_movable_tokens:
            retries = 0
        # The card's 0 is what a native worker writes by default: it does not mean "give up at once".
        most = max(DEFAULT_RETRIES, card_retries) if retries is None else retries
        return cls(most, longest_movable_tokens)


def pinned_instance(routing: RoutingHints) -> int | None:
    """Return the id of the worker that a request names; None: any may serve it."""
    return routing.get("backend_instance_id", routing.get("decode_worker_id"))


class AnswerSoFar(Struct):
    """How far the answer to a request has come, as the reader of its stream notes it."""

    takes_text: bool = False  # the engine has no token ids to go on from
    generated: list[int] = field(default_factory=list)  # what was decoded: another worker goes on behind those tokens
    text_tokens: int = 0  # counted where the engine takes text
    is_complete: bool = False  # the answer is whole, so the stream may end at any time

    @property
    def tokens(self) -> int:
        """How many tokens were generated so far."""
        return self.text_tokens if self.takes_text else len(self.generated)


class DispatchRequest(Struct, eq=False):
    """One request for one choice, and how far its answer has come."""

    body: WorkerRequest  # with its prompt
    prompt: Sequence[int]
    record: DispatchRecord
    timer: DispatchTimer
    limits: DispatchLimits
    pinned_instance_id: int | None = None
    stall_detector: StallDetector | None = None
    answer: AnswerSoFar = field(default_factory=AnswerSoFar)
    kv: KvQuery | None = None  # in the kv mode: the query to its router, for the next attempt

    @property
    def first_token_seconds(self) -> float | None:
        """How long a worker may take for its first token; None: any time."""
        return None if self.stall_detector is None else self.stall_detector.policy.first_token_seconds


FOUND: Final = WorkerFound()


class Failover:
    """Chooses the workers of one request, and waits for one where none is left. What comes next is its course's decision."""

    __slots__ = (
        "_may_queue", "_replacement", "context", "course", "dispatcher", "given", "pool", "request", "session",
        "stages", "worker",
    )  # fmt: skip

    def __init__(self, dispatcher: Dispatcher, request: DispatchRequest, context: Context) -> None:
        self.dispatcher, self.request, self.context = dispatcher, request, context
        self.pool = dispatcher.pool
        self.stages = stages = dispatcher.stages
        self.course = Course(_rules(request, stages))
        self.given: StageResult | None = None  # by the stages to the worker that answers; None: the request as it is
        self.worker: ChosenWorker | None = None  # the last one that was chosen
        self.session: SessionHold | None = None  # of the request, where it has one; released by the stream
        self._may_queue = True  # in the router's queue: before the first attempt only
        self._replacement: ReplacementWait | None = None  # made where a worker is lost, or there is none

    def placement(
        self,
        excluded: Collection[WorkerKey] | None = None,
        *,
        healthy_only: bool = False,
        transfer: TransferRule | None = None,
    ) -> PlacementRequest:
        """Return what the choice of the next worker may use."""
        request = self.request
        bound = None if self.pool.pre_dispatch is None else self._bound_rank()
        if excluded is None:
            excluded = self.course.excluded
        if transfer is None and self.given is not None:
            transfer = self.given.transfer
        routing: RoutingHints = request.body.get("routing") or {}
        return PlacementRequest(  # by position, which takes half as long
            request.prompt,
            routing.get("lora_name"),
            request.pinned_instance_id,
            bound,
            routing.get("priority") or 0,
            excluded,
            healthy_only,
            request.kv,
            transfer,
        )

    def _bound_rank(self) -> WorkerRank | None:
        """Return where the session of the request is bound; a stage needs that before the session is held."""
        session, sessions = self.session, self.pool.sessions
        if session is not None:
            return session.rank
        return None if sessions is None else sessions.bound_rank(self.request.body)

    @property
    def body(self) -> WorkerRequest:
        """The request for the worker that answers."""
        return self.request.body if self.given is None else self.given.body

    # -- what the stages need (`stages.AnsweringWorkers`) ------------------------------------------------------------

    def check_room(self) -> None:
        """Raise Overloaded where every worker that may be chosen is busy; nothing is chosen."""
        self.pool.check_room(self.placement())

    def has_worker_for(self, rule: TransferRule) -> bool:
        """Return whether a worker that was not tried is there for KV blocks that can be sent by this rule only."""
        return self.pool.has_worker(self.placement(transfer=rule))

    def take(self, result: StageResult) -> None:
        """Take over what a stage passes on, to the next one or to the worker that answers."""
        self.given = result
        self.course.step(StageDone(result.is_single_use))

    def declined(self, worker: ChosenWorker) -> None:
        """Readmit the worker that a stage had chosen: it does not serve the request as it was sent."""
        self.course.step(Declined(worker.key))

    # -- what may come after a failure -------------------------------------------------------------------------------

    def migration_blocker(self) -> str | None:
        """Return what keeps the rest of the answer from another worker; None: nothing does."""
        request = self.request
        if request.answer.takes_text:
            return "its engine takes text: there is no position to go on from"
        return migration_blocker(
            request.body,
            len(request.prompt) + len(request.answer.generated),
            longest=request.limits.longest_movable_tokens,
            runtime_data=self.pool.runtime_config.runtime_data,
        )

    def can_move(self, error: DynamoException) -> bool:
        """Return whether a healthy worker is there that may go on after `error`."""
        if not self.may_move(error) or (self.request.answer.tokens and self.migration_blocker() is not None):
            return False
        return self.pool.has_worker(self.placement(healthy_only=True))

    def may_move(self, error: DynamoException) -> bool:
        """Return whether another worker may be tried after `error`."""
        return self.course.may_move(error, is_over=self._is_over())

    def _is_over(self) -> bool:
        return self.context.is_stopped() or self._is_late()

    def _is_late(self) -> bool:
        """Return whether the request's own deadline has passed: then no worker is at fault, and none need be tried."""
        deadline = self.context.deadline
        return deadline is not None and self._now() >= deadline

    def lost(self, worker: ChosenWorker, error: DynamoException, *, is_exempt: bool, has_begun: bool) -> Lost:
        """Note the failure, and count it against its worker, so that the next request need not find out for itself.

        `is_exempt`: it does not count. `has_begun`: some of the answer has come. Return what the course is to know of it.
        """
        request, tokens = self.request, self.request.answer.tokens
        request.record.note_failure("generate", worker.placement, error, self._now(), tokens)
        is_registered_anew = False
        if not is_exempt and not self._is_late():
            if self.session is not None:
                self.session.failed(worker.instance.instance_id, error)
            is_registered_anew = worker.record_failure(error)
        self._waiting().lost[worker.key] = worker.instance
        is_over = self._is_over()
        if not has_begun:
            return Lost(error, tokens, is_over, is_registered_anew)
        return Lost(
            error,
            tokens,
            is_over,
            is_registered_anew,
            blocker=self.migration_blocker(),
            is_complete=bool(request.answer.generated)
            and tokens_left(request.body, len(request.answer.generated)) == 0,
            stages=len(self.stages),
        )

    async def next_body(self, error: DynamoException) -> bool:
        """Make the request for the next worker after `error`: anew where the last worker may have taken what it gives away
        once. False: the request was cancelled meanwhile."""
        given = self.given
        if given is None or given.renew is None or not may_be_taken(error):
            return True
        body = await given.renew()
        if body is None:
            return False
        self.given = given._replace(body=body)
        return True

    # -- the choice of a worker --------------------------------------------------------------------------------------

    async def choose(self, order: Choose) -> Event:
        """Choose a worker. See `drive.Leg`."""
        if order.looks_only:
            return self._look(order)
        pool = self.pool
        if pool.kv is not None and not order.is_after_wait:
            request = self.request
            query = await pool.kv.query(self.body, request.record, pinned=request.pinned_instance_id)
            if request.kv is not None:  # another attempt: its first token is due when that of the first one was
                query.aim = request.kv.aim
            request.kv = query
        if pool.pre_dispatch is None:
            worker = self._place(order) if self.given is None else self._chosen(order)
        else:
            turn = await self._pass(order)
            if turn is None:
                return CANCELLED
            worker = turn
        self.worker, candidate = worker, worker.placement.candidate
        return Chosen((candidate.endpoint, candidate.instance_id))

    def no_worker(self, error: WorkerUnavailable) -> NoWorker:
        """Return whether a worker was there moments ago, so that the request may wait for the next one. See `drive.Leg`."""
        order = self.course.instruction
        is_after_wait = isinstance(order, Choose) and order.is_after_wait
        return self._waiting().no_worker(error, self.course.last, is_after_wait=is_after_wait)

    async def wait(self, seconds: float) -> Event:
        """Wait for a change of the pool. See `drive.Leg`."""
        return await self._waiting().wait(seconds)

    def _waiting(self) -> ReplacementWait:
        if self._replacement is None:
            is_pinned = self.request.pinned_instance_id is not None
            self._replacement = ReplacementWait(
                self.pool, self.context, self.dispatcher.worker_wait, is_pinned=is_pinned
            )
        return self._replacement

    def _look(self, order: Choose) -> Event:
        """Report whether a worker could be chosen. Raises WorkerUnavailable where there is none."""
        if order.is_after_wait:
            self._place(order)
        elif not self.pool.has_worker(self.placement(order.excluded)):
            raise WorkerUnavailable(f"No workers available for {self.pool.name}")
        return FOUND

    def _chosen(self, order: Choose) -> ChosenWorker:
        """Return the worker that a stage has chosen already, once; else one that is chosen now."""
        given = self.given
        if given is not None and given.worker is not None:
            self.given = given._replace(worker=None)
            if self._fits_session(given.worker):  # else the session was bound elsewhere since a stage chose it
                return given.worker
        return self._place(order)

    def _place(self, order: Choose) -> ChosenWorker:
        worker = self.pool.choose(self.placement(order.excluded))
        if order.is_after_wait:
            self._waiting().end()
        if order.last is not None and not order.looks_only:
            logger.info("request %s: moves to worker %x", self.context.id(), worker.instance.instance_id)
        return worker

    async def _pass(self, order: Choose) -> ChosenWorker | None:
        """Choose in a pool with a queue or sessions; None: the request was cancelled meanwhile.

        Before its first attempt a request may have to wait for its session to be bound, and for its turn.
        """
        pool = self.pool
        if self.session is None and pool.sessions is not None:
            await self._join_session()
        worker, session = self._chosen(order), self.session
        may_queue, self._may_queue = self._may_queue, False
        if not may_queue or order.last is not None:
            return worker
        wait = pool.wait_for_turn(worker, self.context)
        if wait is not None and session is not None and session.may_go_elsewhere:
            wait.close()  # a session that only prefers its worker goes elsewhere before it waits
            session.go_elsewhere()
            worker = pool.choose(self.placement(order.excluded))
            wait = pool.wait_for_turn(worker, self.context)
        if wait is None:
            return worker
        began = self._now()
        is_turn = await wait
        self.request.record.queued_seconds += self._now() - began
        return pool.choose(self.placement(order.excluded)) if is_turn else None

    async def _join_session(self) -> None:
        request = self.request
        dp_rank = (request.body.get("routing") or {}).get("dp_rank")
        self.session = await self.pool.hold_session(
            request.body, self.context, worker_id=request.pinned_instance_id, dp_rank=dp_rank
        )

    def _fits_session(self, worker: ChosenWorker) -> bool:
        """Return whether a request of this session may go to a worker: the session is bound there, or not yet."""
        bound = None if self.session is None else self.session.rank
        return bound is None or bound == (worker.instance.instance_id, worker.placement.dp_rank or 0)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


_PLAIN: Final = CourseRules(retries=DEFAULT_RETRIES)


def _rules(request: DispatchRequest, stages: Sequence[DispatchStage]) -> CourseRules:
    retries, pinned, routing = request.limits.retries, request.pinned_instance_id, request.body.get("routing")
    if retries == DEFAULT_RETRIES and pinned is None and not (stages or routing):
        return _PLAIN  # as nearly every request
    has_adapter = routing is not None and bool(routing.get("lora_name"))
    return CourseRules(retries=retries, stages=len(stages), is_pinned=pinned is not None, has_adapter=has_adapter)
