"""The records of all ranks, each made anew only when something about its rank has changed. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from operator import is_not
from typing import Final

from msgspec import structs

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.gaps import NO_GAPS, Gaps
from dynamo.placement.kv_query import KvQuery, RankExclusion, RankInfo, eligible_ranks, exclusion_of, names_ranks
from dynamo.placement.kv_state import SAME, RankState, RecordChanges, Records
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

    def __init__(self, every: list[WorkerRank], excluded: Mapping[int, RankExclusion]) -> None:
        """`every`: all ranks; without exclusions this part is always those that are in the list. `excluded`: those of all ranks that are not of this part, by position, in order."""
        self.excluded = (*excluded.values(),)
        self.gaps = Gaps([*excluded], len(every)) if excluded else NO_GAPS
        self.ranks = self.gaps.left(every) if excluded else every
        self.allowed: Collection[int] | None = None  # of the query, by identity


class RankInfos(dict[WorkerRank, RankInfo]):
    """What is known of each rank, with a note of what has changed since its one reader took it over."""

    __slots__ = ("_noted", "_reader")

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[WorkerRank, None] = {}
        self._reader: object = None

    def __setitem__(self, rank: WorkerRank, info: RankInfo) -> None:
        super().__setitem__(rank, info)
        self._note(rank)

    def __delitem__(self, rank: WorkerRank) -> None:
        super().__delitem__(rank)
        self._note(rank)

    def _note(self, rank: WorkerRank) -> None:
        self._noted.pop(rank, None)  # in the order of the last changes, as the ranks themselves
        self._noted[rank] = None

    def take(self, reader: object) -> Collection[WorkerRank] | None:
        """Return the ranks that are gone, new or known otherwise since the last call; None: another reader made that."""
        noted = self._noted if self._reader is reader else None
        self._noted, self._reader = {}, reader
        return noted


class RankSet:
    """The ranks there are, in order, and what is known of each."""

    __slots__ = ("_parts", "_pinned", "_places", "_shown", "busy", "every", "facts", "workers")

    def __init__(self) -> None:
        self.facts: dict[WorkerRank, RankInfo] = {}  # in any order
        self._shown: Mapping[WorkerRank, RankInfo] = {}
        self.busy: set[WorkerRank] = set()  # over a busy threshold
        self._parts: dict[int, RankPart] = {}  # of queries that had no more than allowed workers, by identity
        # Of each rank, for a query that names another worker; empty: none has come.
        self._pinned: Sequence[RankExclusion] = ()
        self.every = RankPart([], {})
        self._places: dict[WorkerRank, int] = {}  # where each rank was when it was last searched for
        self.workers: frozenset[int] = frozenset()

    @property
    def infos(self) -> Mapping[WorkerRank, RankInfo]:
        """What is known of each rank now, in their order; it does not change with the ranks."""
        if len(self._shown) != len(self.facts):
            self._shown = dict(zip(self.every.ranks, map(self.facts.__getitem__, self.every.ranks), strict=True))
        return self._shown

    def place(self, rank: WorkerRank) -> int:
        """Return where a rank is among all; -1: it is not."""
        at, order = self._places.get(rank, -1), self.every.ranks
        if at >= 0 and (at >= len(order) or order[at] != rank):  # others have come or gone before it
            self._places[rank] = at = bisect_left(order, rank)
        return at

    def change(
        self, gone: Collection[WorkerRank], others: Mapping[WorkerRank, RankInfo]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Take out the ranks that are gone, and take what is known of others, which may be new.

        Return where the first were and where the new ones are, in order.
        """
        order, new = self.every.ranks, sorted([rank for rank in others if rank not in self.facts])
        self._shown, self._parts = {}, {}
        left, places = sorted([self.place(rank) for rank in gone]), list[int]()
        for rank in gone:
            del self.facts[rank], self._places[rank]
        for at in reversed(left):
            del order[at]
        for rank in new:
            self._places[rank] = at = bisect_left(order, rank)
            places.append(at)
            order.insert(at, rank)
        self.facts.update(others)
        self.busy.difference_update(gone, others)
        self.busy.update([rank for rank, info in others.items() if info.is_busy])
        if left or places:
            self._pinned = ()
            lost = {rank.worker_id for rank in gone if not self._of_worker(rank.worker_id)}
            joined = {rank.worker_id for rank in new} - self.workers
            if lost or joined:
                self.workers = self.workers - lost | joined
        return left, places

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
            reason = exclusion_of(ranks[at], self.facts[ranks[at]], query)
            if reason is not None:
                excluded[at] = RankExclusion(ranks[at], reason)
            else:
                excluded.pop(at, None)
        if len(excluded) == len(ranks):
            eligible_ranks(self.facts, query)  # it names the reason
        return RankPart(ranks, excluded)

    def _doubted(self, query: KvQuery) -> Iterable[int]:
        """Return the positions of all ranks that a query may exclude, in order; of those that are not pinned, only the others."""
        if query.pinned_worker_id is not None:
            return self._of_worker(query.pinned_worker_id)
        if query.required_taints or query.required_topology or query.pinned_dp_rank is not None:
            return range(len(self.facts))
        found = {*map(self.place, self.busy)}
        for worker in () if query.allowed is None else self.workers.difference(query.allowed):
            found.update(self._of_worker(worker))
        for each in query.excluded:
            at = self.place(each) if isinstance(each, tuple) else -1
            found.update(self._of_worker(each) if isinstance(each, int) else () if at < 0 else (at,))
        return sorted(found)

    def _of_worker(self, worker_id: int) -> range:
        ranks = self.every.ranks
        return range(bisect_left(ranks, (worker_id,)), bisect_left(ranks, (worker_id + 1,)))


