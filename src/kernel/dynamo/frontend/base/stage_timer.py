"""Where the time of one request goes: from its complete body to the last byte that was handed to the transport.

The stages follow each other without a gap, so they add up to the wall time. A stamp costs about 50 ns; there are about
ten per request and none per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final

OVERHEAD_HEADER: Final = b"x-dynamo-overhead"

STAGES: Final = ("parse", "template", "tokenise", "queue", "route", "wire", "first_token", "write")

PARSE, TEMPLATE, TOKENISE, QUEUE, ROUTE, WIRE, FIRST_TOKEN, WRITE = range(len(STAGES))


def wants_stage_times(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the client requests the stage times in its answer."""
    return OVERHEAD_HEADER in headers and headers[OVERHEAD_HEADER].lower() not in (b"", b"0", b"false")


class StageTimer:
    """The stage times of one request. A stage may be entered several times (a retry, several prompts); its parts add up.

    `mark(stage)` books the time since the last mark to `stage`. The clock is `perf_counter`, because a loop's clock stands
    still within one of its turns, and nearly all of this happens within one.
    """

    __slots__ = (
        "_at", "_began", "_clock", "_has_arrived", "_is_answering", "dispatch_seconds", "is_wanted", "on_dispatch",
        "seconds",
    )  # fmt: skip

    def __init__(self, *, is_wanted: bool = False, clock: Callable[[], float] = perf_counter) -> None:
        """Begin now. `is_wanted`: the client gets the times in a header, or in a comment at the end of its stream."""
        self._clock = clock
        self._began = self._at = clock()
        self._has_arrived = self._is_answering = False
        self.seconds = [0.0] * len(STAGES)
        self.dispatch_seconds = 0.0  # the part of `wire` until the request was handed to a connection
        self.is_wanted = is_wanted
        self.on_dispatch: Callable[[], None] | None = None
        """Called each time the request was handed to a connection; for the phase of the exchange."""

    def mark(self, stage: int) -> float:
        """Book the time since the last mark to `stage`. Return when the stage has ended: now."""
        before, self._at = self._at, self._clock()
        self.seconds[stage] += self._at - before
        return self._at

    def mark_until(self, stage: int, ended: float) -> None:
        """Do as `mark` for a stage that ended at a time that was noted elsewhere."""
        self.seconds[stage] += ended - self._at
        self._at = ended

    # -- several choices may run at once: what counts is the first of them that gets this far ------------------------

    def routed(self) -> None:
        """Book the time of choosing a worker."""
        if not self._has_arrived:
            before, self._at = self._at, self._clock()
            self.seconds[ROUTE] += self._at - before

    def dispatched(self) -> None:
        """Record the moment at which the request was handed to a connection."""
        if self.on_dispatch is not None:
            self.on_dispatch()
        if not self._has_arrived:
            before, self._at = self._at, self._clock()
            seconds = self._at - before
            self.seconds[WIRE] += seconds
            self.dispatch_seconds += seconds

    def arrived(self, *, failed: bool = False) -> None:
        """Note the first items, or the end of an attempt that another attempt may follow (`failed`)."""
        if not self._has_arrived:
            self._has_arrived = not failed
            before, self._at = self._at, self._clock()
            self.seconds[WIRE] += self._at - before

    def again(self) -> None:
        """Book what follows as the way to a first token: what has come of the answer is not sent, another model makes one."""
        self._has_arrived = self._is_answering = False

    def answering(self) -> None:
        """Record the moment at which the first part of the answer is on its way."""
        if not self._is_answering:
            self._is_answering = True
            before, self._at = self._at, self._clock()
            self.seconds[FIRST_TOKEN] += self._at - before

    def ended(self) -> None:
        """Record the moment at which all of the answer was handed over."""
        before, self._at = self._at, self._clock()
        self.seconds[WRITE] += self._at - before

    # -- what a client reads ------------------------------------------------------------------------------------------------

    def server_timing(self) -> bytes:
        """Return the times known now as the value of a `server-timing` header, in milliseconds; `total` is their sum.

        Stages that were not reached yet are left out; a stage that was reached and took no time is 0.
        """
        last = WRITE if self._is_answering else WIRE if self._has_arrived else ROUTE
        parts = [f"{STAGES[stage]};dur={self.seconds[stage] * 1000:.3f}" for stage in range(last + 1)]
        return ", ".join([*parts, f"total;dur={(self._at - self._began) * 1000:.3f}"]).encode()

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return the header for a client that requests it; () for any other."""
        return ((b"server-timing", self.server_timing()),) if self.is_wanted else ()

    def comment(self) -> bytes:
        """Return the times as a comment at the end of an event stream; b"" for a client that does not request them."""
        return b": server-timing " + self.server_timing() + b"\n\n" if self.is_wanted else b""
