"""Finish reasons: whatever an engine reports natively becomes one of a handful of words. Pure."""

from __future__ import annotations

import logging
from typing import Any, Final

logger = logging.getLogger(__name__)

STOP: Final = "stop"
EOS: Final = "eos"
LENGTH: Final = "length"
CANCELLED: Final = "cancelled"
CONTENT_FILTER: Final = "content_filter"

_KNOWN: Final = frozenset({STOP, EOS, LENGTH, CANCELLED, CONTENT_FILTER})


class EngineFailed(Exception):
    """An engine finished with an error reason; carries its message."""


def normalise(reason: Any) -> str:
    """Return the canonical word for an engine's finish reason.

    Case and surrounding blanks do not matter. "abort" with any suffix is "cancelled", "tool_calls" is "stop" (the
    frontend decides about tool calls), and an unknown word is "stop" with a warning.

    Raises:
        EngineFailed: the reason is an error ("error", "error: text" or {"error": text}).
        TypeError: the reason is neither text nor such an object.
    """
    if isinstance(reason, dict):
        if set(reason) == {"error"}:
            raise EngineFailed(str(reason["error"]))
        raise TypeError(f'finish_reason must be text or {{"error": text}}, got an object with keys {sorted(reason)}')
    if not isinstance(reason, str):
        raise TypeError(f"finish_reason must be text, got {type(reason).__name__}")
    word = reason.strip().lower()
    if word in _KNOWN:
        return word
    if word.startswith("abort"):
        return CANCELLED
    if word == "tool_calls":
        return STOP
    if word == "error" or word.startswith("error:"):
        raise EngineFailed(reason.strip()[len("error:") :].strip() or "the engine reported an error")
    logger.warning("unknown finish_reason %r from the engine; treating it as %r", reason, STOP)
    return STOP
