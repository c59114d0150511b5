"""What an operator says of workers: no new requests (a drain), or only where nothing else is left (a quarantine).

It holds for the routers of this process. A worker knows nothing of it: its requests go on, and frontends that were not told
still use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from dynamo.placement import Candidate, Placement

__all__ = ["MAX_HOLDS", "OperatedWorkers", "OperatorDesk", "WorkerHold"]

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


class OperatorDesk:
    """The holds of one process, shared by all pools. Empty, it costs a choice one test. Used on the event loop only."""

    __slots__ = ("holds", "on_choice")

    def __init__(self) -> None:
        self.holds: dict[int, WorkerHold] = {}
        self.on_choice: OnChoice | None = None
        """Called with each choice of a worker, while somebody wants to know of them."""

    def put(self, hold: WorkerHold, now: float) -> None:
        """Hold a worker from `now` on, in place of an earlier hold; or take that back. The oldest goes where there are too many."""
        self.holds.pop(hold.instance_id, None)
        if not hold.kind:
            return
        until = None if hold.seconds is None else now + hold.seconds
        self.holds[hold.instance_id] = msgspec.structs.replace(hold, until=until)
        if len(self.holds) > MAX_HOLDS:
            del self.holds[next(iter(self.holds))]

    def of(self, instance_id: int, now: float) -> WorkerHold | None:
        """Return the hold on a worker; None: there is none, or it is over."""
        hold = self.holds.get(instance_id)
        if hold is not None and hold.until is not None and now >= hold.until:
            del self.holds[instance_id]
            return None
        return hold

    def keep_only(self, present: frozenset[int]) -> None:
        """Forget the holds on workers that have left."""
        for instance_id in self.holds.keys() - present:
            del self.holds[instance_id]

    def apply(self, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """Return the candidates without the drained ones; those in quarantine count as failed."""
        found = []
        for each in candidates:
            hold = self.of(each.instance_id, now)
            if hold is None:
                found.append(each)
            elif hold.kind == "quarantine":
                found.append(msgspec.structs.replace(each, is_circuit_open=True))
        return found


class OperatedWorkers:
    """Workers that an operator may hold."""

    __slots__ = ("desk",)

    def __init__(self) -> None:
        self.desk = OperatorDesk()  # a shared one, where somebody operates them
