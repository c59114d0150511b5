"""Which data-parallel rank a request was routed to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dynamo.contract.requests.invalid import InvalidRequest

__all__ = ["forced_dp_rank", "validate_global_dp_rank"]

logger = logging.getLogger(__name__)


def forced_dp_rank(request: Mapping[str, Any]) -> int | None:
    """Return the rank that the router chose (`routing.dp_rank`), or None when the engine may choose.

    Numeric text is accepted. Raises InvalidRequest for anything else that is not a number.
    """
    routing = request.get("routing")
    rank = routing.get("dp_rank") if isinstance(routing, Mapping) else None
    try:
        return None if rank is None else int(rank)
    except (TypeError, ValueError):
        raise InvalidRequest(f"routing.dp_rank must be an integer, got {rank!r}") from None


def validate_global_dp_rank(dp_rank: int | None, dp_start: int, dp_size: int, backend_label: str) -> int | None:
    """Return `dp_rank` if this worker hosts it, else None with a warning that begins with `backend_label`.

    A worker with one rank has nothing to choose, so it always gets None.
    """
    if dp_rank is None or dp_size <= 1:
        return None
    end = dp_start + dp_size
    if not dp_start <= dp_rank < end:
        logger.warning(
            "%s: dp_rank %d is outside [%d, %d); the engine chooses a rank", backend_label, dp_rank, dp_start, end
        )
        return None
    return dp_rank
