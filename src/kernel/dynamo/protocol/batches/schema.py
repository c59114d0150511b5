"""The Files and Batches APIs in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from dynamo.protocol.batches.objects import BatchObject, FileObject
from dynamo.protocol.openai.schema import (
    ApiDescription,
    Content,
    describe_operation,
    json_content,
    path_parameter,
    query_parameter,
)


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
