"""The file and batch objects, as answers carry them. Times are whole seconds since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

BATCH_INPUT: Final = "batch"
BATCH_OUTPUT: Final = "batch_output"  # of files that only a batch makes
PURPOSES: Final = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")


class FileObject(Struct, kw_only=True):
    """One stored file."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | UnsetType = UNSET  # left out where the file never expires
    filename: str
    purpose: str
    status: str = "processed"


class BatchErrorEntry(Struct):
    """One reason why an input file was refused."""

    code: str
    message: str
    line: int | None = None  # of the input file, from 1; None: it concerns the whole file
    param: str | None = None


class BatchErrors(Struct):
    data: list[BatchErrorEntry]
    object: str = "list"


class BatchRequestCounts(Struct):
    """Lines of a batch. They count what is on the disk for good, so no figure ever goes down."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(Struct):
    cached_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int = 0


class BatchUsage(Struct):
    """Tokens of all answered lines."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = msgspec.field(default_factory=InputTokensDetails)
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)
    total_tokens: int = 0


class BatchObject(Struct, kw_only=True):
    """One batch. A time is None until what it names has happened."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None  # None: not known yet, or several
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchRequestCounts = msgspec.field(default_factory=BatchRequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None
    paused: str | None = None  # ours: why no line is executed now, as the process that runs the batch sees it


def encode_object(value: Any) -> bytes:
    """Return an object as the body of an answer."""
    return msgspec.json.encode(value)


def list_page(found: Sequence[FileObject | BatchObject], *, has_more: bool) -> bytes:
    """Return one page of a list as the body of an answer."""
    return msgspec.json.encode(
        {
            "object": "list",
            "data": found,
            "first_id": found[0].id if found else None,
            "last_id": found[-1].id if found else None,
            "has_more": has_more,
        }
    )
