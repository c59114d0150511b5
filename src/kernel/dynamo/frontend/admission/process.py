"""How many requests may be in flight, and whether new ones are welcome at all.

There is no queue here on purpose: a request without a slot is rejected within microseconds, with Retry-After, and the
engine's own bounded queue is the only place where requests wait. Those that arrive together wait some turns of the loop for
each other (`slices`).
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping
from typing import Final

from dynamo.errors import DynamoException, Overloaded
from dynamo.frontend.admission.slices import Slices


class Stage(enum.Enum):
    """Where a frontend is in its life."""

    SERVING = "serving"
    LEAVING = "leaving"  # not ready any more; what comes before balancers have noticed is served
    DRAINING = "draining"  # no new request; what is in flight goes on
    STOPPING = "stopping"  # the listener is about to close


TRANSITIONS: Final[Mapping[Stage, frozenset[Stage]]] = {
    Stage.SERVING: frozenset({Stage.LEAVING, Stage.DRAINING, Stage.STOPPING}),
    Stage.LEAVING: frozenset({Stage.DRAINING, Stage.STOPPING}),
    Stage.DRAINING: frozenset({Stage.STOPPING}),
    Stage.STOPPING: frozenset(),  # nothing leaves it
}

OPEN: Final = (Stage.SERVING, Stage.LEAVING)  # requests are taken; a tuple, as the first comparison is by identity


class NotReady(DynamoException):
    """The frontend is draining or stopping: another frontend should be tried (503)."""

    def __init__(self) -> None:
        super().__init__("Service is not ready")


class Admission:
    """Counts places. Used on the event loop only.

    `enter` takes a place or raises; the caller gives the place back with `leave`, once, on every path.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self.limit = limit
        self.processes = 1
        """How many processes have the limit together."""
        self.in_flight = 0
        self.stage = Stage.SERVING
        self.slices = Slices()
        """When requests that have a place begin."""
        self._idle: asyncio.Event | None = None

    def free(self) -> int:
        """Return how many places no request has."""
        return self.limit - self.in_flight

    def enter(self) -> None:
        """Take a place. Raises `NotReady` once draining began, `Overloaded` when all places are taken."""
        if self.stage not in OPEN:
            raise NotReady
        if self.in_flight >= self.limit:
            raise Overloaded
        self.in_flight += 1

    def leave(self) -> None:
        """Give the place back."""
        self.in_flight -= 1
        if self.in_flight == 0 and self._idle is not None:
            self._idle.set()

    def move(self, stage: Stage) -> None:
        """Go on to `stage`; staying where it is does nothing. Raises ValueError for a move the table does not know."""
        if stage is self.stage:
            return
        if stage not in TRANSITIONS[self.stage]:
            raise ValueError(f"a frontend cannot go from {self.stage.value} to {stage.value}")
        self.stage = stage

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no request is in flight; return whether that happened in time."""
        if self.in_flight == 0:
            return True
        self._idle = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
