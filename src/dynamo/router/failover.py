"""What becomes of a request whose worker failed: whether another worker may be tried, which one, and the wait for one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from dynamo.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    EngineShutdown,
    NoReplacement,
    Overloaded,
    WorkerUnavailable,
    rule_of,
)
from dynamo.kv.overlap import WorkerRank
from dynamo.placement import PlacementRequest, WorkerKey
from dynamo.placement.kv_query import KvQuery
from dynamo.placement.kv_transfer import TransferRule
from dynamo.protocol.worker_request import RoutingHints, WorkerRequest
from dynamo.router.handoff import Renew, may_be_taken
from dynamo.router.kv.sessions import SessionHold
from dynamo.router.migration import migration_blocker
from dynamo.router.pool import ChosenWorker, ModelPool
from dynamo.router.record import DispatchRecord
from dynamo.router.stages import DispatchTimer
from dynamo.router.stall_detector import StallDetector
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance

__all__ = [
    "DEFAULT_RETRIES",
    "NO_WAIT",
    "Attempts",
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


class DispatchRequest:
    """One request for one choice, and how far its answer has come.

    The reader of the stream appends what it decoded to `generated`: another worker goes on behind those tokens.
    """

    __slots__ = (
        "body",
        "generated",
        "is_complete",
        "kv",
        "limits",
        "pinned_instance_id",
        "prompt",
        "record",
        "stall_detector",
        "takes_text",
        "text_tokens",
        "timer",
    )

    def __init__(
        self,
        body: WorkerRequest,
        prompt: Sequence[int],
        *,
        record: DispatchRecord,
        timer: DispatchTimer,
        limits: DispatchLimits,
        pinned_instance_id: int | None = None,
        takes_text: bool = False,
        stall_detector: StallDetector | None = None,
    ) -> None:
        """`body`: the worker's request with its prompt. `takes_text`: the engine has no token ids to go on from."""
        self.body = body
        self.prompt = prompt
        self.record = record
        self.timer = timer
        self.limits = limits
        self.pinned_instance_id = pinned_instance_id
        self.takes_text = takes_text
        self.stall_detector = stall_detector
        self.kv: KvQuery | None = None  # in the kv mode: the query to its router, for the next attempt
        self.generated: list[int] = []
        self.text_tokens = 0  # counted by the reader where the engine takes text
        self.is_complete = False  # set by the reader: the answer is whole, so the stream may end at any time

    @property
    def tokens(self) -> int:
        """How many tokens were generated so far."""
        return self.text_tokens if self.takes_text else len(self.generated)

    @property
    def first_token_seconds(self) -> float | None:
        """How long a worker may take for its first token; None: any time."""
        return None if self.stall_detector is None else self.stall_detector.policy.first_token_seconds

    def placement(
        self,
        excluded: Collection[WorkerKey],
        *,
        healthy_only: bool = False,
        transfer: TransferRule | None = None,
        bound: WorkerRank | None = None,
    ) -> PlacementRequest:
        """Return what the choice of a worker may look at."""
        routing = self.body.get("routing")
        return PlacementRequest(
            token_ids=self.prompt,
            lora_name=routing.get("lora_name") if routing else None,
            pinned_instance_id=self.pinned_instance_id,
            bound=bound,
            priority=(routing.get("priority") or 0) if routing else 0,
            excluded=excluded,
            healthy_only=healthy_only,
            kv=self.kv,
            transfer=transfer,
        )


class Attempts:
    """The workers that one request has tried."""

    __slots__ = ("_shed", "_tried", "count")

    def __init__(self) -> None:
        self.count = 0
        self._tried: dict[WorkerKey, Instance] = {}  # not to be tried again
        self._shed: list[WorkerKey] = []  # of those, the ones that only had no room

    def begin(self, worker: ChosenWorker) -> None:
        """Record an attempt at a worker."""
        self.count += 1
        self._tried[worker.key] = worker.instance

    @property
    def excluded(self) -> Collection[WorkerKey]:
        """The workers that are not to be tried again."""
        return self._tried.keys()

    def failed(self, worker: ChosenWorker, error: DynamoException) -> None:
        """Note why an attempt failed. A worker that only had no room may be tried again once another worker is lost."""
        if isinstance(error, Overloaded):
            self._shed.append(worker.key)
        elif self._shed:
            for key in self._shed:
                self._tried.pop(key, None)
            self._shed.clear()

    def readmit(self, worker: ChosenWorker) -> None:
        """Let a worker be tried again."""
        self._tried.pop(worker.key, None)

    def forget_tried(self) -> None:
        """Let every worker be tried again."""
        self._tried.clear()
        self._shed.clear()

    def readmit_restarted(self, pool: ModelPool) -> None:
        """Let workers be tried again that registered anew under their old id."""
        for key, instance in list(self._tried.items()):
            current = pool.instance(key[1])
            if current is not None and current is not instance and (current.endpoint == instance.endpoint):
                del self._tried[key]


