"""A raw engine without a model: it answers OpenAI's requests for images with pictures that prompt and seed draw.

An edit reads the image and the mask that it is given. In a stream each picture comes in ever finer steps.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Final, Self

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import DiffusionEngine, EngineConfig, RawRequest, RawResponseChunk
from dynamo.contract.health_check import build_raw_health_check_payload, is_probe
from dynamo.contract.requests.invalid import InvalidRequest
from dynamo.engines.native_flags import refuse_media_output
from dynamo.engines.sample.drawing import FULL_STEP, draw_png, edited_png
from dynamo.engines.sample.png import Pixels, read_png
from dynamo.errors import Cancelled
from dynamo.protocol.model_types import ModelInput
from dynamo.runtime.calls.context import Context

__all__ = ["SampleDiffusionEngine"]

MAX_IMAGES: Final = 10
MAX_SIDE: Final = 2048  # pixels
DEFAULT_SIDE: Final = 64
MAX_EDITED_PIXELS: Final = 1_000_000  # they are read in Python, which takes up to a second for so many


class SampleDiffusionEngine(DiffusionEngine):
    """Waits `delay` seconds and yields one OpenAI image response."""

    def __init__(self, model_name: str = "sample-diffusion-model", delay: float = 0.05) -> None:
        self.model_name = model_name
        self.delay = delay

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        parser = BackendArgumentParser("sample-diffusion-backend", description="An image backend that needs no model.")
        parser.add_argument("--model-name", default="sample-diffusion-model", help="name to serve")
        parser.add_argument("--delay", type=float, default=0.05, help="seconds per request (default: 0.05)")
        add_backend_arguments(parser, component="sample", endpoint_types="images")
        refuse_media_output(argv)
        args = parser.parse_args(argv)
        config = worker_config_from(
            args,
            served_model_name=args.model_name,
            model_input=ModelInput.Text,
            enable_kv_routing=False,
        )
        return cls(args.model_name, args.delay), config

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.model_name, served_model_name=self.model_name)

    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        count, seed, steps = image_count(request), image_seed(request), partial_steps(request)
        check_format(request)
        if not is_probe(request):
            await asyncio.sleep(self.delay)
        if context.is_stopped():
            return
        try:
            draw = await asyncio.to_thread(drawer, request, context.is_stopped)
        except Cancelled:
            return
        images = []
        for number in range(count):
            text = f"{seed}/{number}/{request.get('prompt')}"
            for place, step in enumerate(steps):
                if context.is_stopped():
                    return
                drawn = await asyncio.to_thread(draw, text, step)
                yield {"partial_image_index": place, "b64_json": base64.b64encode(drawn).decode()}
            if context.is_stopped():
                return
            images.append(one_image(request, await asyncio.to_thread(draw, text, FULL_STEP)))
        yield {"created": int(time.time()), "data": images, "usage": image_usage(request, count)}

    async def cleanup(self) -> None:
        """Release nothing: nothing is held."""

    async def health_check_payload(self) -> dict[str, Any]:
        return build_raw_health_check_payload({"prompt": "ping", "n": 1, "response_format": "b64_json"})


def image_count(request: RawRequest) -> int:
    """Read how many images are requested. Raises InvalidRequest unless the number is 1 to 10."""
    count = request.get("n")
    if count is None:
        return 1
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_IMAGES:
        raise InvalidRequest(f"n must be an integer in 1..{MAX_IMAGES}, got {count!r}")
    return count


def image_size(request: RawRequest) -> tuple[int, int]:
    """Read the width and height in pixels. Raises InvalidRequest for sides beyond `MAX_SIDE`."""
    size = request.get("size")
    if size in (None, "auto"):
        return DEFAULT_SIDE, DEFAULT_SIDE
    width, _, height = str(size).partition("x")
    if not (width.isdecimal() and height.isdecimal() and 1 <= int(width) <= MAX_SIDE and 1 <= int(height) <= MAX_SIDE):
        raise InvalidRequest(f"size must be WIDTHxHEIGHT with sides in 1..{MAX_SIDE}, got {size!r}")
    return int(width), int(height)


def image_seed(request: RawRequest) -> int:
    """Read the seed of the pictures, `nvext.seed`; 0 where there is none."""
    nvext = request.get("nvext")
    seed = nvext.get("seed") if isinstance(nvext, dict) else None
    return seed if isinstance(seed, int) else 0


def one_image(request: RawRequest, png: bytes | None = None) -> dict[str, str]:
    """Return a picture (None: the smallest) in the requested form. Raises InvalidRequest for an unknown `response_format`."""
    encoded = base64.b64encode(draw_png("", 1, 1) if png is None else png).decode()
    match request.get("response_format") or "url":
        case "url":
            return {"url": f"data:image/png;base64,{encoded}"}
        case "b64_json":
            return {"b64_json": encoded}
        case other:
            raise InvalidRequest(f"response_format must be url or b64_json, got {other!r}")


def check_format(request: RawRequest) -> None:
    """Raise InvalidRequest for a format that this engine does not write."""
    if (wanted := request.get("output_format")) not in (None, "png"):
        raise InvalidRequest(f"output_format must be png, which is all that this engine writes; got {wanted!r}")


def partial_steps(request: RawRequest) -> range:
    """Return the steps of a picture that a stream shows before it is finished. Raises InvalidRequest for more than three."""
    count = (request.get("partial_images") or 0) if request.get("stream") is True else 0
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= FULL_STEP:
        raise InvalidRequest(f"partial_images must be an integer in 0..{FULL_STEP}, got {count!r}")
    return range(FULL_STEP - count, FULL_STEP)


def image_usage(request: RawRequest, count: int) -> dict[str, Any]:
    """Count words of the prompt, pictures that were given, and pictures that were made, each as one token."""
    words, given = len(str(request.get("prompt") or "").split()), len(_given(request))
    return {
        "input_tokens": words + given,
        "input_tokens_details": {"text_tokens": words, "image_tokens": given},
        "output_tokens": count,
        "total_tokens": words + given + count,
    }


def drawer(request: RawRequest, is_given_up: Callable[[], bool] = lambda: False) -> Callable[[str, int], bytes]:
    """Return what draws a picture of a text, as it is in a step.

    Raises InvalidRequest for images that cannot be edited, and Cancelled once `is_given_up` returns True.
    """
    given = _given(request)
    if not given:
        width, height = image_size(request)
        return lambda text, step: draw_png(text, width, height, step)
    if len(given) > 1:
        raise InvalidRequest("input_reference: this engine edits one image at a time")
    image = _read(given[0], "input_reference", is_given_up)
    found = _passthrough(request).get("mask")
    mask = None if found is None else _read(found, "mask", is_given_up)
    if mask is not None and (mask.width, mask.height) != (image.width, image.height):
        raise InvalidRequest("mask: it must have the size of the image")
    if request.get("size") not in (None, "auto", f"{image.width}x{image.height}"):
        raise InvalidRequest("size: this engine leaves an edited image in its size")
    return partial(edited_png, image, mask)


def _passthrough(request: RawRequest) -> dict[str, Any]:
    extra = request.get("extra_args")
    found = extra.get("media_passthrough") if isinstance(extra, dict) else None
    return found if isinstance(found, dict) else {}


def _given(request: RawRequest) -> list[Any]:
    """Return the URLs of the images that are to be edited."""
    several, one = _passthrough(request).get("input_references"), request.get("input_reference")
    if isinstance(several, list):
        return several
    return [] if one is None else [one]


def _read(url: Any, field: str, is_given_up: Callable[[], bool]) -> Pixels:
    head, _, content = str(url).partition(",")
    if not (head.startswith("data:") and head.endswith(";base64")):
        raise InvalidRequest(f"{field}: this engine reads data URLs, and fetches nothing")
    try:
        return read_png(binascii.a2b_base64(content), MAX_EDITED_PIXELS, is_given_up)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}") from error
