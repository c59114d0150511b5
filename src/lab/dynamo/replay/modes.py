"""The router modes that a replay knows, by name, and what makes their frontends. Pure.

- `round-robin`, `random`, `least-loaded`, `power-of-two`
- `kv`: the policy `time`; `kv:default`, `kv:time`: a policy by its name
- `kv:time,NAME=VALUE,...`: with parameters of the policy

Three names are the replay's own. `events=off` routes without KV events, by what was sent where in the last two minutes; with
`lru=on` that counts as held until newer prompts fill the worker's cache. `predicted=SECONDS` counts what was sent as held
for so long beside the events.

`queue=PART` lets requests wait as `--router-queue-threshold` does, in the `order` fcfs, wspt, dlpm (`quantum=TOKENS` of a turn),
or vtc: tenants in turn by all tokens of their prompts, cached or not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.events import RouterEvent
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery, RankInfo, Trust
from dynamo.placement.kv_state import KvPolicy
from dynamo.placement.policies import RouterMode
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.queueing import (
    PolicyClass,
    PolicyProfile,
    QueueOrder,
    QueueRequest,
    RankPrefill,
    RouterQueue,
    UncachedIslBucket,
)
from dynamo.placement.queueing.profile import DEFAULT_CLASS, TENANT_QUANTUM
from dynamo.replay.flight import Flight
from dynamo.replay.frontends import CountingFrontend, MakeFrontend, Routed
from dynamo.router.kv.queue_gate import held_tokens
from dynamo.router.kv.router import KvRouter
from dynamo.scheduling import SchedulerOptions

# A frontend of a replay that routes by what workers hold: the production `KvRouter`, fed as in production. Pure.


class KvFrontend:
    """Routes by a KV policy. With `reads_events` off it knows only what it has routed itself, and what others report."""

    def __init__(
        self,
        policy: KvPolicy,
        options: SchedulerOptions,
        rng: random.Random,
        *,
        reads_events: bool = True,
        guesses_by_lru: bool = False,
        predicted_ttl_seconds: float | None = None,
    ) -> None:
        """`options` is what the workers' cards have.

        Without events, what was routed to a worker counts as held for two minutes, or with `guesses_by_lru` until newer
        prompts fill its cache. `predicted_ttl_seconds`: beside the events, what was routed counts as held for so long.
        """
        self.reads_events = reads_events
        self._rng = rng
        self._index = PrefixIndex() if reads_events else None
        self._routed: ApproximateIndex | None = None  # learns from what is sent where
        if not reads_events:
            self._routed = ApproximateIndex(is_lru=guesses_by_lru)
        elif predicted_ttl_seconds is not None:
            self._routed = ApproximateIndex(ttl_seconds=predicted_ttl_seconds)
        self._info = RankInfo(
            total_kv_blocks=options.num_gpu_blocks,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            trust=Trust.EXACT if reads_events else Trust.PREDICTED,
        )
        self._begun: dict[str, tuple[Flight, int]] = {}  # own bookings, with the tokens there were before
        self.router = KvRouter(
            block_size=options.block_size,
            policy=policy,
            rng=rng,
            index=self._index if reads_events else self._routed,
            predicted=self._routed if reads_events else None,
        )

    def set_workers(self, worker_ids: Sequence[int]) -> None:
        """Take note of the workers that are there now."""
        ranks = {WorkerRank(worker_id): self._info for worker_id in worker_ids}
        for index in (self._index, self._routed):
            if index is not None:
                for rank in ranks:
                    index.set_capacity(rank, self._info.total_kv_blocks)
        self.router.set_ranks(ranks)

    def route(self, flight: Flight, now_ms: float) -> Routed | None:
        """Choose the worker of a request and book it there."""
        router, now = self.router, now_ms / 1000
        selection = router.select(_query(flight), now)
        router.book(flight.booking_id, selection, now)
        self._begun[flight.booking_id] = flight, flight.tokens
        return Routed(selection.rank.worker_id, selection.cached_tokens)

    def ready(self, now_ms: float) -> Iterator[tuple[Flight, Routed]]:
        """Return none: nothing waits."""
        return iter(())

    def would_choose(self, flight: Flight, now_ms: float) -> int | None:
        """Return the worker that `route` would choose; the next choice has the same chance all the same."""
        chance = self._rng.getstate()
        chosen = self.router.select(_query(flight), now_ms / 1000).rank.worker_id
        self._rng.setstate(chance)
        return chosen

    def booked_elsewhere(self, flight: Flight, booking_id: str, routed: Routed, now_ms: float) -> None:
        """Count a request that another frontend has booked."""
        rank, now = WorkerRank(routed.worker_id), now_ms / 1000
        self.router.load.add(
            booking_id,
            rank,
            flight.blocks.sequence,
            prompt_tokens=flight.request.prompt_tokens + flight.tokens,
            cached_tokens=routed.cached_tokens,
            now=now,
        )

    def first_token(self, booking_id: str, now_ms: float) -> None:
        """Count the prompt as computed."""
        self.router.first_token(booking_id, now_ms / 1000)

    def end(self, booking_id: str, now_ms: float) -> None:
        """Free what is booked; the router learns how long the answer was, if it is its own."""
        now = now_ms / 1000
        if (begun := self._begun.pop(booking_id, None)) is not None:
            flight, tokens_before = begun
            self.router.output(booking_id, flight.tokens - tokens_before, now)
        self.router.free(booking_id, now)

    def apply(self, event: RouterEvent, now_ms: float) -> None:
        """Let the index follow a worker's cache."""
        if self._index is not None:
            self._index.apply(event)

    def forget(self, worker_id: int) -> None:
        """Drop a worker's blocks."""
        for index in (self._index, self._routed):
            if index is not None:
                index.forget(worker_id)


