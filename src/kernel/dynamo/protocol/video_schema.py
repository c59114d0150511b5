"""The routes for videos in the OpenAPI document, from the type that decodes their requests."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from dynamo.protocol.openai.schema import ApiDescription, describe_read, generation_errors, json_content
from dynamo.protocol.videos import VideoRequest


class VideoObject(Struct):
    id: str
    object: str
    model: str
    status: str
    progress: int
    created_at: int
    seconds: str
    size: str
    data: list[dict[str, Any]] | None = None


class VideoList(Struct):
    object: str
    data: list[VideoObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class VideoDeleted(Struct):
    id: str
    object: str
    deleted: bool


_FORM: Final = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["model", "prompt"],
            "properties": {name: {"type": "string"} for name in ("model", "prompt", "seconds", "size")},
        }
    }
}
_ID: Final = [{"name": "video_id", "in": "path", "required": True, "schema": {"type": "string"}}]
_GONE: Final = {404: "There is no such video, or videos are not kept.", 422: "It is not in this version."}


def _read(operation: str, summary: str, answer: str) -> dict[str, Any]:
    return {**describe_read(operation, summary, answer, errors=_GONE), "parameters": _ID}


VIDEOS_API: Final = ApiDescription(
    [VideoRequest, VideoObject, VideoList, VideoDeleted],
    {
        "/v1/videos": {
            "post": {
                "operationId": "createVideo",
                "summary": "Make a video of a prompt",
                "requestBody": {"required": True, "content": {**json_content("VideoRequest"), **_FORM}},
                "responses": {
                    "200": {"description": "The video.", "content": json_content("VideoObject")},
                    **generation_errors("ErrorBody"),
                },
            },
            "get": describe_read("listVideos", "List the videos that are kept", "VideoList", errors=_GONE),
        },
        "/v1/videos/{video_id}": {
            "get": _read("retrieveVideo", "Show a video", "VideoObject"),
            "delete": _read("deleteVideo", "Delete a video", "VideoDeleted"),
        },
    },
)
