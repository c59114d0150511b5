"""Where the time of one request goes: from its complete body to the last byte that was handed to the transport.

The stages follow each other without a gap, so they add up to the wall time. A stamp costs about 50 ns; there are about
ten per request and none per token.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

from dynamo.frontend.http.asgi import Headers

__all__ = [
    "FIRST_TOKEN",
    "OVERHEAD_HEADER",
    "PARSE",
    "QUEUE",
    "ROUTE",
    "STAGES",
    "TEMPLATE",
    "TOKENISE",
    "WIRE",
    "WRITE",
    "Overhead",
    "wants_overhead",
]

OVERHEAD_HEADER: Final = b"x-dynamo-overhead"

STAGES: Final = ("parse", "template", "tokenise", "queue", "route", "wire", "first_token", "write")

PARSE, TEMPLATE, TOKENISE, QUEUE, ROUTE, WIRE, FIRST_TOKEN, WRITE = range(len(STAGES))


def wants_overhead(headers: Headers) -> bool:
    """Whether the client asks to be told."""
    return headers.get(OVERHEAD_HEADER, b"0").lower() not in (b"", b"0", b"false")


class Overhead:
    """The record of one request. Stages may be entered several times (a retry, several prompts); their parts add up.

    `mark(stage)` says: what went on since the last mark was this stage. Times are those of `perf_counter`: a loop's clock
    stands still within one of its turns, and nearly all of this happens within one.
    """

    __slots__ = ("_at", "_began", "_has_arrived", "_is_answering", "dispatch_seconds", "is_wanted", "seconds")

    def __init__(self, *, is_wanted: bool = False) -> None:
        """Begins now. `is_wanted`: the client is told."""
        self._began = self._at = perf_counter()
        self._has_arrived = self._is_answering = False
        self.seconds = [0.0] * len(STAGES)
        self.dispatch_seconds = 0.0  # the part of `wire` until the request was handed to a connection
        self.is_wanted = is_wanted

    def mark(self, stage: int, now: float | None = None) -> None:
        """The time since the last mark (until `now`, when that has passed already) belongs to `stage`."""
        if now is None:
            now = perf_counter()
        self.seconds[stage] += now - self._at
        self._at = now

    # -- several choices may run at once: what counts is the first of them that gets this far ------------------------

    def routed(self) -> None:
        """A worker was picked."""
        if not self._has_arrived:
            self.mark(ROUTE)

    def dispatched(self) -> None:
        """The request was handed to a connection."""
        if not self._has_arrived:
            before = self._at
            self.mark(WIRE)
            self.dispatch_seconds += self._at - before

    def arrived(self, *, failed: bool = False) -> None:
        """The first items came, or the attempt is over and another one may follow."""
        if not self._has_arrived:
            self._has_arrived = not failed
            self.mark(WIRE)

    def answering(self) -> None:
        """The first of the answer is on its way."""
        if not self._is_answering:
            self._is_answering = True
            self.mark(FIRST_TOKEN)

    def ended(self) -> None:
        """All of the answer was handed over."""
        self.mark(WRITE)

    # -- what is told ------------------------------------------------------------------------------------------------

    def server_timing(self) -> bytes:
        """What is known now as the value of a `server-timing` header, in milliseconds; `total` is their sum.

        Stages that were not reached yet are left out; those that were and took no time stand at 0.
        """
        last = WRITE if self._is_answering else WIRE if self._has_arrived else ROUTE
        parts = [f"{STAGES[stage]};dur={self.seconds[stage] * 1000:.3f}" for stage in range(last + 1)]
        return ", ".join([*parts, f"total;dur={(self._at - self._began) * 1000:.3f}"]).encode()

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The header for a client that asked for it."""
        return ((b"server-timing", self.server_timing()),) if self.is_wanted else ()

    def comment(self) -> bytes:
        """The same at the end of an event stream, as a comment; b"" for a client that did not ask."""
        return b": server-timing " + self.server_timing() + b"\n\n" if self.is_wanted else b""
