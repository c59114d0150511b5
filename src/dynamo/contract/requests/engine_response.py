"""What engines say at the end of a stream, in the contract's words."""

from __future__ import annotations

__all__ = ["normalize_finish_reason"]


def normalize_finish_reason(finish_reason: str) -> str:
    """Turn any `abort...` into `cancelled`; leave every other reason alone."""
    return "cancelled" if finish_reason.startswith("abort") else finish_reason
