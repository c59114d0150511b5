"""Which faults are due: the bookkeeping of one process. Pure, but for the log."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from dynamo.chaos.plan import Fault, FaultKind
from dynamo.runtime.calls.context import Context

logger = logging.getLogger(__name__)


class Visit:
    """One request, as this process sees it."""

    __slots__ = ("chunks", "context", "items", "number")

    def __init__(self, number: int, context: Context) -> None:
        self.number, self.context = number, context
        self.chunks = 0  # that the engine has given
        self.items = 0  # that went over the connection, or came


class _Planned:
    __slots__ = ("fault", "left")

    def __init__(self, fault: Fault) -> None:
        self.fault, self.left = fault, fault.times


class FaultPlan:
    """The faults of this process that have not fired yet. Every fault that fires is a warning in the log."""

    def __init__(self, faults: Iterable[Fault], *, name: str) -> None:
        self._left = [_Planned(fault) for fault in faults]
        self._requests = 0
        logger.warning(
            "CHAOS: fault injection is on in this process (%s), %d faults are planned", name, len(self._left)
        )
        for fault in self.pending:
            logger.warning("CHAOS: planned: %s, %d x", fault, fault.times)

    @property
    def pending(self) -> list[Fault]:
        """The faults that have not fired as often as planned."""
        return [planned.fault for planned in self._left]

    def begin(self, context: Context) -> Visit:
        """Count a request that has arrived."""
        visit = Visit(self._requests, context)
        self._requests += 1
        return visit

    def due(self, visit: Visit, point: int, kinds: Collection[FaultKind]) -> list[Fault]:
        """Return the faults of these kinds that hit this request now."""
        if not self._left:
            return []
        found: list[Fault] = []
        for planned in self._left:
            fault = planned.fault
            if fault.point == point and fault.kind in kinds and _is_meant(fault, visit):
                found.append(fault)
                planned.left -= 1
                logger.warning(
                    "CHAOS: %s fires: item %d of request %d (%s)", fault.kind, point, visit.number, visit.context.id()
                )
        if found:
            self._left = [planned for planned in self._left if planned.left]
        return found


def _is_meant(fault: Fault, visit: Visit) -> bool:
    if fault.request not in (None, visit.number) or fault.request_id not in (None, visit.context.id()):
        return False
    if not fault.metadata:
        return True
    if not visit.context.has_metadata:
        return False
    brought = visit.context.metadata
    return all(brought.get(name) == value for name, value in fault.metadata)