VTC: Final = "vtc"


class QueuedFrontend(KvFrontend):
    """A `KvFrontend` before whose workers requests wait, in the production queue."""

    def __init__(self, queue: PolicyClass, *given: Any, sees_caches: bool = True, **more: Any) -> None:
        """`sees_caches`: the order may depend on what workers hold. `given`, `more`: see `KvFrontend`."""
        super().__init__(*given, **more)
        profile = PolicyProfile((queue,), (UncachedIslBucket(0, DEFAULT_CLASS),), DEFAULT_CLASS)
        self._sees_caches = sees_caches
        self._now = 0.0
        self._queue: RouterQueue[Flight] = RouterQueue(profile, cached_now=self._cached)

    def route(self, flight: Flight, now_ms: float) -> Routed | None:
        """Choose the worker of a request and book it there; None: it waits."""
        self._now = now_ms / 1000
        query, of = _query(flight), flight.request
        request = QueueRequest(
            flight.booking_id,
            flight,
            query.prompt_tokens or 0,
            0,
            None,
            query.priority,
            of.strict_priority,
            tenant=of.tenant,
        )
        request = msgspec.structs.replace(request, cached_tokens=self._cached(request))
        return super().route(flight, now_ms) if self._queue.arrive(request, self, self._now) else None

    def ready(self, now_ms: float) -> Iterator[tuple[Flight, Routed]]:
        """Yield the requests that have waited and go now."""
        self._now = now_ms / 1000
        for request in self._queue.ready(self, self._now):
            routed = super().route(request.payload, now_ms)
            assert routed is not None, "it has its turn"
            yield request.payload, routed

    def eligible(self, request: QueueRequest[Flight]) -> Iterator[RankPrefill]:
        """Return all ranks."""
        for rank, info in self.router.ranks.items():
            yield RankPrefill(self.router.load.prefill_tokens(rank), info.max_num_batched_tokens)

    def workers(self) -> int:
        """Return how many workers there are."""
        return len(self.router.ranks)

    def _cached(self, request: QueueRequest[Flight]) -> int:
        return held_tokens(self.router, _query(request.payload), self._now) if self._sees_caches else 0


