"""In which order the parked requests of one policy class are dispatched."""

from __future__ import annotations

import math
from enum import StrEnum

OrderKey = tuple[int, float, float, int]
"""What the heaps of parked requests compare: the smallest key goes first."""


class QueueOrder(StrEnum):
    """The order within a class; the values are those of `queue_policy` and `--router-queue-policy`."""

    FCFS = "fcfs"
    """First come, first served. A priority of n moves a request ahead by n seconds."""
    WSPT = "wspt"
    """Weighted shortest processing time first: the fewest uncached tokens for each point of priority."""
    DLPM = "dlpm"
    """Tenants in turn, and of one tenant what has the longest cached prefix (`TenantLanes`)."""
    LCFS = "lcfs"
    """Last come, first served. For comparisons through the library: no flag and no file can name it."""


def order_key(
    order: QueueOrder,
    *,
    strict_priority: int,
    priority: float,
    arrived_at: float,
    uncached_tokens: int,
    number: int,
    due: float | None = None,
) -> OrderKey:
    """Return the key of a request. `number` counts the arrivals: it decides between requests that are equal otherwise.

    A higher `strict_priority` always goes first, then what is `due` first; None: after all that are due. A negative `priority`
    counts as 0.
    """
    jump = max(0, priority)
    match order:
        case QueueOrder.FCFS | QueueOrder.DLPM:
            score = jump - arrived_at
        case QueueOrder.LCFS:
            score = jump + arrived_at
        case QueueOrder.WSPT:
            score = (1 + jump) / max(1, uncached_tokens)
    return -strict_priority, math.inf if due is None else due, -score, number
