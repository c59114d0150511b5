"""The prefix caches of the workers as rows: what the routers' indexes know of them, and how much of the prompts they held.

A request costs one addition when it ends. Indexes are looked into only while somebody looks, and at most every few seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from dynamo.frontend.models.cards import Group
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.figures import HISTORY_SLOTS, MINUTE_SLOTS, SLOT_SECONDS
from dynamo.frontend.parts.inspector.stream_rows import worker_name
from dynamo.frontend.parts.inspector.workers import ROLES
from dynamo.frontend.pipeline.plan import Tally
from dynamo.kv.overlap import WorkerRank
from dynamo.placement import Placement
from dynamo.protocol.inspector.views import CacheView, PrefixView
from dynamo.router.kv.placement import KvPlaced, KvPlacement
from dynamo.router.kv_events.rank_events import CacheEvents

MAX_WORKERS: Final = 4096  # whose hits are counted
MAX_PREFIXES: Final = 200  # of all models together
_Number = TypeVar("_Number", int, float)
LOOK_SECONDS: Final = 2.0  # between two looks into the indexes for prefixes, which take milliseconds


class _Hits(Struct):
    """What the prompts of requests that ended were to one worker."""

    prompt_tokens: int = 0
    cached_tokens: int = 0


class _WorkerHits:
    """The hits of one worker in slots of time, and those since the last slot."""

    __slots__ = ("open", "slots")

    def __init__(self) -> None:
        self.open = _Hits()
        self.slots: deque[_Hits] = deque(maxlen=HISTORY_SLOTS)

    def end_slot(self) -> None:
        self.slots.append(self.open)
        self.open = _Hits()

    @property
    def is_idle(self) -> bool:
        return not self.open.prompt_tokens and not any(slot.prompt_tokens for slot in self.slots)

    def last_minute(self) -> tuple[int, int]:
        """Return the prompt tokens and the cached ones of the last minute."""
        recent = [*list(self.slots)[-MINUTE_SLOTS:], self.open]
        return sum(slot.prompt_tokens for slot in recent), sum(slot.cached_tokens for slot in recent)


class CacheTable:
    """Rows of caches and of prefixes. Used on the event loop only."""

    def __init__(self, models: ModelDirectory, clock: InspectorClock) -> None:
        self._models, self._clock = models, clock
        self._hits: dict[int, _WorkerHits] = {}  # by instance id
        self._evictions = Evictions()
        self._prefixes: tuple[list[PrefixView], int] = ([], 0)
        self._looked_at: float | None = None

    # -- counting ----------------------------------------------------------------------------------------------------

    def ended(self, tally: Tally) -> None:
        """Count the prompt of a request that has ended for the worker that computed it."""
        instance_id = tally.prefill_instance_id
        if instance_id is None:
            instance_id = tally.instances[-1].instance_id if tally.instances else tally.encode_instance_id
        if instance_id is None:
            return
        hits = self._hits.get(instance_id)
        if hits is None:
            if len(self._hits) >= MAX_WORKERS:
                return
            hits = self._hits[instance_id] = _WorkerHits()
        hits.open.prompt_tokens += tally.prompt_tokens
        hits.open.cached_tokens += tally.cached_tokens or 0

    def sample(self) -> None:
        """End a slot of time."""
        for hits in self._hits.values():
            hits.end_slot()
        for instance_id in [id for id, hits in self._hits.items() if hits.is_idle]:
            del self._hits[instance_id]
        self._evictions.end_slot(self._models.cache_events())

    def hit_share(self, instance_id: int) -> float | None:
        """Return the part of the prompts of the last minute that a worker had cached; None: it had no prompts."""
        hits = self._hits.get(instance_id)
        prompt, cached = (0, 0) if hits is None else hits.last_minute()
        return round(cached / prompt, 4) if prompt else None

    # -- rows --------------------------------------------------------------------------------------------------------

    def rows(self) -> list[CacheView]:
        """Return a row for each worker of a model that has a block size, by model and id."""
        found: dict[str, CacheView] = {}
        events = self._models.cache_events()
        evicted = self._evictions.per_minute(events)
        for group in self._models.groups():
            placement = self._placement_of(group)
            for entry in group.accepted:
                name, runtime = worker_name(entry.instance_id), entry.card.runtime_config
                size = entry.card.kv_cache_block_size
                if not size or name in found:
                    continue
                role = ROLES.get(group.key.role, group.key.role)
                view = found[name] = CacheView(id=name, model=group.key.model, role=role, block_size=size)
                view.blocks_total = runtime.total_kv_blocks and runtime.total_kv_blocks * max(
                    1, runtime.data_parallel_size
                )
                self._add_hits(view, entry.instance_id)
                if placement is not None:
                    _add_index(view, placement, entry.instance_id)
                view.evicted_blocks_per_minute = evicted.get(entry.instance_id)
        for rank, counts in events.items():
            if (of := found.get(worker_name(rank.worker_id))) is not None:
                of.gaps, of.resyncs = (of.gaps or 0) + counts.gaps, (of.resyncs or 0) + counts.resyncs
        known = sum(view.blocks_known or 0 for view in found.values())
        for view in found.values():
            if view.blocks_known is not None and known:
                view.index_share = round(view.blocks_known / known, 4)
        return sorted(found.values(), key=lambda view: (view.model, view.id))

    def _add_hits(self, view: CacheView, instance_id: int) -> None:
        hits = self._hits.get(instance_id)
        if hits is None:
            return
        prompt, cached = hits.last_minute()
        minutes = min(len(hits.slots) + 1, MINUTE_SLOTS) * SLOT_SECONDS / 60
        view.prompt_blocks_per_minute = round(prompt / view.block_size / minutes, 1)
        view.hit_blocks_per_minute = round(cached / view.block_size / minutes, 1)
        view.hit_share = round(cached / prompt, 4) if prompt else None
        view.history = [round(slot.cached_tokens / view.block_size * 60 / SLOT_SECONDS, 1) for slot in hits.slots]

    def prefixes(self, choices: Iterable[Placement], limit: int) -> tuple[list[PrefixView], int]:
        """Return the largest prefixes and those that were hit, and how many there are in all.

        `choices`: the last choices of workers, whose prompts are the hits.
        """
        now = self._clock.now()
        if self._looked_at is None or now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._prefixes = self._look(choices)
        rows, total = self._prefixes
        return rows[:limit], total

    def _look(self, choices: Iterable[Placement]) -> tuple[list[PrefixView], int]:
        hits = Counter(_hit_blocks(choices))
        rows: dict[str, PrefixView] = {}
        total = 0
        for model, placement in self._placements():
            for index in placement.router.indexes.visible:
                found = index.prefixes(hits, MAX_PREFIXES)
                total += found.total
                for each in found.shown:
                    row = PrefixView(
                        id=f"{each.block & _U64:016x}",
                        model=model,
                        blocks=each.blocks,
                        depth=each.depth,
                        holders=list(dict.fromkeys(worker_name(rank.worker_id) for rank in each.ranks)),
                        hits=each.hits,
                        parent=None if each.parent is None else f"{each.parent & _U64:016x}",
                    )
                    rows.setdefault(row.id, row)
        ordered = sorted(rows.values(), key=lambda row: (-(row.hits or 0), -row.blocks * len(row.holders), row.id))
        return ordered[:MAX_PREFIXES], total

    def _placements(self) -> Iterator[tuple[str, KvPlacement]]:
        """Yield each kv placement once, with the model that it is for."""
        seen: set[int] = set()
        for group in self._models.groups():
            placement = self._placement_of(group)
            if placement is not None and id(placement) not in seen:
                seen.add(id(placement))
                yield group.key.model, placement

    def _placement_of(self, group: Group) -> KvPlacement | None:
        pool = self._models.pool_of(group.key)
        return None if pool is None else pool.kv


_U64: Final = 2**64 - 1


def merged_caches(members: Sequence[Sequence[CacheView]]) -> list[CacheView]:
    """Return the caches as several processes know them: each has an index of its own, and its own requests that hit.

    All of them follow the same events of a worker, so what one counts the others count, too: of evictions, gaps and
    resyncs each figure is that of the process that counted most. An event that got lost at its worker is a gap of every
    process, and one that got lost on its way to one process is a gap of that process only; a sum would be neither.
    """
    found: dict[str, CacheView] = {}
    for rows in members:
        for row in rows:
            before = found.get(row.id)
            found[row.id] = row if before is None else _merged(before, row)
    return sorted(found.values(), key=lambda row: (row.model, row.id))


def _merged(one: CacheView, other: CacheView) -> CacheView:
    known = one if (one.blocks_known or 0) >= (other.blocks_known or 0) else other
    longer, shorter = (one, other) if len(one.history) >= len(other.history) else (other, one)
    history = list(longer.history)
    for at, value in enumerate(reversed(shorter.history), 1):
        history[-at] = round(history[-at] + value, 1)
    prompts = _sum(one.prompt_blocks_per_minute, other.prompt_blocks_per_minute)
    hits = _sum(one.hit_blocks_per_minute, other.hit_blocks_per_minute)
    return msgspec.structs.replace(
        known,
        prompt_blocks_per_minute=prompts,
        hit_blocks_per_minute=hits,
        hit_share=round(hits / prompts, 4) if prompts and hits is not None else None,
        history=history,
        evicted_blocks_per_minute=_most(one.evicted_blocks_per_minute, other.evicted_blocks_per_minute),
        gaps=_most(one.gaps, other.gaps),
        resyncs=_most(one.resyncs, other.resyncs),
    )


def _most(one: _Number | None, other: _Number | None) -> _Number | None:
    return max((each for each in (one, other) if each is not None), default=None)


def _sum(one: float | None, other: float | None) -> float | None:
    known = [each for each in (one, other) if each is not None]
    return round(sum(known), 1) if known else None


def _add_index(view: CacheView, placement: KvPlacement, instance_id: int) -> None:
    """Fill in what the indexes know of a worker."""
    tiers: Counter[str] = Counter()
    trusts = set()
    for rank, info in placement.router.ranks.items():
        if rank.worker_id == instance_id:
            trusts.add(str(info.trust))
            for index in placement.router.indexes.visible:
                tiers.update(index.blocks_by_tier(rank))
    if trusts:  # else the router does not know the worker: it is not in use
        view.tiers, view.blocks_known, view.trust = dict(tiers), sum(tiers.values()), ", ".join(sorted(trusts))


def _hit_blocks(choices: Iterable[Placement]) -> Iterator[int]:
    """Yield the last cached block of each prompt, where its worker had one."""
    for placement in choices:
        if isinstance(placement, KvPlaced):
            selection = placement.selection
            depth = selection.overlap.device
            if depth:
                yield selection.lookup.sequence[depth - 1]


class Evictions:
    """The evicted blocks in slots of time, and those since the last slot. A worker without any takes no room."""

    __slots__ = ("_counted", "_slots")

    def __init__(self) -> None:
        self._slots: deque[Counter[int]] = deque(maxlen=MINUTE_SLOTS - 1)  # by worker; the open slot is the last one
        self._counted: dict[WorkerRank, int] = {}  # the counters at the end of the last slot

    def end_slot(self, events: Mapping[WorkerRank, CacheEvents]) -> None:
        """End a slot of time."""
        self._slots.append(self._open(events))
        self._counted = {rank: counts.evicted_blocks for rank, counts in events.items()}

    def per_minute(self, events: Mapping[WorkerRank, CacheEvents]) -> dict[int, float]:
        """Return the evicted blocks per minute of each worker whose events are followed, by its id."""
        found = self._open(events)
        for slot in self._slots:
            found.update(slot)
        minutes = (len(self._slots) + 1) * SLOT_SECONDS / 60
        return {rank.worker_id: round(found[rank.worker_id] / minutes, 1) for rank in events}

    def _open(self, events: Mapping[WorkerRank, CacheEvents]) -> Counter[int]:
        found: Counter[int] = Counter()
        for rank, counts in events.items():
            blocks, before = counts.evicted_blocks, self._counted.get(rank, 0)
            if blocks != before:  # a rank that was dropped and came back counts from zero
                found[rank.worker_id] += blocks - before if blocks > before else blocks
        return found
