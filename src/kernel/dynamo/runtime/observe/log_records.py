"""Log records made by hand: for code that has no logger of its own, and for a place that is passed for every request."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from dynamo.runtime.observe.logging import LogHandler

_LEVELS: Final = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def log_message(level: str, message: str, module: str, file: str, line: int) -> None:
    """Log `message` as if line `line` of `file` in `module` had; an unknown level counts as info."""
    logger = logging.getLogger(module)
    number = _LEVELS.get(level.strip().lower(), logging.INFO)
    if logger.isEnabledFor(number):
        logger.handle(logger.makeRecord(module, number, file, line, message, (), None))


# Records of one place in the code that is passed for every request, made without a search of the stack.
#
# Where our own handler is the only one that would get the record, the line is written without making it.
#
# `Logger.info` finds its caller frame by frame and takes the path of its file apart, for every record again. Where a record
# belongs to each request that is a good part of what the whole record costs, and always with the same outcome.


class LogSite:
    """Logs one message of one function. What handlers and filters get is a complete record, as `Logger.log` makes it."""

    __slots__ = ("_constant", "_function", "_line", "_logger", "_made_in", "_message", "_path")

    def __init__(self, logger: logging.Logger, message: str, function: str) -> None:
        """Name the function as the record shows it; its module is the caller's, and its line is that of this call."""
        frame = sys._getframe(1)
        self._logger, self._message, self._function = logger, message, function
        self._path, self._line = frame.f_code.co_filename, frame.f_lineno
        self._made_in: tuple[int, int, int] | None = None  # level, process and thread that `_constant` is of
        self._constant: dict[str, Any] = {}

    def log(self, level: int, fields: Mapping[str, object]) -> None:
        """Log the message with these fields, like `Logger.log` with `extra`; no field may have a name of `LogRecord`'s own.

        The caller has checked `isEnabledFor`.
        """
        if logging.getLogRecordFactory() is not logging.LogRecord:  # another library makes records of its own
            self._logger.log(level, self._message, extra=fields)
            return
        handler = _only_handler(self._logger, level)
        if handler is not None:
            try:
                is_written = handler.write_plain(self._logger.name, level, self._message, fields)
            except Exception:
                is_written = False  # the record meets the same failure, and what logging does about it
            if is_written:
                return
        place = (level, os.getpid(), threading.get_ident())
        if place != self._made_in:
            made = self._logger.makeRecord(
                self._logger.name, level, self._path, self._line, self._message, (), None, self._function
            )
            self._made_in, self._constant = place, vars(made)
        now = time.time()
        record = logging.LogRecord.__new__(logging.LogRecord)
        values = record.__dict__
        values |= self._constant
        values["created"] = now
        values["msecs"] = (now - int(now)) * 1000 // 1 + 0.0
        values["relativeCreated"] += (now - self._constant["created"]) * 1000
        values |= fields
        self._logger.handle(record)


def _only_handler(logger: logging.Logger, level: int) -> LogHandler | None:
    """Return the handler of ours that is all that sees the records of `logger` at `level`; None where something else does, too.

    A handler of a higher level, such as one that gathers errors, is passed over: it would not see the record either.
    """
    if logger.disabled or logger.filters:
        return None
    found: logging.Handler | None = None
    current: logging.Logger | None = logger
    while current is not None:
        for handler in current.handlers:
            if handler.level <= level:
                if found is not None:
                    return None
                found = handler
        current = current.parent if current.propagate else None
    return found if found.__class__ is LogHandler else None
