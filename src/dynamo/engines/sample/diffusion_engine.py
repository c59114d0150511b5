"""A raw engine without a model: it answers an OpenAI image request with a one-pixel picture."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, Final, Self

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import DiffusionEngine, EngineConfig, RawRequest, RawResponseChunk
from dynamo.contract.health_check import build_raw_health_check_payload, is_probe
from dynamo.contract.requests.invalid import InvalidRequest
from dynamo.protocol.model_types import ModelInput
from dynamo.runtime.context import Context

__all__ = ["SampleDiffusionEngine"]

MAX_IMAGES: Final = 10
PIXEL_PNG: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="  # base64
)


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
        image = one_image(request)
        if not is_probe(request):
            await asyncio.sleep(self.delay)
        if context.is_stopped():
            return
        yield {"created": int(time.time()), "data": [dict(image) for _ in range(count)]}

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


def one_image(request: RawRequest) -> dict[str, str]:
    """Return the picture in the requested form. Raises InvalidRequest for an unknown `response_format`."""
    match request.get("response_format") or "url":
        case "url":
            return {"url": f"data:image/png;base64,{PIXEL_PNG}"}
        case "b64_json":
            return {"b64_json": PIXEL_PNG}
        case other:
            raise InvalidRequest(f"response_format must be url or b64_json, got {other!r}")
