"""The records of all ranks, each made anew only when something about its rank has changed. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress, count
from operator import attrgetter, is_not, itemgetter
from typing import Final

from msgspec import structs

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.gaps import NO_GAPS, Gaps
from dynamo.placement.kv_query import KvQuery, RankExclusion, RankInfo, eligible_ranks, exclusion_of, names_ranks
from dynamo.placement.kv_state import RankState, Records
from dynamo.placement.rank_load import LoadOfRank
from dynamo.placement.timing import DEFAULT_TIMING
from dynamo.placement.timing_learner import TimingLearner

MOVED_AT_ONCE: Final = 8
MOVED_OF_MANY: Final = 2
"""How many records one choice makes anew because the speed of the whole fleet is believed to be another, and how many among more
than `MANY` ranks. The others follow with the next choices, or with a change of their own."""
MANY: Final = 128

MAX_PARTS: Final = 8  # of the ranks that are kept: the models of a domain take turns


class RankPart:
    """The ranks that a query may use, in the order of all."""

    __slots__ = ("allowed", "excluded", "gaps", "ranks")

    def __init__(self, every: Sequence[WorkerRank], excluded: Mapping[int, RankExclusion]) -> None:
        """`excluded`: those of all ranks that are not of this part, by position, in order."""
        self.excluded = (*excluded.values(),)
        self.gaps = Gaps([*excluded], len(every)) if excluded else NO_GAPS
        self.ranks: Sequence[WorkerRank] = self.gaps.left([*every]) if excluded else every
        self.allowed: Collection[int] | None = None  # of the query, by identity


class RankSet:
    """The ranks there are, in order, and what is known of each. It never changes."""

    __slots__ = ("_parts", "_pinned", "busy", "every", "infos", "positions", "workers")

    def __init__(self, infos: Mapping[WorkerRank, RankInfo], former: RankSet | None = None) -> None:
        """`infos`: in the order of the ranks. `former`: of the same ranks."""
        self.infos = infos
        # Over a busy threshold.
        self.busy: Sequence[int] = [*compress(count(), map(attrgetter("is_busy"), infos.values()))]
        self._parts: dict[int, RankPart] = {}  # of queries that had no more than allowed workers, by identity
        # Of each rank, for a query that names another worker; empty: none has come.
        self._pinned: Sequence[RankExclusion] = () if former is None else former._pinned
        self.every: RankPart = former.every if former else RankPart((*infos,), {})
        self.positions: Mapping[WorkerRank, int] = former.positions if former else dict(zip(infos, count()))
        self.workers: frozenset[int] = former.workers if former else frozenset(map(itemgetter(0), infos))

    def part(self, query: KvQuery) -> RankPart:
        """Return the ranks that may serve a query; kept while the same workers are allowed. Raises what `eligible_ranks` raises."""
        if names_ranks(query):
            return self._part(query)
        part = self._parts.get(id(query.allowed))
        if part is None:
            if len(self._parts) >= MAX_PARTS:
                del self._parts[next(iter(self._parts))]
            part = self._parts[id(query.allowed)] = self._part(query)
            part.allowed = query.allowed  # so that no other object gets its identity
        return part

    def _part(self, query: KvQuery) -> RankPart:
        ranks, worker_id = self.every.ranks, query.pinned_worker_id
        excluded: dict[int, RankExclusion] = {}
        if worker_id is not None:
            if not self._pinned:
                self._pinned = [RankExclusion(rank, "not_pinned") for rank in ranks]
            excluded = dict(enumerate(self._pinned))
        for at in self._doubted(query):
            reason = exclusion_of(ranks[at], self.infos[ranks[at]], query)
            if reason is not None:
                excluded[at] = RankExclusion(ranks[at], reason)
            else:
                excluded.pop(at, None)
        if len(excluded) == len(ranks):
            eligible_ranks(self.infos, query)  # it names the reason
        return RankPart(ranks, excluded)

    def _doubted(self, query: KvQuery) -> Iterable[int]:
        """Return the positions of all ranks that a query may exclude, in order; of those that are not pinned, only the others."""
        if query.pinned_worker_id is not None:
            return self._of_worker(query.pinned_worker_id)
        if query.required_taints or query.required_topology or query.pinned_dp_rank is not None:
            return range(len(self.infos))
        found = {*self.busy}
        for worker in () if query.allowed is None else self.workers.difference(query.allowed):
            found.update(self._of_worker(worker))
        for each in query.excluded:
            at = self.positions.get(each) if isinstance(each, tuple) else None
            found.update(self._of_worker(each) if isinstance(each, int) else () if at is None else (at,))
        return sorted(found)

    def _of_worker(self, worker_id: int) -> range:
        ranks = self.every.ranks
        return range(bisect_left(ranks, (worker_id,)), bisect_left(ranks, (worker_id + 1,)))


class RankStates:
    """One `RankState` per known rank, in the order of the ranks. Bounded by the ranks."""

    __slots__ = ("_held", "_is_read", "_load", "_now", "_states", "follows_timing", "known", "loads", "timing")

    def __init__(
        self, load: ActiveLoad, timing: TimingLearner, held: Callable[[WorkerRank], int] | None = None
    ) -> None:
        """`held`: how many blocks a rank's cache holds, as far as an index knows."""
        self._load, self.timing = load, timing
        self._held = held or (lambda _: 0)
        self.follows_timing = True  # False: records do not have the speed of their ranks
        self.known = RankSet({})
        self.loads: Sequence[LoadOfRank] = ()  # in the order of `ranks`
        self._now: list[RankState] = []  # the newest records
        self._states = Records.after(None, (), ())  # those that were handed out, or are next
        self._is_read = True  # these records were handed out

    def set(self, ranks: Mapping[WorkerRank, RankInfo]) -> None:
        """Take the ranks there are and what is known of each; the load of every other rank is forgotten."""
        for each in set(self._load.ranks()) - ranks.keys():
            self._load.forget(each.worker_id, each.dp_rank)
        former, block_size = self.infos, self._load.block_size
        # Those that are new, or known otherwise.
        others = [*compress(ranks, map(is_not, map(former.get, ranks), ranks.values()))]
        for rank in others:
            info, load = ranks[rank], self._load.of(rank)
            load.prefill_pass.set_budget(info.max_num_batched_tokens)
            load.reuse.set_blocks(info.total_kv_blocks)
        self.timing.keep(ranks.keys(), {rank: (ranks[rank].total_kv_blocks or 0) * block_size for rank in others})
        new = sorted([rank for rank in others if rank not in former])
        if not new and len(former) == len(ranks):
            self.known = RankSet({**former, **{rank: ranks[rank] for rank in others}}, self.known)
        else:
            self._reorder(ranks, new)
        self._load.changed.update([rank for rank in others if rank in former])

    def _reorder(self, ranks: Mapping[WorkerRank, RankInfo], new: Sequence[WorkerRank]) -> None:
        """Take other ranks than before: `new` ones, in order, and not all of the others."""
        before, order = self.ranks, [*self.ranks]
        loads, states = [*self.loads], self._now
        gone = (
            [] if len(before) + len(new) == len(ranks) else [at for at, rank in enumerate(before) if rank not in ranks]
        )
        for at in reversed(gone):
            del order[at], loads[at], states[at]
        places = list[int]()
        for rank in new:
            places.append(at := bisect_left(order, rank))
            order.insert(at, rank)
            loads.insert(at, self._load.of(rank))
        self.known = RankSet(dict(zip(order, map(ranks.__getitem__, order), strict=True)))
        for at in places:
            states.insert(at, self._state(order[at], loads[at]))
        self.loads = loads
        self._states = Records.after(self._states, states, (), gone, places)
        self._is_read = False

    @property
    def ranks(self) -> Sequence[WorkerRank]:
        """All ranks, in order."""
        return self.known.every.ranks

    @property
    def infos(self) -> Mapping[WorkerRank, RankInfo]:
        """What is known of each rank, in their order."""
        return self.known.infos

    def current(self) -> Records:
        """Return the record of every rank as it is now."""
        changed, moved, known = self._load.changed, self.timing.moved, self.known.positions
        if changed or (moved and self.follows_timing):
            former, states = self._states, self._now
            positions = [known[rank] for rank in changed if rank in known]
            for at in positions:
                states[at] = self._state(self.ranks[at], self.loads[at])
            most = (MOVED_AT_ONCE if len(known) <= MANY else MOVED_OF_MANY) if self.follows_timing else 0
            for rank in [moved.pop() for _ in range(min(len(moved), most))]:
                if rank in known and rank not in changed:  # of its record only this can be another
                    positions.append(at := known[rank])
                    figures = {"timing": self.timing.timing(rank), "held_blocks": self._held(rank)}
                    states[at] = structs.replace(states[at], **figures)
            changed.clear()
            self._states = Records.after(former, states, positions)
            if not self._is_read:  # what differs from those that were handed out
                self._states.former, self._states.changes = former.former, former.changes._replace(changed=positions)
        self._is_read = True
        return self._states

    def _state(self, rank: WorkerRank, load: LoadOfRank) -> RankState:
        info, prefill = self.infos[rank], load.prefill_pass
        load.timing = timing = self.timing.timing(rank) if self.follows_timing else DEFAULT_TIMING
        return RankState(
            rank=rank,
            prefill_tokens=load.prefill_tokens,
            decode_blocks=load.decode_blocks,
            requests=len(load.booked),
            streams=load.clock.streams,
            context_tokens=load.clock.context_tokens,
            pass_started_at=prefill.started_at if prefill.running else None,
            boundary_at=load.boundary_at,
            pass_tokens=prefill.running_tokens,
            waiting_tokens=prefill.waiting_tokens,
            waiting_requests=len(prefill.waiting),
            oldest_use_at=load.reuse.oldest_use_at,
            held_blocks=self._held(rank),
            total_kv_blocks=info.total_kv_blocks,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_num_seqs=info.max_num_seqs,
            trust=info.trust,
            timing=timing,
            taints=info.taints,
        )
