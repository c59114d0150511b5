"""`/v1/images/generations` and `/v1/images/edits`: the requests as typed values, and their rules."""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec import Struct

from dynamo.protocol.forms import FormShape
from dynamo.protocol.openai.reader import RequestReader
from dynamo.protocol.openai.shapes import I64, MediaPart, NvExt
from dynamo.protocol.vectors.requests import ResultRequest, check_choice, check_result_request, client_body, refuse

MAX_PROMPT_CHARACTERS: Final = 32_000  # OpenAI's limit
MAX_IMAGES: Final = 10
MAX_EDITED: Final = 16  # images in one request, OpenAI's limit
MAX_PARTIAL: Final = 3
_SIZE: Final = re.compile(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}")
_REFERENCES: Final = ("image", "images", "mask", "input_reference")


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
    safety_identifier: str | None = None
    stream: bool | None = None
    partial_images: I64 | None = None
    nvext: ImageNvExt | None = None

    @property
    def count(self) -> int:
        """How many images are requested."""
        return 1 if self.n is None else self.n

    @property
    def is_streaming(self) -> bool:
        return self.stream is True


class ImageReference(Struct, forbid_unknown_fields=True):
    """An image by its URL."""

    image_url: str


class ImageEditRequest(ImageRequest, kw_only=True, forbid_unknown_fields=True):
    """The same, and the images that are to be edited: as data URLs, which a form's files become, or as URLs."""

    image: str | list[str] | None = None
    images: list[ImageReference] | None = None
    input_reference: str | None = None  # what 1.6.1 calls the one image
    mask: str | ImageReference | None = None
    input_fidelity: str | None = None


class AnyImage(ImageRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


class AnyImageEdit(ImageEditRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


IMAGES: Final = RequestReader(ImageRequest, AnyImage)
EDITS: Final = RequestReader(ImageEditRequest, AnyImageEdit)
EDIT_FORM: Final = FormShape(
    files=frozenset({"image", "mask", "input_reference"}),
    lists=frozenset({"image"}),
    numbers=frozenset({"n", "partial_images", "output_compression"}),
    switches=frozenset({"stream"}),
)


def validate_image(request: ImageRequest) -> None:
    """Refuse a request that breaks a rule."""
    check_result_request(request)
    if not request.prompt.strip():
        refuse("Prompt cannot be empty or whitespace only", "prompt")
    if len(request.prompt) > MAX_PROMPT_CHARACTERS:
        refuse(f"Prompt must have at most {MAX_PROMPT_CHARACTERS} characters, got {len(request.prompt)}", "prompt")
    if not 1 <= request.count <= MAX_IMAGES:
        refuse(f"N must be between 1 and {MAX_IMAGES}, got {request.n}", "n")
    check_size(request.size)
    check_choice("response_format", request.response_format, ("url", "b64_json"))
    check_choice("output_format", request.output_format, ("png", "webp", "jpeg"))
    partial = request.partial_images
    if partial is not None and not 0 <= partial <= MAX_PARTIAL:
        refuse(f"Partial_images must be between 0 and {MAX_PARTIAL}, got {partial}", "partial_images")
    if partial and not request.is_streaming:
        refuse("Partial_images are parts of a stream: they need `stream: true`", "partial_images")
    if request.is_streaming and request.response_format == "url":
        refuse("Response_format must be b64_json in a stream, whose events hold the images", "response_format")


def check_size(size: str | None) -> None:
    """Refuse a size that is not `WIDTHxHEIGHT` or "auto"."""
    if size not in (None, "auto") and _SIZE.fullmatch(size or "") is None:
        refuse(f"Size must be WIDTHxHEIGHT or auto, got '{(size or '')[:64]}'", "size")


def validate_edit(request: ImageEditRequest) -> None:
    """Refuse a request that breaks a rule."""
    validate_image(request)
    given = [name for name in ("image", "images", "input_reference") if getattr(request, name) is not None]
    if len(given) > 1:
        refuse(f"`{given[1]}` says the same as `{given[0]}`: send one of them", given[1])
    images = [part for part in edit_parts(request) if part.where != "mask"]
    if not images:
        refuse("An image is required for /v1/images/edits: a file `image`, or a URL as `input_reference`", "image")
    if len(images) > MAX_EDITED:
        refuse(f"At most {MAX_EDITED} images are taken, got {len(images)}", given[0])
    check_choice("input_fidelity", request.input_fidelity, ("high", "low"))


def edit_parts(request: ImageEditRequest) -> list[MediaPart]:
    """Return the images of a request, in their order, and last its mask."""
    found: list[MediaPart] = []
    if isinstance(request.image, list):
        is_only = len(request.image) == 1
        found += [_part(url, "image" if is_only else f"image[{place}]") for place, url in enumerate(request.image)]
    elif request.image is not None:
        found.append(_part(request.image, "image"))
    found += [_part(each.image_url, f"images[{place}].image_url") for place, each in enumerate(request.images or ())]
    if request.input_reference is not None:
        found.append(_part(request.input_reference, "input_reference"))
    if request.mask is not None:
        url = request.mask if isinstance(request.mask, str) else request.mask.image_url
        found.append(_part(url, "mask"))
    return found


def _part(url: str, where: str) -> MediaPart:
    return MediaPart("image", url, None, where, is_upload=True)


def image_body(request: ImageRequest, urls: list[str] | None = None, mask: str | None = None) -> dict[str, Any]:
    """Return the worker's request: the client's own, with the images where engines of 1.6.1 expect them.

    `urls`: the images of an edit, the first of which is `input_reference`; None: there are none.
    """
    body = {name: value for name, value in client_body(request).items() if name not in _REFERENCES}
    if request.is_streaming:
        body["response_format"] = "b64_json"
    if urls:
        body["input_reference"] = urls[0]
        passed: dict[str, Any] = {} if len(urls) == 1 else {"input_references": urls}
        if mask is not None:
            passed["mask"] = mask
        if passed:
            body["extra_args"] = {"media_passthrough": passed}
    return body
