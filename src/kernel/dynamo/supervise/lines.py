"""Bytes of a pipe into lines of bounded length, and such lines into JSON records."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Final

from dynamo.runtime.observe.log_text import one_line, without_colours

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


def record_of(process: str, line: str, *, level: str = "INFO") -> str:
    """Return a line of a process as a JSON record that names it: its own record, or one made of its words."""
    try:
        record = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        moment = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
        record = {"time": f"{moment}Z", "level": level, "target": process, "message": line}
    record["process"] = process
    return json.dumps(record)  # ASCII only: half a character in an escape could not be written
