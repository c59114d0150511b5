"""The finish reasons of engines, in the contract's words."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["normalize_finish_reason", "trailing_stop_prefix_len"]


def normalize_finish_reason(finish_reason: str) -> str:
    """Turn any `abort...` into `cancelled`; leave every other reason alone."""
    return "cancelled" if finish_reason.startswith("abort") else finish_reason


def trailing_stop_prefix_len(text: str, stop_strings: Collection[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a stop string, or a whole one."""
    longest = min(len(text), max(map(len, stop_strings), default=0))
    return next(
        (size for size in range(longest, 0, -1) if any(stop.startswith(text[-size:]) for stop in stop_strings)), 0
    )
