"""Ends, or moves, a request whose workers have sent nothing for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from dynamo.errors import DynamoException, ResponseTimeout

IDLE_CHECKS_PER_TIMEOUT: Final = 10
"""In how many steps an idle time is counted. The timeout fires at most one step late."""


class _Endable(Protocol):
    def end_with(self, reason: DynamoException) -> None: ...


class IdleTimeout:
    """Fires after `limit_seconds` without output; costs one assignment (`last`) for each wake-up.

    Idle time is counted in checks of this very loop. While the loop was away (a suspended machine, a long block) it read
    nothing, and that counts as one check, however long it was.
    """

    __slots__ = ("_exchange", "_fail_over", "_idle_checks", "_limit", "_loop", "_seen", "_timer", "last")

    def __init__(self, exchange: _Endable, fail_over: Callable[[DynamoException], bool], limit_seconds: float) -> None:
        """`fail_over(error)` moves the idle streams to other workers; False when none can go on."""
        self._exchange, self._fail_over, self._limit = exchange, fail_over, limit_seconds
        self._loop = asyncio.get_running_loop()
        self.last = self._seen = self._loop.time()
        self._idle_checks = 0  # since the last output
        self._timer = self._loop.call_later(limit_seconds / IDLE_CHECKS_PER_TIMEOUT, self._check)

    def _check(self) -> None:
        if self.last != self._seen:
            self._seen, self._idle_checks = self.last, 0
        else:
            self._idle_checks += 1
        if self._idle_checks >= IDLE_CHECKS_PER_TIMEOUT:
            timeout = ResponseTimeout(f"no output for {self._limit:g} s")
            if not self._fail_over(timeout):
                self._exchange.end_with(timeout)
                return
            self._idle_checks = 0
        self._timer = self._loop.call_later(self._limit / IDLE_CHECKS_PER_TIMEOUT, self._check)

    def close(self) -> None:
        """Stop checking; idempotent."""
        self._timer.cancel()
