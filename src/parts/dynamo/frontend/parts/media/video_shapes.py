"""`/v1/videos`: the request as a typed value, its rules, the object of a video, and the description of its routes."""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from dynamo.errors import Unknown
from dynamo.protocol.forms import FormShape
from dynamo.protocol.images import ImageReference, check_size
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.reader import RequestReader
from dynamo.protocol.openai.schema import (
    ApiDescription,
    describe_operation,
    describe_read,
    generation_errors,
    json_content,
)
from dynamo.protocol.openai.shapes import I64, MediaPart, NvExt
from dynamo.protocol.vectors.requests import ResultRequest, check_choice, check_result_request, client_body, refuse

MAX_PROMPT_CHARACTERS: Final = 32_000
MAX_SECONDS: Final = 600
MAX_PAGE: Final = 100
_SECONDS: Final = re.compile(r"[0-9]{1,4}")
_DATA_URL: Final = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,")


class VideoNvExt(NvExt, forbid_unknown_fields=True):
    """The extension object, with what diffusion engines take."""

    fps: I64 | None = None
    num_frames: I64 | None = None
    negative_prompt: str | None = None
    num_inference_steps: I64 | None = None
    guidance_scale: float | None = None
    seed: I64 | None = None


class VideoRequest(ResultRequest, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's members, and those of 1.6.1."""

    prompt: str
    input_reference: str | ImageReference | None = None
    seconds: I64 | str | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    nvext: VideoNvExt | None = None


class AnyVideo(VideoRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


VIDEOS: Final = RequestReader(VideoRequest, AnyVideo)
VIDEO_FORM: Final = FormShape(files=frozenset({"input_reference"}))


def validate_video(request: VideoRequest) -> None:
    """Refuse a request that breaks a rule."""
    check_result_request(request)
    if not request.prompt.strip():
        refuse("Prompt cannot be empty or whitespace only", "prompt")
    if len(request.prompt) > MAX_PROMPT_CHARACTERS:
        refuse(f"Prompt must have at most {MAX_PROMPT_CHARACTERS} characters, got {len(request.prompt)}", "prompt")
    given = request.seconds
    if isinstance(given, str) and _SECONDS.fullmatch(given) is None:
        refuse(f"Seconds must be a whole number, got '{given[:64]}'", "seconds")
    if given is not None and not 1 <= int(given) <= MAX_SECONDS:
        refuse(f"Seconds must be between 1 and {MAX_SECONDS}, got {given}", "seconds")
    check_size(request.size)
    check_choice("response_format", request.response_format, ("url", "b64_json"))


def reference_image(request: VideoRequest) -> list[MediaPart]:
    """Return the image that the video begins with, if there is one."""
    given = request.input_reference
    if given is None:
        return []
    url = given if isinstance(given, str) else given.image_url
    return [MediaPart("image", url, None, "input_reference", is_upload=True)]


def video_body(request: VideoRequest, image: str | None) -> dict[str, Any]:
    """Return the worker's request: the client's own, with seconds as a number and the content of its image."""
    body = client_body(request)
    if request.seconds is not None:
        body["seconds"] = int(request.seconds)
    if image is not None:
        body["input_reference"] = image
    return body


class MadeVideo(Struct):
    """What a worker has made: its entry, and the content where that is here."""

    entry: dict[str, Any]
    content_type: str = ""
    content: bytes | None = None  # None: the entry names a URL elsewhere


def read_video(answer: Any, max_bytes: int) -> MadeVideo | None:
    """Return the video in an object of a worker; None: it only reports progress. Raises Unknown for any other object."""
    if not isinstance(answer, Mapping):
        raise Unknown("the worker did not answer with an object")
    data = answer.get("data")
    if not data and answer.get("status") in ("queued", "in_progress"):
        return None
    if not isinstance(data, list) or len(data) != 1 or not isinstance(data[0], Mapping):
        raise Unknown("the worker did not answer with `data` of one video")
    entry = dict(data[0])
    encoded, url = entry.get("b64_json"), entry.get("url")
    content_type = f"video/{entry.get('output_format') or 'mp4'}"
    if entry.get("output_format") in ("apng", "gif", "webp"):
        content_type = f"image/{entry['output_format']}"
    if encoded is None and isinstance(url, str) and (head := _DATA_URL.match(url[:128])) is not None:
        content_type, encoded = head[1], url[head.end() :]
    if encoded is None and isinstance(url, str) and url:
        return MadeVideo(entry)
    if not isinstance(encoded, str) or not encoded:
        raise Unknown("the worker's video has neither `b64_json` nor `url`")
    if len(encoded) > max_bytes:
        raise Unknown(f"the worker's video has more than {max_bytes} bytes")
    try:
        return MadeVideo(entry, content_type, binascii.a2b_base64(encoded, strict_mode=True))
    except ValueError as error:
        raise Unknown(f"the worker's video is not base64: {error}") from error


def video_object(
    id: str, request: VideoRequest, made: Mapping[str, Any], created: int, completed: int
) -> dict[str, Any]:
    """Return the object of a finished video, without its content; `made` is what the worker reports of it."""
    size = made.get("size")
    seconds = made.get("seconds")
    found: dict[str, Any] = {
        "id": id,
        "object": "video",
        "model": request.model,
        "status": "completed",
        "progress": 100,
        "created": created,
        "created_at": created,
        "completed_at": completed,
        "prompt": request.prompt,
        "seconds": str(request.seconds if seconds is None else seconds),
        "size": size if isinstance(size, str) else request.size or "auto",
        "error": None,
    }
    if isinstance(time := made.get("inference_time_s"), int | float):
        found["inference_time_s"] = time
    return found


class VideoPage(Struct, frozen=True):
    """Which part of a list is requested."""

    limit: int = 20
    after: str | None = None
    is_descending: bool = True


def video_page(query: Mapping[str, Sequence[str]]) -> VideoPage:
    """Return the part of a list that a query selects. Raises RequestRejected (400)."""
    limit, order = query.get("limit", ["20"])[0], query.get("order", ["desc"])[0]
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_PAGE:
        raise RequestRejected(400, f"limit must be between 1 and {MAX_PAGE}", param="limit")
    if order not in ("asc", "desc"):
        raise RequestRejected(400, "order must be asc or desc", param="order")
    return VideoPage(int(limit), query.get("after", [None])[0], order == "desc")


def video_list(objects: Sequence[Mapping[str, Any]], page: VideoPage) -> bytes:
    """Return the part of `objects`, the oldest first, that a page is. Raises RequestRejected for an unknown `after`."""
    found = list(reversed(objects)) if page.is_descending else list(objects)
    if page.after is not None:
        places = [place for place, each in enumerate(found) if each["id"] == page.after]
        if not places:
            raise RequestRejected(400, f"after names no video: {page.after[:128]}", param="after")
        found = found[places[0] + 1 :]
    shown = found[: page.limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(found) > len(shown),
        }
    )


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
            "post": describe_operation(
                "createVideo",
                "Make a video of a prompt",
                json_content("VideoObject"),
                meaning="The video.",
                body={**json_content("VideoRequest"), **_FORM},
                errors=generation_errors("ErrorBody"),
            ),
            "get": describe_read("listVideos", "List the videos that are kept", "VideoList", errors=_GONE),
        },
        "/v1/videos/{video_id}": {
            "get": _read("retrieveVideo", "Show a video", "VideoObject"),
            "delete": _read("deleteVideo", "Delete a video", "VideoDeleted"),
        },
    },
)
