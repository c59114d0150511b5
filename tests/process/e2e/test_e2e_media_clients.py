"""OpenAI's own client, unchanged, over every route of raw engines: a real frontend, a real worker for each sample engine."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dynamo.engines.sample.png import read_png
from support.pictures import Colour, plain_png
from support.processes import Cluster

GREEN: Colour = (0, 200, 0)
TEXT = "Hello, wörld! It is 5 o'clock. 😀"
ENGINES = {
    "pictures": "dynamo.engines.sample.diffusion_main",
    "speech": "dynamo.engines.sample.speech_engine",
    "ears": "dynamo.engines.sample.transcription_engine",
    "films": "dynamo.engines.sample.video_engine",
}


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the client: some routes will go at OpenAI


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    root = tmp_path_factory.mktemp("media")
    with Cluster(root) as cluster:
        frontend = cluster.frontend("frontend", "--media-store", str(root / "kept"))
        workers = [cluster.raw(model, model, program) for model, program in ENGINES.items()]
        cluster.wait_ready(frontend, *workers)
        with openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
            yield made


def size_of(content: str | None) -> tuple[int, int]:
    assert content is not None
    picture = read_png(base64.b64decode(content), 1 << 20)
    return picture.width, picture.height


def test_pictures_are_made(client: openai.OpenAI) -> None:
    answer = client.images.generate(model="pictures", prompt="a fox", n=2, size="1024x1024", response_format="b64_json")
    assert [size_of(entry.b64_json) for entry in answer.data or ()] == [(1024, 1024)] * 2
    assert answer.usage is not None
    assert answer.usage.output_tokens == 2


def test_pictures_are_linked_where_they_are_kept(client: openai.OpenAI) -> None:
    answer = client.images.generate(model="pictures", prompt="a fox")
    (entry,) = answer.data or []
    assert entry.url is not None
    assert "/v1/media?id=image_" in entry.url
    found = client._client.get(entry.url)  # any client that has the link
    assert (found.status_code, found.headers["content-type"]) == (200, "image/png")
    assert read_png(found.content, 1 << 20).width == 64
    assert client._client.get(entry.url[:-1] + "0").status_code in (200, 404)
    assert client._client.get(entry.url.replace("signature=", "signature=a")).status_code == 404


def test_a_stream_shows_partial_pictures(client: openai.OpenAI) -> None:
    stream = client.images.generate(model="pictures", prompt="a fox", stream=True, partial_images=2)
    events = list(stream)
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events if event.type == "image_generation.partial_image"] == [0, 1]
    assert {size_of(event.b64_json) for event in events} == {(64, 64)}
    last = events[-1]
    assert last.type == "image_generation.completed"
    assert last.usage.output_tokens == 1


def test_an_edit_keeps_to_its_mask(client: openai.OpenAI) -> None:
    image = ("a.png", plain_png(GREEN, 32, 32), "image/png")
    whole = client.images.edit(model="pictures", prompt="a fox", image=image, response_format="b64_json")
    opaque = client.images.edit(
        model="pictures", prompt="a fox", image=[image], mask=image, n=1, response_format="b64_json"
    )
    (mixed,), (untouched,) = whole.data or [], opaque.data or []
    assert mixed.b64_json is not None
    assert untouched.b64_json is not None
    picture = read_png(base64.b64decode(untouched.b64_json), 1 << 20)
    assert picture.pixels == bytes([*GREEN, 255]) * 1024
    assert mixed.b64_json != untouched.b64_json
    stream = client.images.edit(model="pictures", prompt="a fox", image=image, stream=True, partial_images=1)
    assert [event.type for event in stream] == ["image_edit.partial_image", "image_edit.completed"]


def test_what_is_spoken_is_heard_again(client: openai.OpenAI, tmp_path: Path) -> None:
    spoken = client.audio.speech.create(model="speech", voice="nova", input=TEXT, response_format="wav")
    with wave.open(io.BytesIO(spoken.content)) as file:
        assert file.getframerate() == 24_000
    path = tmp_path / "streamed.wav"
    with client.audio.speech.with_streaming_response.create(
        model="speech", voice="nova", input=TEXT, response_format="wav"
    ) as streamed:
        streamed.stream_to_file(path)
    assert path.read_bytes() == spoken.content
    sound = ("a.wav", spoken.content)
    assert client.audio.transcriptions.create(model="ears", file=sound).text == TEXT
    assert client.audio.transcriptions.create(model="ears", file=path, response_format="text") == TEXT
    srt = client.audio.transcriptions.create(model="ears", file=sound, response_format="srt")
    assert srt.startswith("1\n00:00:00,")
    assert client.audio.transcriptions.create(model="ears", file=sound, response_format="vtt").startswith("WEBVTT")
    verbose = client.audio.transcriptions.create(
        model="ears", file=sound, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert [word.word for word in verbose.words or ()] == TEXT.split()
    assert len(verbose.segments or ()) == 3
    events = list(client.audio.transcriptions.create(model="ears", file=sound, stream=True))
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == TEXT
    done = events[-1]
    assert done.type == "transcript.text.done"
    assert done.text == TEXT


def test_sound_in_another_language_is_translated(client: openai.OpenAI) -> None:
    said = client.audio.speech.create(model="speech", voice="echo", input="Hallo Welt", response_format="wav")
    assert client.audio.translations.create(model="ears", file=("a.wav", said.content)).text == "Hello World"


def test_sound_as_events_of_the_wire(client: openai.OpenAI) -> None:
    spoken = client.audio.speech.create(
        model="speech", voice="nova", input=TEXT, response_format="pcm", stream_format="sse"
    )
    assert b"event: speech.audio.delta" in spoken.content
    assert b"event: speech.audio.done" in spoken.content


def test_a_video_is_made_kept_listed_fetched_and_deleted(client: openai.OpenAI) -> None:
    videos: Any = client.videos
    video = videos.create_and_poll(model="films", prompt="a fox", seconds="4", size="720x1280")
    assert (video.status, video.progress, video.seconds, video.size) == ("completed", 100, "4", "720x1280")
    assert videos.retrieve(video.id).prompt == "a fox"
    content = videos.download_content(video.id).read()
    assert content.startswith(b"\x89PNG")
    assert content.count(b"fcTL") == 16
    other = videos.create(model="films", prompt="a dog", seconds="1", size="64x64")
    assert [each.id for each in videos.list(limit=1)] == [other.id, video.id]  # two pages
    assert videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        videos.retrieve(video.id)


def test_mistakes_are_the_exceptions_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.speech.create(model="speech", voice="a", input=TEXT, response_format="mp3")
    assert "mp3" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.edit(model="pictures", prompt="x", image=("a.svg", b"<svg/>"))
    assert refused.value.param == "image"
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="pictures", file=("a.wav", b"RIFF"))
    with pytest.raises(openai.UnprocessableEntityError):
        client.images.create_variation(model="pictures", image=plain_png(GREEN))


async def test_the_asynchronous_client_does_the_same(client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=60) as made:
        stream = await made.images.generate(model="pictures", prompt="a fox", stream=True, partial_images=1)
        assert [event.type async for event in stream] == [
            "image_generation.partial_image",
            "image_generation.completed",
        ]
        spoken = await made.audio.speech.create(model="speech", voice="nova", input=TEXT, response_format="wav")
        heard = await made.audio.transcriptions.create(model="ears", file=("a.wav", spoken.content), stream=True)
        assert "".join([event.delta async for event in heard if event.type == "transcript.text.delta"]) == TEXT
