"""Where responses are kept, and how many."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

IN_MEMORY: Final = "memory"
OFF: Final = "off"
SQLITE: Final = "sqlite:"


class StoreLimits(Struct, frozen=True):
    """How much is kept. What was used longest ago goes first."""

    entries: int
    bytes: int
    ttl_seconds: float


def read_store_place(given: str) -> str:
    """Check where responses are to be kept. Raises ValueError."""
    if given in (IN_MEMORY, OFF) or (given.startswith(SQLITE) and given != SQLITE):
        return given
    raise ValueError(f"{given!r} is not {IN_MEMORY}, {OFF} or {SQLITE}FILE")
