"""Which store a frontend has, from its settings."""

from __future__ import annotations

import logging
from pathlib import Path

from dynamo.frontend.parts.stored_responses.base import ResponseStore, StoreLimits
from dynamo.frontend.parts.stored_responses.memory import MemoryResponseStore

__all__ = ["IN_MEMORY", "OFF", "SQLITE", "open_response_store", "read_store_place"]

logger = logging.getLogger(__name__)

IN_MEMORY = "memory"
OFF = "off"
SQLITE = "sqlite:"


def read_store_place(given: str) -> str:
    """Check where responses are to be kept. Raises ValueError."""
    if given in (IN_MEMORY, OFF) or (given.startswith(SQLITE) and given != SQLITE):
        return given
    raise ValueError(f"{given!r} is not {IN_MEMORY}, {OFF} or {SQLITE}FILE")


def open_response_store(place: str, limits: StoreLimits, *, is_shared_port: bool) -> ResponseStore | None:
    """Open the store; None where nothing is kept. `is_shared_port`: other processes take requests on the same port.

    Raises InvalidArgument for a file that cannot be opened.
    """
    if place.startswith(SQLITE):
        from dynamo.frontend.parts.stored_responses.sqlite import (
            SqliteResponseStore,  # a frontend without a file does without
        )

        return SqliteResponseStore(Path(place.removeprefix(SQLITE)).expanduser(), limits)
    if place == OFF:
        return None
    if is_shared_port:
        logger.info(
            "responses are not stored: each of several processes would find only its own (--responses-store sqlite:FILE)"
        )
        return None
    return MemoryResponseStore(limits)
