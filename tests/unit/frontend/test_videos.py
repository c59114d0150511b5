"""`/v1/videos` and links to what was made, with the sample engine behind a real worker adapter and a store in a directory."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dynamo.contract.conformance import run_raw_conformance
from dynamo.engines.sample.diffusion_engine import SampleDiffusionEngine
from dynamo.engines.sample.drawing import Blocks
from dynamo.engines.sample.png import read_png
from dynamo.engines.sample.video_engine import SampleVideoEngine
from dynamo.errors import InvalidArgument
from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.frontend.parts.media.store import KeepLimits, MediaStore
from dynamo.protocol.model_types import ModelInput, ModelType
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.worker.serving import RawServing
from support.asgi_client import Exchange
from support.cases import each_case
from support.forms import CONTENT_TYPE, form
from support.frontend_cluster import Cluster, Script, cluster, raw_engine, sends
from support.pictures import RED, data_url

VIDEO: dict[str, Any] = {"model_type": ModelType.Videos, "model_input": ModelInput.Text}
HOST = {"host": "media.localhost"}


def sample() -> Script:
    return raw_engine(SampleVideoEngine(delay=0))


async def make(found: Cluster, **body: Any) -> Exchange:
    whole = {"model": "m", "prompt": "a fox", "size": "16x8", "seconds": "2", **body}
    return await found.client.call("POST", "/v1/videos", whole, headers=HOST)


def frames(video: bytes) -> list[bytes]:
    """The frames of an animation, each as a PNG of its own."""
    chunks, at = [], 8
    while at < len(video):
        length, kind = struct.unpack(">I4s", video[at : at + 8])
        chunks.append((kind, video[at + 8 : at + 8 + length]))
        at += 12 + length
    header = dict(chunks)[b"IHDR"]
    packed = [data if kind == b"IDAT" else data[4:] for kind, data in chunks if kind in (b"IDAT", b"fdAT")]
    written = [(b"IHDR", header), (b"IDAT", b""), (b"IEND", b"")]
    return [
        video[:8]
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + bytes(4)
            for kind, data in ((kind, one if kind == b"IDAT" else data) for kind, data in written)
        )
        for one in packed
    ]


async def test_a_video_has_the_frames_that_were_asked_for_and_they_move(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(sample(), **VIDEO)
        answer = await make(found, response_format="b64_json", nvext={"fps": 3, "seed": 5})
        assert answer.status == 200, answer.body
        video = answer.json
        assert (video["object"], video["status"], video["progress"]) == ("video", "completed", 100)
        assert (video["seconds"], video["size"], video["prompt"], video["model"]) == ("2", "16x8", "a fox", "m")
        (entry,) = video["data"]
        assert (entry["output_format"], entry["fps"]) == ("apng", 3)
        shown = frames(base64.b64decode(entry["b64_json"]))
        assert len(shown) == 6
        for number, frame in enumerate(shown):
            rows = b"".join(Blocks("5/0/a fox").rows(16, 8, shift=number))
            picture = read_png(frame, 128)
            assert bytes(value for at, value in enumerate(picture.pixels) if at % 4 != 3) == rows
        assert len(set(shown)) == 6
        assert worker.requests[0]["seconds"] == 2


async def test_the_form_of_the_official_client_is_taken(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(sends({"data": [{"url": "https://example.com/a.mp4"}]}), **VIDEO)
        body = form(("model", "m"), ("prompt", "a fox"), ("seconds", "4"), ("input_reference", RED))
        answer = await found.client.call("POST", "/v1/videos", body, headers=CONTENT_TYPE)
        assert (answer.status, answer.json["data"]) == (200, [{"url": "https://example.com/a.mp4"}])
        assert worker.requests[0] == {
            "model": "m", "prompt": "a fox", "seconds": 4, "input_reference": data_url(RED)
        }  # fmt: skip


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"seconds": "four"}, "seconds"),
    ({"seconds": 0}, "seconds"),
    ({"seconds": 601}, "seconds"),
    ({"size": "wide"}, "size"),
    ({"response_format": "mp4"}, "response_format"),
    ({"input_reference": "ftp://example.com/a"}, "input_reference"),
    ({"input_reference": data_url(b"no image")}, "input_reference"),
    ({"length": 3}, "length"),
]


@each_case("body,param", REFUSED)
async def test_a_broken_rule_names_the_field(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(sample(), **VIDEO)
        answer = await make(found, **body)
        assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body
        assert worker.requests == []


WRONG: list[list[Any]] = [
    [], [7], [{}], [{"data": []}], [{"data": [{}]}], [{"data": [{"b64_json": "?"}]}], [{"status": "in_progress"}],
    [{"data": [{"url": "data:video/mp4;base64,AAAA"}]}] * 2,
]  # fmt: skip


@each_case("objects", WRONG)
async def test_a_wrong_answer_of_a_worker_is_one_well_formed_error(tmp_path: Path, objects: list[Any]) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sends(*objects), **VIDEO)
        answer = await make(found)
        assert answer.status in (500, 503), answer.body
        assert answer.json["error"]["message"]


async def test_a_failed_video_is_an_error(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sends({"status": "failed", "error": "no film"}), **VIDEO)
        answer = await make(found)
        assert (answer.status, answer.json["message"]) == (500, "no film")


async def test_a_kept_video_is_shown_fetched_by_ranges_and_deleted(tmp_path: Path) -> None:
    async with cluster(tmp_path, media=MediaSettings(store_dir=tmp_path / "kept")) as found:
        await found.worker(sample(), **VIDEO)
        video = (await make(found)).json
        link = video["data"][0]["url"]
        assert link.startswith("http://media.localhost/v1/media?")
        one = f"/v1/videos/{video['id']}"
        shown = (await found.client.get(one)).json
        assert shown == {name: value for name, value in video.items() if name != "data"}
        content = await found.client.get(one + "/content")
        assert content.headers["content-type"] == "image/apng"
        assert len(frames(content.body)) == 8
        linked = found.client.begin("GET", "/v1/media", query=urlsplit(link).query)
        assert (await linked.done()).body == content.body
        part = await found.client.call("GET", one + "/content", headers={"range": "bytes=0-7"})
        assert (part.status, part.body) == (206, content.body[:8])
        assert [each["id"] for each in (await found.client.get("/v1/videos")).json["data"]] == [video["id"]]
        assert (await found.client.call("DELETE", one)).json["deleted"] is True
        for path in (one, one + "/content"):
            assert (await found.client.get(path)).status == 404
        assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["signing.key"]


async def test_without_a_store_the_video_is_in_the_answer_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sample(), **VIDEO)
        video = (await make(found)).json
        assert video["data"][0]["url"].startswith("data:image/apng;base64,")
        for path in ("/v1/videos", f"/v1/videos/{video['id']}", f"/v1/videos/{video['id']}/content"):
            answer = await found.client.get(path)
            assert answer.status == 404
            assert "DYN_MEDIA_STORE" in answer.json["message"]


async def test_pictures_are_linked_and_a_changed_link_shows_nothing(tmp_path: Path) -> None:
    serving = RawServing(SampleDiffusionEngine(delay=0))

    async def pictures(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await serving.handle(dict(body), context, sink)

    settings = MediaSettings(store_dir=tmp_path / "kept", link_prefix="https://cdn.test/")
    async with cluster(tmp_path, media=settings) as found:
        await found.worker(pictures, model_type=ModelType.Images, model_input=ModelInput.Text)
        body = {"model": "m", "prompt": "x", "n": 2}
        entries = (await found.client.call("POST", "/v1/images/generations", body)).json["data"]
        for entry in entries:
            assert entry["url"].startswith("https://cdn.test/v1/media?id=image_")
            query = urlsplit(entry["url"]).query
            assert (
                read_png((await found.client.begin("GET", "/v1/media", query=query).done()).body, 1 << 16).width == 64
            )
        given = {name: values[0] for name, values in parse_qs(urlsplit(entries[0]["url"]).query).items()}
        other = parse_qs(urlsplit(entries[1]["url"]).query)["id"][0]
        for changed in (
            {"id": other},
            {"expires": str(int(given["expires"]) + 1)},
            {"signature": "0" * 64},
            {"signature": "é"},
            {"expires": "9" * 40},
            {"id": "../signing"},
        ):
            query = "&".join(f"{name}={value}" for name, value in (given | changed).items())
            assert (await found.client.begin("GET", "/v1/media", query=query).done()).status == 404, changed


def test_the_store_keeps_what_fits_and_forgets_what_is_old(tmp_path: Path) -> None:
    clock = [1000.0]
    store = MediaStore(tmp_path / "kept", KeepLimits(100, 60), now=lambda: clock[0])
    first, second = (store.keep(bytes(40), "video/mp4", owner="a", kind="video") for _ in range(2))
    clock[0] += 1
    third = store.keep(bytes(40), "video/mp4", owner="b", kind="video")
    kept = [each.id for each in (first, second, third) if store.find(each.id, None) is not None]
    assert len(kept) == 2
    assert third.id in kept
    assert store.find(third.id, "a") is None
    assert [each.id for each in store.listed("video", "b")] == [third.id]
    assert store.linked(third.id, str(int(third.expires_at)), "") is None
    clock[0] += 61
    assert store.find(third.id, "b") is None
    store.keep(b"x", "video/mp4", owner="a", kind="video")
    assert len(list((tmp_path / "kept").iterdir())) == 3  # the new one, and the key


def test_the_owner_that_has_most_makes_the_room(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, KeepLimits(100, 60))
    quiet = [store.keep(bytes(10), "image/png", owner="quiet", kind="image") for _ in range(2)]
    greedy = [store.keep(bytes(20), "image/png", owner="greedy", kind="image") for _ in range(20)]
    assert store.owners() == {"quiet": 20, "greedy": 80}
    assert all(store.find(each.id, "quiet") is not None for each in quiet)
    assert [store.find(each.id, "greedy") is not None for each in greedy[-5:]] == [False, True, True, True, True]


def test_links_of_one_process_hold_in_another(tmp_path: Path) -> None:
    one, other = (MediaStore(tmp_path, KeepLimits(100, 60)) for _ in range(2))
    kept = one.keep(b"x", "image/png", owner="", kind="image")
    query = {name: values[0] for name, values in parse_qs(urlsplit(one.link(kept)).query).items()}
    found = other.linked(query["id"], query["expires"], query["signature"])
    assert found is not None
    assert found.id == kept.id
    assert (tmp_path / "signing.key").stat().st_mode & 0o777 == 0o600


def test_a_store_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="media store"):
        MediaStore(tmp_path / "file" / "kept", KeepLimits(100, 60))


def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MediaStore(tmp_path, KeepLimits(100, 60))

    def rename(self: Path, target: Path) -> None:
        if target.suffix == ".json":
            raise OSError("the disk is full")
        os.rename(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="full"):
        store.keep(b"x", "image/png", owner="", kind="image")
    assert [path.name for path in tmp_path.iterdir()] == ["signing.key"]


async def test_the_sample_engine_passes_its_conformance_kit() -> None:
    await run_raw_conformance(lambda: SampleVideoEngine(delay=0.001))
