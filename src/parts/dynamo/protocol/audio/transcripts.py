"""`/v1/audio/transcriptions` and `/v1/audio/translations`: requests, rules, what a worker answers, and its five forms; and the
description of all routes for sound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from dynamo.errors import Unknown
from dynamo.protocol.audio.speech import CONTENT_TYPES, SpeechRequest
from dynamo.protocol.forms import FormShape
from dynamo.protocol.openai.errors import not_built
from dynamo.protocol.openai.reader import RequestReader
from dynamo.protocol.openai.schema import EVENTS, ApiDescription, describe_operation, generation_errors, json_content
from dynamo.protocol.openai.shapes import MediaPart
from dynamo.protocol.vectors.requests import ResultRequest, check_choice, check_result_request, client_body, refuse

FORMATS: Final = ("json", "text", "srt", "verbose_json", "vtt")
MAX_PROMPT_CHARACTERS: Final = 32_000


class SoundRequest(ResultRequest, kw_only=True):
    """What both routes take."""

    file: str  # a data URL, which a form's file becomes, or a URL
    prompt: str | None = None
    response_format: str | None = None
    temperature: float | None = None


class TranscriptionRequest(SoundRequest, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's members."""

    language: str | None = None
    stream: bool | None = None
    timestamp_granularities: list[str] | None = None
    include: list[str] | None = None
    chunking_strategy: str | None = None

    @property
    def is_streaming(self) -> bool:
        return self.stream is True


