"""Which rank serves a prompt, by what ranks hold of it and what they have to do: a library without runtime, loop or clock.

    router = KvRouter(block_size=16, policy=kv_policy("default"), index=index, rng=random.Random())
    router.set_ranks({WorkerRank(1): RankInfo(), WorkerRank(2): RankInfo()})
    selection = router.select(KvQuery(token_ids=prompt), now)
    router.book("request-1", selection, now)      # in the same turn, or two prompts see the same load
    router.first_token("request-1", now)
    router.free("request-1", now)

Whatever is missing (an index, a capacity, the end of a request) makes a choice less well informed, and never an error.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final, Protocol

import msgspec

from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.overlap import Overlap, OverlapIndex, WorkerRank
from dynamo.placement.active_load import DEFAULT_EXPIRY_SECONDS, ActiveLoad
from dynamo.placement.kv_query import (
    DISK_HIT_WEIGHT,
    HOST_HIT_WEIGHT,
    KvQuery,
    RankInfo,
    is_unconstrained,
    preferred_weight,
)
from dynamo.placement.kv_state import KvChoice, KvPolicy, KvRequest, KvState, Lookup, RankMatch, RankState, Selection
from dynamo.placement.rank_load import Booked, LoadOfRank, common_blocks
from dynamo.placement.rank_states import RankPart, RankStates
from dynamo.placement.timing_learner import TimingLearner
from dynamo.router.kv.indexes import KvIndexes

EXAMINED_PREFILLS: Final = 16  # prompts of one running pass that are compared with a new one


class KvRouterOptions(msgspec.Struct, frozen=True, gc=False):
    """What a router counts, and how lower tiers weigh in reported cached tokens."""

    host_cache_hit_weight: float = HOST_HIT_WEIGHT
    disk_cache_hit_weight: float = DISK_HIT_WEIGHT
    tracks_prefill_tokens: bool = True
    tracks_active_blocks: bool = True
    tracks_output_blocks: bool = False
    assumes_kv_reuse: bool = True  # False: every request's blocks are counted as its own
    expiry_seconds: float = DEFAULT_EXPIRY_SECONDS


class PotentialLoad(msgspec.Struct, frozen=True, gc=False):
    """The load that one rank would have with the prompt of the query."""

    rank: WorkerRank
    potential_prefill_tokens: int
    potential_decode_blocks: float
    active_requests: int


class BookingObserver(Protocol):
    """Gets the bookings of a router, such as `ReplicaSync`, which reports them to other routers."""

    def booked(self, request_id: str, selection: Selection) -> None:
        """Take a request that was booked."""

    def prefill_completed(self, request_id: str, rank: WorkerRank) -> None:
        """Take the first token of a request that is booked."""

    def freed(self, request_id: str, rank: WorkerRank) -> None:
        """Take the end of a request that was booked."""


class KvRouter:
    """Chooses ranks, and keeps account of what it chose. Bounded by the ranks, the active requests and its indexes."""

    __slots__ = (
        "_block_size", "_options", "_own_blocks", "_policy", "_rng", "_states", "indexes", "load", "observer",
    )  # fmt: skip

    def __init__(
        self,
        *,
        block_size: int,
        policy: KvPolicy,
        rng: random.Random,
        index: OverlapIndex | None = None,
        predicted: OverlapIndex | None = None,
        options: KvRouterOptions | None = None,
    ) -> None:
        """Make a router without ranks.

        `index` has what ranks hold; `predicted` is looked up as well, and the deeper answer counts. An index that has a method
        `add(rank, sequence, now)` gets what is booked; `blocks(rank)` of one that has it is how much a rank holds in all.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._block_size, self._policy, self._rng = block_size, policy, rng
        self._options = options or KvRouterOptions()
        self.indexes = KvIndexes(index, predicted)
        self.load = ActiveLoad(
            block_size,
            tracks_output_blocks=self._options.tracks_output_blocks,
            expiry_seconds=self._options.expiry_seconds,
        )
        self._states = RankStates(self.load, TimingLearner(), self.indexes.held)
        self._states.follows_timing = getattr(policy, "reads_timing", True)
        self.observer: BookingObserver | None = None
        self._own_blocks = _OWN_BLOCKS  # the last name of a block that is not shared

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def policy(self) -> KvPolicy:
        return self._policy

    @property
    def index(self) -> OverlapIndex | None:
        """What it knows of the ranks' caches, apart from predictions."""
        return self.indexes.index

    @property
    def ranks(self) -> Mapping[WorkerRank, RankInfo]:
        """The ranks there are, with what is known of each."""
        return self._states.infos

    @property
    def workers(self) -> frozenset[int]:
        """The workers of the ranks; the same object until one comes or goes."""
        return self._states.known.workers

    def records(self) -> Sequence[RankState]:
        """Return the record of every rank as it is now."""
        return self.timed(self._states.current())

    def timed(self, records: Sequence[RankState]) -> Sequence[RankState]:
        """Return records with the speed of their ranks. All have it from now on, whatever the policy reads."""
        if self._states.follows_timing:
            return records
        self._states.follows_timing = True
        self.load.changed.update(self._states.ranks)
        now = dict(zip(self._states.ranks, self._states.current(), strict=True))
        return tuple([now[each.rank] for each in records if each.rank in now])

    def set_ranks(self, ranks: Mapping[WorkerRank, RankInfo]) -> None:
        """Take the ranks there are. What is booked on a rank that is gone is forgotten."""
        self._states.set(ranks)

    # -- decisions

    def look_up(self, query: KvQuery, now: float) -> Lookup:
        """Find what ranks hold of a prompt. A selection may use it later, as long as it is not too old."""
        sequence = self._sequence(query)
        tokens = query.prompt_tokens
        if tokens is None:
            tokens = len(query.token_ids) or len(sequence) * self._block_size
        return Lookup(sequence, tokens, self.indexes.find(sequence, now), now)

    def select(
        self, query: KvQuery, now: float, *, lookup: Lookup | None = None, explain: bool = False, draw: float | None = None
    ) -> Selection:  # fmt: skip
        """Choose a rank; nothing is booked. `explain` adds every candidate's cost, term by term. `draw`: the chance of ties.

        Raises what `eligible_ranks` raises for a query that no rank may serve.
        """
        lookup = lookup or self.look_up(query, now)
        tracking = self._tracking_sequence(query, lookup)
        state = self._state(query, lookup, tracking, now)
        choice = self._policy.choose(state, self._rng.random() if draw is None else draw, with_terms=explain)
        return self._selection(state, choice, lookup, tracking)

    def book(
        self, request_id: str, selection: Selection, now: float, *, expires: bool = True, is_learned: bool = True
    ) -> bool:
        """Count a request for the rank that was selected. False: the id is booked already, and nothing changes.

        `expires=False`: the caller frees the request in any case, so it counts for however long it runs.
        `is_learned=False`: the indexes that guess by where prompts went do not count it.
        """
        request = selection.state.request
        is_new = self.load.add(
            request_id, selection.rank, selection.tracking_sequence, prompt_tokens=request.prompt_tokens,
            cached_tokens=selection.cached_tokens, coming_tokens=self._coming_tokens(selection), now=now,
            expected_output=request.expected_output, counts_prefill=request.tracks_prefill, expires=expires,
        )  # fmt: skip
        if is_new:
            if is_learned:
                self.learn(selection, now)
            if self.observer is not None:
                self.observer.booked(request_id, selection)
        return is_new

    def learn(self, selection: Selection, now: float) -> None:
        """Report a prompt that goes where it was selected to the indexes that guess by where prompts went."""
        self.indexes.add(selection.rank, selection.lookup.sequence, now)

    def first_token(self, request_id: str, now: float) -> None:
        """Count the first token of a request: its prompt is computed. Unknown ids and second calls change nothing."""
        self.load.prefill_completed(request_id, now)
        booked = self.load.get(request_id)
        if booked is None:
            return
        load = self.load.of(booked.rank)
        passes = load.prefill_pass.take_finished()
        if passes is not None:
            if not self._states.follows_timing:
                self._states.timing.timing(booked.rank)  # its steps are left out of what the passes took
            self._states.timing.prefilled(booked.rank, load, passes, now)
        if self.observer is not None:
            self.observer.prefill_completed(request_id, booked.rank)

    def output(self, request_id: str, tokens: int, now: float) -> None:
        """Count `tokens` more tokens of an answer. May be called once for many."""
        self.load.output(request_id, tokens)

    def free(self, request_id: str, now: float) -> Booked | None:
        """End a request, however it ended. Return what was booked; None: nothing was."""
        booked = self.load.free(request_id, now)
        if booked is None:
            return None
        self._states.timing.ended(booked, self.load.of(booked.rank), now)
        if self.observer is not None:
            self.observer.freed(request_id, booked.rank)
        return booked

    # -- reported loads

    def best_cached_tokens(self, query: KvQuery, lookup: Lookup) -> int:
        """Return the most tokens of a prompt that an eligible rank has cached."""
        eligible = self._states.known.facts if is_unconstrained(query) else self._states.known.part(query).ranks
        depths = (self._effective_blocks(lookup.overlaps[rank]) for rank in eligible if rank in lookup.overlaps)
        return self._tokens(max(depths, default=0.0), lookup.prompt_tokens)

    def potential_loads(self, query: KvQuery, now: float) -> list[PotentialLoad]:
        """Return what each rank's load would be with the prompt of a query."""
        lookup = self.look_up(query, now)
        tracking = self._tracking_sequence(query, lookup)
        loads = []
        for rank, load in zip(self._states.ranks, self._states.loads, strict=True):
            cached = self._tokens(self._effective_blocks(lookup.overlaps.get(rank, _NOTHING)), lookup.prompt_tokens)
            uncached = lookup.prompt_tokens - cached if self._options.tracks_prefill_tokens else 0
            blocks = self._potential_blocks(load.decode_blocks, load.active_blocks(tracking), lookup)
            loads.append(PotentialLoad(rank, load.prefill_tokens + uncached, blocks, len(load.booked)))
        return loads

    # -- parts

    def _sequence(self, query: KvQuery) -> Sequence[int]:
        if query.sequence is not None:
            return query.sequence
        return sequence_hashes(block_hashes(
            query.token_ids, self._block_size, lora_name=query.lora_name, cache_salt=query.cache_salt, mm_hashes=query.mm_hashes,
        ))  # fmt: skip

    def _tracking_sequence(self, query: KvQuery, lookup: Lookup) -> Sequence[int]:
        """Return the names of the prompt's blocks in the account of loads."""
        if not self._options.tracks_active_blocks:
            return ()
        reuse = query.overrides.assume_kv_reuse if query.overrides is not None else None
        if not (self._options.assumes_kv_reuse if reuse is None else reuse):
            last = self._own_blocks
            self._own_blocks -= len(lookup.sequence)
            return range(self._own_blocks, last)
        return lookup.sequence if query.tracking_sequence is None else query.tracking_sequence

    def _state(self, query: KvQuery, lookup: Lookup, tracking: Sequence[int], now: float) -> KvState:
        states = self._states
        part, records = states.known.every, states.current()
        if not records or states.known.busy or not is_unconstrained(query):
            part = states.known.part(query)
            if part.excluded:
                records = records.without(part.gaps)
        overrides = query.overrides
        tracks = overrides.track_prefill_tokens if overrides is not None else None
        has_preferences = bool(query.preferred_taints or query.preferred_topology)
        request = KvRequest(
            lookup.prompt_tokens, len(lookup.sequence), query.expected_output, query.pinned_worker_id is not None, has_preferences,
            self._options.tracks_prefill_tokens if tracks is None else tracks, query.shared_hits, overrides, query.origin,
        )  # fmt: skip
        matches = self._matches(part, lookup.overlaps, tracking)
        if has_preferences:
            matches = {
                at: msgspec.structs.replace(
                    matches.get(at, _NO_MATCH), preferred_weight=preferred_weight(states.known.facts[rank], query)
                )
                for at, rank in enumerate(part.ranks)
            }
        return KvState(self._block_size, request, records, matches, now, part.excluded)

    def _matches(
        self, part: RankPart, overlaps: Mapping[WorkerRank, Overlap], tracking: Sequence[int]
    ) -> dict[int, RankMatch]:
        """Return what each rank has of the prompt, by position; ranks that have nothing are left out."""
        matches: dict[int, RankMatch] = {}
        first = tracking[0] if tracking else None
        heads = () if first is None else self.load.heads.get(first, ())
        if not overlaps and not heads:
            return matches
        # Only those that have some of it, in the order of all.
        guess, ranks, place, loads = 0, self._states.ranks, self._states.known.place, self._states.loads
        for of_all in sorted([at for rank in {*overlaps, *heads} if (at := place(rank)) >= 0]):
            at = part.gaps.place(of_all) if part.excluded else of_all
            if at < 0:
                continue
            load, overlap = loads[of_all], overlaps.get(ranks[of_all])
            if first in load.blocks:
                active = guess = load.active_blocks(tracking, guess)
                coming = 0
                if load.prefill_pass.running and active > (0 if overlap is None else overlap.device):
                    coming = _coming_blocks(load, tracking, active)
                matches[at] = RankMatch(overlap or _NOTHING, active, coming)
            elif overlap is not None:
                matches[at] = RankMatch(overlap)
        return matches

    def _selection(self, state: KvState, choice: KvChoice, lookup: Lookup, tracking: Sequence[int]) -> Selection:
        rank = choice.rank
        record, match = state.ranks[choice.position], state.matches.get(choice.position, _NO_MATCH)
        return Selection(
            rank,
            0 if match is _NO_MATCH else self._tokens(self._effective_blocks(match.overlap), lookup.prompt_tokens),
            match.overlap, record.trust, state, choice, lookup, tracking,
            self._potential_blocks(record.decode_blocks, match.active_blocks, lookup),
        )  # fmt: skip

    def _coming_tokens(self, selection: Selection) -> int:
        """Return the tokens of a prompt that others compute on its rank, beyond the cached ones."""
        match = selection.state.matches.get(selection.choice.position, _NO_MATCH)
        return max(0, match.coming_blocks * self._block_size - selection.cached_tokens)

    def _potential_blocks(self, active: float, shared: int, lookup: Lookup) -> float:
        """Return the blocks of a rank with the prompt, its unfinished last block included."""
        return active - shared - (-lookup.prompt_tokens // self._block_size)

    def _effective_blocks(self, overlap: Overlap) -> float:
        options = self._options
        return (
            overlap.device + options.host_cache_hit_weight * overlap.host + options.disk_cache_hit_weight * overlap.disk
        )

    def _tokens(self, blocks: float, prompt_tokens: int) -> int:
        return min(prompt_tokens, int(blocks * self._block_size + 0.5))


_OWN_BLOCKS: Final = -(2**60)  # negative, so that no hash is one of them; and far from those of output blocks
_NOTHING: Final = Overlap()
_NO_MATCH: Final = RankMatch()


def _coming_blocks(load: LoadOfRank, tracking: Sequence[int], active: int) -> int:
    """Return how many of the `active` leading blocks are there before the prompt is begun.

    The running pass leaves its blocks behind. So does the next one where it is full already: then the prompt is begun after
    it. A prompt that fits into the same pass as another one is computed beside it, and gets nothing from it.
    """
    prefills, best = load.prefill_pass, 0
    ahead = chain(prefills.running, prefills.waiting) if prefills.next_is_full else prefills.running
    for seen, request_id in enumerate(ahead):
        booked = load.booked.get(request_id)
        if booked is None or seen >= EXAMINED_PREFILLS:
            break
        sequence = booked.sequence
        if len(sequence) >= active and sequence[active - 1] == tracking[active - 1]:
            return active
        best = max(best, common_blocks(sequence, tracking))
    return best
