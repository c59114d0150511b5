"""The thread that writes records: it makes, redacts and encodes them, so that the event loop only hands them over."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from dynamo.frontend.base.redaction import Redact
from dynamo.frontend.base.settings.recording import RequestTraceSettings
from dynamo.runtime.base.forever import Failed, counted

logger = logging.getLogger(__name__)

_GZIP: Final = 31  # zlib's window bits for a gzip member

CLOSE_SECONDS: Final = 5.0
SCHEMA: Final = "dynamo.request.trace.v1"
MakeRecords = Callable[[], list[dict[str, Any]]]


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


def _uncounted(error: Exception, delay_seconds: float) -> None:
    return


class _Losses:
    """Counts what is not written, and logs the first failure."""

    def __init__(self, dropped: Callable[[str, int], None]) -> None:
        self.dropped = dropped
        self.count_failure: Failed = _uncounted  # of the loop that runs
        self._has_complained = False

    def failed(self, error: Exception, reason: str, count: int, text: str, *, shows_error: bool = False) -> None:
        """Count a failure; the first one is in the log."""
        self.count_failure(error, 0.0)
        if not self._has_complained:
            self._has_complained = True
            logger.error("%s (further failures are only counted)", text, exc_info=shows_error)
        self.dropped(reason, count)


class TraceWriter:
    """Takes what makes the records of one request. It never waits: what finds no room is dropped and counted."""

    def __init__(
        self, settings: RequestTraceSettings, redact: Redact | None, dropped: Callable[[str, int], None]
    ) -> None:
        """`dropped` gets the reason ("full", "redaction", "failed", "unwritable") and how many; in either thread."""
        self._settings, self._redact, self._losses = settings, redact, _Losses(dropped)
        self._sinks: list[RecordSink] = open_sinks(settings)
        self._waiting: deque[MakeRecords] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._began = time.time()

    def put(self, make: MakeRecords) -> None:
        """Write the records that `make` returns, soon. `make` runs in the writer's thread."""
        if len(self._waiting) >= self._settings.capacity or self._is_closing:
            self._losses.dropped("full", 1)
            return
        self._waiting.append(make)
        if 2 * len(self._waiting) >= self._settings.capacity:
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dynamo-request-trace", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the rest, within 5 s. Blocks."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    # -- in the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with counted("frontend: request trace") as self._losses.count_failure:
            while True:
                self._wake.wait(self._settings.flush_seconds)
                is_last = self._is_closing
                self._wake.clear()
                self._write_waiting()
                if is_last:
                    for sink in self._sinks:
                        self._try(sink.close, 0)
                    return

    def _write_waiting(self) -> None:
        lines: list[bytes] = []
        size = 0
        while self._waiting:
            for line in self._lines(self._waiting.popleft()):
                lines.append(line)
                size += len(line)
            if size >= self._settings.buffer_bytes:
                self._write(lines)
                lines, size = [], 0
        self._write(lines)

    def _lines(self, make: MakeRecords) -> list[bytes]:
        try:
            records = make()
        except Exception as error:
            self._losses.failed(error, "failed", 1, "a record of a request could not be made", shows_error=True)
            return []
        return [line for record in records if (line := self._line(record)) is not None]

    def _line(self, record: dict[str, object]) -> bytes | None:
        """Return a record as a line; None: it is dropped."""
        now = time.time()
        event = {"schema": SCHEMA, "event_time_unix_ms": int(now * 1000), "event_source": "dynamo"}
        made: dict[str, object] | None = {"timestamp": int((now - self._began) * 1000), "event": {**event, **record}}
        try:
            if self._redact is not None:
                made = self._redact(made or {})
            return None if made is None else msgspec.json.encode(made)
        except Exception as error:
            # Whatever the function meant to take out is still in there, and may be in the error's text, too.
            kind = type(error).__name__
            text = f"a record was dropped, because DYN_REQUEST_TRACE_REDACT failed for it with {kind}"
            self._losses.failed(error, "redaction", 1, text)
            return None

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            for sink in self._sinks:
                self._try(lambda sink=sink: sink.write(lines), len(lines))  # type: ignore[misc]

    def _try(self, write: Callable[[], None], count: int) -> None:
        try:
            write()
        except Exception as error:  # the boundary: also a defect in here must not end the thread
            text, is_defect = f"the request trace cannot be written: {error}", not isinstance(error, OSError)
            self._losses.failed(error, "unwritable", count, text, shows_error=is_defect)
