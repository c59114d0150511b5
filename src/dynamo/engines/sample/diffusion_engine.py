"""A raw engine without a model: it answers an OpenAI image request with pictures that its prompt and seed draw."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import zlib
from collections.abc import AsyncGenerator
from typing import Any, Final, Self

from blake3 import blake3

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import DiffusionEngine, EngineConfig, RawRequest, RawResponseChunk
from dynamo.contract.health_check import build_raw_health_check_payload, is_probe
from dynamo.contract.requests.invalid import InvalidRequest
from dynamo.protocol.model_types import ModelInput
from dynamo.runtime.context import Context

__all__ = ["SampleDiffusionEngine"]

MAX_IMAGES: Final = 10
MAX_SIDE: Final = 2048  # pixels
DEFAULT_SIDE: Final = 64
BLOCKS: Final = 8  # of one colour each, on a side of a picture


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
        count = image_count(request)
        width, height = image_size(request)
        seed = image_seed(request)
        if not is_probe(request):
            await asyncio.sleep(self.delay)
        if context.is_stopped():
            return
        images = []
        for number in range(count):
            if context.is_stopped():
                return
            drawn = await asyncio.to_thread(draw_png, f"{seed}/{number}/{request.get('prompt')}", width, height)
            images.append(one_image(request, drawn))
        yield {"created": int(time.time()), "data": images}

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


def draw_png(text: str, width: int, height: int) -> bytes:
    """Return a picture of coloured blocks as PNG. The same text draws the same picture."""
    colours = blake3(text.encode(errors="replace")).digest(length=3 * BLOCKS * BLOCKS)
    rows = []
    for block in range(BLOCKS):
        line = b"".join(
            colours[3 * (block * BLOCKS + column) :][:3] * ((column + 1) * width // BLOCKS - column * width // BLOCKS)
            for column in range(BLOCKS)
        )
        rows += [b"\0" + line] * ((block + 1) * height // BLOCKS - block * height // BLOCKS)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


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
