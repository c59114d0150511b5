"""Gauges of single workers as one frontend sees them: their reported load, and the last request that each answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dynamo.runtime.observe.metrics import Family, Gauge, MetricsRegistry, set_each

NO_RANK: Final = "none"  # as the native frontend labels what is not of one rank
MAX_WORKERS: Final = 4096

_LAST: Final = ("time_to_first_token_seconds", "input_sequence_tokens", "inter_token_latency_seconds")
_LOAD: Final = ("active_decode_blocks", "active_prefill_tokens")


class WorkerGauges:
    """Keeps the gauges of the workers that exist. `worker_id` is the instance id in lower-case hex."""

    def __init__(self, registry: MetricsRegistry, families: Mapping[str, Family]) -> None:
        """`families`: by name without prefix; those of `worker_...` are taken."""
        self._registry = registry
        self._families = {short: families[f"worker_{short}"] for short in _LOAD}
        self._families |= {short: families[f"worker_last_{short}"] for short in _LAST}
        self._gauges: dict[int, dict[tuple[str, str], Gauge]] = {}  # by worker, then (name, rank)
        self._last: dict[int, tuple[Gauge, ...]] = {}  # by worker, those of `_LAST` in its order
        self._roles: dict[int, str] = {}

    def answered(self, worker_id: int, first_token_seconds: float, input_tokens: int, itl_seconds: float) -> None:
        """Note the last request that a worker answered; `itl_seconds` is its mean time between tokens."""
        last = self._last.get(worker_id)
        if last is None:
            found = [self._gauge(worker_id, short, NO_RANK) for short in _LAST]
            last = tuple([gauge for gauge in found if gauge is not None])
            if len(last) < len(_LAST):
                return
            self._last[worker_id] = last
        set_each(last, (first_token_seconds, input_tokens, itl_seconds))

    def loaded(self, worker_id: int, dp_rank: int, decode_blocks: int | None, prefill_tokens: int | None) -> None:
        """Note the load that one rank reported."""
        for short, value in zip(_LOAD, (decode_blocks, prefill_tokens), strict=True):
            if value is not None and (gauge := self._gauge(worker_id, short, str(dp_rank))) is not None:
                gauge.set(value)

    def keep_only(self, roles: Mapping[int, str]) -> None:
        """Learn the workers that exist and their roles; the gauges of the others go."""
        for worker_id in self._gauges.keys() - roles.keys():
            self._last.pop(worker_id, None)
            for gauge in self._gauges.pop(worker_id).values():
                self._registry.remove(gauge)
        self._roles = dict(roles)

    def _gauge(self, worker_id: int, short: str, dp_rank: str) -> Gauge | None:
        role = self._roles.get(worker_id)
        if role is None:
            return None  # it has left, and its gauges with it
        held = self._gauges.get(worker_id)
        if held is None:
            if len(self._gauges) >= MAX_WORKERS:
                return None
            held = self._gauges[worker_id] = {}
        gauge = held.get((short, dp_rank))
        if gauge is None:
            # A worker that does both is a "decode" one on these gauges, as on 1.6.1's.
            kind = "decode" if role == "aggregated" else role
            labels = {"worker_id": f"{worker_id:x}", "dp_rank": dp_rank, "worker_type": kind}
            gauge = held[short, dp_rank] = self._families[short].gauge(self._registry, labels)
        return gauge
