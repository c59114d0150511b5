"""Where requests wait until a worker has little enough to prefill: the event loop's side of `placement.queueing`.

A request that was just placed shows the gate its decision. Where every rank that could serve the request is above the threshold
of its policy class, or requests of the class wait already, it waits for its turn and is placed anew. Turns are given when
loads fall or workers change, one at a time: the next request is considered after the one before it has been booked.

While nothing waits, a gate costs four calls for each request and nothing for anything else.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from dynamo.errors import DynamoException, RouterQueueLimitExceeded
from dynamo.kv.overlap import WorkerRank
from dynamo.placement import Candidate
from dynamo.placement.kv_query import FirstTokenAim, KvQuery, exclusion_of
from dynamo.placement.kv_state import Selection
from dynamo.placement.queueing import PolicyClass, PolicyProfile, QueueRequest, QueueUsage, RankPrefill, RouterQueue
from dynamo.placement.queueing.router_queue import RECHECK_SECONDS
from dynamo.placement.queueing.targets import check_target
from dynamo.router.kv.queue_metrics import QueueMetrics
from dynamo.router.kv.router import KvRouter
from dynamo.runtime.calls.context import Context, on_loop

if TYPE_CHECKING:
    from dynamo.router.kv.placement import KvPlacement

POLICY_CLASS: Final = "policy-class"  # of a request's metadata: the class or family that it names


class QueuedRanks(Protocol):
    """The workers in front of which requests wait. Read anew for every decision."""

    def prefills(self, query: KvQuery) -> Iterable[RankPrefill]:
        """Return the ranks that may serve a query, however busy they are."""
        ...

    def workers(self) -> int:
        """Return how many workers there are."""
        ...


class RouterRanks:
    """All ranks of a router (`QueuedRanks`)."""

    __slots__ = ("_router",)

    def __init__(self, router: KvRouter) -> None:
        self._router = router

    def prefills(self, query: KvQuery) -> Iterable[RankPrefill]:
        """Return the ranks that may serve a query."""
        load = self._router.load
        for rank, info in self._router.ranks.items():
            reason = exclusion_of(rank, info, query)
            if reason is None or reason == "overloaded":
                tokens = load.prefill_tokens(rank) if reason is None else math.inf
                yield RankPrefill(tokens, info.max_num_batched_tokens)

    def workers(self) -> int:
        """Return how many workers there are."""
        return len({rank.worker_id for rank in self._router.ranks})


class GatedPool(Protocol):
    """What is needed of a pool of workers before which requests wait."""

    @property
    def busy(self) -> frozenset[int]:
        """The members whose reported load exceeds a threshold."""
        ...

    @property
    def workers(self) -> int:
        """How many members there are."""
        ...

    def candidates(self) -> list[Candidate]:
        """Return the members as a policy sees them."""
        ...

    def instance(self, instance_id: int) -> object | None:
        """Return the member with this id; None: there is none."""
        ...


class PoolRanks:
    """The ranks of one pool's workers, as a router that other pools share knows them (`QueuedRanks`)."""

    __slots__ = ("_placement", "_pool")

    def __init__(self, pool: GatedPool, placement: KvPlacement) -> None:
        self._pool, self._placement = pool, placement

    def prefills(self, query: KvQuery) -> Iterable[RankPrefill]:
        """Return the ranks, see `QueuedRanks`. A worker with an open circuit counts only where all have one; a worker over a busy
        threshold counts as busy without end."""
        candidates = self._pool.candidates()
        ids = {each.instance_id for each in candidates if not each.is_circuit_open}
        if not ids or query.pinned_worker_id is not None:
            ids = {each.instance_id for each in candidates}
        shed, router = self._pool.busy, self._placement.current_router()
        query.allowed = ids
        for rank, info in router.ranks.items():
            if exclusion_of(rank, info, query) is None:
                tokens = math.inf if rank.worker_id in shed else router.load.prefill_tokens(rank)
                yield RankPrefill(tokens, info.max_num_batched_tokens)

    def workers(self) -> int:
        """Return how many workers there are."""
        return self._pool.workers


