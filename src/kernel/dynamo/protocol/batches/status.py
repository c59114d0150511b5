"""The states of a batch, and the only moves between them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class BatchStatus(enum.StrEnum):
    """Where a batch is. The values are those of the API."""

    VALIDATING = "validating"
    FAILED = "failed"  # its input was refused: no line was executed
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"  # every line has its result; the result files are being written
    COMPLETED = "completed"  # also when lines failed
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing will happen to the batch any more."""
        return not TRANSITIONS[self]


TRANSITIONS: Final[Mapping[BatchStatus, frozenset[BatchStatus]]] = {
    BatchStatus.VALIDATING: frozenset({BatchStatus.FAILED, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING}),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.EXPIRED}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED}),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}

CANCELLABLE: Final = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