def _queue_of(name: str, parameters: dict[str, bool | float | str]) -> tuple[PolicyClass, bool] | None:
    """Take the queue out of the parameters of a mode, and whether its order sees caches; None: nothing waits."""
    threshold, order = parameters.pop("queue", None), parameters.pop("order", "fcfs")
    quantum = parameters.pop("quantum", TENANT_QUANTUM)
    if threshold is None:
        return None
    try:
        made = PolicyClass(
            name=DEFAULT_CLASS,
            quantum=1,
            policy_family=DEFAULT_CLASS,
            cache_bucket=DEFAULT_CLASS,
            queue_policy=QueueOrder.DLPM if order == VTC else QueueOrder(str(order)),
            prefill_busy_threshold_frac=float(threshold),
            tenant_quantum=1 if order == VTC else int(quantum),
        )
        made.check("")
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}") from error
    return made, order != VTC


def _query(flight: Flight) -> KvQuery:
    """Return a request as the router sees it; one that moves brings what it has generated so far."""
    return KvQuery(
        sequence=flight.blocks.sequence,
        prompt_tokens=flight.request.prompt_tokens + flight.tokens,
        priority=flight.request.priority,
        policy_class=flight.request.policy_class,
    )


_COUNTING: Final = (RouterMode.ROUND_ROBIN, RouterMode.RANDOM, RouterMode.LEAST_LOADED, RouterMode.POWER_OF_TWO)
COUNTING_MODES: Final[tuple[str, ...]] = tuple(mode.value for mode in _COUNTING)
KV: Final = "kv"
STANDARD_POLICY: Final = "time"
_SWITCH: Final = {"on": True, "off": False, "true": True, "false": False}


def frontend_of(name: str, options: SchedulerOptions) -> MakeFrontend:
    """Return what makes frontends of a mode, for workers with these options.

    Raises InvalidArgument for an unknown mode, policy or parameter; the message lists what is known.
    """
    if name in COUNTING_MODES:
        mode = RouterMode(name)
        return lambda seed: CountingFrontend(mode, random.Random(f"{seed} {mode}"))
    kind, _, policy_text = name.partition(":")
    if kind != KV:
        raise InvalidArgument(f"there is no mode {name!r} to replay; use {', '.join(COUNTING_MODES)}, kv, kv:POLICY")
    policy, *given = (policy_text or STANDARD_POLICY).split(",")
    parameters = dict(_parameter(name, text) for text in given)
    reads_events = parameters.pop("events", True)
    predicted = parameters.pop("predicted", None)
    by_lru = parameters.pop("lru", False)
    if not isinstance(reads_events, bool) or not isinstance(by_lru, bool):
        raise InvalidArgument(f"{name}: events and lru are on or off")
    if predicted is not None and (isinstance(predicted, bool | str) or not predicted > 0):
        raise InvalidArgument(f"{name}: predicted is a number of seconds above 0")
    queue = _queue_of(name, parameters)
    kv_policy(policy, parameters)  # so that a mistake shows before anything is replayed
    make = KvFrontend if queue is None else partial(QueuedFrontend, queue[0], sees_caches=queue[1])
    return lambda seed: make(
        kv_policy(policy, parameters),
        options,
        random.Random(f"{seed} {KV}"),
        reads_events=reads_events,
        guesses_by_lru=by_lru,
        predicted_ttl_seconds=predicted,
    )


def _parameter(mode: str, text: str) -> tuple[str, bool | float | str]:
    """Split NAME=VALUE; a value is a number, or on or off, or the name of an order."""
    name, _, value = text.partition("=")
    if name == "order":
        return name, value
    if value.lower() in _SWITCH:
        return name, _SWITCH[value.lower()]
    try:
        number = float(value)
    except ValueError:
        raise InvalidArgument(f"{mode}: {text!r} is not NAME=NUMBER, nor NAME=on or off") from None
    return name, int(number) if number.is_integer() and "." not in value else number
