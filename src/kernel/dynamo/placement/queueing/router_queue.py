"""Where requests wait in the router while every worker that could serve them has much to prefill.

A request is parked on arrival, or not at all. Parked requests are dispatched when a prefill ends, a request ends, the workers
change, or time passes: the caller then reads `ready`. Pure: time and load are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from dynamo.errors import RouterQueueLimitExceeded
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.queueing.deficit_round_robin import DeficitRoundRobin
from dynamo.placement.queueing.lanes import ClassLanes, LaneEntry, TenantLanes
from dynamo.placement.queueing.order import OrderKey, QueueOrder, order_key
from dynamo.placement.queueing.profile import PolicyClass, PolicyProfile, RankPrefill

MAX_PARKED: Final = 100_000  # requests of one router, whatever the limits of its classes
RECHECK_SECONDS: Final = 60.0  # read `ready` at least this often, as loads also change in ways that are not reported
OVERLAP_REFRESH_SECONDS: Final = 10.0  # the native router's default

P = TypeVar("P")


class QueueRequest(msgspec.Struct, Generic[P], frozen=True, gc=False):
    """The facts of one request that a queue needs."""

    request_id: str
    payload: P
    """The caller's own; the queue hands it back."""
    prompt_tokens: int
    cached_tokens: int = 0
    """The most that an eligible rank holds of the prompt."""
    policy_class: str | None = None
    """The class or family that the request names."""
    priority: float = 0
    strict_priority: int = 0
    pinned: WorkerRank | None = None
    """The one rank that may serve it."""
    tenant: str | None = None
    """Owner of its key; None: it came without one. Such requests are one tenant."""
    due: float | None = None
    """When its first token should be there; None: it has no target."""

    @property
    def uncached_tokens(self) -> int:
        """The tokens that the best rank would have to compute."""
        return max(0, self.prompt_tokens - self.cached_tokens)


class EligibleRanks(Protocol[P]):
    """The workers as a queue sees them. Read anew for every decision, so it shows what was booked a moment ago."""

    def eligible(self, request: QueueRequest[P]) -> Iterable[RankPrefill]:
        """Return the ranks that may serve a request, however busy they are; of a pinned request its rank alone."""
        ...

    def workers(self) -> int:
        """Return how many workers are discovered: the limits of a class are for each worker."""
        ...


class QueueUsage(msgspec.Struct, frozen=True, gc=False):
    """What waits in one class."""

    requests: int = 0
    raw_isl_tokens: int = 0
    cached_tokens: int = 0


class _ClassQueue(Generic[P]):
    __slots__ = ("cached_tokens", "lanes", "policy", "raw_isl_tokens")

    def __init__(self, policy: PolicyClass, cached_now: Callable[[QueueRequest[P]], int]) -> None:
        self.policy = policy
        self.lanes: ClassLanes[_Parked[P]] | TenantLanes[_Parked[P]] = ClassLanes()
        if policy.queue_policy is QueueOrder.DLPM:

            def held(parked: _Parked[P]) -> tuple[int, int]:
                cached = cached_now(parked.request)
                return cached, parked.request.prompt_tokens - cached

            self.lanes = TenantLanes(policy.tenant_quantum, held)
        self.raw_isl_tokens = 0
        self.cached_tokens = 0


class _Parked(msgspec.Struct, Generic[P], gc=False):
    request: QueueRequest[P]
    queue: _ClassQueue[P]
    parked_at: float


