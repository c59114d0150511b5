"""The kv router mode beside a pool: the query to the `KvRouter`, and a booking for as long as a stream is open.

A placement is booked when its stream is opened, in the turn of the loop in which it was chosen. Its first items end the
prefill, and the release of the stream, however it came about, ends the booking. Nothing runs per token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, Protocol

import msgspec

from dynamo.errors import DynamoException, WorkerUnavailable
from dynamo.kv.hashing import PrefixHasher, block_hashes, block_seed, sequence_hashes
from dynamo.kv.media_routing import RoutedPrompt
from dynamo.kv.overlap import WorkerRank
from dynamo.placement import Candidate, CandidateList, Placement, PlacementReason, PlacementRequest, Policy
from dynamo.placement.candidates import find
from dynamo.placement.kv_query import (
    KvQuery,
    PinnedWorkerOverloaded,
    RankInfo,
    clamp_output,
    media_prompt,
    read_overrides,
    read_preferred_taints,
    read_priority,
    read_target,
)
from dynamo.placement.kv_state import KvPolicy, Selection
from dynamo.placement.policies.least_loaded import fewest_in_flight
from dynamo.protocol.worker_request import RoutingHints, WorkerRequest
from dynamo.router.kv.decisions import DecisionLog
from dynamo.router.kv.fetch_hints import fetch_hint
from dynamo.router.kv.router import KvRouter
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, ResponseStream

logger = logging.getLogger(__name__)

HASHED_AT_ONCE: Final = 16_384  # tokens; about a millisecond. A longer prompt lets others run in between
OUTPUT_SECONDS: Final = 0.1  # how often the output of running requests is counted, where it counts as load


class HashedPrompts(Protocol):
    """Where the hashes of a request's prompts are kept, for its choices and stages."""

    tenant: str | None
    sequences: list[tuple[Sequence[int], int, Sequence[int]]] | None


class _Opens(Protocol):
    async def open(self, instance: Instance, body: object, context: Context) -> ResponseStream: ...


class OpenedWorker(Protocol):
    """What is needed of a worker that was chosen."""

    @property
    def placement(self) -> Placement: ...

    @property
    def instance(self) -> Instance: ...

    @property
    def client(self) -> _Opens: ...


class KvPlaced(Placement, frozen=True, gc=False, kw_only=True):
    """A placement with the decision behind it."""

    selection: Selection
    kv_policy: KvPolicy  # that made it
    query: KvQuery  # of the request


class KvWatcher:
    """Gets decisions, and the events of the streams behind them. This one ignores them."""

    __slots__ = ()

    def hashed(self, seconds: float) -> None:
        """Take how long it took to hash a prompt."""

    def selected(self, seconds: float) -> None:
        """Take how long a decision took."""

    def booked(self, selection: Selection) -> None:
        """Take a request that is sent to the worker of the decision."""

    def answered(self, seconds: float) -> None:
        """Take how long the first output of a request took."""

    def ended(self, tokens: int, seconds: float) -> None:
        """Take the end of a stream that brought `tokens`, in `seconds` since the first of them."""


class _Running:
    """One request that is booked."""

    __slots__ = ("counted", "first_at", "opened_at", "stream")

    def __init__(self, stream: ResponseStream, opened_at: float) -> None:
        self.stream, self.opened_at = stream, opened_at
        self.first_at: float | None = None  # None: nothing has come
        self.counted = 0  # of its output, in tokens


class _RunningRequests:
    """The requests that are booked, and when their output is counted next."""

    __slots__ = ("_repeated", "by_booking", "count_at")

    def __init__(self, tracks_output: bool) -> None:
        self.by_booking: dict[str, _Running] = {}  # by the id of the booking; bounded by the streams that are open
        self.count_at = 0.0 if tracks_output else math.inf
        self._repeated = 0  # bookings whose id was booked already

    def another_id(self, request_id: str) -> str:
        """Return an id for the booking of a request whose own id is booked already."""
        self._repeated += 1
        return f"{request_id}\0{self._repeated}"


