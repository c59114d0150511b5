"""Does the work of this process go on: what runs, since when nothing came of it, and how late the event loop is.

One timer a second, and only while requests run, so an idle process pays nothing and a token nothing at all: every response
counts what was sent anyway, and the timer looks at these counts.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dynamo.runtime.request_plane.base import ResponseSink

__all__ = ["BEAT_SECONDS", "ServingProgress"]

BEAT_SECONDS: Final = 1.0


class _Mark:
    """What was known of one request at the last beat."""

    __slots__ = ("beats", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.beats = 0  # since it grew


class ServingProgress:
    """Watches the requests of the endpoints that requested it. Use it on the event loop; only reading is for other
    threads.

    Silence is counted in beats of this very loop. While it was away (a suspended machine, an engine that blocks it) nobody
    could have said anything, and that is one beat, however long it was.
    """

    def __init__(self, limit_seconds: float) -> None:
        """`limit_seconds`: after so long without anything from any request, `trouble` returns a reason; 0: never."""
        self._limit_seconds = limit_seconds
        self._running: dict[ResponseSink, _Mark] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._answered = False  # since the last beat one ended by itself
        self._silent_beats = 0
        self._longest_beats = 0
        self.loop_lag_seconds = 0.0  # of the last beat

    def entered(self, sink: ResponseSink) -> None:
        """Count a request that runs from now on."""
        self._running[sink] = _Mark()
        if self._timer is None:
            self._beat_later()

    def left(self, sink: ResponseSink, *, is_answered: bool) -> None:
        """Drop a request that has ended; `is_answered`: by itself, and not because its caller gave up."""
        self._running.pop(sink, None)
        self._answered = self._answered or is_answered
        if not self._running:  # no request is silent now; the timer ends by itself, as requests may follow closely
            self._silent_beats = self._longest_beats = 0
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
        return self._silent_beats * BEAT_SECONDS

    @property
    def longest_silence_seconds(self) -> float:
        """The same of the one request that has been silent for longest."""
        return self._longest_beats * BEAT_SECONDS

    def trouble(self) -> str | None:
        """Return why this process is not able to serve; None while the work goes on."""
        if not self._limit_seconds or self.silent_seconds < self._limit_seconds:
            return None
        return f"{len(self._running)} request(s), none of them has had a token for {self.silent_seconds:.0f} s"

    def _beat_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + BEAT_SECONDS
        self._timer = loop.call_at(self._due, self._beat)

    def _beat(self) -> None:
        if not self._running:
            self._timer = None
            self.loop_lag_seconds = 0.0
            return
        self.loop_lag_seconds = max(0.0, asyncio.get_running_loop().time() - self._due)
        moved, could_speak, longest = self._answered, False, 0
        for sink, mark in self._running.items():
            sent = sink.response_bytes
            if sent != mark.sent:
                mark.sent, mark.beats, moved = sent, 0, True
            elif sink.has_credit():
                mark.beats += 1
                could_speak = True
                longest = max(longest, mark.beats)
            else:
                mark.beats = 0  # its caller does not read: that is not the engine's silence
        self._answered = False
        self._silent_beats = 0 if moved or not could_speak else self._silent_beats + 1
        self._longest_beats = longest
        self._beat_later()
