"""How many lines run at once in this process, and whose turn it is: owner by owner, then batch by batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from dynamo.frontend.base.shares import SharedBound


class FairSlots:
    """Slots that go to the owner that was served longest ago, and there to the batch that was served longest ago.

    A batch takes one slot at a time, so a large one waits behind a small one for one line, and not for all of them.
    """

    def __init__(self, bound: SharedBound, begin: Callable[[], float] = lambda: 0.0) -> None:
        """`bound`: how many slots there are. `begin` is called for each slot that could be taken, and returns 0.0, or in
        how many seconds to try again.
        """
        self._bound, self._begin = bound, begin
        self._asks_again: asyncio.TimerHandle | None = None
        self._turns = count(1)
        self._served: dict[
            str, int
        ] = {}  # of the owners and batches that wait or have run: the turn of their last slot
        self._waiting: dict[str, tuple[str, asyncio.Future[None]]] = {}  # by batch

    async def acquire(self, owner: str, batch_id: str) -> None:
        """Wait for a slot; give it back with `release`, once."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[batch_id] = (owner, waiter)
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            if self._waiting.pop(batch_id, None) is None and not waiter.cancelled():
                self.release(owner)  # it was granted in the same turn of the loop
            raise

    def release(self, owner: str) -> None:
        """Give a slot back."""
        self._bound.give_back(owner)
        self._grant()

    def forget(self, owner: str, batch_id: str) -> None:
        """Forget a batch that has ended, and its owner when no other batch of theirs waits."""
        self._served.pop(f"batch {batch_id}", None)
        if all(other != owner for other, _ in self._waiting.values()):
            self._served.pop(f"owner {owner}", None)

    def _grant(self) -> None:
        while self._asks_again is None:
            admitted = [batch_id for batch_id, (owner, _) in self._waiting.items() if self._bound.may_take(owner)]
            if not admitted:
                return
            pause = self._begin()
            if pause > 0.0:
                self._asks_again = asyncio.get_running_loop().call_later(pause, self._ask_again)
                return
            batch_id = min(admitted, key=self._turn_of)
            owner, waiter = self._waiting.pop(batch_id)
            self._served[f"owner {owner}"] = self._served[f"batch {batch_id}"] = next(self._turns)
            if not waiter.done():
                self._bound.take(owner)
                waiter.set_result(None)

    def _ask_again(self) -> None:
        self._asks_again = None
        self._grant()

    def _turn_of(self, batch_id: str) -> tuple[int, int]:
        owner = self._waiting[batch_id][0]
        return self._served.get(f"owner {owner}", 0), self._served.get(f"batch {batch_id}", 0)
