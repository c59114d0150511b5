"""The rows of the index: a file and a batch, each with what no answer shows."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from dynamo.protocol.batches.objects import BatchObject, FileObject
from dynamo.protocol.batches.status import TRANSITIONS, BatchStatus

_TIMES: Final = {
    BatchStatus.FAILED: "failed_at",
    BatchStatus.IN_PROGRESS: "in_progress_at",
    BatchStatus.CANCELLING: "cancelling_at",
    BatchStatus.FINALIZING: "finalizing_at",
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLED: "cancelled_at",
}


class FileRecord(Struct, kw_only=True):
    """A stored file."""

    file: FileObject
    owner: str  # the project whose keys see it; empty: all clients
    sha256: str


class BatchRecord(Struct, kw_only=True):
    """A batch, and what its runner has to remember across a restart."""

    batch: BatchObject
    owner: str
    key_id: str = ""  # of the key that made it; empty: there are no keys
    output_expires_seconds: int | None = None
    ending: str | None = None  # the state in which it will end, once every line has its result
    models: list[str] = []  # that were served when a line named them: such a line waits for its workers to come back

    @property
    def status(self) -> BatchStatus:
        return BatchStatus(self.batch.status)

    def enter(self, status: BatchStatus, now: float) -> None:
        """Go on to `status`. Raises ValueError for a move that the table of states does not have."""
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"batch {self.batch.id} cannot go from {self.batch.status} to {status}")
        self.batch.status = status.value
        setattr(self.batch, _TIMES[status], int(now))
