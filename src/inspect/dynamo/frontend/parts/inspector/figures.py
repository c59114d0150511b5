"""The figures of a frontend over the last five minutes: a slot each five seconds, which can be added up over processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import add
from typing import Final

import msgspec
from msgspec import Struct

from dynamo.frontend.base.metrics.requests import RequestTotals
from dynamo.protocol.inspector.views import CountersView

SLOT_SECONDS: Final = 5.0
HISTORY_SLOTS: Final = 60  # five minutes
MINUTE_SLOTS: Final = 12

Bounds = tuple[Sequence[float], Sequence[float]]
"""Of the buckets of first tokens and of the gaps between tokens."""


class Slot(Struct):
    """What was counted in one span of time."""

    number: int  # of its end: the time of the system clock in units of a slot
    seconds: float
    started: float = 0.0
    ended: float = 0.0
    failed: float = 0.0
    refused: float = 0.0
    shed: float = 0.0
    input_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    running: float = 0.0  # at its end
    waiting: float = 0.0  # at its end
    kv_used: int = 0  # blocks, at its end, of workers that report them
    kv_total: int = 0
    first_token: list[int] = []
    inter_token: list[int] = []


_SUMS: Final = (
    "started", "ended", "failed", "refused", "shed", "input_tokens", "cached_tokens", "output_tokens", "running",
    "waiting",
)  # fmt: skip


def _difference(number: int, seconds: float, before: RequestTotals, after: RequestTotals) -> Slot:
    """Return what was counted between two moments. A total that fell is that of a model that has gone."""

    def grown(name: str) -> float:
        return max(0.0, float(getattr(after, name) - getattr(before, name)))

    def more(old: list[int], new: list[int]) -> list[int]:
        return [max(0, late - early) for early, late in zip(old, new, strict=True)] if old else list(new)

    return Slot(
        number,
        seconds,
        started=grown("started"),
        ended=grown("ended"),
        failed=grown("failed"),
        refused=grown("refused"),
        shed=grown("shed"),
        input_tokens=grown("input_tokens"),
        cached_tokens=grown("cached_tokens"),
        output_tokens=grown("output_tokens"),
        running=after.running,
        waiting=after.waiting,
        first_token=more(before.first_token, after.first_token),
        inter_token=more(before.inter_token, after.inter_token),
    )


class FigureRing:
    """The slots of one process. `sample` ends one."""

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque(maxlen=HISTORY_SLOTS)
        self._last: RequestTotals | None = None
        self._last_at = 0.0

    def sample(self, totals: RequestTotals, now: float, number: int, kv: tuple[int, int] = (0, 0)) -> None:
        """End a slot at `now`, the time of the loop. The first sample only begins one."""
        if self._last is not None and now > self._last_at:
            slot = _difference(number, now - self._last_at, self._last, totals)
            slot.kv_used, slot.kv_total = kv
            self._slots.append(slot)
        self._last, self._last_at = totals, now

    def with_open(self, totals: RequestTotals, now: float, number: int, kv: tuple[int, int] = (0, 0)) -> list[Slot]:
        """Return the slots, and what was counted since the last one as one more; the newest is last."""
        if self._last is None or now <= self._last_at:
            open_slot = Slot(number, 0.0, running=totals.running, waiting=totals.waiting)
        else:
            open_slot = _difference(number, now - self._last_at, self._last, totals)
        open_slot.kv_used, open_slot.kv_total = kv
        return [*self._slots, open_slot]


def add_slots(members: Sequence[Sequence[Slot]]) -> list[Slot]:
    """Return the slots of several processes as those of one, by their numbers."""
    if len(members) == 1:
        return list(members[0])
    found: dict[int, list[Slot]] = {}
    for slots in members:
        own: dict[int, Slot] = {}
        for slot in slots:  # the open slot may end in the same unit of time as the last whole one
            own[slot.number] = slot if slot.number not in own else _merged(own[slot.number], slot, is_same_time=False)
        for number, slot in own.items():
            found.setdefault(number, []).append(slot)
    result = []
    for number in sorted(found)[-HISTORY_SLOTS - 1 :]:
        merged, *others = found[number]
        for slot in others:
            merged = _merged(merged, slot, is_same_time=True)
        result.append(merged)
    return result


def _merged(one: Slot, other: Slot, *, is_same_time: bool) -> Slot:
    """Return two slots as one: of two processes at the same time, or of one process one after the other."""
    merged = msgspec.structs.replace(one, seconds=max(one.seconds, other.seconds))
    for name in _SUMS:
        setattr(merged, name, getattr(one, name) + getattr(other, name))
    merged.first_token = _add(one.first_token, other.first_token)
    merged.inter_token = _add(one.inter_token, other.inter_token)
    if not is_same_time:
        merged.seconds = one.seconds + other.seconds
        merged.running, merged.waiting = other.running, other.waiting
    # Blocks are the workers', which every process sees: the most that one of them knows of.
    merged.kv_used, merged.kv_total = max((one.kv_total, one.kv_used), (other.kv_total, other.kv_used))[::-1]
    return merged


def _add(one: list[int], other: list[int]) -> list[int]:
    return list(map(add, one, other)) if one and other else list(one or other)


def counters_of(slots: Sequence[Slot], bounds: Bounds) -> CountersView:
    """Return the figures of some slots, the newest last. `running` and `waiting` are those of its end."""
    seconds = sum([slot.seconds for slot in slots])
    ended, input_tokens = (sum([getattr(slot, name) for slot in slots]) for name in ("ended", "input_tokens"))
    last = slots[-1] if slots else Slot(0, 0.0)

    def rate(name: str) -> float:
        return round(sum([getattr(slot, name) for slot in slots]) / seconds, 3) if seconds else 0.0

    def total(name: str) -> list[int]:
        result: list[int] = []
        for slot in slots:
            result = _add(result, getattr(slot, name))
        return result

    first, inter = total("first_token"), total("inter_token")
    return CountersView(
        requests_per_second=rate("started"),
        input_tokens_per_second=rate("input_tokens"),
        output_tokens_per_second=rate("output_tokens"),
        running=int(last.running),
        waiting=int(last.waiting),
        ttft_p50_seconds=quantile(0.5, bounds[0], first),
        ttft_p99_seconds=quantile(0.99, bounds[0], first),
        itl_p50_seconds=quantile(0.5, bounds[1], inter),
        itl_p99_seconds=quantile(0.99, bounds[1], inter),
        error_share=round(sum([slot.failed for slot in slots]) / ended, 5) if ended else None,
        refused_share=round(sum([slot.refused for slot in slots]) / ended, 5) if ended else None,
        shed_per_second=rate("shed"),
        kv_share=round(last.kv_used / last.kv_total, 4) if last.kv_total else None,
        prefix_hit_share=round(sum([slot.cached_tokens for slot in slots]) / input_tokens, 4) if input_tokens else None,
    )


def now_of(slots: Sequence[Slot], bounds: Bounds) -> CountersView:
    """Return the figures of the last minute."""
    return counters_of(slots[-MINUTE_SLOTS - 1 :], bounds)


def history_of(slots: Sequence[Slot], bounds: Bounds) -> dict[str, list[float | None]]:
    """Return the figures of each whole slot, by the names of `CountersView`."""
    found = [counters_of([slot], bounds) for slot in slots[:-1]]
    return {name: [getattr(one, name) for one in found] for name in CountersView.__struct_fields__} if found else {}


def quantile(share: float, bounds: Sequence[float], counts: Iterable[int]) -> float | None:
    """Return the value below which a share of what was observed lies, as Prometheus reckons it; None: nothing was observed.

    It lies within a bucket, in proportion; past the last bound it is that bound.
    """
    buckets = list(counts)
    total = sum(buckets)
    if not total:
        return None
    wanted, seen, low = share * total, 0, 0.0
    for bound, count in zip(bounds, buckets, strict=False):
        if count and seen + count >= wanted:
            return round(low + (bound - low) * (wanted - seen) / count, 6)
        seen, low = seen + count, bound
    return bounds[-1]