class TranslationRequest(SoundRequest, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's members; the translation is into English."""


class AnyTranscription(TranscriptionRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


class AnyTranslation(TranslationRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


TRANSCRIPTIONS: Final = RequestReader(TranscriptionRequest, AnyTranscription)
TRANSLATIONS: Final = RequestReader(TranslationRequest, AnyTranslation)
TRANSCRIPT_FORM: Final = FormShape(
    files=frozenset({"file"}),
    lists=frozenset({"timestamp_granularities", "include"}),
    numbers=frozenset({"temperature"}),
    switches=frozenset({"stream"}),
)


def validate_sound(request: SoundRequest) -> None:
    """Refuse a request that breaks a rule of both routes."""
    check_result_request(request)
    check_choice("response_format", request.response_format, FORMATS)
    if request.prompt is not None and len(request.prompt) > MAX_PROMPT_CHARACTERS:
        refuse(f"Prompt must have at most {MAX_PROMPT_CHARACTERS} characters, got {len(request.prompt)}", "prompt")
    if request.temperature is not None and not 0 <= request.temperature <= 1:
        refuse(f"Temperature must be between 0 and 1, got {request.temperature}", "temperature")


def validate_transcription(request: TranscriptionRequest) -> None:
    """Refuse a request that breaks a rule."""
    validate_sound(request)
    for place, wanted in enumerate(request.timestamp_granularities or ()):
        if wanted not in ("word", "segment"):
            field = f"timestamp_granularities[{place}]"
            refuse(f"{field.capitalize()} must be word or segment, got '{wanted[:64]}'", field)
    if request.timestamp_granularities and request.response_format != "verbose_json":
        refuse("Timestamp_granularities need the response_format verbose_json", "timestamp_granularities")
    if request.is_streaming and request.response_format not in (None, "json", "text"):
        refuse("Response_format must be json or text in a stream, whose events hold text", "response_format")
    if request.include:
        raise not_built("Validation: `include` (log probabilities of a transcript) is not in this version", "include")
    check_choice("chunking_strategy", request.chunking_strategy, ("auto",))


def sound_part(request: SoundRequest) -> MediaPart:
    """Return the sound of a request."""
    return MediaPart("audio", request.file, None, "file", is_upload=True)


def sound_body(request: SoundRequest, url: str) -> dict[str, Any]:
    """Return the worker's request; `url`: the sound, as `audio`."""
    body = {name: value for name, value in client_body(request).items() if name != "file"}
    return {**body, "audio": url, "task": "translate" if isinstance(request, TranslationRequest) else "transcribe"}


class Segment(Struct, omit_defaults=True):
    """A part of the text and its time in the sound, in seconds. What an engine does not know of it is not there."""

    start: float
    end: float
    text: str
    id: int | None = None
    seek: int | None = None
    tokens: list[int] | None = None
    temperature: float | None = None
    avg_logprob: float | None = None
    compression_ratio: float | None = None
    no_speech_prob: float | None = None


class Word(Struct):
    """One word and its time in the sound."""

    word: str
    start: float
    end: float


class TranscriptPiece(Struct):
    """One object of a worker: the next part of the text, and what is known beside it."""

    text: str
    segments: list[Segment] = []
    words: list[Word] = []
    language: str | None = None
    duration: float | None = None
    usage: dict[str, Any] | None = None


class Transcript:
    """What a worker has sent so far, and the forms of it."""

    __slots__ = ("_duration", "_language", "_request", "_segments", "_texts", "_words", "usage")

    def __init__(self, request: SoundRequest) -> None:
        self._request = request
        self._texts: list[str] = []
        self._segments: list[Segment] = []
        self._words: list[Word] = []
        self._language: str | None = None
        self._duration: float | None = None
        self.usage: dict[str, Any] | None = None

    def add(self, found: Any) -> str:
        """Take the next object; return its text. Raises Unknown for one that is none of a transcript."""
        try:
            piece = msgspec.convert(found, TranscriptPiece)
        except msgspec.ValidationError as error:
            raise Unknown(f"the worker's object is no part of a transcript: {error}") from error
        times = [(one.start, one.end) for one in piece.segments] + [(one.start, one.end) for one in piece.words]
        for start, end in times:
            if not (math.isfinite(start) and math.isfinite(end) and 0 <= start <= end):
                raise Unknown(f"the worker sent a time from {start} to {end}")
        self._texts.append(piece.text)
        self._segments += piece.segments
        self._words += piece.words
        self._language = piece.language or self._language
        self._duration = piece.duration if piece.duration is not None else self._duration
        self.usage = piece.usage or self.usage
        return piece.text

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def shown_usage(self) -> dict[str, Any] | None:
        """Return what the answer reports of its cost: tokens where the engine counts them, else seconds of sound."""
        if self.usage is not None:
            return {"type": "tokens", **self.usage}
        return None if self._duration is None else {"type": "duration", "seconds": math.ceil(self._duration)}

    def written(self) -> tuple[bytes, bytes]:
        """Return the answer in the form that was requested, and its content type. Raises Unknown where a part is missing."""
        wanted = self._request.response_format or "json"
        if wanted == "json":
            body: dict[str, Any] = {"text": self.text}
            if (usage := self.shown_usage()) is not None:
                body["usage"] = usage
            return msgspec.json.encode(body), b"application/json"
        if wanted == "text":
            return self.text.encode(), b"text/plain; charset=utf-8"
        if wanted == "verbose_json":
            return msgspec.json.encode(self._verbose()), b"application/json"
        if wanted == "srt":
            return subtitles_srt(self._timed()).encode(), b"text/plain; charset=utf-8"
        return subtitles_vtt(self._timed()).encode(), b"text/vtt; charset=utf-8"

    def _timed(self) -> Sequence[Segment]:
        if self.text.strip() and not self._segments:
            raise Unknown("the worker sent no `segments`, which subtitles are made of")
        return self._segments

    def _verbose(self) -> dict[str, Any]:
        request = self._request
        asked = getattr(request, "timestamp_granularities", None) or ["segment"]
        body: dict[str, Any] = {
            "task": "translate" if isinstance(request, TranslationRequest) else "transcribe",
            "language": self._language,
            "duration": self._duration,
            "text": self.text,
        }
        if "segment" in asked:
            for number, segment in enumerate(self._segments):
                segment.id = number
            body["segments"] = self._segments
        if "word" in asked:
            body["words"] = self._words
        if (usage := self.shown_usage()) is not None:
            body["usage"] = usage
        return body


def subtitles_srt(segments: Sequence[Segment]) -> str:
    """Return subtitles as SubRip has them."""
    return "".join(
        [
            f"{number}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{_lines(one.text)}\n\n"
            for number, one in enumerate(segments, 1)
        ]
    )


def subtitles_vtt(segments: Sequence[Segment]) -> str:
    """Return subtitles as WebVTT has them."""
    cues = []
    for one in segments:
        text = _lines(one.text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        cues.append(f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{text}\n\n")
    return "WEBVTT\n\n" + "".join(cues)


def _clock(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"


def _lines(text: str) -> str:
    """Return a text without empty lines, which would end its subtitle."""
    return "\n".join([line for line in text.strip().splitlines() if line.strip()])


def transcript_event(kind: str, members: Mapping[str, Any]) -> bytes:
    """Return one event of a stream: `kind` is "delta" or "done"."""
    name = f"transcript.text.{kind}"
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **members}))


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
