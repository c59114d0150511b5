"""The warnings and errors of this process by request, the last ones: what a bundle of a failed request shows of the log."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from typing import Final

from dynamo.runtime.observe.logging import fields_of, format_readable

__all__ = ["RequestLogLines"]

MAX_REQUESTS: Final = 512
MAX_LINES: Final = 20  # of one request: the last ones
MAX_CHARACTERS: Final = 4000  # of one record, its traceback included: the first and the last ones
_OURS: Final = "dynamo"


class RequestLogLines(logging.Handler):
    """Keeps records from WARNING on that belong to a request. May be called in any thread.

    It is attached to our own loggers, so what an engine's libraries log without a request's fields is not in it.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: OrderedDict[str, deque[str]] = OrderedDict()

    def attach(self) -> None:
        """Begin to keep lines. Idempotent."""
        logging.getLogger(_OURS).addHandler(self)

    def detach(self) -> None:
        """Keep no more lines. Idempotent."""
        logging.getLogger(_OURS).removeHandler(self)

    def take(self, request_id: str) -> list[str]:
        """Return the lines of a request, and forget them."""
        with self.lock or logging.Lock():  # type: ignore[attr-defined]
            return list(self._lines.pop(request_id, ()))

    def emit(self, record: logging.LogRecord) -> None:
        request_id = fields_of(record).get("request_id")
        if not isinstance(request_id, str):
            return
        line = format_readable(record)
        if len(line) > MAX_CHARACTERS:
            half = MAX_CHARACTERS // 2
            line = f"{line[:half]} ...(cut)... {line[-half:]}"
        lines = self._lines.get(request_id)
        if lines is None:
            if len(self._lines) >= MAX_REQUESTS:
                self._lines.popitem(last=False)
            lines = self._lines[request_id] = deque(maxlen=MAX_LINES)
        lines.append(line)
