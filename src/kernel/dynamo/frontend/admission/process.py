"""How many requests may be in flight, and whether new ones are welcome at all.

There is no queue here on purpose: a request without a slot is rejected within microseconds, with Retry-After, and the
engine's own bounded queue is the only place where requests wait. Those that arrive together wait some turns of the loop for
each other (`Slices`).
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Mapping
from typing import Final

from dynamo.errors import DynamoException, Overloaded


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


# Preparing a request takes half a millisecond and no step of it waits. Without slices, of hundreds that arrive at once the first
# would be sent to its worker only after the last one was prepared, as sockets are written between turns; and the tokens of all
# running streams would wait as long.
AT_ONCE: Final = 8
"""Requests that begin in one turn: about 4 ms of work."""
SHORT_BYTES: Final = 16 * 1024
"""A request with a longer body lets shorter ones go first, but for one in each turn."""


class Slices:
    """Determines which requests begin in this turn of the loop. Used on one loop only, by requests that were admitted."""

    __slots__ = ("_left", "_long", "_short")

    def __init__(self) -> None:
        self._left = AT_ONCE
        # Bounded by the places of the frontend: a request has one before it comes here.
        self._short: deque[asyncio.Future[None]] = deque()
        self._long: deque[asyncio.Future[None]] = deque()

    def takes(self) -> bool:
        """Return whether a request may begin now. If not, it waits for its `turn`."""
        if self._left == AT_ONCE:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._left -= 1
        return self._left >= 0

    async def turn(self, body_bytes: int) -> None:
        """Wait until a request may begin. One that is cancelled meanwhile takes no place of a turn."""
        begins = asyncio.get_running_loop().create_future()
        (self._short if body_bytes <= SHORT_BYTES else self._long).append(begins)
        await begins

    def _next_turn(self) -> None:
        self._left = AT_ONCE
        if not (self._short or self._long):
            return
        asyncio.get_running_loop().call_soon(self._next_turn)
        if self._long:
            self._begin(self._long)
        while self._left > 0 and (waiting := self._short or self._long):
            self._begin(waiting)
        self._left = 0  # what arrives in this turn is behind those that wait

    def _begin(self, waiting: deque[asyncio.Future[None]]) -> None:
        begins = waiting.popleft()
        if not begins.done():  # else its task was cancelled
            self._left -= 1
            begins.set_result(None)