class WorkerWait(NamedTuple):
    """How a request waits while its model has no worker."""

    seconds: float = 0.0  # 0: not at all
    is_from_arrival: bool = False  # else from the loss of the last worker on


NO_WAIT: Final = WorkerWait()


class Failover:
    """Decides what one request does after a failure. It opens no stream itself."""

    __slots__ = (
        "_context",
        "_may_wait",
        "_pool",
        "_request",
        "_worker_wait",
        "attempts",
        "decided",
        "exempt_error",
        "is_single_use",
        "renew",
        "session",
        "transfer",
    )

    def __init__(self, pool: ModelPool, request: DispatchRequest, context: Context, worker_wait: WorkerWait) -> None:
        self._pool, self._request, self._context = pool, request, context
        self._worker_wait = worker_wait
        self.session: SessionHold | None = None  # of the request, where it has one; released by the stream
        self._may_wait = True  # in the router's queue: before the first attempt only
        self.attempts = Attempts()
        self.exempt_error: DynamoException | None = None  # does not count against the worker
        self.is_single_use = False  # no second worker can answer what one has taken
        self.renew: Renew | None = None  # makes the request anew, where one worker only can take what it holds
        self.decided: ChosenWorker | None = None  # what a stage has chosen already; taken once
        self.transfer: TransferRule | None = None  # where the KV blocks of its prompt can be sent; None: anywhere

    def placement(self, *, healthy_only: bool = False) -> PlacementRequest:
        """Return what the choice of the next worker may look at."""
        session, sessions = self.session, self._pool.sessions
        bound = None if session is None else session.rank
        if session is None and sessions is not None:  # a stage asks before the session is held
            bound = sessions.bound_rank(self._request.body)
        return self._request.placement(
            self.attempts.excluded, healthy_only=healthy_only, transfer=self.transfer, bound=bound
        )

    async def _join_session(self) -> None:
        request = self._request
        dp_rank = (request.body.get("routing") or {}).get("dp_rank")
        self.session = await self._pool.hold_session(
            request.body, self._context, worker_id=request.pinned_instance_id, dp_rank=dp_rank
        )

    def _fits_session(self, worker: ChosenWorker) -> bool:
        """Return whether a request of this session may go to a worker: the session is bound there, or not yet."""
        bound = None if self.session is None else self.session.rank
        return bound is None or bound == (worker.instance.instance_id, worker.placement.dp_rank or 0)

    def readmit(self, worker: ChosenWorker) -> None:
        """Readmit a worker that refused the request."""
        self.attempts.readmit(worker)

    def check_room(self) -> None:
        """Raise Overloaded where every worker that may be chosen is busy; nothing is chosen."""
        self._pool.check_room(self.placement())

    def must_start_over(self, error: DynamoException) -> bool:
        """Return whether the prompt has to be computed again, as a worker may have taken what it is given once."""
        return self.is_single_use and may_be_taken(error)

    async def next_body(self, body: WorkerRequest, error: DynamoException) -> WorkerRequest | None:
        """Return the request for the next worker after `error`: `body`, made anew where the last worker may have taken what
        it gives away once. None: the request was cancelled meanwhile."""
        return body if self.renew is None or not may_be_taken(error) else await self.renew()

    async def has_next(self, error: DynamoException) -> bool:
        """Return whether another worker is there, waiting for one if it is expected; False: the request was cancelled.

        Raises `error` when none is.
        """
        self.transfer = None  # the prompt is computed again, maybe elsewhere
        if self._pool.has_worker(self.placement()):
            return True
        if not self.expects_replacement(error):
            raise error
        return await self.await_replacement(error, self._now()) is not None

    def start_over(self) -> None:
        """Readmit all workers that were tried; how many they were stays."""
        self.attempts.forget_tried()

    def has_worker_for(self, rule: TransferRule) -> bool:
        """Return whether a worker that was not tried is there for KV blocks that can be sent by this rule only."""
        return self._pool.has_worker(self._request.placement(self.attempts.excluded, transfer=rule))

    def migration_blocker(self) -> str | None:
        """Return what keeps the rest of the answer from another worker; None: nothing does."""
        request = self._request
        if request.takes_text:
            return "its engine takes text: there is no position to go on from"
        return migration_blocker(
            request.body,
            len(request.prompt) + len(request.generated),
            longest=request.limits.longest_movable_tokens,
            runtime_data=self._pool.runtime_config.runtime_data,
        )

    def can_move(self, error: DynamoException) -> bool:
        """Return whether a healthy worker is there that may go on after `error`."""
        if not self.may_move(error) or (self._request.tokens and self.migration_blocker() is not None):
            return False
        return self._pool.has_worker(self.placement(healthy_only=True))

    def may_move(self, error: DynamoException) -> bool:
        """Return whether another worker may be tried after `error`."""
        return (
            rule_of(error).retryable
            and not self._context.is_stopped()
            and not self._is_late()
            and self._request.pinned_instance_id is None
            and self.attempts.count <= self._request.limits.retries
        )

    def _is_late(self) -> bool:
        """Return whether the request's own deadline has passed: then no worker is at fault, and none need be tried."""
        deadline = self._context.deadline
        return deadline is not None and self._now() >= deadline

    def record_failure(self, worker: ChosenWorker, error: DynamoException) -> None:
        """Note the failure, and count it against its worker, so that the next request need not find out for itself."""
        request = self._request
        request.record.note_failure("generate", worker.placement, error, self._now(), request.tokens)
        if error is self.exempt_error or self._is_late():
            return
        if self.session is not None:
            self.session.failed(worker.instance.instance_id, error)
        if worker.record_failure(error):
            self.attempts.readmit(worker)

    async def pass_and_choose(self, last: DynamoException | None) -> ChosenWorker | None:
        """Do as `choose`, in a pool with a queue or sessions: before its first attempt a request may have to wait for its turn,
        or for its session to be bound.
        """
        pool = self._pool
        if self.session is None and pool.sessions is not None:
            await self._join_session()
        if self.decided is not None and not self._fits_session(self.decided):
            self.decided = None  # the session was bound elsewhere since a stage looked at it
        worker = await self.choose(last)
        may_wait, self._may_wait = self._may_wait, False
        if worker is None or not may_wait or last is not None or pool.gate is None:
            return worker
        wait = pool.wait_for_turn(worker, self._context)
        if wait is not None and self.session is not None and self.session.may_go_elsewhere:
            wait.close()  # a session that only prefers its worker goes elsewhere before it waits
            self.session.go_elsewhere()
            worker = await self.choose(None)
            wait = None if worker is None else pool.wait_for_turn(worker, self._context)
        if wait is None:
            return worker
        began = self._now()
        is_turn = await wait
        self._request.record.queued_seconds += self._now() - began
        return await self.choose(None) if is_turn else None

    async def choose(self, last: DynamoException | None) -> ChosenWorker | None:
        """Choose a worker; where none is left, wait for a replacement if one is expected. None: the request was cancelled.

        Where no worker can be had, the failure of the last one is raised, which explains more. `last` None: none has failed.
        """
        worker, self.decided = self.decided, None
        if worker is not None:
            return worker
        try:
            worker = self._pool.choose(self.placement())
        except WorkerUnavailable as error:
            if not self.expects_replacement(last):
                raise last or error from None
            failure = last or NoReplacement(self._pool.name)
            worker = await self.await_replacement(failure, self._waits_since(last))
        if worker is not None and last is not None:
            logger.info("request %s: moves to worker %x", self._context.id(), worker.instance.instance_id)
        return worker

    def _waits_since(self, last: DynamoException | None) -> float:
        emptied_at = self._pool.emptied_at
        if last is not None or emptied_at is None or self._worker_wait.is_from_arrival:
            return self._now()
        return emptied_at

    def expects_replacement(self, last: DynamoException | None) -> bool:
        """Return whether a worker was there moments ago and is gone now, and the request may wait for the next one.

        An error that a worker reports of a request shows that the worker is there, and so does a worker that is silent:
        neither makes room for a replacement.
        """
        if self._worker_wait.seconds <= 0 or self._request.pinned_instance_id is not None or self._context.is_stopped():
            return False
        if last is None:
            emptied_at = self._pool.emptied_at
            if emptied_at is None or self._worker_wait.is_from_arrival:
                return emptied_at is not None
            return self._now() < emptied_at + self._worker_wait.seconds
        if isinstance(last, CannotConnect | Disconnected):
            return not last.is_reported
        if (
            isinstance(last, WorkerUnavailable)
            and last.is_reported
            and (self._request.body.get("routing") or {}).get("lora_name")
        ):
            return False  # the adapter was unloaded there; its worker is well
        return isinstance(last, EngineShutdown | WorkerUnavailable)

    async def await_replacement(self, failure: DynamoException, lost_at: float) -> ChosenWorker | None:
        """Wait until a worker can be chosen. Raises `failure` when none comes in time; None: the request was cancelled.

        `lost_at`: when the last worker was lost.
        """
        pool, began = self._pool, self._now()
        deadline = lost_at + self._worker_wait.seconds
        if self._context.deadline is not None:
            deadline = min(deadline, self._context.deadline)
        logger.warning(
            "request %s: no worker of model %s is left; waiting up to %.1f s for a replacement",
            self._context.id(),
            pool.name,
            deadline - began,
        )
        while not self._context.is_stopped():
            self.attempts.readmit_restarted(pool)
            try:
                worker = pool.choose(self.placement())
            except WorkerUnavailable:
                if self._now() >= deadline:
                    break
                await pool.wait_for_change(self._context, deadline)
            else:
                logger.warning("request %s: a replacement came after %.1f s", self._context.id(), self._now() - began)
                return worker
        else:
            return None
        logger.warning(
            "request %s: gave up after %.1f s: no replacement came for the last worker of model %s",
            self._context.id(),
            self._now() - began,
            pool.name,
        )
        raise failure

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
