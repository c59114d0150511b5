"""One request between the passes, which bring its tokens, and the generator, which yields them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynamo.errors import DynamoException


class MockStream:
    """The tokens of one request that have not been yielded yet. Used on the event loop only."""

    __slots__ = ("_error", "_waiter", "arrived", "began_at", "is_complete", "last_at", "prompt", "rank")

    def __init__(self, rank: int, prompt: Sequence[int], began_at: float) -> None:
        self.rank = rank
        self.prompt = prompt
        self.began_at = began_at
        self.last_at = 0.0  # when its last token came
        self.arrived: list[int] = []
        self.is_complete = False  # the last token is in `arrived`, or was taken
        self._error: DynamoException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def fail(self, error: DynamoException) -> None:
        """End it with an error, behind the tokens that have arrived."""
        self._error = self._error or error
        self.wake()

    def wake(self, _killed: bool = False) -> None:
        """Let `wait` return."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until there are tokens, or `wake`. Raises what `fail` was given."""
        if not self.arrived and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None and not self.arrived:
            raise self._error
