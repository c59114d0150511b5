"""Drains and quarantines set by an operator: a worker gets no new requests, or only where nothing else is left.

A hold counts for the routers of this process. The worker does not get it: its requests go on, and frontends without the hold
still use the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from dynamo.placement import Candidate, CandidateList, Placement

MAX_HOLDS: Final = 4096

OnChoice = Callable[[str, Sequence[Candidate], Placement], None]
"""Gets the name of a model, the candidates of a choice, and what was chosen."""


class WorkerHold(msgspec.Struct, frozen=True):
    """Why a worker gets no new requests, or few."""

    instance_id: int
    kind: str  # "drain" or "quarantine"; "" takes back either
    by: str = ""
    reason: str = ""
    seconds: float | None = None  # how long it lasts; None: until it is taken back
    until: float | None = None  # loop time of this process; None: as `seconds`


class WorkerHolds:
    """Drains and quarantines set by an operator, for all pools of a process. Used on the event loop only."""

    __slots__ = ("by_worker", "on_choice")

    def __init__(self) -> None:
        self.by_worker: dict[int, WorkerHold] = {}  # empty: a choice need not be filtered
        self.on_choice: OnChoice | None = None
        """Called with each choice of a worker; None while nothing shows them."""

    def put(self, hold: WorkerHold, now: float) -> None:
        """Hold a worker from `now` on, in place of an earlier hold; or take that back. The oldest goes where there are too many."""
        self.by_worker.pop(hold.instance_id, None)
        if not hold.kind:
            return
        until = None if hold.seconds is None else now + hold.seconds
        self.by_worker[hold.instance_id] = msgspec.structs.replace(hold, until=until)
        if len(self.by_worker) > MAX_HOLDS:
            del self.by_worker[next(iter(self.by_worker))]

    def of(self, instance_id: int, now: float) -> WorkerHold | None:
        """Return the hold on a worker; None: there is none, or it is over."""
        hold = self.by_worker.get(instance_id)
        if hold is not None and hold.until is not None and now >= hold.until:
            del self.by_worker[instance_id]
            return None
        return hold

    def keep_only(self, present: frozenset[int]) -> None:
        """Forget the holds on workers that have left."""
        for instance_id in self.by_worker.keys() - present:
            del self.by_worker[instance_id]

    def apply(self, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """Return the candidates without the drained ones; those in quarantine count as failed."""
        holds = [hold for held in [*self.by_worker] if (hold := self.of(held, now)) is not None]
        drained = frozenset([hold.instance_id for hold in holds if hold.kind == "drain"])
        failed = {hold.instance_id for hold in holds if hold.kind == "quarantine"}
        if isinstance(candidates, CandidateList):
            kept = candidates.without(drained)
            at = [place for held in failed if (place := kept.shape.find(held)) >= 0]
            return CandidateList(kept, {each: _failed(kept[each]) for each in at}) if at else kept
        left = [each for each in candidates if each.instance_id not in drained]
        return [_failed(each) if each.instance_id in failed else each for each in left]


def _failed(candidate: Candidate) -> Candidate:
    return msgspec.structs.replace(candidate, is_circuit_open=True)


class HeldWorkers:
    """Workers that an operator may hold."""

    __slots__ = ("holds",)

    def __init__(self) -> None:
        self.holds = WorkerHolds()  # shared by the pools of a frontend
