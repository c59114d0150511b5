"""Whether the work of this process goes on: the running requests, for how long none has sent anything, the lag of the event loop.

One timer a second, and only while requests run, so an idle process pays nothing and a token nothing at all: every response
counts what was sent anyway, and the timer reads these counts.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dynamo.runtime.calls.request_plane.base import ResponseSink

CHECK_SECONDS: Final = 1.0


class _Mark:
    """One request at the last check."""

    __slots__ = ("idle_checks", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.idle_checks = 0  # since it grew


class ServingProgress:
    """Watches the requests of the endpoints that requested it. Use it on the event loop; only reading is for other
    threads.

    Idle time is counted in checks by this very event loop. While the loop stood still (a suspended machine, an engine that blocks
    it) no request could have sent anything, and that is one check, however long it was.
    """

    def __init__(self, limit_seconds: float) -> None:
        """`limit_seconds`: after so long without anything from any request, `trouble` returns a reason; 0: never."""
        self._limit_seconds = limit_seconds
        self._running: dict[ResponseSink, _Mark] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._answered = False  # since the last check one ended by itself
        self._idle_checks = 0
        self._longest_idle_checks = 0
        self.loop_lag_seconds = 0.0  # of the last check

    def entered(self, sink: ResponseSink) -> None:
        """Count a request that runs from now on."""
        self._running[sink] = _Mark()
        if self._timer is None:
            self._check_later()

    def left(self, sink: ResponseSink, *, is_answered: bool) -> None:
        """Drop a request that has ended; `is_answered`: by itself, and not because its caller gave up."""
        self._running.pop(sink, None)
        self._answered = self._answered or is_answered
        if not self._running:  # no request is idle now; the timer ends by itself, as requests may follow closely
            self._idle_checks = self._longest_idle_checks = 0
            self._answered = False

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def silent_seconds(self) -> float:
        """For how long no request has produced output, although some running request could have."""
        return self._idle_checks * CHECK_SECONDS

    @property
    def longest_silence_seconds(self) -> float:
        """The same of the one request that has been idle for longest."""
        return self._longest_idle_checks * CHECK_SECONDS

    def trouble(self) -> str | None:
        """Return why this process is not able to serve; None while the work goes on."""
        if not self._limit_seconds or self.silent_seconds < self._limit_seconds:
            return None
        return f"{len(self._running)} request(s), none of them has had a token for {self.silent_seconds:.0f} s"

    def _check_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + CHECK_SECONDS
        self._timer = loop.call_at(self._due, self._check)

    def _check(self) -> None:
        if not self._running:
            self._timer = None
            self.loop_lag_seconds = 0.0
            return
        self.loop_lag_seconds = max(0.0, asyncio.get_running_loop().time() - self._due)
        moved, could_send, longest = self._answered, False, 0
        for sink, mark in self._running.items():
            sent = sink.response_bytes
            if sent != mark.sent:
                mark.sent, mark.idle_checks, moved = sent, 0, True
            elif sink.has_credit():
                mark.idle_checks += 1
                could_send = True
                longest = max(longest, mark.idle_checks)
            else:
                mark.idle_checks = 0  # its caller does not read, which is no fault of the engine
        self._answered = False
        self._idle_checks = 0 if moved or not could_send else self._idle_checks + 1
        self._longest_idle_checks = longest
        self._check_later()
