"""The thread that writes records: it makes, redacts and encodes them, so that the event loop only hands them over."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dynamo.frontend.base.redaction import Redact
from dynamo.frontend.base.settings.request_trace import RequestTraceSettings
from dynamo.frontend.parts.recording.trace_files import RecordSink, open_sinks

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 5.0
SCHEMA: Final = "dynamo.request.trace.v1"

MakeRecords = Callable[[], list[dict[str, Any]]]


class TraceWriter:
    """Takes what makes the records of one request. It never waits: what finds no room is dropped and counted."""

    def __init__(
        self, settings: RequestTraceSettings, redact: Redact | None, dropped: Callable[[str, int], None]
    ) -> None:
        """`dropped` gets the reason ("full", "redaction", "failed", "unwritable") and how many; in either thread."""
        self._settings, self._redact, self._dropped = settings, redact, dropped
        self._sinks: list[RecordSink] = open_sinks(settings)
        self._waiting: deque[MakeRecords] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._has_complained = False
        self._thread: threading.Thread | None = None
        self._began = time.time()

    def put(self, make: MakeRecords) -> None:
        """Write the records that `make` returns, soon. `make` runs in the writer's thread."""
        if len(self._waiting) >= self._settings.capacity or self._is_closing:
            self._dropped("full", 1)
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
        except Exception:
            self._complain("a record of a request could not be made", shows_error=True)
            self._dropped("failed", 1)
            return []
        return [line for record in records if (line := self._line(record)) is not None]

    def _line(self, record: dict[str, Any]) -> bytes | None:
        """Return a record as a line; None: it is dropped."""
        now = time.time()
        event = {"schema": SCHEMA, "event_time_unix_ms": int(now * 1000), "event_source": "dynamo"}
        made: dict[str, Any] | None = {"timestamp": int((now - self._began) * 1000), "event": {**event, **record}}
        try:
            if self._redact is not None:
                made = self._redact(made or {})
            return None if made is None else msgspec.json.encode(made)
        except Exception as error:
            # Whatever the function meant to take out is still in there, and may be in the error's text, too.
            kind = type(error).__name__
            self._complain(f"a record was dropped, because DYN_REQUEST_TRACE_REDACT failed for it with {kind}")
            self._dropped("redaction", 1)
            return None

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            for sink in self._sinks:
                self._try(lambda sink=sink: sink.write(lines), len(lines))  # type: ignore[misc]

    def _try(self, write: Callable[[], None], count: int) -> None:
        try:
            write()
        except OSError as error:
            self._complain(f"the request trace cannot be written: {error}")
            self._dropped("unwritable", count)

    def _complain(self, text: str, *, shows_error: bool = False) -> None:
        """Log the first failure; the metric counts them all."""
        if not self._has_complained:
            self._has_complained = True
            logger.error("%s (further failures are only counted)", text, exc_info=shows_error)
