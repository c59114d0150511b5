"""The file and batch objects, as answers carry them, and their routes in the OpenAPI document.

Times are whole seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from dynamo.protocol.openai.schema import (
    ApiDescription,
    Content,
    describe_operation,
    json_content,
    path_parameter,
    query_parameter,
)

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


# The Files and Batches APIs in the OpenAPI document.


class FileList(Struct):
    data: list[FileObject]
    object: str
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class BatchList(Struct):
    data: list[BatchObject]
    object: str
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class FileDeleted(Struct):
    id: str
    object: str
    deleted: bool


class BatchOutputExpiry(Struct):
    anchor: str
    seconds: int


class BatchRequest(Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: BatchOutputExpiry | None = None


_REFUSED: Final = {400: "A field breaks a rule.", 404: "There is no such object."}


def _operation(
    operation: str,
    summary: str,
    content: Content,
    errors: dict[int, str],
    *,
    body: Content | None = None,
    parameters: Sequence[Content] = (),
) -> dict[str, object]:
    failures = {
        str(status): {"description": text, "content": json_content("ErrorBody")}
        for status, text in {**errors, 501: "Files and batches are switched off."}.items()
    }
    return describe_operation(operation, summary, content, body=body, parameters=parameters, errors=failures)


_UPLOAD: Final = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
}
_AFTER: Final = query_parameter("after", {"type": "string"})

BATCHES_API: Final = ApiDescription(
    [FileObject, BatchObject, FileList, BatchList, FileDeleted, BatchRequest],
    {
        "/v1/files": {
            "post": _operation(
                "uploadFile", "Upload a file", json_content("FileObject"),
                {400: "A field breaks a rule.", 413: "The file is too large.", 415: "No form.", 507: "The disk is full."},
                body={"multipart/form-data": {"schema": _UPLOAD}},
            ),
            "get": _operation(
                "listFiles", "The files, in pages", json_content("FileList"), _REFUSED,
                parameters=[
                    _AFTER,
                    query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}),
                    query_parameter("order", {"type": "string", "enum": ["asc", "desc"]}),
                    query_parameter("purpose", {"type": "string"}),
                ],
            ),
        },
        "/v1/files/{file_id}": {
            "get": _operation(
                "getFile", "One file", json_content("FileObject"), {404: "No such file."}, parameters=[path_parameter("file_id")]
            ),
            "delete": _operation(
                "deleteFile", "Delete a file", json_content("FileDeleted"),
                {404: "No such file.", 409: "A batch that has not ended reads it."}, parameters=[path_parameter("file_id")],
            ),
        },
        "/v1/files/{file_id}/content": {
            "get": _operation(
                "getFileContent", "The bytes of a file",
                {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
                {404: "No such file.", 416: "The range is not within the file."}, parameters=[path_parameter("file_id")],
            )
        },
        "/v1/batches": {
            "post": _operation(
                "createBatch", "Execute the lines of a file", json_content("BatchObject"),
                {**_REFUSED, 415: "No JSON.", 422: "The endpoint is not built.", 429: "Too many batches have not ended."},
                body=json_content("BatchRequest"),
            ),
            "get": _operation(
                "listBatches", "The batches, the newest first", json_content("BatchList"), _REFUSED,
                parameters=[_AFTER, query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": 100})],
            ),
        },
        "/v1/batches/{batch_id}": {
            "get": _operation(
                "getBatch", "One batch", json_content("BatchObject"), {404: "No such batch."},
                parameters=[path_parameter("batch_id")],
            )
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": _operation(
                "cancelBatch", "Cancel a batch", json_content("BatchObject"),
                {404: "No such batch.", 409: "The batch has ended."}, parameters=[path_parameter("batch_id")],
            )
        },
    },
)  # fmt: skip
