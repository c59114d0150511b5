"""Speech and transcripts through the frontend, with the sample engines: what is spoken is heard again to the letter."""

from __future__ import annotations

import base64
import io
import json
import random
import wave
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo.contract.conformance import run_raw_conformance
from dynamo.engines.sample.speech_engine import SampleSpeechEngine
from dynamo.engines.sample.tones import Tones, heard
from dynamo.engines.sample.transcription_engine import SampleTranscriptionEngine
from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.protocol.audio.transcripts import Segment, subtitles_srt, subtitles_vtt
from dynamo.protocol.model_types import ModelInput, ModelType
from support.asgi_client import Exchange
from support.cases import each_case
from support.forms import CONTENT_TYPE, form
from support.frontend_cluster import Cluster, cluster, raw_engine, sends
from support.pictures import RED, data_url

SOUND: dict[str, Any] = {"model_type": ModelType.Audios, "model_input": ModelInput.Text}
TEXT = "Hello, wörld! It is 5 o'clock & all <is> well. 😀 Bye"
Body = dict[str, Any]
Part = tuple[str, str | bytes]


async def speakers(found: Cluster) -> None:
    await found.worker(raw_engine(SampleSpeechEngine(delay=0)), model="tts", component="tts", **SOUND)
    await found.worker(raw_engine(SampleTranscriptionEngine(delay=0)), model="stt", component="stt", **SOUND)


async def speak(found: Cluster, **body: Any) -> Exchange:
    whole = {"model": "tts", "input": TEXT, "response_format": "wav", **body}
    return await found.client.call("POST", "/v1/audio/speech", whole)


async def transcribe(found: Cluster, sound: bytes, *parts: Part, path: str = "transcriptions") -> Exchange:
    body = form(("model", "stt"), ("file", sound), *parts)
    return await found.client.call("POST", f"/v1/audio/{path}", body, headers=CONTENT_TYPE)


def events(answer: Exchange) -> list[dict[str, Any]]:
    found = []
    for block in answer.events:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


