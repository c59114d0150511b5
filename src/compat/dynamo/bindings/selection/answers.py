"""The prompt of a request as a router reads it, and what a router chose as callers read it. No state."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from dynamo.bindings.selection.pools import SelectionPool
from dynamo.bindings.selection.records import ChosenRank, PoolName, SelectionCacheConfig, SelectionRequest, refusal
from dynamo.kv.hashing import block_hashes, sequence_hashes, to_unsigned
from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_query import KvOverrides, KvQuery
from dynamo.placement.kv_state import Selection
from dynamo.placement.session_affinity import SessionLease
from dynamo.router.kv.router import KvRouter

NOTHING: Final = Overlap()


def query_of(asked: SelectionRequest, pool: SelectionPool) -> KvQuery:
    """Return the prompt of a request, hashed. Raises ValueError for one that is incomplete."""
    size = pool.block_size
    if asked.token_ids is not None:
        blocks = block_hashes(
            asked.token_ids, size, lora_name=asked.lora_name, cache_salt=asked.cache_salt, eagle=pool.is_eagle
        )
        tokens = len(asked.token_ids)
    elif asked.block_hashes is not None:
        blocks = [to_unsigned(each) for each in asked.block_hashes]
        tokens = len(blocks) * size if asked.isl_tokens is None else asked.isl_tokens
        if tokens < len(blocks) * size:
            raise ValueError(f"isl_tokens must be at least {len(blocks) * size} for {len(blocks)} blocks, got {tokens}")
    else:
        raise ValueError("block_hashes is required without token_ids")
    names = asked.sequence_hashes
    if names is not None and len(names) != len(blocks):
        raise ValueError(f"sequence_hashes must name each of {len(blocks)} blocks, got {len(names)}")
    return KvQuery(
        sequence=sequence_hashes(blocks),
        prompt_tokens=tokens,
        tracking_sequence=None if names is None else [to_unsigned(each) for each in names],
        allowed=None if asked.allowed_worker_ids is None else set(asked.allowed_worker_ids),
        overrides=None if asked.track_prefill_tokens else KvOverrides(track_prefill_tokens=False),
    )


def chosen_rank(asked: SelectionRequest, selection: Selection) -> ChosenRank:
    """Return a selection, as far as it takes part in a reservation."""
    return ChosenRank(
        asked.pool,
        selection.rank,
        selection.tracking_sequence,
        selection.lookup.prompt_tokens,
        selection.cached_tokens,
        asked.track_prefill_tokens,
        asked.session_id,
    )


def named(pool: PoolName) -> dict[str, Any]:
    """Return the names of a pool."""
    return {"model_name": pool.model, "routing_group": pool.routing_group}


def place(name: PoolName, pool: SelectionPool, rank: WorkerRank, selection_id: str | None) -> dict[str, Any]:
    """Return where a prompt goes."""
    return {
        **({} if selection_id is None else {"selection_id": selection_id}),
        **named(name),
        "worker_id": rank.worker_id,
        "dp_rank": rank.dp_rank,
        "endpoint": pool.members[rank.worker_id].endpoint,
    }


def answer(
    asked: SelectionRequest, pool: SelectionPool, selection: Selection, selection_id: str | None
) -> dict[str, Any]:  # fmt: skip
    overlaps = selection.lookup.overlaps
    own = {rank: overlaps.get(rank, NOTHING) for rank in pool.members[selection.rank.worker_id].ranks}
    gpu = max(each.device for each in own.values())
    cpu = max(each.device + each.host for each in own.values())
    disk = max(each.device + each.host + each.disk for each in own.values())
    size = pool.block_size
    return {
        **place(asked.pool, pool, selection.rank, selection_id),
        "block_size": size,
        "overlap": {
            "longest_matched": disk * size,
            "gpu": gpu * size,
            "dp": {str(rank.dp_rank): each.device * size for rank, each in own.items()},
            "cpu": cpu * size,
            "disk": disk * size,
        },
        "effective_prefill_tokens": selection.lookup.prompt_tokens - selection.cached_tokens,
        "potential_decode_blocks": round(selection.potential_decode_blocks),
    }


def loads_of(name: PoolName, pool: SelectionPool, query: KvQuery, now: float) -> dict[str, Any]:
    """Return the load that each rank would have with a prompt."""
    """Return what a caller reads of a selection: where it goes, and what the worker holds of it, in tokens."""
    pool.router.load.expire(now)  # else that happens with the next reservation only
    unfinished = 1 if (query.prompt_tokens or 0) % pool.block_size else 0  # it counts in no account
    return {
        **named(name),
        "loads": [
            {
                "worker_id": each.rank.worker_id,
                "dp_rank": each.rank.dp_rank,
                "potential_prefill_tokens": each.potential_prefill_tokens,
                "potential_decode_blocks": round(each.potential_decode_blocks) - unfinished,
                "active_requests": each.active_requests,
            }
            for each in pool.router.potential_loads(query, now)
        ],
    }


def signed(value: int) -> int:
    """Return an unsigned 64-bit number as the signed one with the same bits."""
    return value - 2**64 if value >= 2**63 else value


# Selections that wait for their reservation, and the reservations that are counted.

SPARE_BOOKINGS: Final = 1024  # that may be remembered beyond twice those that are booked


class PendingSelections:
    """Selections that wait for their reservation, oldest first; within the bounds of a configuration."""

    def __init__(self, config: SelectionCacheConfig) -> None:
        self._config = config
        self._kept: OrderedDict[tuple[PoolName, str], tuple[ChosenRank, float]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, selection_id: str, chosen: ChosenRank, now: float) -> None:
        """Keep a selection, in place of an earlier one of that id."""
        self.take(chosen.pool, selection_id, now)
        self._kept[chosen.pool, selection_id] = (chosen, now + self._config.ttl_secs)
        self.bytes += chosen.size
        while self._kept:
            expires_at = next(iter(self._kept.values()))[1]
            is_full = len(self._kept) > self._config.max_entries or self.bytes > self._config.max_bytes
            if not is_full and expires_at > now:
                break
            self.bytes -= self._kept.popitem(last=False)[1][0].size

    def take(self, pool: PoolName, selection_id: str, now: float) -> ChosenRank | None:
        """Return a selection, which is kept no longer; None: there is none, or it is too old."""
        found = self._kept.pop((pool, selection_id), None)
        if found is None:
            return None
        self.bytes -= found[0].size
        return found[0] if found[1] > now else None


class Reservations:
    """Which router counts each reservation. A router may end one by itself: a worker left, or it is too old."""

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[KvRouter, SessionLease | None]] = {}
        self._sweep_at = SPARE_BOOKINGS

    def __len__(self) -> int:
        return len(self._by_id)

    def check_new(self, selection_id: str, now: float) -> None:
        """Raise SelectionServiceError for an id that is reserved."""
        if self._find(selection_id, now) is not None:
            raise refusal("conflict", f"selection {selection_id} is already reserved or being reserved")

    def add(self, selection_id: str, router: KvRouter, lease: SessionLease | None, now: float) -> None:
        """Take a reservation that its router has booked."""
        self._by_id[selection_id] = (router, lease)
        if len(self._by_id) > self._sweep_at:
            for each in list(self._by_id):
                self._find(each, now)
            self._sweep_at = 2 * len(self._by_id) + SPARE_BOOKINGS

    def router(self, selection_id: str, now: float) -> KvRouter:
        """Return the router of a reservation. Raises SelectionServiceError for one that does not exist."""
        router = self._find(selection_id, now)
        if router is None:
            raise refusal("not_found", f"reservation {selection_id} not found")
        return router

    def end(self, selection_id: str, now: float) -> None:
        """Forget a reservation, and let go of its session."""
        _, lease = self._by_id.pop(selection_id)
        if lease is not None:
            lease.release(now)

    def _find(self, selection_id: str, now: float) -> KvRouter | None:
        found = self._by_id.get(selection_id)
        if found is None or selection_id in found[0].load:
            return None if found is None else found[0]
        self.end(selection_id, now)
        return None
