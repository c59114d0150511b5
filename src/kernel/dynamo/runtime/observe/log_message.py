"""One log record on behalf of code that has no logger of its own."""

from __future__ import annotations

import logging
from typing import Final

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