class _KnownWorkers:
    """The workers that the router knows, beside those that may serve a request."""

    __slots__ = ("_same", "ids")

    def __init__(self, ids: frozenset[int]) -> None:
        self.ids = ids
        self._same: object = None  # the shape of a list whose ids are all of these

    def allowed(self, candidates: Sequence[Candidate]) -> Collection[int] | None:
        """Return the ids of the candidates; None: they are all that the router knows, so nothing has to be left out."""
        if not isinstance(candidates, CandidateList):
            ids = {each.instance_id for each in candidates}
            return None if ids == self.ids else ids
        shape = candidates.shape
        if shape is not self._same:
            if shape.known != self.ids:
                return shape.known
            self._same = shape
        return None


class KvPlacement:
    """The policy of pools in the kv mode: `dynamo.placement.Policy`, and the booking of what it has chosen.

    One object may serve several pools whose workers are the same, such as those of a model and its adapters.
    """

    __slots__ = (
        "_decisions", "_hasher", "_rng", "_running", "_watcher", "_workers",
        "is_stale", "read_ranks", "router",
    )  # fmt: skip

    def __init__(
        self,
        router: KvRouter,
        *,
        rng: random.Random,
        is_eagle: bool = False,
        tracks_output: bool = False,
        watcher: KvWatcher | None = None,
        decisions: DecisionLog | None = None,
    ) -> None:
        """`is_eagle`: the blocks of these engines also cover the token behind them. `tracks_output`: the tokens of running
        answers count as load, and are counted `OUTPUT_SECONDS` apart."""
        self.router = router
        self.read_ranks: Callable[[], Mapping[WorkerRank, RankInfo]] = dict
        self.is_stale = False  # the ranks have changed since they were read
        self._workers = _KnownWorkers(frozenset())
        self._hasher = None if is_eagle else PrefixHasher(router.block_size)
        self._rng = rng
        self._watcher = watcher or KvWatcher()
        self._decisions = decisions
        self._running = _RunningRequests(tracks_output)

    def __len__(self) -> int:
        """Return how many requests are booked."""
        return len(self._running.by_booking)

    # -- the question ------------------------------------------------------------------------------------------------

    async def query(
        self, body: WorkerRequest, record: HashedPrompts, *, pinned: int | None, is_prefill: bool = False
    ) -> KvQuery:
        """Return the query to the router for a request. The hashes of a prompt are computed once for its record."""
        routing, overrides = body.get("routing"), body.get("router_config_override")
        prompt: Sequence[Any] = body.get("token_ids") or ()
        tokens, media = len(prompt), body.get("mm_routing_info")
        if tokens and isinstance(prompt[0], list):
            prompt, tokens = (), _tokens_of_inputs(prompt)
        if not routing and media is None:  # nearly every request names nothing
            sequence = await self._sequence(RoutedPrompt(prompt, tokens), record, None, None)
            return KvQuery(
                sequence=sequence, prompt_tokens=tokens, pinned_worker_id=pinned,
                overrides=read_overrides(overrides) if overrides else None, tenant=record.tenant,
            )  # fmt: skip
        routing = routing or {}
        lora_name, cache_salt = routing.get("lora_name"), routing.get("cache_salt")
        routed = RoutedPrompt(prompt, tokens) if media is None else media_prompt(media, prompt)
        constraints = routing.get("routing_constraints") or {}
        return KvQuery(
            sequence=await self._sequence(routed, record, lora_name, cache_salt),
            prompt_tokens=routed.length,
            lora_name=lora_name,
            cache_salt=cache_salt,
            priority=read_priority(routing.get("priority_jump") or routing.get("priority")),
            strict_priority=routing.get("strict_priority") or 0,
            pinned_worker_id=pinned,
            pinned_dp_rank=routing.get("prefill_dp_rank") if is_prefill else routing.get("dp_rank"),
            required_taints=constraints.get("required_taints") or (),
            preferred_taints=read_preferred_taints(constraints.get("preferred_taints")),
            expected_output=None if is_prefill else clamp_output(routing.get("expected_output_tokens")),
            overrides=read_overrides(overrides),
            tenant=record.tenant,
            aim=read_target(routing.get("slo_ttft_ms")),
        )

    async def _sequence(
        self, routed: RoutedPrompt, record: HashedPrompts, lora_name: str | None, cache_salt: str | None
    ) -> Sequence[int]:
        prompt, mm_hashes = routed.token_ids, routed.mm_hashes
        size = self.router.block_size
        known = record.sequences
        if known is None:
            known = record.sequences = []
        for of, block_size, sequence in known:
            if of is prompt and block_size == size:
                return sequence
        began, step, hasher = perf_counter(), max(1, HASHED_AT_ONCE // size) * size, self._hasher
        hashes: list[int] = []
        sequence = []
        for start in range(0, len(prompt), step):
            if start:
                await asyncio.sleep(0)
            part = prompt[start : start + step + (hasher is None)] if len(prompt) > step else prompt
            if hasher is not None and not mm_hashes:
                hasher.extend(sequence, part, block_seed(lora_name, cache_salt))
                continue
            media = {at - len(hashes): objects for at, objects in mm_hashes.items()} if mm_hashes else None
            hashes += block_hashes(
                part, size, lora_name=lora_name, cache_salt=cache_salt, eagle=hasher is None, mm_hashes=media
            )
        sequence += sequence_hashes(hashes)
        self._watcher.hashed(perf_counter() - began)
        known.append((prompt, size, sequence))
        return sequence

    # -- the choice --------------------------------------------------------------------------------------------------

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose one of `candidates`. See `dynamo.placement.Policy`."""
        query = request.kv
        if query is None:  # not a request of a client's own, such as the release of blocks after a hand-over
            query = KvQuery(token_ids=request.token_ids, lora_name=request.lora_name)
        self._refresh()
        query.allowed = self._workers.allowed(candidates)
        if query.allowed is not None and self._workers.ids.isdisjoint(query.allowed):
            return fewest_in_flight(candidates, self._rng, "kv")  # no card of these workers was seen yet
        try:
            selection = self.select(query, now)
        except WorkerUnavailable as error:
            logger.debug("the kv router can place at none of %d workers: %s", len(candidates), error)
            return fewest_in_flight(candidates, self._rng, "kv")
        candidate = find(candidates, selection.rank.worker_id)
        assert candidate is not None, "the router chooses among them"
        return self._placed(candidate, selection, query)

    def settle(self, placement: Placement, request: PlacementRequest, now: float) -> Placement:
        """Return a placement with its decision: a request that names its worker was placed without one.

        Raises PinnedWorkerOverloaded where the worker that the request names is over a busy threshold.
        """
        if isinstance(placement, KvPlaced) or request.kv is None:
            return placement
        if placement.candidate.is_busy:
            raise PinnedWorkerOverloaded
        self._refresh()
        if placement.candidate.instance_id not in self._workers.ids:
            return placement
        # A query of its own: without the session's rank, the request may have to go elsewhere.
        query = msgspec.structs.replace(request.kv, allowed=None, pinned_worker_id=placement.candidate.instance_id)
        if placement.dp_rank is not None:
            query.pinned_dp_rank = placement.dp_rank
        try:
            selection = self.select(query, now)
        except WorkerUnavailable:
            return placement
        return self._placed(placement.candidate, selection, query, placement.reasons)

    def _placed(
        self,
        candidate: Candidate,
        selection: Selection,
        query: KvQuery,
        reasons: tuple[PlacementReason, ...] | None = None,
    ) -> KvPlaced:
        choice = selection.choice
        why = reasons or (
            PlacementReason(choice.reason, choice.cost),
            PlacementReason("cached_tokens", selection.cached_tokens),
        )
        return KvPlaced(
            candidate, f"kv {choice.policy}", why, dp_rank=selection.rank.dp_rank, selection=selection,
            kv_policy=self.router.policy, query=query,
        )  # fmt: skip

    @property
    def may_defer(self) -> bool:
        """Whether its policy holds requests back."""
        return False

    def current_router(self) -> KvRouter:
        """Return the router, with the ranks there are now."""
        self._refresh()
        return self.router

    def _refresh(self) -> None:
        """Take the ranks there are now, if they have changed."""
        if self.is_stale:
            self.is_stale = False
            self.router.set_ranks(self.read_ranks())
            if self.router.workers is not self._workers.ids:
                self._workers = _KnownWorkers(self.router.workers)

    def previewing(self) -> Policy:
        """Return a policy that chooses as this one does now, and leaves nothing behind."""
        return _Preview(self)

    def preview(self, query: KvQuery, now: float) -> Selection:
        """Decide with a chance that is always the same, and book nothing. Raises the errors of `KvRouter.select`."""
        self._refresh()
        return self.router.select(query, now, explain=True, draw=0.5)

    def select(self, query: KvQuery, now: float) -> Selection:
        """Decide, and book nothing. Raises the errors of `KvRouter.select`."""
        if self.is_stale:
            self._refresh()
        if now >= self._running.count_at:
            self._running.count_at = now + OUTPUT_SECONDS
            for request_id, running in self._running.by_booking.items():
                self._count_output(request_id, running, now)
        began = perf_counter()
        selection = self.router.select(query, now)
        self._watcher.selected(perf_counter() - began)
        return selection

    # -- the booking -------------------------------------------------------------------------------------------------

    async def open(self, worker: OpenedWorker, body: WorkerRequest, context: Context) -> ResponseStream:
        """Book the decision behind `worker`, and open the stream there. Every end of the stream ends the booking."""
        placement = worker.placement
        if not isinstance(placement, KvPlaced):
            return await worker.client.open(worker.instance, body, context)
        selection, router, clock = placement.selection, self.router, asyncio.get_running_loop().time
        aim = placement.query.aim
        request_id, now = context.id(), clock()
        if not router.book(request_id, selection, now, expires=False):
            # An attempt before this one is still on its way out, or a client uses one id for several requests.
            request_id = self._running.another_id(request_id)
            router.book(request_id, selection, now, expires=False)
        self._watcher.booked(selection)
        if self._decisions is not None:
            self._decisions.record(request_id, body.get("model") or "", selection)
        routing: RoutingHints = {**(body.get("routing") or {}), "dp_rank": selection.rank.dp_rank}
        hint = fetch_hint(router, selection)
        try:
            stream = await worker.client.open(worker.instance, {**body, "routing": routing, **hint}, context)
        except BaseException:
            router.free(request_id, clock())
            raise
        self._running.by_booking[request_id] = running = _Running(stream, now)

        def first(error: DynamoException | None) -> None:
            if error is None:
                running.first_at = now = clock()
                router.first_token(request_id, now)
                self._watcher.answered(now - running.opened_at)
                if aim.reached is not None:
                    aim.reached(now)

        def released() -> None:
            self._release(request_id, running, clock())

        stream.book(first=first, released=released)
        return stream

    def _release(self, request_id: str, running: _Running, now: float) -> None:
        del self._running.by_booking[request_id]
        self._count_output(request_id, running, now)
        self.router.free(request_id, now)
        self._watcher.ended(running.counted, 0.0 if running.first_at is None else now - running.first_at)

    def _count_output(self, request_id: str, running: _Running, now: float) -> None:
        """Report to the router how much a request has generated since the last time."""
        tokens = running.stream.tokens_taken
        if tokens > running.counted:
            self.router.output(request_id, tokens - running.counted, now)
            running.counted = tokens


class _Preview:
    """The policy of a `KvPlacement` for a request that is only placed."""

    def __init__(self, placement: KvPlacement) -> None:
        self._placement = placement

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose one of `candidates`. See `dynamo.placement.Policy`."""
        placement = self._placement
        by_id = {each.instance_id: each for each in reversed(candidates)}
        if request.kv is None:
            return min((Placement(each, "kv") for each in candidates), key=lambda made: made.candidate.in_flight)
        query = msgspec.structs.replace(request.kv, allowed=by_id.keys())
        selection = placement.preview(query, now)
        return KvPlaced(
            by_id[selection.rank.worker_id],
            f"kv {selection.choice.policy}",
            (PlacementReason(selection.choice.reason, selection.choice.cost),),
            dp_rank=selection.rank.dp_rank,
            selection=selection,
            kv_policy=placement.router.policy,
            query=query,
        )


def _tokens_of_inputs(inputs: Sequence[Sequence[int]]) -> int:
    """Count the tokens of several inputs to embed. Nothing of them is in a cache, so only their number matters."""
    return sum(map(len, inputs))
