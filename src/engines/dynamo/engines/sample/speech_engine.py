"""A raw engine that makes speech of tones, which the sample transcription engine turns back into the same text.

python -m dynamo.engines.sample.speech_engine --discovery-backend file
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from dynamo.contract.engine import RawRequest, RawResponseChunk
from dynamo.contract.health_check import build_raw_health_check_payload, is_probe
from dynamo.contract.requests.invalid import InvalidRequest
from dynamo.engines.sample.raw_arguments import SampleRawEngine
from dynamo.engines.sample.tones import Tones, wav_header
from dynamo.runtime.calls.context import Context

MAX_CHARACTERS: Final = 4096  # OpenAI's limit
PIECE_CHARACTERS: Final = 16


class SampleSpeechEngine(SampleRawEngine):
    """Waits `delay` seconds and yields the tones of the input: piece by piece where the frontend takes pieces."""

    program = "sample-speech-backend"
    what = "A backend that speaks without a model."
    name = "sample-speech-model"
    endpoint_types = "audios"

    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        text, tones, kind = spoken(request), voice(request), sound_format(request)
        if not is_probe(request):
            await asyncio.sleep(self.delay)
        nvext = request.get("nvext")
        in_pieces = isinstance(nvext, dict) and nvext.get("frontend_accepts_audio_chunks") is True
        step = PIECE_CHARACTERS if in_pieces else len(text)
        head = (wav_header(tones.size(text)) if kind == "wav" else b"") + tones.opening()
        for begin in range(0, len(text), step):
            if context.is_stopped():
                return
            sound = head + await asyncio.to_thread(tones.of, text[begin : begin + step])
            head = b""
            entry = {"output_format": kind, "b64_json": base64.b64encode(sound).decode()}
            answer: dict[str, Any] = {"created": int(time.time()), "data": [entry]}
            if begin + step >= len(text):
                words, tokens = len(text.split()), 2 * len(text.encode(errors="replace"))  # each tone is one
                answer["usage"] = {"input_tokens": words, "output_tokens": tokens, "total_tokens": words + tokens}
            yield answer

    async def cleanup(self) -> None:
        """Release nothing: nothing is held."""

    async def health_check_payload(self) -> dict[str, Any]:
        return build_raw_health_check_payload({"input": "ping", "response_format": "pcm"})


def spoken(request: RawRequest) -> str:
    """Read the text. Raises InvalidRequest for none, and for one that is too long."""
    if "audio" in request:
        raise InvalidRequest("this engine makes speech, and transcribes nothing")
    text = request.get("input")
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_CHARACTERS:
        raise InvalidRequest(f"input must be a text of 1 to {MAX_CHARACTERS} characters")
    return text


def voice(request: RawRequest) -> Tones:
    """Read the voice and its speed. Raises InvalidRequest for a speed beyond 0.25 to 4."""
    named, speed = request.get("voice"), request.get("speed")
    if isinstance(named, dict):
        named = named.get("id")
    speed = 1.0 if speed is None else speed
    if not isinstance(speed, int | float) or not 0.25 <= speed <= 4:
        raise InvalidRequest(f"speed must be between 0.25 and 4.0, got {speed!r}")
    return Tones(str(named or "alloy"), speed)


def sound_format(request: RawRequest) -> str:
    """Read the format. Raises InvalidRequest for one that this engine does not write."""
    kind = request.get("response_format") or "wav"
    if kind not in ("wav", "pcm"):
        raise InvalidRequest(f"response_format must be wav or pcm, which is all that this engine writes; got {kind!r}")
    return str(kind)


if __name__ == "__main__":
    from dynamo.worker.run import run

    run(SampleSpeechEngine)
