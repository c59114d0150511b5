"""Excludes workers whose reported load exceeds a threshold from new requests.

A worker is busy when every rank that reports is above a threshold of the model. As a report may be lost, a worker counts as
busy for `BUSY_SECONDS` after its last report at most: then the next request tries it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from dynamo.protocol.records import ModelRuntimeConfig

BUSY_SECONDS: Final = 5.0
MAX_WORKERS: Final = 65_536  # whose load is remembered
MAX_RANKS: Final = 4_096  # of one worker: as many as its card can name


class BusyThresholds(msgspec.Struct, frozen=True):
    """Limits of one model; a rank above any of them is busy. None: ignored."""

    model: str
    active_decode_blocks_threshold: float | None = None  # a part of the KV blocks of a rank
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None  # of the tokens of one engine step

    @property
    def is_set(self) -> bool:
        """Whether there is any limit."""
        return any(value is not None for name, value in msgspec.structs.asdict(self).items() if name != "model")

    def check(self) -> None:
        """Check the ranges. Raises ValueError naming the field."""
        blocks = self.active_decode_blocks_threshold
        if blocks is not None and not 0 <= blocks <= 1:
            raise ValueError(f"active_decode_blocks_threshold must be between 0.0 and 1.0, got {blocks:g}")
        for name in ("active_prefill_tokens_threshold", "active_prefill_tokens_threshold_frac"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:
                raise ValueError(f"{name} must be at least 0, got {value:g}")

    def over(self, other: BusyThresholds) -> BusyThresholds:
        """Return these limits where they are set, and those of `other` elsewhere."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(other, **given)

    def is_busy(self, load: LoadReport, *, total_kv_blocks: int | None, max_batched_tokens: int | None) -> bool:
        """Return whether one rank with this load is busy."""
        tokens, part = load.active_prefill_tokens, self.active_prefill_tokens_threshold_frac
        limit = self.active_decode_blocks_threshold
        if limit is not None and total_kv_blocks:
            for blocks in (load.active_decode_blocks, load.kv_used_blocks):
                if blocks is not None and blocks / total_kv_blocks > limit:
                    return True
        if tokens is None:
            return False
        most = self.active_prefill_tokens_threshold
        return (most is not None and tokens > most) or (
            part is not None and bool(max_batched_tokens) and tokens > part * (max_batched_tokens or 0)
        )


class LoadReport(msgspec.Struct, frozen=True):
    """One report of one rank: a worker reports the blocks in use, a router what it has booked there. None: nothing is reported
    about it. Unknown keys are ignored.
    """

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    kv_used_blocks: int | None = None

    def over(self, before: LoadReport | None) -> LoadReport:
        """Return this report, with the figures of the earlier report where this one has none."""
        if before is None:
            return self
        return LoadReport(
            self.worker_id,
            self.dp_rank,
            before.active_decode_blocks if self.active_decode_blocks is None else self.active_decode_blocks,
            before.active_prefill_tokens if self.active_prefill_tokens is None else self.active_prefill_tokens,
            before.kv_used_blocks if self.kv_used_blocks is None else self.kv_used_blocks,
        )


class LoadedPool(Protocol):
    """What is needed of a `ModelPool`."""

    name: str
    busy: frozenset[int]

    @property
    def runtime_config(self) -> ModelRuntimeConfig: ...

    @property
    def member_ids(self) -> frozenset[int]: ...


class BusyWorkers:
    """Keeps the load reports and marks the busy workers of every pool. Used on the event loop only."""

    def __init__(
        self, pools: Callable[[], Iterable[LoadedPool]], thresholds_of: Callable[[str], BusyThresholds]
    ) -> None:
        """`pools`: the pools there are now; `thresholds_of`: from a model's name to its limits."""
        self._pools, self._thresholds_of = pools, thresholds_of
        self._reports: dict[int, dict[int, LoadReport]] = {}  # by worker and rank; of workers that exist
        self._expiries: dict[int, asyncio.TimerHandle] = {}  # by worker: when it is tried again

    def close(self) -> None:
        """Stop every timer. Idempotent."""
        for timer in self._expiries.values():
            timer.cancel()
        self._expiries.clear()

    def report(self, load: LoadReport) -> None:
        """Take over a report of one rank. A figure holds until another report gives it: so the blocks that a worker
        counts and those that routers count each keep a rank busy until they are below the threshold.
        """
        if load.worker_id not in self._reports and len(self._reports) >= MAX_WORKERS:
            return
        ranks = self._reports.setdefault(load.worker_id, {})
        if load.dp_rank not in ranks and len(ranks) >= MAX_RANKS:
            return
        ranks[load.dp_rank] = load.over(ranks.get(load.dp_rank))
        self._mark(load.worker_id)

    def reports_of(self, worker: int) -> list[LoadReport]:
        """Return the last report of each rank of a worker; empty: none has come, or loads are not followed."""
        return list(self._reports.get(worker, {}).values())

    def thresholds_changed(self) -> None:
        """Judge every worker anew."""
        for worker in list(self._reports):
            self._mark(worker)

    def keep_only(self, present: frozenset[int]) -> None:
        """Forget the reports of workers that have vanished."""
        for worker in self._reports.keys() - present:
            self._forget(worker)

    def _mark(self, worker: int) -> None:
        if (timer := self._expiries.pop(worker, None)) is not None:
            timer.cancel()
        ranks = self._reports.get(worker, {}).values()
        judged: dict[
            tuple[float | None, ...], bool
        ] = {}  # a model and its adapters have the same limits, and one verdict
        for pool in self._pools():
            if worker not in pool.member_ids:
                continue
            limits, runtime = self._thresholds_of(pool.name), pool.runtime_config
            blocks, tokens = runtime.total_kv_blocks, runtime.max_num_batched_tokens
            is_busy = judged.get(key := (*msgspec.structs.astuple(limits)[1:], blocks, tokens))
            if is_busy is None:
                is_busy = judged[key] = bool(ranks) and all(
                    limits.is_busy(load, total_kv_blocks=blocks, max_batched_tokens=tokens) for load in ranks
                )
            if is_busy != (worker in pool.busy):
                pool.busy = pool.busy | {worker} if is_busy else pool.busy - {worker}
        if True in judged.values():
            self._expiries[worker] = asyncio.get_running_loop().call_later(BUSY_SECONDS, self._forget, worker)

    def _forget(self, worker: int) -> None:
        self._reports.pop(worker, None)
        self._mark(worker)
