"""Bytes of a pipe into lines of bounded length."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_LINE_BYTES", "LineSplitter"]

MAX_LINE_BYTES: Final = 8 * 1024  # a traceback line or a JSON log record fits; a dumped tensor does not
CUT: Final = " ... (line cut)"

_ENDS: Final = re.compile(rb"[\r\n]")  # progress bars return without a new line


class LineSplitter:
    """Feed it what arrives; it gives whole lines, each at most `limit` bytes. Empty lines are left out."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._is_cut = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        first, *rest = _ENDS.split(data)
        self._append(first)
        lines: list[str] = []
        for piece in rest:
            lines += self.finish()
            self._append(piece)
        return lines

    def finish(self) -> list[str]:
        """The line that was begun, if any: the pipe has ended."""
        line = self._buffer.decode("utf-8", errors="replace") + (CUT if self._is_cut else "")
        self._buffer.clear()
        self._is_cut = False
        return [line] if line.strip() else []

    def _append(self, piece: bytes) -> None:
        room = self._limit - len(self._buffer)
        self._buffer += piece[:room]
        self._is_cut |= len(piece) > room
