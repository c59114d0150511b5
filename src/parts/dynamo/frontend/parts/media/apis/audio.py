"""`/v1/audio/speech`, `/v1/audio/transcriptions` and `/v1/audio/translations`, for raw engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.errors import Unknown
from dynamo.frontend.parts.media.content import media_type
from dynamo.frontend.parts.media.relay import (
    Planning,
    Relayed,
    RelayedApi,
    RelayWriter,
    check_raw,
    check_status,
    note_usage,
)
from dynamo.frontend.pipeline.inputs import result_plan
from dynamo.frontend.pipeline.result_api import ResultReply
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.protocol.audio.speech import (
    CONTENT_TYPES,
    SPEECH,
    SpeechRequest,
    delta_event,
    done_event,
    read_sound,
    reference_sound,
    speech_body,
    validate_speech,
)
from dynamo.protocol.audio.transcripts import (
    TRANSCRIPTIONS,
    TRANSLATIONS,
    SoundRequest,
    Transcript,
    TranscriptionRequest,
    TranslationRequest,
    sound_body,
    sound_part,
    transcript_event,
    validate_sound,
    validate_transcription,
)
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.shapes import MediaPart, RequestMedia

_BY_FIRST_BYTES = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "opus": "audio/ogg"}


async def _contents(at: Planning, request: Any, parts: list[MediaPart]) -> list[str]:
    """Return the sounds of a request as data URLs, or as URLs where workers fetch."""
    if not parts:
        return []
    media = request.media = RequestMedia(parts, [], owner=request.key_owner or "")
    found = await at.media.contents(media, at.model, at.context)
    return [content.url if content is not None else part.url or "" for part, content in zip(parts, found, strict=True)]


class SpeechApi(RelayedApi[SpeechRequest]):
    """Sound of a text."""

    endpoint = "audios"
    id_prefix = "speech-"
    model_type = ModelType.Audios

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> SpeechRequest:
        request: SpeechRequest = SPEECH.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: SpeechRequest) -> None:
        validate_speech(request)

    async def plan(self, at: Planning, request: SpeechRequest) -> ResultPlan:
        check_raw(at.model, "Speech")
        sounds = await _contents(at, request, reference_sound(request))
        body = speech_body(request, sounds[0] if sounds else None)
        return result_plan(at.preprocessor, request, at.model, [body], 0)

    def writer(self, request: SpeechRequest, relayed: Relayed) -> RelayWriter:
        return _SpeechWriter(request, relayed)


class _SpeechWriter(RelayWriter):
    """Sound piece by piece: as bytes, as events, or, where the engine names a URL, as its own object."""

    def __init__(self, request: SpeechRequest, relayed: Relayed) -> None:
        super().__init__()
        self._request, self._relayed = request, relayed
        self._object: object = None  # that names a URL
        self._has_sound = False
        self._usage: object = None

    def take(self, found: Any) -> bytes:
        if isinstance(found, Mapping):
            check_status(found)
        if self._object is not None:
            raise Unknown("the worker sent more behind the URL of its sound")
        sound = read_sound(found)
        if (usage := found.get("usage")) is not None:
            self._usage = usage
            note_usage(self._relayed.tally, usage)
        if sound is None:
            if self._has_sound or self._request.is_streaming:
                raise Unknown("the worker sent a URL in place of sound")
            self._object = found
            return b""
        if not self._has_sound and sound:
            self._has_sound = True
            self.content_type = self._kind(sound)
        return delta_event(sound) if self._request.is_streaming and sound else sound

    def _kind(self, sound: bytes) -> bytes:
        """Return the content type. Raises Unknown for sound in another format than was requested."""
        found, wanted = media_type(sound[:16]), self._request.response_format
        if wanted is None:
            return found.encode() if found is not None and found.startswith("audio/") else b"application/octet-stream"
        expected = _BY_FIRST_BYTES.get(wanted)
        if expected is not None and found != expected:
            raise Unknown(f"the worker's sound is not {wanted}")
        return CONTENT_TYPES[wanted]

    def end(self) -> bytes:
        if not self._has_sound:
            raise Unknown("the worker ended without sound")
        return done_event(self._usage) if self._request.is_streaming else b""

    def whole(self) -> ResultReply:
        if self._object is None:
            raise Unknown("the worker ended without sound")
        return ResultReply(msgspec.json.encode(self._object))


class TranscriptionsApi(RelayedApi[TranscriptionRequest]):
    """The text of sound."""

    endpoint = "audios"
    id_prefix = "trsc-"
    model_type = ModelType.Audios

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> TranscriptionRequest:
        request: TranscriptionRequest = TRANSCRIPTIONS.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: TranscriptionRequest) -> None:
        validate_transcription(request)

    async def plan(self, at: Planning, request: TranscriptionRequest) -> ResultPlan:
        return await _plan(at, request)

    def writer(self, request: TranscriptionRequest, relayed: Relayed) -> RelayWriter:
        return _TranscriptWriter(request, relayed)


class TranslationsApi(RelayedApi[TranslationRequest]):
    """The text of sound, in English."""

    endpoint = "audios"
    id_prefix = "trsl-"
    model_type = ModelType.Audios

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> TranslationRequest:
        request: TranslationRequest = TRANSLATIONS.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: TranslationRequest) -> None:
        validate_sound(request)

    async def plan(self, at: Planning, request: TranslationRequest) -> ResultPlan:
        return await _plan(at, request)

    def writer(self, request: TranslationRequest, relayed: Relayed) -> RelayWriter:
        return _TranscriptWriter(request, relayed)


async def _plan(at: Planning, request: SoundRequest) -> ResultPlan:
    check_raw(at.model, "Transcripts")
    (url,) = await _contents(at, request, [sound_part(request)])
    return result_plan(at.preprocessor, request, at.model, [sound_body(request, url)], 0)


class _TranscriptWriter(RelayWriter):
    """A transcript as events, or whole in one of its forms."""

    def __init__(self, request: SoundRequest, relayed: Relayed) -> None:
        super().__init__()
        self._request, self._relayed = request, relayed
        self._transcript = Transcript(request)

    def take(self, found: object) -> bytes:
        if isinstance(found, Mapping):
            check_status(found)
        text = self._transcript.add(found)
        self.keep(len(text) + 1)
        note_usage(self._relayed.tally, self._transcript.usage)
        return transcript_event("delta", {"delta": text}) if self._request.is_streaming and text else b""

    def end(self) -> bytes:
        done: dict[str, object] = {"text": self._transcript.text}
        if self._transcript.usage is not None:
            done["usage"] = self._transcript.shown_usage()
        return transcript_event("done", done)

    def whole(self) -> ResultReply:
        body, content_type = self._transcript.written()
        return ResultReply(body, content_type=content_type)
