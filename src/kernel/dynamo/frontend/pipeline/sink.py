"""Where the answer of a call goes: an HTTP connection, a line of a batch, a caller in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from dynamo.frontend.base.asgi import HeaderPairs
from dynamo.protocol.dialect import Dialect
from dynamo.protocol.openai.errors import RequestRejected

__all__ = ["AnswerBytes", "AnswerSink", "AnswerStream", "FailureRenderer", "HeaderPairs", "OpenAnswer", "SplicedEvents"]


class SplicedEvents(Protocol):
    """Pushes events that differ only in their middle, and share what stands before and behind it."""

    pushed_at: float
    """Loop time of the last push; 0: there was none."""

    def push(self, middle: bytes, now: float) -> bool:
        """Do what `AnswerStream.push` does for `opening + middle + closing`."""

    @staticmethod
    def push_each(splicers: Sequence[object], middles: Sequence[bytes], now: float) -> Sequence[int]:
        """Push one event through each of `splicers`, which are all of this kind; return the places of those that refused it,
        in order."""


class AnswerStream(Protocol):
    """A streamed answer. Nothing is sent before the first `write`, or before the peek time is over.

    Used by one task. `write` and `end` return when the reader has room for more.
    """

    is_committed: bool
    """Whether the status is on its way; from then on an error can only be an event."""

    async def write(self, data: bytes) -> None:
        """Send `data`."""

    @property
    def can_push(self) -> bool:
        """Whether `push` may return True."""

    def push(self, data: bytes, now: float) -> bool:
        """Send `data` without waiting; False, and nothing sent, when that is not possible now. `now` is loop time."""

    def splicer(self, opening: bytes, closing: bytes) -> SplicedEvents | None:
        """Return the short way for events with these ends; None where there is only `push`."""

    async def settle(self) -> None:
        """Let what was begun to be sent get out, before an error is sent in place of the stream."""

    async def end(self, data: bytes) -> None:
        """Send the last bytes and end the answer."""

    def close(self) -> None:
        """Stop the timers; idempotent, for every path."""


class AnswerBytes(AnswerStream, Protocol):
    """A streamed answer without events."""

    async def cut(self) -> None:
        """End the connection in place of the answer, if it has begun; `end` does nothing then."""


class AnswerSink(Protocol):
    """Takes one answer: `reply`, `reject`, or a stream."""

    async def reply(
        self, status: int, body: bytes, headers: HeaderPairs = (), *, content_type: bytes = b"application/json"
    ) -> None:
        """Send a whole answer."""

    async def reject(self, rejected: RequestRejected) -> None:
        """Send the answer that `rejected` stands for."""

    def open_stream(
        self, *, peek_seconds: float, keep_alive_seconds: float | None, late_headers: Callable[[], HeaderPairs]
    ) -> AnswerStream:
        """Begin a stream; `late_headers` is called when its headers are sent."""

    def open_bytes(self, content_type: bytes, headers: HeaderPairs = ()) -> AnswerBytes:
        """Begin a stream of bytes that are no events: nothing is sent before its first `write`, and one that fails is cut."""


class FailureRenderer(Protocol):
    """Writes the end of a stream that fails once its status is sent."""

    def failed(self, rejected: RequestRejected) -> bytes | None:
        """Return the last bytes of a stream that fails; None: use those of the dialect of the API."""


class OpenAnswer(Struct, eq=False):
    """Where one answer goes: its sink, its stream if it is streamed, and what writes the stream once that is known."""

    sink: AnswerSink
    stream: AnswerStream | None = None
    renderer: FailureRenderer | None = None  # None: the dialect of the API writes the end of a failed stream

    async def reject(self, rejected: RequestRejected, dialect: Dialect, request_id: str) -> None:
        """Send the answer that `rejected` stands for: as an event where the status is on its way."""
        if (stream := self.stream) is not None:
            await stream.settle()
            if stream.is_committed:
                last = None if self.renderer is None else self.renderer.failed(rejected)
                await stream.end(dialect.stream_failure(rejected, request_id) if last is None else last)
                return
        await self.sink.reject(rejected)

    def close(self) -> None:
        """Stop the timers of the stream; idempotent."""
        if self.stream is not None:
            self.stream.close()
