"""Which data-parallel rank a request was routed to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

__all__ = ["forced_dp_rank", "validate_global_dp_rank"]

logger = logging.getLogger(__name__)


def forced_dp_rank(request: Mapping[str, Any]) -> int | None:
    """The rank the router chose (`routing.dp_rank`), or None when the engine may choose. Numeric text is accepted."""
    routing = request.get("routing")
    rank = routing.get("dp_rank") if isinstance(routing, Mapping) else None
    return None if rank is None else int(rank)


def validate_global_dp_rank(rank: int | None, start: int, size: int, label: str) -> int | None:
    """`rank` if this worker hosts it, else None with a warning that begins with `label`.

    A worker with one rank has nothing to choose, so it always gets None.
    """
    if rank is None or size <= 1:
        return None
    end = start + size
    if not start <= rank < end:
        logger.warning("%s: dp_rank %d is outside [%d, %d); the engine chooses a rank itself", label, rank, start, end)
        return None
    return rank
