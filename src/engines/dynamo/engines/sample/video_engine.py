"""A raw engine that makes short animations of coloured blocks, as a PNG that moves.

python -m dynamo.engines.sample.video_engine --discovery-backend file
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from dynamo.contract.engine import DiffusionEngine, RawRequest, RawResponseChunk
from dynamo.contract.health_check import build_raw_health_check_payload, is_probe
from dynamo.contract.requests.invalid import InvalidRequest
from dynamo.engines.sample.diffusion_engine import image_seed, image_size
from dynamo.engines.sample.drawing import Blocks
from dynamo.engines.sample.png import animated_png
from dynamo.engines.sample.raw_arguments import SampleRawEngine
from dynamo.runtime.calls.context import Context

DEFAULT_SECONDS: Final = 4  # OpenAI's
DEFAULT_RATE: Final = 4  # frames a second
MAX_RATE: Final = 30
MAX_PIXELS: Final = 32_000_000  # of all frames: about 100 MB before they are packed


class SampleVideoEngine(SampleRawEngine, DiffusionEngine):
    """Waits `delay` seconds and yields how far it is, then a video whose blocks move one place with each frame."""

    program = "sample-video-backend"
    what = "A backend that makes videos without a model."
    name = "sample-video-model"
    endpoint_types = "videos"

    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        width, height = image_size(request)
        rate, seconds = frame_rate(request), clip_seconds(request)
        count = rate * seconds
        if width * height * count > MAX_PIXELS:
            raise InvalidRequest(f"size: {count} frames of {width} x {height} pixels are more than this engine makes")
        if "input_reference" in request:
            raise InvalidRequest("input_reference: this engine begins with no image")
        if request.get("output_format") not in (None, "apng"):
            raise InvalidRequest("output_format must be apng, which is all that this engine writes")
        began = time.monotonic()
        if not is_probe(request):
            await asyncio.sleep(self.delay)
        blocks = Blocks(f"{image_seed(request)}/0/{request.get('prompt')}")
        frames = []
        for number in range(count):
            if context.is_stopped():
                return
            frames.append(await asyncio.to_thread(blocks.rows, width, height, shift=number))
            if number % rate == 0:
                yield {"object": "video", "status": "in_progress", "progress": 100 * number // count}
        packed = await asyncio.to_thread(animated_png, width, height, frames, rate)
        encoded = base64.b64encode(packed).decode()
        entry: dict[str, Any] = {"output_format": "apng", "fps": rate}
        if request.get("response_format") == "b64_json":
            entry["b64_json"] = encoded
        else:
            entry["url"] = f"data:image/apng;base64,{encoded}"
        yield {
            "object": "video",
            "status": "completed",
            "progress": 100,
            "data": [entry],
            "size": f"{width}x{height}",
            "seconds": seconds,
            "inference_time_s": round(time.monotonic() - began, 3),
        }

    async def cleanup(self) -> None:
        """Release nothing: nothing is held."""

    async def health_check_payload(self) -> dict[str, Any]:
        return build_raw_health_check_payload({"prompt": "ping", "seconds": 1, "size": "8x8"})


def clip_seconds(request: RawRequest) -> int:
    """Read how long the video is. Raises InvalidRequest for less than a second."""
    seconds = request.get("seconds")
    seconds = DEFAULT_SECONDS if seconds is None else seconds
    if isinstance(seconds, bool) or not isinstance(seconds, int) or seconds < 1:
        raise InvalidRequest(f"seconds must be a whole number from 1 on, got {seconds!r}")
    return seconds


def frame_rate(request: RawRequest) -> int:
    """Read the frames of a second, `nvext.fps`. Raises InvalidRequest for none, and for too many."""
    nvext = request.get("nvext")
    rate = nvext.get("fps") if isinstance(nvext, dict) else None
    rate = DEFAULT_RATE if rate is None else rate
    if isinstance(rate, bool) or not isinstance(rate, int) or not 1 <= rate <= MAX_RATE:
        raise InvalidRequest(f"nvext.fps must be an integer in 1..{MAX_RATE}, got {rate!r}")
    return rate


if __name__ == "__main__":
    from dynamo.worker.run import run

    run(SampleVideoEngine)