async def test_what_is_spoken_is_heard_again_to_the_letter(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await speakers(found)
        for more in (
            {},
            {"voice": "nova", "speed": 4},
            {"voice": {"id": "echo"}, "speed": 0.25, "stream_format": "audio"},
        ):
            spoken = await speak(found, **more)
            assert spoken.status == 200, spoken.body
            assert spoken.headers["content-type"] == "audio/wav"
            with wave.open(io.BytesIO(spoken.body)) as file:
                assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
                assert 44 + 2 * file.getnframes() == len(spoken.body)  # the size in the header is that of the file
            answer = await transcribe(found, spoken.body)
            assert (answer.status, answer.json["text"]) == (200, TEXT)


async def test_pcm_is_the_samples_of_the_wav_and_voices_differ(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await speakers(found)
        plain = await speak(found, response_format="pcm")
        assert plain.headers["content-type"] == "audio/pcm"
        assert (await speak(found)).body[44:] == plain.body
        assert len({(await speak(found, response_format="pcm", voice=name)).body for name in "abcdefgh"}) == 3
        assert len((await speak(found, response_format="pcm", speed=2)).body) * 2 == len(plain.body)


async def test_events_hold_the_same_sound_in_pieces(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await speakers(found)
        answer = await speak(found, stream_format="sse")
        *pieces, done = events(answer)
        assert len(pieces) > 2
        assert {piece["type"] for piece in pieces} == {"speech.audio.delta"}
        assert b"".join(base64.b64decode(piece["audio"]) for piece in pieces) == (await speak(found)).body
        assert done["type"] == "speech.audio.done"
        assert done["usage"]["input_tokens"] == len(TEXT.split())


async def test_a_transcript_has_five_forms(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await speakers(found)
        sound = (await speak(found)).body
        seconds = (len(sound) - 44) / 48_000
        plain = await transcribe(found, sound, ("response_format", "text"))
        assert (plain.body.decode(), plain.headers["content-type"]) == (TEXT, "text/plain; charset=utf-8")
        asked = [("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment"), ("language", "en")]
        verbose = (await transcribe(found, sound, ("response_format", "verbose_json"), *asked)).json
        assert verbose["text"] == TEXT
        assert abs(verbose["duration"] - seconds) < 1e-9
        assert (verbose["task"], verbose["language"]) == ("transcribe", "en")
        assert [word["word"] for word in verbose["words"]] == TEXT.split()
        said = ["Hello, wörld!", "It is 5 o'clock & all <is> well.", "😀 Bye"]
        assert [segment["text"] for segment in verbose["segments"]] == said
        assert [segment["id"] for segment in verbose["segments"]] == [0, 1, 2]
        times = [time for word in verbose["words"] for time in (word["start"], word["end"])]
        assert times == sorted(times)
        assert times[-1] == verbose["segments"][-1]["end"] == verbose["duration"]
        srt = (await transcribe(found, sound, ("response_format", "srt"))).body.decode()
        assert srt.startswith("1\n00:00:00,020 --> 00:00:00,300\nHello, wörld!\n\n2\n")
        vtt = await transcribe(found, sound, ("response_format", "vtt"))
        assert vtt.headers["content-type"] == "text/vtt; charset=utf-8"
        assert "\nIt is 5 o'clock &amp; all &lt;is&gt; well.\n" in vtt.body.decode()


async def test_a_streamed_transcript_comes_word_by_word(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await speakers(found)
        answer = await transcribe(found, (await speak(found)).body, ("stream", "true"))
        *deltas, done = events(answer)
        assert {event["type"] for event in deltas} == {"transcript.text.delta"}
        assert len(deltas) == len(TEXT.split())
        assert "".join(event["delta"] for event in deltas) == TEXT
        assert (done["type"], done["text"]) == ("transcript.text.done", TEXT)


async def test_a_translation_is_into_english(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await speakers(found)
        sound = (await speak(found, input="Hallo Welt, das ist ein Haus.")).body
        answer = await transcribe(found, sound, path="translations")
        assert answer.json["text"] == "Hello World, the is a House."
        verbose = await transcribe(found, sound, ("response_format", "verbose_json"), path="translations")
        assert (verbose.json["task"], verbose.json["language"]) == ("translate", "en")


async def test_the_worker_gets_the_sound_as_a_data_url(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(sends({"text": "x"}), model="stt", **SOUND)
        sound = Tones("a", 1).opening()
        wav = b"RIFF\x24\0\0\0WAVEfmt " + sound
        assert (await transcribe(found, wav, ("prompt", "p"), ("temperature", "0.5"))).json == {"text": "x"}
        assert worker.requests == [
            {
                "model": "stt",
                "prompt": "p",
                "temperature": 0.5,
                "audio": data_url(wav, "audio/wav"),
                "task": "transcribe",
            }
        ]
        body = {"model": "stt", "file": data_url(wav, "audio/wav")}  # JSON does the same
        assert (await found.client.call("POST", "/v1/audio/transcriptions", body)).status == 200
        assert worker.requests[1]["audio"] == data_url(wav, "audio/wav")


SPOKEN: list[tuple[Body, str]] = [
    ({"input": " "}, "input"),
    ({"input": "x" * 32_001}, "input"),
    ({"response_format": "midi"}, "response_format"),
    ({"speed": 0.2}, "speed"),
    ({"speed": 4.1}, "speed"),
    ({"stream_format": "text"}, "stream_format"),
    ({"stream_format": "sse", "data_source": "url"}, "data_source"),
    ({"voices": "x"}, "voices"),
    ({"ref_audio": data_url(RED)}, "ref_audio"),
    ({"ref_audio": "file:///etc/passwd"}, "ref_audio"),
    ({"ref_audio": "http://127.0.0.1/x"}, "ref_audio"),
]


@each_case("body,param", SPOKEN)
async def test_a_broken_rule_of_speech_names_the_field(tmp_path: Path, body: Body, param: str) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(raw_engine(SampleSpeechEngine(delay=0)), model="tts", **SOUND)
        answer = await speak(found, **body)
        assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body
        assert worker.requests == []


@each_case("kind", ["mp3", "opus", "aac", "flac"])
async def test_a_format_that_the_engine_cannot_write_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    async with cluster(tmp_path) as found:
        await speakers(found)
        answer = await speak(found, response_format=kind)
        assert answer.status == 400
        assert kind in answer.json["message"]


WAVES = b"RIFF\x24\0\0\0WAVEfmt " + bytes(28)
HEARD: list[tuple[list[Part], int, str | None]] = [
    ([("response_format", "xml")], 400, "response_format"),
    ([("temperature", "2")], 400, "temperature"),
    ([("timestamp_granularities[]", "letter"), ("response_format", "verbose_json")], 400, "timestamp_granularities[0]"),
    ([("timestamp_granularities[]", "word")], 400, "timestamp_granularities"),
    ([("stream", "true"), ("response_format", "srt")], 400, "response_format"),
    ([("include[]", "logprobs")], 422, "include"),
    ([("chunking_strategy", "never")], 400, "chunking_strategy"),
    ([("keywords", "x")], 400, "keywords"),
    ([("file", WAVES)], 400, "file"),
]


@each_case("parts,status,param", HEARD)
async def test_a_broken_rule_of_transcripts_names_the_field(
    tmp_path: Path, parts: list[Part], status: int, param: str | None
) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(raw_engine(SampleTranscriptionEngine(delay=0)), model="stt", **SOUND)
        answer = await transcribe(found, WAVES, *parts)
        assert (answer.status, answer.json["error"]["param"]) == (status, param), answer.body
        assert worker.requests == []


async def test_what_is_no_sound_is_refused_before_a_worker_gets_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, media=MediaSettings(sound_form_bytes=100_000)) as found:
        worker = await found.worker(raw_engine(SampleTranscriptionEngine(delay=0)), model="stt", **SOUND)
        for sound in (RED, b"", b"MThd"):
            answer = await transcribe(found, sound)
            assert (answer.status, answer.json["error"]["param"]) == (400, "file"), answer.body
        answer = await transcribe(found, WAVES + bytes(100_000))
        assert answer.status == 413
        assert "DYN_HTTP_AUDIO_FORM_LIMIT_MB" in answer.json["message"]
        assert worker.requests == []
        assert found.media.held_bytes == 0


async def test_a_sound_that_the_engine_does_not_understand_is_its_400(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await speakers(found)
        answer = await transcribe(found, WAVES)
        assert answer.status == 400
        assert answer.json["message"].startswith("file: ")


async def test_the_models_of_the_two_routes_say_which_route_they_are_for(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await speakers(found)
        assert "transcribes" in (await speak(found, model="stt")).json["message"]
        assert (await speak(found, model="nobody")).status == 404


PIECE = {"data": [{"b64_json": base64.b64encode(WAVES).decode()}]}
WRONG: list[Any] = [
    7, {}, {"data": []}, {"data": [{}]}, {"data": [{"b64_json": "?"}]}, {"data": [{"b64_json": ""}]},
    {"data": [{"b64_json": base64.b64encode(b"ID3").decode()}]},
]  # fmt: skip


@each_case("value", WRONG)
async def test_a_wrong_sound_of_a_worker_is_one_well_formed_error(tmp_path: Path, value: Any) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sends(value), model="tts", **SOUND)
        for more in ({}, {"stream_format": "sse"}):
            answer = await speak(found, **more)
            assert answer.status == 500, answer.body
            assert answer.json["error"]["message"]


async def test_sound_that_fails_on_its_way_is_cut_and_never_looks_whole(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sends(PIECE, fails=ValueError("broken")), model="tts", **SOUND)
        answer = await speak(found)
        assert answer.status == 200
        assert answer.body == WAVES
        assert not answer.is_complete
        streamed = await speak(found, stream_format="sse")
        assert "error" in json.loads(streamed.events[-2].removeprefix("data: "))


async def test_an_engine_may_name_a_url_in_place_of_sound(tmp_path: Path) -> None:
    named = {"created": 1, "data": [{"url": "https://example.com/a.wav"}]}
    async with cluster(tmp_path) as found:
        await found.worker(sends(named), model="tts", **SOUND)
        answer = await speak(found, data_source="url")
        assert (answer.status, answer.json) == (200, named)


NO_TRANSCRIPTS: list[Any] = [
    7, {}, {"text": 7}, {"text": "a", "segments": [{"start": 1}]}, {"text": "a", "segments": [{"start": 2, "end": 1, "text": ""}]},
]  # fmt: skip


@each_case("value", NO_TRANSCRIPTS)
async def test_a_wrong_transcript_of_a_worker_is_one_well_formed_error(tmp_path: Path, value: Any) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sends(value), model="stt", **SOUND)
        assert (await transcribe(found, WAVES)).status == 500
        assert (await transcribe(found, WAVES, ("stream", "true"))).status == 500


async def test_subtitles_need_times(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sends({"text": "hello"}), model="stt", **SOUND)
        assert (await transcribe(found, WAVES, ("response_format", "srt"))).status == 500
        assert (await transcribe(found, WAVES)).json == {"text": "hello"}


def test_subtitles_are_those_of_their_formats() -> None:
    said = [Segment(0, 1.5, "a -->\n\n b"), Segment(3661.0005, 3662.9999, " c ")]
    assert subtitles_srt(said) == (
        "1\n00:00:00,000 --> 00:00:01,500\na -->\n b\n\n2\n01:01:01,000 --> 01:01:03,000\nc\n\n"
    )
    assert subtitles_vtt(said) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\na --&gt;\n b\n\n01:01:01.000 --> 01:01:03.000\nc\n\n"
    )


@given(st.text(min_size=1, max_size=12), st.sampled_from(["a", "b", "c", "d"]), st.floats(0.25, 4))
def test_any_text_comes_back_from_its_tones(text: str, voice: str, speed: float) -> None:
    tones = Tones(voice, speed)
    sound = tones.opening() + tones.of(text)
    assert len(sound) == tones.size(text)
    assert "".join(one.text for one in heard(sound)) == text.encode(errors="replace").decode()


def test_tones_are_heard_through_noise() -> None:
    chance = random.Random(7)
    tones = Tones("nova", 1)
    sound = bytearray(tones.opening() + tones.of("noisy"))
    for at in range(960, len(sound), 2):  # the gap and the first tone say how it was made
        value = int.from_bytes(sound[at : at + 2], "little", signed=True) + chance.randint(-6000, 6000)
        sound[at : at + 2] = value.to_bytes(2, "little", signed=True)
    assert "".join(one.text for one in heard(bytes(sound))) == "noisy"


async def test_the_sample_engines_pass_their_conformance_kit() -> None:
    await run_raw_conformance(lambda: SampleSpeechEngine(delay=0.001))
    await run_raw_conformance(lambda: SampleTranscriptionEngine(delay=0.001))
