"""The records of all ranks, each made anew only when something about its rank has changed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.kv_query import KvQuery, RankExclusion, RankInfo, eligible_ranks, names_ranks
from dynamo.placement.kv_state import RankState, Records
from dynamo.placement.rank_load import LoadOfRank
from dynamo.placement.timing_learner import TimingLearner

MOVED_AT_ONCE: Final = 8
"""How many records one choice makes anew because the speed of the whole fleet is believed to be another. Among many ranks the others
follow with the next choices: all of them at once would hold up the event loop."""


class RankPart:
    """The ranks that a query may use, in the order of all."""

    __slots__ = ("allowed", "excluded", "left", "positions", "ranks")

    def __init__(
        self, ranks: Sequence[WorkerRank], excluded: tuple[RankExclusion, ...] = (), every: Sequence[WorkerRank] = ()
    ) -> None:
        """`every`: all ranks, of which these are some."""
        self.ranks, self.excluded = ranks, excluded
        self.positions = {rank: at for at, rank in enumerate(ranks)}
        self.left = [rank in self.positions for rank in every]
        self.allowed: Collection[int] | None = None  # of the query, by identity


def _nothing_held(_: WorkerRank) -> int:
    return 0


class RankStates:
    """One `RankState` per known rank, in the order of the ranks. Bounded by the ranks."""

    __slots__ = ("_held", "_load", "_part", "_states", "every", "infos", "loads", "some_are_busy", "timing")

    def __init__(
        self, load: ActiveLoad, timing: TimingLearner, held: Callable[[WorkerRank], int] | None = None
    ) -> None:
        """`held`: how many blocks a rank's cache holds, as far as an index knows."""
        self._load, self.timing = load, timing
        self._held = held or _nothing_held
        self.infos: dict[WorkerRank, RankInfo] = {}
        self.every = RankPart(())
        self.loads: tuple[LoadOfRank, ...] = ()  # in the order of `ranks`
        self.some_are_busy = False
        self._part: RankPart | None = None  # of the last query that had no more than allowed workers
        self._states = Records.after(None, (), ())

    def set(self, ranks: Mapping[WorkerRank, RankInfo]) -> None:
        """Take the ranks there are and what is known of each; the load of every other rank is forgotten."""
        for gone in set(self._load.ranks()) - ranks.keys():
            self._load.forget(gone.worker_id, gone.dp_rank)
        former, block_size, self._part = self.infos, self._load.block_size, None
        others = [
            rank for rank, info in ranks.items() if former.get(rank) is not info
        ]  # that are new, or known otherwise
        for rank in others:
            info, load = ranks[rank], self._load.of(rank)
            load.prefill_pass.set_budget(info.max_num_batched_tokens)
            load.reuse.set_blocks(info.total_kv_blocks)
        has_same = former.keys() == ranks.keys()
        self.timing.keep(ranks.keys(), {rank: (ranks[rank].total_kv_blocks or 0) * block_size for rank in others})
        self.infos = {rank: ranks[rank] for rank in (self.ranks if has_same else sorted(ranks))}
        self.loads = tuple(map(self._load.of, self.infos))
        if not has_same:
            states = dict(zip(self.ranks, self._states, strict=True))
            self.every = RankPart(tuple(self.infos))
            current = [
                states.get(rank) or self._state(rank, load) for rank, load in zip(self.ranks, self.loads, strict=True)
            ]
            self._states = Records.after(None, current, ())
        self.some_are_busy = any(info.is_busy for info in self.infos.values())
        self._load.changed.update([rank for rank in others if rank in former])

    @property
    def ranks(self) -> Sequence[WorkerRank]:
        """All ranks, in order."""
        return self.every.ranks

    def current(self) -> Records:
        """Return the record of every rank as it is now."""
        changed, moved = self._load.changed, self.timing.moved
        for _ in range(min(len(moved), MOVED_AT_ONCE)):
            changed.add(moved.pop())
        if changed:
            states = list(self._states)
            known = self.every.positions
            positions = [known[rank] for rank in changed if rank in known]
            for at in positions:
                states[at] = self._state(self.ranks[at], self.loads[at])
            changed.clear()
            self._states = Records.after(self._states, states, positions)
        return self._states

    def part(self, query: KvQuery) -> RankPart:
        """Return the ranks that may serve a query; kept while the same workers are allowed. Raises what `eligible_ranks` raises."""
        part = self._part
        if part is None or part.allowed is not query.allowed or names_ranks(query):
            part = RankPart(*eligible_ranks(self.infos, query), self.ranks)
            if not names_ranks(query):
                part.allowed, self._part = query.allowed, part
        return part

    def _state(self, rank: WorkerRank, load: LoadOfRank) -> RankState:
        info, prefill = self.infos[rank], load.prefill_pass
        load.timing = timing = self.timing.timing(rank)
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
