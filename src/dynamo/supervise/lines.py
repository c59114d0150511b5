"""Bytes of a pipe into lines of bounded length."""

from __future__ import annotations

import re
from typing import Final

from dynamo.runtime.log_text import one_line, without_colours

__all__ = ["MAX_LINE_BYTES", "LineSplitter"]

MAX_LINE_BYTES: Final = 64 * 1024  # a JSON log record with its traceback fits; a dumped tensor does not
CUT: Final = " ... (line cut)"

_ENDS: Final = re.compile(rb"[\r\n]")  # progress bars return without a new line


class LineSplitter:
    """Turns the bytes that arrive into whole lines of at most `limit` bytes each, without empty lines.

    Control characters are escaped and colours removed: the lines of several processes end up on one terminal, where the
    output of one process must not pass for that of another.
    """

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._is_cut = False

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        first, *rest = _ENDS.split(data)
        self._append(first)
        lines: list[str] = []
        for piece in rest:
            lines += self.finish()
            self._append(piece)
        return lines

    def finish(self) -> list[str]:
        """Return the line that was begun, if any: the pipe has ended."""
        text = without_colours(self._buffer.decode("utf-8", errors="replace"))
        line = one_line(text, self._limit) + (CUT if self._is_cut else "")
        self._buffer.clear()
        self._is_cut = False
        return [line] if line.strip() else []

    def _append(self, piece: bytes) -> None:
        room = self._limit - len(self._buffer)
        self._buffer += piece[:room]
        self._is_cut |= len(piece) > room
