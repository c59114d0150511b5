"""The routes for sound in the OpenAPI document, from the types that decode their requests."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from dynamo.protocol.audio.speech import CONTENT_TYPES, SpeechRequest
from dynamo.protocol.audio.transcripts import TranscriptionRequest, TranslationRequest
from dynamo.protocol.openai.schema import EVENTS, ApiDescription, describe_operation, generation_errors, json_content


class TranscriptText(Struct):
    text: str


_TEXT: Final = {"schema": {"type": "string"}}
_BYTES: Final = {"schema": {"type": "string", "contentMediaType": "application/octet-stream"}}
_SOUND: Final = {
    "application/json": {"schema": {"type": "object"}},  # an engine may name a URL
    "application/octet-stream": _BYTES,  # of a format that was not requested and is not known
    **EVENTS,
    **{kind.decode().partition(";")[0]: _BYTES for kind in CONTENT_TYPES.values()},
}
_TRANSCRIPT: Final = {
    **json_content("TranscriptText"),
    "text/plain": _TEXT,
    "text/vtt": _TEXT,
    **EVENTS,
}


def _form(*texts: str) -> dict[str, Any]:
    """Return the body as a form, with its file."""
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    members = {"file": file, "model": {"type": "string"}, **{name: {"type": "string"} for name in texts}}
    return {"multipart/form-data": {"schema": {"type": "object", "required": ["file", "model"], "properties": members}}}


def _operation(name: str, summary: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    errors = generation_errors("ErrorBody")
    return {"post": describe_operation(name, summary, answer, meaning="The answer.", body=body, errors=errors)}


AUDIO_API: Final = ApiDescription(
    [SpeechRequest, TranscriptionRequest, TranslationRequest, TranscriptText],
    {
        "/v1/audio/speech": _operation("createSpeech", "Speak a text", json_content("SpeechRequest"), _SOUND),
        "/v1/audio/transcriptions": _operation(
            "createTranscription",
            "Write down what is said",
            {**json_content("TranscriptionRequest"), **_form("language", "prompt", "response_format", "stream")},
            _TRANSCRIPT,
        ),
        "/v1/audio/translations": _operation(
            "createTranslation",
            "Write down in English what is said",
            {**json_content("TranslationRequest"), **_form("prompt", "response_format")},
            _TRANSCRIPT,
        ),
    },
)
