"""The bytes of the events of a streamed response."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.protocol.openai.escaping import json_text


class EventNumbers:
    """Writes events, and numbers them from 0 without a gap."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, members: bytes) -> bytes:
        """Return an event; `members` is JSON without braces, beside the type and the number."""
        name, number = kind.encode(), self._next
        self._next = number + 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (name, name, number, members)

    def repeated(self, kind: str, members: bytes, last: bytes) -> Callable[[bytes], bytes]:
        """Return what writes events of one kind that differ in the value of their last member, which is JSON."""
        name = kind.encode()
        head = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)
        middle = b",%b,%b:" % (members, json_text(last.decode()))

        def write(value: bytes) -> bytes:
            number = self._next
            self._next = number + 1
            return b"%b%d%b%b}\n\n" % (head, number, middle, value)

        return write
