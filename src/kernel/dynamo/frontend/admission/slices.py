"""Requests that arrive together are begun a few at a time, with a turn of the loop in between.

Preparing a request takes half a millisecond and no step of it waits. Without this, of hundreds that arrive at once the first
would be sent to its worker only after the last one was prepared, as sockets are written between turns; and the tokens of all
running streams would wait as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

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
