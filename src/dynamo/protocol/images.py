"""`/v1/images/generations`: the request as a typed value, its rules, and what a worker answers."""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from dynamo.errors import Unknown
from dynamo.protocol.openai.errors import not_built
from dynamo.protocol.openai.reader import RequestReader
from dynamo.protocol.openai.schema import ApiDescription, generation_errors, json_content
from dynamo.protocol.openai.shapes import I64, NvExt
from dynamo.protocol.vectors.requests import ResultRequest, check_choice, check_result_request, refuse

__all__ = ["IMAGES", "IMAGES_API", "ImageRequest", "check_images", "validate_image"]

MAX_PROMPT_CHARACTERS: Final = 32_000  # OpenAI's limit
MAX_IMAGES: Final = 10
_SIZE: Final = re.compile(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}")


class ImageNvExt(NvExt, forbid_unknown_fields=True):
    """The extension object, with what diffusion engines take."""

    negative_prompt: str | None = None
    num_inference_steps: I64 | None = None
    guidance_scale: float | None = None
    seed: I64 | None = None


class ImageRequest(ResultRequest, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's members; the engine gets them as they were sent."""

    prompt: str
    n: I64 | None = None
    size: str | None = None
    quality: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    output_compression: I64 | None = None
    background: str | None = None
    moderation: str | None = None
    style: str | None = None
    stream: bool | None = None
    partial_images: I64 | None = None
    nvext: ImageNvExt | None = None

    @property
    def count(self) -> int:
        """How many images are asked for."""
        return 1 if self.n is None else self.n


class AnyImage(ImageRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


IMAGES: Final = RequestReader(ImageRequest, AnyImage)


def validate_image(request: ImageRequest) -> None:
    """Refuse a request that breaks a rule."""
    check_result_request(request)
    if not request.prompt.strip():
        refuse("Prompt cannot be empty or whitespace only", "prompt")
    if len(request.prompt) > MAX_PROMPT_CHARACTERS:
        refuse(f"Prompt must have at most {MAX_PROMPT_CHARACTERS} characters, got {len(request.prompt)}", "prompt")
    if not 1 <= request.count <= MAX_IMAGES:
        refuse(f"N must be between 1 and {MAX_IMAGES}, got {request.n}", "n")
    if request.size not in (None, "auto") and _SIZE.fullmatch(request.size or "") is None:
        refuse(f"Size must be WIDTHxHEIGHT or auto, got '{(request.size or '')[:64]}'", "size")
    check_choice("response_format", request.response_format, ("url", "b64_json"))
    check_choice("output_format", request.output_format, ("png", "webp", "jpeg"))
    if request.stream or request.partial_images:
        field = "stream" if request.stream else "partial_images"
        raise not_built(f"Validation: `{field}` of images is not in this version", field)


def check_images(answer: Any, request: ImageRequest) -> Mapping[str, Any]:
    """Return the answer of a worker. Raises Unknown where it does not fit the request."""
    data = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(data, list) or len(data) != request.count:
        raise Unknown(f"the worker did not answer with `data` of {request.count} image(s)")
    wanted = request.response_format or "url"
    for position, entry in enumerate(data):
        value = entry.get(wanted) if isinstance(entry, Mapping) else None
        if not isinstance(value, str) or not value:
            raise Unknown(f"the worker's image {position} has no `{wanted}`")
        if wanted == "b64_json":
            try:
                binascii.a2b_base64(value, strict_mode=True)
            except ValueError as error:
                raise Unknown(f"the worker's image {position} is not base64: {error}") from error
    found: Mapping[str, Any] = answer
    return found


class MadeImage(Struct):
    url: str | None = None
    b64_json: str | None = None
    revised_prompt: str | None = None


class ImageList(Struct):
    created: int
    data: list[MadeImage]


IMAGES_API: Final = ApiDescription(
    [ImageRequest, ImageList],
    {
        "/v1/images/generations": {
            "post": {
                "operationId": "createImage",
                "summary": "Make pictures of a prompt",
                "requestBody": {"required": True, "content": json_content("ImageRequest")},
                "responses": {
                    "200": {"description": "The pictures.", "content": json_content("ImageList")},
                    **generation_errors("ErrorBody"),
                },
            }
        }
    },
)