class _Waiter(msgspec.Struct, frozen=True, gc=False):
    query: KvQuery
    turn: asyncio.Future[bool]
    policy: PolicyClass


class QueueGate:
    """The queue in front of one pool of workers. Used on one event loop."""

    __slots__ = ("_is_due", "_metrics", "_only", "_queue", "_ranks", "_recheck", "_router", "_serial")

    def __init__(
        self, router: KvRouter, profile: PolicyProfile, ranks: QueuedRanks, metrics: QueueMetrics | None = None
    ) -> None:
        self._router, self._ranks, self._metrics = router, ranks, metrics
        self._queue: RouterQueue[_Waiter] = RouterQueue(profile, cached_now=self._cached_now)
        classes = tuple(profile.classes.values())
        self._only = classes[0] if len(classes) == 1 and not classes[0].is_explicit else None
        self._serial = 0
        self._is_due = False  # the next check of the queue is scheduled
        self._recheck: asyncio.TimerHandle | None = None  # set while requests wait

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._queue)

    def usage_of(self, policy_class: str) -> QueueUsage:
        """Return what waits in one class."""
        return self._queue.usage_of(policy_class)

    def parks(self, selection: Selection, query: KvQuery, context: Context) -> PolicyClass | None:
        """Return the class in which a request has to `wait` that was about to go to the worker of `selection`.

        None: it may go; book it in the same turn of the loop.
        """
        policy = self._only or self._class_of(selection, query, context)
        if self._metrics is not None:
            self._metrics.received(policy.name)
        aim = query.aim
        if aim.due is None and (aim.target_ms is not None or policy.slo_ttft_ms is not None):
            self._set_due(aim, policy)
        state = selection.state
        if self._recheck is not None and self._queue.has_backlog(policy, _lane(selection, query)):
            return policy
        chosen = state.ranks[selection.choice.position]
        if not policy.is_over(chosen.prefill_tokens, chosen.max_num_batched_tokens):
            return None
        is_over = policy.is_over
        return (
            policy if all(is_over(each.prefill_tokens, each.max_num_batched_tokens) for each in state.ranks) else None
        )

    async def wait(self, policy: PolicyClass, selection: Selection, query: KvQuery, context: Context) -> bool:
        """Wait for the turn of a request, and return True: place and book it in the same turn of the loop.

        False: the request was cancelled, or its deadline passed, and its place in the queue is free.

        Raises:
            RouterQueueLimitExceeded: a limit of the class was reached before this request came, or its first token cannot be there
                in time.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        began = loop.time()
        self._serial += 1
        request = QueueRequest(
            str(self._serial),  # requests for several choices share the id of their client's request
            _Waiter(query, turn, policy),
            selection.lookup.prompt_tokens,
            self._router.best_cached_tokens(query, selection.lookup),
            priority=query.priority,
            strict_priority=query.strict_priority,
            pinned=_lane(selection, query),
            tenant=query.tenant,
            due=query.aim.due,
        )
        self._park(request, began, selection)

        def leave(_killed: bool = False) -> None:
            if not turn.done():
                turn.set_result(False)
            self._remove(request)

        forget = context.on_cancel(on_loop(loop, leave))
        try:
            is_turn = await turn
        finally:
            forget()
            self._remove(request)  # where this very task was cancelled
            query.queued_seconds = loop.time() - began
        if (
            not is_turn
            and self._metrics is not None
            and context.deadline is not None
            and loop.time() >= context.deadline
        ):
            self._metrics.late(policy.name)
        return is_turn and not context.is_stopped()

    def changed(self) -> None:
        """Check the queue soon: a load has fallen, or the workers have changed."""
        if self._recheck is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._give_turn)

    # -- placement.queueing.EligibleRanks ----------------------------------------------------------------------------

    def eligible(self, request: QueueRequest[_Waiter]) -> Iterable[RankPrefill]:
        """Return the ranks that may serve a request that waits."""
        return self._ranks.prefills(request.payload.query)

    def workers(self) -> int:
        """Return how many workers there are."""
        return self._ranks.workers()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _class_of(self, selection: Selection, query: KvQuery, context: Context) -> PolicyClass:
        asked = context.metadata.get(POLICY_CLASS) if context.has_metadata else None
        lookup = selection.lookup
        uncached = lookup.prompt_tokens - self._router.best_cached_tokens(query, lookup)
        return self._queue.profile.resolve(asked, uncached)

    def _set_due(self, aim: FirstTokenAim, policy: PolicyClass) -> None:
        target_ms = policy.slo_ttft_ms if aim.target_ms is None else aim.target_ms
        assert target_ms is not None, "the caller has seen one"
        due = aim.due = asyncio.get_running_loop().time() + target_ms / 1000
        if (metrics := self._metrics) is not None:
            aim.reached = lambda at: metrics.first_token(policy.name, at <= due)

    def _cached_now(self, request: QueueRequest[_Waiter]) -> int:
        """Return how many tokens of a request some rank holds, or is about to hold for those before it."""
        try:
            return held_tokens(self._router, request.payload.query, asyncio.get_running_loop().time())
        except DynamoException:  # no rank may serve it now: its own choice of a worker raises the reason
            return request.cached_tokens

    def _park(self, request: QueueRequest[_Waiter], now: float, selection: Selection) -> None:
        policy = request.payload.policy
        try:
            if request.due is not None:
                ahead = self._queue.tokens_ahead(request, policy, now)
                check_target(policy.name, request, self._router.timed(selection.state.ranks), ahead, now)
            self._queue.park(request, policy, self._ranks.workers(), now)
        except RouterQueueLimitExceeded as error:
            if self._metrics is not None:
                self._metrics.refused(error)
            raise
        self._count(request, 1)
        if self._recheck is None:
            self._router.load.on_relief[self] = self.changed
            self._arm()

    def _remove(self, request: QueueRequest[_Waiter]) -> None:
        if self._queue.remove(request.request_id):
            self._left(request)
            self.changed()  # it may have held up those behind it

    def _left(self, request: QueueRequest[_Waiter]) -> None:
        self._count(request, -1)
        if not len(self._queue) and self._recheck is not None:
            self._recheck.cancel()
            self._recheck = None
            self._router.load.on_relief.pop(self, None)

    def _count(self, request: QueueRequest[_Waiter], sign: int) -> None:
        if self._metrics is not None:
            self._metrics.waiting(
                request.payload.policy.name,
                sign,
                prompt_tokens=sign * request.prompt_tokens,
                cached_tokens=sign * request.cached_tokens,
            )

    def _give_turn(self) -> None:
        """Give the next request its turn, if one may go, and check again once that one has been booked."""
        self._is_due = False
        for request in self._queue.ready(self, asyncio.get_running_loop().time()):
            self._left(request)
            turn = request.payload.turn
            if not turn.done():
                turn.set_result(True)  # wakes the task, which books in its next step,
                self.changed()  # and this call comes after that step
                return

    def _arm(self) -> None:
        self._recheck = asyncio.get_running_loop().call_later(RECHECK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        """Check without a reason: what was never freed expires, and a circuit closes, and neither is reported."""
        self._router.load.expire(asyncio.get_running_loop().time())
        self._arm()
        self.changed()


def held_tokens(router: KvRouter, query: KvQuery, now: float) -> int:
    """Return how many tokens of a prompt some rank holds, or will hold when it has computed the prompts before this one.

    Raises what `KvRouter.select` raises for a query that no rank may serve.
    """
    lookup = router.look_up(query, now)
    load, sequence = router.load, lookup.sequence
    ranks = load.heads.get(sequence[0], ()) if sequence else ()
    active = max((load.of(rank).active_blocks(sequence) for rank in ranks), default=0)
    return max(router.best_cached_tokens(query, lookup), min(lookup.prompt_tokens, active * router.block_size))


def _lane(selection: Selection, query: KvQuery) -> WorkerRank | None:
    """Return the rank that a request names; None: it may go to any."""
    return None if query.pinned_worker_id is None else selection.rank
