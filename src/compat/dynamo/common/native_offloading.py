"""How many tokens an engine's own offloading of KV blocks holds, as an entry of the model card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

__all__ = [
    "NATIVE_OFFLOADING_CAPACITY_RUNTIME_KEY",
    "get_native_offloading_capacity_tokens",
    "native_offloading_capacity",
]

NATIVE_OFFLOADING_CAPACITY_RUNTIME_KEY: Final = "native_offloading_capacity"


def native_offloading_capacity(total_tokens: object) -> dict[str, int] | None:
    """Return the entry for a capacity; None for what is not a number above 0."""
    is_number = isinstance(total_tokens, int | float) and not isinstance(total_tokens, bool)
    if not is_number or not math.isfinite(total_tokens) or total_tokens < 1:  # type: ignore[arg-type, operator]
        return None
    return {"total_tokens": int(total_tokens)}  # type: ignore[call-overload]


def get_native_offloading_capacity_tokens(runtime_data: object) -> int | None:
    """Return the capacity that a card's runtime data has, or None."""
    entry = runtime_data.get(NATIVE_OFFLOADING_CAPACITY_RUNTIME_KEY) if isinstance(runtime_data, Mapping) else None
    found = native_offloading_capacity(entry.get("total_tokens")) if isinstance(entry, Mapping) else None
    return found["total_tokens"] if found else None
