"""`/v1/audio/speech`: the request as a typed value, its rules, what a worker answers, and the events of a stream."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from dynamo.errors import Unknown
from dynamo.protocol.openai.reader import RequestReader
from dynamo.protocol.openai.shapes import I64, MediaPart, NvExt
from dynamo.protocol.vectors.requests import ResultRequest, check_choice, check_result_request, client_body, refuse

MAX_INPUT_CHARACTERS: Final = 32_000
CONTENT_TYPES: Final = {
    "wav": b"audio/wav",
    "mp3": b"audio/mpeg",
    "pcm": b"audio/pcm",
    "flac": b"audio/flac",
    "aac": b"audio/aac",
    "opus": b"audio/ogg; codecs=opus",
}
_IN_PIECES: Final = ("wav", "pcm")  # what can be sent on as it is made, and glued together by its reader


class SpeechNvExt(NvExt, forbid_unknown_fields=True):
    """The extension object, with what engines of speech take."""

    seed: I64 | None = None


class Voice(Struct, forbid_unknown_fields=True):
    """A voice by its id."""

    id: str


class SpeechRequest(ResultRequest, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's members, and those of 1.6.1; the engine gets them as they were sent."""

    input: str
    voice: str | Voice | None = None
    instructions: str | None = None
    response_format: str | None = None
    speed: float | None = None
    stream_format: str | None = None
    data_source: str | None = None
    task_type: str | None = None
    language: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    max_new_tokens: I64 | None = None
    nvext: SpeechNvExt | None = None

    @property
    def is_streaming(self) -> bool:
        """Whether events are requested; sound as bytes is sent as it is made in any case."""
        return self.stream_format == "sse"


class AnySpeech(SpeechRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


SPEECH: Final = RequestReader(SpeechRequest, AnySpeech)


def validate_speech(request: SpeechRequest) -> None:
    """Refuse a request that breaks a rule."""
    check_result_request(request)
    if not request.input.strip():
        refuse("Input cannot be empty or whitespace only", "input")
    if len(request.input) > MAX_INPUT_CHARACTERS:
        refuse(f"Input must have at most {MAX_INPUT_CHARACTERS} characters, got {len(request.input)}", "input")
    check_choice("response_format", request.response_format, tuple(CONTENT_TYPES))
    check_choice("stream_format", request.stream_format, ("sse", "audio"))
    check_choice("data_source", request.data_source, ("url", "b64_json"))
    if request.speed is not None and not 0.25 <= request.speed <= 4.0:
        refuse("speed: speed must be between 0.25 and 4.0", "speed")
    if request.data_source == "url" and request.is_streaming:
        refuse("Data_source must be b64_json in a stream, whose events hold the sound", "data_source")


def reference_sound(request: SpeechRequest) -> list[MediaPart]:
    """Return the sound of a voice that is to be imitated, if there is one."""
    if request.ref_audio is None:
        return []
    return [MediaPart("audio", request.ref_audio, None, "ref_audio", is_upload=True)]


def speech_body(request: SpeechRequest, ref_audio: str | None) -> dict[str, Any]:
    """Return the worker's request; `ref_audio`: the content of the reference sound."""
    body = client_body(request)
    if ref_audio is not None:
        body["ref_audio"] = ref_audio
    if request.response_format in _IN_PIECES and request.data_source != "url":
        body["nvext"] = {**body.get("nvext", {}), "frontend_accepts_audio_chunks": True}
    return body


def read_sound(answer: Any) -> bytes | None:
    """Return the sound in an object of a worker; None: it names a URL instead. Raises Unknown for any other object."""
    data = answer.get("data") if isinstance(answer, Mapping) else None
    entries = data if isinstance(data, list) else []
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise Unknown("the worker did not answer with `data` of sound")
    if all(isinstance(entry.get("url"), str) and entry["url"] for entry in entries):
        return None
    pieces = []
    for entry in entries:
        content = entry.get("b64_json")
        if not isinstance(content, str):
            raise Unknown("the worker's sound has neither `b64_json` nor `url`")
        try:
            pieces.append(binascii.a2b_base64(content, strict_mode=True))
        except ValueError as error:
            raise Unknown(f"the worker's sound is not base64: {error}") from error
    return b"".join(pieces)


def delta_event(sound: bytes) -> bytes:
    """Return the event of a further piece of sound."""
    return b'event: speech.audio.delta\ndata: {"type":"speech.audio.delta","audio":"%b"}\n\n' % (
        binascii.b2a_base64(sound, newline=False)
    )


def done_event(usage: Any) -> bytes:
    """Return the last event of a stream of sound."""
    event = {"type": "speech.audio.done", "usage": usage}
    return b"event: speech.audio.done\ndata: %b\n\n" % msgspec.json.encode(event)
