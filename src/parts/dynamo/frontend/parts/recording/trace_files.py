"""Where records go: numbered files, plain or compressed, or standard error. Used by one thread."""

from __future__ import annotations

import os
import sys
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from dynamo.frontend.base.settings.request_trace import RequestTraceSettings

_GZIP: Final = 31  # zlib's window bits for a gzip member


class RecordSink(Protocol):
    """Takes lines."""

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines without their line breaks, so that a reader finds them. Raises OSError."""

    def close(self) -> None:
        """Write the rest. Raises OSError."""


def open_sinks(settings: RequestTraceSettings) -> list[RecordSink]:
    """Return the sinks that the settings name; files are made with their first record."""
    made: dict[str, RecordSink] = {"file": _Files(settings), "stderr": _StandardError()}
    return [made[name] for name in settings.sinks]


class _StandardError:
    def write(self, lines: Sequence[bytes]) -> None:
        sys.stderr.buffer.write(b"".join([line + b"\n" for line in lines]))
        sys.stderr.buffer.flush()

    def close(self) -> None:
        pass


class _Files:
    """PATH.PID.NUMBER.jsonl, the next number once a file is long enough.

    A compressed file is flushed with each write, so that it can be read while it grows, and after a kill to its last write.
    """

    def __init__(self, settings: RequestTraceSettings) -> None:
        self._settings = settings
        self._suffix = "jsonl.gz" if settings.format == "jsonl_gz" else "jsonl"
        self._names: deque[str] = deque()
        self._descriptor: int | None = None
        self._number = self._bytes = self._lines = 0
        self._packer: zlib._Compress | None = None

    def write(self, lines: Sequence[bytes]) -> None:
        limit_bytes, limit_lines = self._settings.roll_bytes, self._settings.roll_lines
        pending: list[bytes] = []
        for line in lines:
            is_full = self._bytes >= limit_bytes or (limit_lines is not None and self._lines >= limit_lines)
            if self._descriptor is not None and is_full:
                self._put(pending)
                pending = []
                self._end_file()
            if self._descriptor is None:
                self._begin_file()
            pending += (line, b"\n")
            self._bytes += len(line) + 1
            self._lines += 1
        self._put(pending)

    def close(self) -> None:
        self._end_file()

    def _begin_file(self) -> None:
        name = f"{os.path.expanduser(self._settings.path)}.{os.getpid()}.{self._number:06}.{self._suffix}"
        # No file that is there, and no link: the default directory is one that every user may write to.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        self._number += 1
        self._descriptor = os.open(name, flags, 0o600)
        self._bytes = self._lines = 0
        self._packer = zlib.compressobj(wbits=_GZIP) if self._settings.format == "jsonl_gz" else None
        self._names.append(name)
        while len(self._names) > self._settings.max_files:
            oldest = self._names.popleft()
            if os.path.exists(oldest):
                os.unlink(oldest)

    def _put(self, pieces: Sequence[bytes]) -> None:
        if self._descriptor is None or not pieces:
            return
        data = b"".join(pieces)
        if self._packer is not None:
            data = self._packer.compress(data) + self._packer.flush(zlib.Z_SYNC_FLUSH)
        _write_all(self._descriptor, data)

    def _end_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if self._packer is not None:
                _write_all(descriptor, self._packer.flush())
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