class RankStates:
    """One `RankState` per known rank, in the order of the ranks. Bounded by the ranks."""

    __slots__ = ("_held", "_load", "_now", "_states", "_unread", "follows_timing", "known", "loads", "timing")

    def __init__(
        self, load: ActiveLoad, timing: TimingLearner, held: Callable[[WorkerRank], int] | None = None
    ) -> None:
        """`held`: how many blocks a rank's cache holds, as far as an index knows."""
        self._load, self.timing = load, timing
        self._held = held or (lambda _: 0)
        self.follows_timing = True  # False: records do not have the speed of their ranks
        self.known = RankSet()
        self.loads: list[LoadOfRank] = []  # in the order of `ranks`
        self._now: list[RankState] = []  # the newest records
        self._states = Records.after(None, (), ())  # those that were handed out last
        self._unread: RecordChanges | None = None  # where ranks have come and gone since

    def set(self, ranks: Mapping[WorkerRank, RankInfo]) -> None:
        """Take the ranks there are and what is known of each; the load of every other rank is forgotten.

        `RankInfos` are compared only where they have changed.
        """
        former, accounts, block_size = self.known.facts, self._load.ranks(), self._load.block_size
        noted = ranks.take(self) if isinstance(ranks, RankInfos) else None
        if noted is None:
            gone: Collection[WorkerRank] = former.keys() - ranks.keys()
            new = [*compress(ranks, map(is_not, map(former.get, ranks), ranks.values()))]
        else:
            gone = [rank for rank in noted if rank in former and rank not in ranks]
            new = [rank for rank in noted if rank in ranks and former.get(rank) is not ranks[rank]]
        # A peer's booking may have made an account of a rank that is not there.
        strays = gone if noted is not None and len(accounts) == len(former) else {*accounts} - ranks.keys()
        for each in strays:
            self._load.forget(*each)
        others = {rank: ranks[rank] for rank in new}  # or known otherwise
        for rank, info in others.items():
            load = self._load.of(rank)
            load.prefill_pass.set_budget(info.max_num_batched_tokens)
            load.reuse.set_blocks(info.total_kv_blocks)
        self.timing.change(strays, {rank: (info.total_kv_blocks or 0) * block_size for rank, info in others.items()})
        self._load.changed.update([rank for rank in others if rank in former])
        left, places = self.known.change(gone, others)
        for at in reversed(left):
            del self.loads[at], self._now[at]
        for at in places:
            self.loads.insert(at, self._load.of(rank := self.ranks[at]))
            self._now.insert(at, self._state(rank, self.loads[at]))
        if left or places:
            if self._unread is not None:  # twice: the records are compared whole
                self._states = Records.after(None, (), ())
            self._unread = RecordChanges(left, places)

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
        changed, moved, known, unread = self._load.changed, self.timing.moved, self.known, self._unread
        if changed or unread is not None or (moved and self.follows_timing):
            states = self._now
            positions = [at for rank in changed if (at := known.place(rank)) >= 0]
            for at in positions:
                states[at] = self._state(self.ranks[at], self.loads[at])
            most = (MOVED_AT_ONCE if len(states) <= MANY else MOVED_OF_MANY) if self.follows_timing else 0
            for rank in [moved.pop() for _ in range(min(len(moved), most))]:
                at = known.place(rank)
                if at >= 0 and rank not in changed:  # of its record only this can be another
                    positions.append(at)
                    figures = {"timing": self.timing.timing(rank), "held_blocks": self._held(rank)}
                    states[at] = structs.replace(states[at], **figures)
            changed.clear()
            gone, new, _ = unread or SAME
            self._states, self._unread = Records.after(self._states, states, positions, gone, new), None
        return self._states

    def _state(self, rank: WorkerRank, load: LoadOfRank) -> RankState:
        info, prefill = self.known.facts[rank], load.prefill_pass
        load.timing = timing = self.timing.timing(rank) if self.follows_timing else DEFAULT_TIMING
        return RankState(  # by position, as names take longer: this runs for nearly every step of a request
            rank, True, load.prefill_tokens, load.decode_blocks, len(load.booked), load.clock.streams, load.clock.context_tokens,
            prefill.started_at if prefill.running else None, load.boundary_at, prefill.running_tokens, prefill.waiting_tokens,
            len(prefill.waiting), load.reuse.oldest_use_at, self._held(rank), info.total_kv_blocks, info.max_num_batched_tokens,
            info.max_num_seqs, info.trust, timing, info.taints,
        )  # fmt: skip
