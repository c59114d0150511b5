"""What a worker answers to a request for images, and the events of a stream; the routes in the OpenAPI document."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from dynamo.errors import Unknown
from dynamo.protocol.images import ImageEditRequest, ImageRequest
from dynamo.protocol.openai.schema import EVENTS, ApiDescription, describe_operation, generation_errors, json_content


class ImageFacts(Struct, frozen=True):
    """What the bytes of an image define of it."""

    size: str  # 64x64
    output_format: str  # png


def check_images(answer: Any, request: ImageRequest) -> Mapping[str, Any]:
    """Return the answer of a worker. Raises Unknown where it does not fit the request."""
    data = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(data, list) or len(data) != request.count:
        raise Unknown(f"the worker did not answer with `data` of {request.count} image(s)")
    wanted = "b64_json" if request.is_streaming else request.response_format or "url"
    for position, entry in enumerate(data):
        value = entry.get(wanted) if isinstance(entry, Mapping) else None
        if not isinstance(value, str) or not value:
            raise Unknown(f"the worker's image {position} has no `{wanted}`")
        if wanted == "b64_json":
            check_base64(value, f"image {position}")
    found: Mapping[str, Any] = answer
    return found


def check_base64(text: str, what: str) -> bytes:
    """Return the bytes of a text of base64. Raises Unknown where it is none."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise Unknown(f"the worker's {what} is not base64: {error}") from error


def read_partial(answer: Any, request: ImageRequest) -> tuple[int, str] | None:
    """Return the number and the content of a picture that is not finished; None for any other object.

    Raises Unknown for one that was not requested.
    """
    index = answer.get("partial_image_index") if isinstance(answer, Mapping) else None
    if index is None:
        return None
    wanted = request.partial_images or 0
    if type(index) is not int or not 0 <= index < wanted or not request.is_streaming:
        raise Unknown(f"the worker sent the partial image {index!r} of a request for {wanted}")
    content = answer.get("b64_json")
    if not isinstance(content, str):
        raise Unknown(f"the worker's partial image {index} has no `b64_json`")
    return index, content


def image_event(kind: str, request: ImageRequest, facts: ImageFacts, created: int, members: Mapping[str, Any]) -> bytes:
    """Return one event of a stream: `kind` is "partial_image" or "completed", `members` are what it has besides."""
    surface = "image_edit" if isinstance(request, ImageEditRequest) else "image_generation"
    name = f"{surface}.{kind}"
    event = {
        "type": name,
        "created_at": created,
        "size": facts.size,
        "quality": request.quality or "auto",
        "background": request.background or "auto",
        "output_format": facts.output_format,
        **members,
    }
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(event))


class MadeImage(Struct):
    url: str | None = None
    b64_json: str | None = None
    revised_prompt: str | None = None


class ImageList(Struct):
    created: int
    data: list[MadeImage]


def _operation(name: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
    made = describe_operation(
        name,
        summary,
        {**json_content("ImageList"), **EVENTS},
        meaning="The pictures. With `stream`, server-sent events of partial and finished ones.",
        body=content,
        errors=generation_errors("ErrorBody"),
    )
    return {"post": made}


_FILE: Final = {"type": "string", "contentMediaType": "application/octet-stream"}
_FORM: Final = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["model", "prompt", "image"],
            "properties": {
                "model": {"type": "string"},
                "prompt": {"type": "string"},
                "image": {"anyOf": [_FILE, {"type": "array", "items": _FILE, "maxItems": 16}]},
                "mask": _FILE,
            },
        }
    }
}
IMAGES_API: Final = ApiDescription(
    [ImageRequest, ImageEditRequest, ImageList],
    {
        "/v1/images/generations": _operation("createImage", "Make pictures of a prompt", json_content("ImageRequest")),
        "/v1/images/edits": _operation(
            "editImage", "Edit pictures by a prompt", {**json_content("ImageEditRequest"), **_FORM}
        ),
    },
)
