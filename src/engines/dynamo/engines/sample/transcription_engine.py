"""A raw engine that turns the tones of the sample speech engine back into text, and translates some German words.

python -m dynamo.engines.sample.transcription_engine --discovery-backend file
"""

from __future__ import annotations

import asyncio
import base64
import io
import re
import wave
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Final

from dynamo.contract.engine import RawRequest, RawResponseChunk
from dynamo.contract.health_check import build_raw_health_check_payload, is_probe
from dynamo.contract.requests.invalid import InvalidRequest
from dynamo.engines.sample.raw_arguments import SampleRawEngine, data_of
from dynamo.engines.sample.tones import BYTES_PER_SECOND, SAMPLE_RATE, Heard, Tones, heard, wav_header
from dynamo.runtime.calls.context import Context

ENGLISH: Final = {
    "hallo": "hello", "welt": "world", "guten": "good", "tag": "day", "morgen": "morning", "ich": "I", "bin": "am",
    "ein": "a", "eine": "a", "der": "the", "die": "the", "das": "the", "ist": "is", "und": "and", "nicht": "not",
    "haus": "house", "katze": "cat", "hund": "dog", "danke": "thanks", "wasser": "water",
}  # fmt: skip
_WORD: Final = re.compile(r"[^\W\d_]+")


class SampleTranscriptionEngine(SampleRawEngine):
    """Waits `delay` seconds and yields the text of a sound word by word, with the times of words and sentences."""

    program = "sample-transcription-backend"
    what = "A backend that transcribes the sample speech backend without a model."
    name = "sample-transcription-model"
    endpoint_types = "audios"

    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        samples = await asyncio.to_thread(samples_of, request)
        if not is_probe(request):
            await asyncio.sleep(self.delay)
        translates = request.get("task") == "translate"
        words = spoken_words(heard(samples))
        sentence: list[Heard] = []
        while not context.is_stopped():
            word = await asyncio.to_thread(next_word, words)
            if word is None:
                duration, language = len(samples) / BYTES_PER_SECOND, "en" if translates else request.get("language")
                yield {"text": "", "segments": segments_of(sentence), "duration": duration, "language": language}
                return
            if translates:
                word = word._replace(text=_WORD.sub(in_english, word.text))
            sentence.append(word)
            named = word.text.strip()
            piece: dict[str, Any] = {"text": word.text}
            if named:
                piece["words"] = [{"word": named, "start": word.start, "end": word.end}]
            if named.endswith((".", "!", "?")):
                piece["segments"] = segments_of(sentence)
                sentence = []
            yield piece

    async def cleanup(self) -> None:
        """Release nothing: nothing is held."""

    async def health_check_payload(self) -> dict[str, Any]:
        sound = Tones("alloy", 4).opening() + Tones("alloy", 4).of("ping")
        url = "data:audio/wav;base64," + base64.b64encode(wav_header(len(sound)) + sound).decode()
        return build_raw_health_check_payload({"audio": url})


def samples_of(request: RawRequest) -> bytes:
    """Return the samples of a WAV file. Raises InvalidRequest for any other sound."""
    if "audio" not in request:
        raise InvalidRequest("this engine transcribes, and makes no speech")
    try:
        with wave.open(io.BytesIO(data_of(request, "audio"))) as file:
            if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, SAMPLE_RATE):
                raise InvalidRequest(f"file: it must have one channel of 16 bits, {SAMPLE_RATE} times a second")
            samples: bytes = file.readframes(file.getnframes())
            return samples
    except (wave.Error, EOFError) as error:
        raise InvalidRequest(f"file: this engine reads WAV: {error}") from error


def spoken_words(characters: Iterator[Heard]) -> Iterator[Heard]:
    """Join characters to words, each with the blanks behind it. Together they are the whole text."""
    text, start, end = "", 0.0, 0.0
    for one in characters:
        if text and text[-1].isspace() and not one.text.isspace():
            yield Heard(text, start, end)
            text = ""
        start = start if text else one.start
        text += one.text
        end = end if one.text.isspace() and text.strip() else one.end
    if text:
        yield Heard(text, start, end)


def next_word(words: Iterator[Heard]) -> Heard | None:
    """Return the next word; None: there is none. Raises InvalidRequest for a sound that is not understood."""
    try:
        return next(words, None)
    except ValueError as error:
        raise InvalidRequest(f"file: {error}") from error


def segments_of(words: list[Heard]) -> list[dict[str, Any]]:
    """Return the sentence that some words are, if they are one."""
    text = "".join([word.text for word in words])
    return [{"start": words[0].start, "end": words[-1].end, "text": text.strip()}] if text.strip() else []


def in_english(found: re.Match[str]) -> str:
    """Return the English word for a German one; a word that is not known stays."""
    word = found[0]
    english = ENGLISH.get(word.lower(), word)
    return (
        english[:1].upper() + english[1:] if word[:1].isupper() and found.start() == 0 and english != word else english
    )


if __name__ == "__main__":
    from dynamo.worker.run import run

    run(SampleTranscriptionEngine)