class RouterQueue(Generic[P]):
    """The parked requests of one pool of workers, by policy class. Every call takes the time in seconds."""

    def __init__(
        self,
        profile: PolicyProfile,
        *,
        refresh_overlap: Callable[[QueueRequest[P]], None] | None = None,
        cached_now: Callable[[QueueRequest[P]], int] | None = None,
        overlap_refresh_seconds: float = OVERLAP_REFRESH_SECONDS,
        max_parked: int = MAX_PARKED,
    ) -> None:
        """`refresh_overlap` is called right before a request is handed out whose overlap is older than
        `overlap_refresh_seconds`: what the workers hold may have changed since. `cached_now`: the tokens of a request that some
        worker holds now, read by classes with `dlpm`; None: those that it came with.
        """
        self.profile = profile
        self._refresh_overlap = refresh_overlap
        self._overlap_refresh_seconds = overlap_refresh_seconds
        self._max_parked = max_parked
        self._queues: dict[str, _ClassQueue[P]] = {
            name: _ClassQueue(policy, cached_now or _cached_then) for name, policy in profile.classes.items()
        }
        self._turns = DeficitRoundRobin({name: policy.quantum for name, policy in profile.classes.items()})
        self._parked: dict[str, LaneEntry[_Parked[P]]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._parked)

    def usage(self) -> Mapping[str, QueueUsage]:
        """Return what waits in each class."""
        return {name: self.usage_of(name) for name in self._queues}

    def usage_of(self, name: str) -> QueueUsage:
        """Return what waits in one class."""
        queue = self._queues[name]
        return QueueUsage(len(queue.lanes), queue.raw_isl_tokens, queue.cached_tokens)

    def arrive(self, request: QueueRequest[P], ranks: EligibleRanks[P], now: float) -> bool:
        """Return True when a request may be dispatched at once; otherwise it is parked, and `ready` returns it later.

        A request that no rank may serve is not parked: the choice of a worker then raises the reason.

        Raises:
            RouterQueueLimitExceeded: a limit of the class was reached before this request came.
        """
        policy = self.profile.resolve(request.policy_class, request.uncached_tokens)
        if not policy.parks:
            return True
        found = list(ranks.eligible(request))
        if not found:
            return True
        if not self.has_backlog(policy, request.pinned) and not all(map(policy.is_busy, found)):
            return True
        self.park(request, policy, ranks.workers(), now)
        return False

    def has_backlog(self, policy: PolicyClass, pinned: WorkerRank | None) -> bool:
        """Return whether a request waits already where a new one of the class would. `pinned`: the rank that it names."""
        return self._queues[policy.name].lanes.waiting(pinned) > 0

    def ready(self, ranks: EligibleRanks[P], now: float) -> Iterator[QueueRequest[P]]:
        """Yield the requests that may be dispatched now, each no longer parked.

        Dispatch and book each one before taking the next: the next decision reads the loads again.
        """
        while self._parked:
            heads = {
                name: head
                for name, queue in self._queues.items()
                if (head := queue.lanes.head(lambda parked: _may_go(parked, ranks))) is not None
            }
            name = self._turns.take({name: head.cost for name, head in heads.items()})
            if name is None:
                return
            parked = heads[name].request
            parked.queue.lanes.charge(heads[name])
            self._take_out(heads[name])
            if self._refresh_overlap is not None and now - parked.parked_at > self._overlap_refresh_seconds:
                self._refresh_overlap(parked.request)
            yield parked.request

    def remove(self, request_id: str) -> bool:
        """Forget a parked request, such as one whose client left; return whether it was parked."""
        entry = self._parked.get(request_id)
        if entry is None:
            return False
        self._take_out(entry)
        return True

    def park(self, request: QueueRequest[P], policy: PolicyClass, workers: int, now: float) -> None:
        """Park a request of a class; `ready` returns it later. `workers`: how many there are.

        Raises:
            RouterQueueLimitExceeded: a limit of the class was reached before this request came.
        """
        queue = self._queues[policy.name]
        if request.request_id in self._parked:
            raise ValueError(f"request {request.request_id} is parked already")
        self._check_limits(queue, workers, request.tenant or "")
        key, cost = self._key(request, policy, now), max(1, request.uncached_tokens)
        self._arrivals += 1
        entry = LaneEntry(_Parked(request, queue, now), key, request.pinned, cost, request.tenant or "")
        if isinstance(queue.lanes, TenantLanes):
            queue.lanes.quantum = policy.tenant_quantum * max(1, workers)
        queue.lanes.push(entry)
        queue.raw_isl_tokens += request.prompt_tokens
        queue.cached_tokens += request.cached_tokens
        self._parked[request.request_id] = entry

    def tokens_ahead(self, request: QueueRequest[P], policy: PolicyClass, now: float) -> int:
        """Return the uncached tokens that would go before a request if it were parked now, other classes by their share."""
        own = self._queues[policy.name].lanes.ahead(
            self._key(request, policy, now), request.tenant or "", request.pinned
        )
        others = (each for each in self._queues.values() if each.policy is not policy and len(each.lanes))
        waiting = ((each.raw_isl_tokens - each.cached_tokens, each.policy.quantum) for each in others)
        return own + sum(min(tokens, own * quantum // policy.quantum) for tokens, quantum in waiting)

    def _key(self, request: QueueRequest[P], policy: PolicyClass, now: float) -> OrderKey:
        return order_key(
            policy.queue_policy,
            strict_priority=request.strict_priority,
            priority=request.priority,
            arrived_at=now,
            uncached_tokens=request.uncached_tokens,
            number=self._arrivals + 1,
            due=request.due,
        )

    def _check_limits(self, queue: _ClassQueue[P], workers: int, tenant: str) -> None:
        """Raise RouterQueueLimitExceeded where what waits has reached a limit. The request that crosses a limit is let in.

        With `dlpm` so is that of a tenant that has less than its share of the limit.
        """
        policy = queue.policy
        for kind, current, limit in (
            ("requests", len(queue.lanes), policy.request_queue_limit_per_worker),
            ("raw_isl_tokens", queue.raw_isl_tokens, policy.raw_isl_token_queue_limit_per_worker),
            ("cached_tokens", queue.cached_tokens, policy.cached_token_queue_limit_per_worker),
        ):
            if limit is not None and current >= limit * workers and not _has_room(queue, tenant, kind, limit * workers):
                raise RouterQueueLimitExceeded(policy.name, kind, current, limit * workers)
        if len(self._parked) >= self._max_parked:
            raise RouterQueueLimitExceeded(policy.name, "requests", len(self._parked), self._max_parked)

    def _take_out(self, entry: LaneEntry[_Parked[P]]) -> None:
        parked = entry.request
        queue, request = parked.queue, parked.request
        queue.lanes.remove(entry)
        queue.raw_isl_tokens -= request.prompt_tokens
        queue.cached_tokens -= request.cached_tokens
        del self._parked[request.request_id]
        if not len(queue.lanes):
            self._turns.drop_credit(queue.policy.name)


def _cached_then(request: QueueRequest[P]) -> int:
    return request.cached_tokens


def _has_room(queue: _ClassQueue[P], tenant: str, kind: str, limit: int) -> bool:
    """Return whether a tenant has less than its share of a limit that the class has reached."""
    if not isinstance(lanes := queue.lanes, TenantLanes):
        return False
    own = [parked.request for parked in lanes.of(tenant)]
    amount = (
        len(own)
        if kind == "requests"
        else sum(each.prompt_tokens if kind == "raw_isl_tokens" else each.cached_tokens for each in own)
    )
    return amount * (len(lanes.tenants) + (not own)) < limit


def _may_go(parked: _Parked[P], ranks: EligibleRanks[P]) -> bool:
    """Return whether a parked request is dispatched: some rank is free enough, or none is left that could serve it."""
    is_busy = parked.queue.policy.is_busy
    found = False
    for rank in ranks.eligible(parked.request):
        if not is_busy(rank):
            return True
        found = True
    return not found
