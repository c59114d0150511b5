"""Server-sent events from bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_EVENT_BYTES: Final = 64 * 1024 * 1024  # a picture of 10,000 streams has some 5 MB


class StreamTooLong(ValueError):
    """An event that is larger than any picture: the server is not an inspector."""


@dataclass(frozen=True, slots=True)
class SentEvent:
    """One event."""

    kind: str
    data: bytes
    id: str | None = None


class EventStreamDecoder:
    """Takes lines, each as it was read with its end, and returns an event with the line that ends it.

    Of the standard: a comment is skipped, lines of data are joined with a line feed, an event without data is none, and
    what the stream ends in is dropped. Lines end in LF or CRLF; a lone CR, which no server writes, does not end one.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0
        self.last_id: str | None = None

    def feed(self, line: bytes) -> SentEvent | None:
        """Take one line. Raises StreamTooLong."""
        line = line.rstrip(b"\r\n")
        if not line:
            return self._ended()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._size += len(value)
            if self._size > MAX_EVENT_BYTES:
                raise StreamTooLong(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
            self._data.append(value)
        elif name == b"event":
            self._kind = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self.last_id = value.decode("utf-8", "replace")
        return None

    def _ended(self) -> SentEvent | None:
        kind, data = self._kind, self._data
        self._kind, self._data, self._size = "", [], 0
        return SentEvent(kind or "message", b"\n".join(data), self.last_id) if data else None
