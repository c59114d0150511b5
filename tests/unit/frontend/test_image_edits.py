"""`/v1/images/edits` as forms and as JSON, and streams of pictures, with the sample engine behind a real worker adapter."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from dynamo.engines.sample.diffusion_engine import SampleDiffusionEngine
from dynamo.engines.sample.drawing import Blocks
from dynamo.engines.sample.png import read_png
from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.protocol.model_types import ModelInput, ModelType
from support.asgi_client import Exchange
from support.cases import each_case
from support.forms import CONTENT_TYPE, form
from support.frontend_cluster import Cluster, Script, cluster, raw_engine, sends
from support.media_server import media_server, ok
from support.pictures import GIF, JPEG, WAV, Colour, data_url, plain_png, png

IMAGES: dict[str, Any] = {"model_type": ModelType.Images, "model_input": ModelInput.Text}
GREEN: Colour = (0, 200, 0)
SQUARE = plain_png(GREEN, 16, 16)
Part = tuple[str, str | bytes]


def sample() -> Script:
    return raw_engine(SampleDiffusionEngine(delay=0))


def with_alpha(size: int, hidden: int) -> bytes:
    """A PNG whose left columns are transparent, in grey with an alpha channel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + b"".join(bytes([9, 0 if column < hidden else 255]) for column in range(size))
    header = struct.pack(">IIBBBBB", size, size, 8, 4, 0, 0, 0)
    packed = zlib.compress(row * size)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


async def edit(found: Cluster, *parts: Part) -> Exchange:
    body = form(("model", "m"), ("prompt", "a fox"), *parts)
    return await found.client.call("POST", "/v1/images/edits", body, headers=CONTENT_TYPE)


def pixels(content: str) -> list[tuple[int, ...]]:
    picture = read_png(base64.b64decode(content), 1 << 20)
    return [tuple(picture.pixels[at : at + 3]) for at in range(0, len(picture.pixels), 4)]


def events(answer: Exchange) -> list[dict[str, Any]]:
    found = []
    for block in answer.events:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


async def test_an_edit_with_a_mask_changes_what_is_transparent_and_nothing_else(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(sample(), **IMAGES)
        answer = await edit(
            found, ("image", SQUARE), ("mask", with_alpha(16, 6)), ("n", "2"), ("response_format", "b64_json"),
            ("nvext[seed]", "3"),
        )  # fmt: skip
        assert answer.status == 200, answer.body
        made = [pixels(entry["b64_json"]) for entry in answer.json["data"]]
        assert len(made) == 2
        assert made[0] != made[1]
        for number, picture in enumerate(made):
            drawn = Blocks(f"3/{number}/a fox").rows(16, 16)
            for at, pixel in enumerate(picture):
                row, column = divmod(at, 16)
                expected = tuple(drawn[row][3 * column : 3 * column + 3]) if column < 6 else GREEN
                assert pixel == expected
        (body,) = worker.requests
        assert body["input_reference"] == data_url(SQUARE)
        assert body["extra_args"]["media_passthrough"] == {"mask": data_url(with_alpha(16, 6))}
        assert (body["n"], body["nvext"], "image" in body, "mask" in body) == (2, {"seed": 3}, False, False)


async def test_an_edit_without_a_mask_mixes_the_whole_image(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sample(), **IMAGES)
        answer = await edit(found, ("image[]", SQUARE), ("response_format", "b64_json"))
        drawn = b"".join(Blocks("0/0/a fox").rows(16, 16))
        expected = [
            tuple((given + drawn[3 * at + channel]) // 2 for channel, given in enumerate(GREEN)) for at in range(256)
        ]
        assert pixels(answer.json["data"][0]["b64_json"]) == expected


async def test_several_images_reach_the_worker_in_their_order(tmp_path: Path) -> None:
    other = plain_png((1, 2, 3))
    async with cluster(tmp_path) as found:
        worker = await found.worker(sends({"data": [{"url": "data:,"}]}), **IMAGES)
        assert (await edit(found, ("image[]", SQUARE), ("image[]", other))).status == 200
        assert worker.requests[0]["extra_args"]["media_passthrough"] == {
            "input_references": [data_url(SQUARE), data_url(other)]
        }


async def test_json_names_images_by_url_and_they_are_fetched_here(tmp_path: Path) -> None:
    async with cluster(tmp_path, media=MediaSettings(allow_internal=True)) as found, media_server() as server:
        server.answers["/a.png"] = ok(SQUARE)
        worker = await found.worker(sample(), **IMAGES)
        for body in (
            {"input_reference": server.url("/a.png")},
            {"image": data_url(SQUARE)},
            {"images": [{"image_url": server.url("/a.png")}]},
        ):
            answer = await found.client.call("POST", "/v1/images/edits", {"model": "m", "prompt": "a fox", **body})
            assert answer.status == 200, answer.body
        assert [request["input_reference"] for request in worker.requests] == [data_url(SQUARE)] * 3


REFUSED: list[tuple[list[Part], int, str | None]] = [
    ([], 400, "image"),
    ([("image", "https://user:key@example.com/a.png")], 400, "image"),
    ([("image", WAV)], 400, "image"),
    ([("image", b"")], 400, "image"),
    ([("image", SQUARE), ("image", SQUARE), ("input_reference", "https://example.com/a")], 400, "input_reference"),
    ([("image", SQUARE), ("mask", plain_png(GREEN))], 400, "mask"),
    ([("image", SQUARE), ("mask", GIF)], 400, "mask"),
    ([("image", SQUARE), ("image", WAV)], 400, "image[1]"),
    ([("image", SQUARE)] * 17, 400, "image"),
    ([("image", SQUARE), ("n", "many")], 400, "n"),
    ([("image", SQUARE), ("n", "1"), ("n", "1")], 400, "n"),
    ([("image", SQUARE), ("steps", "1")], 400, "steps"),
    ([("image", SQUARE), ("markup", SQUARE)], 400, "markup"),
    ([("image", SQUARE), ("nvext", "{")], 400, "nvext"),
    ([("image", SQUARE), ("size", "big")], 400, "size"),
    ([("image", SQUARE), ("prompt", "x")], 400, "prompt"),
]


@each_case("parts,status,param", REFUSED)
async def test_a_form_that_breaks_a_rule_is_refused_by_name(
    tmp_path: Path, parts: list[Part], status: int, param: str | None
) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(sample(), **IMAGES)
        answer = await edit(found, *parts)
        assert (answer.status, answer.json["error"]["param"]) == (status, param), answer.body
        assert worker.requests == []
        assert found.media.held_bytes == 0


async def test_what_the_sample_engine_cannot_read_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sample(), **IMAGES)
        answer = await edit(found, ("image", JPEG))
        assert (answer.status, answer.json["message"]) == (400, "input_reference: it is not a PNG")


async def test_a_form_has_a_limit_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path, media=MediaSettings(image_form_bytes=64 * 1024)) as found:
        await found.worker(sample(), **IMAGES)
        answer = await edit(found, ("image", bytes(64 * 1024)))
        assert answer.status == 413
        assert "DYN_HTTP_IMAGE_FORM_LIMIT_MB" in answer.json["message"]
        assert answer.headers["connection"] == "close"
        cut = form(("model", "m"), ("image", SQUARE))[:-30]
        answer = await found.client.call("POST", "/v1/images/edits", cut, headers=CONTENT_TYPE)
        assert (answer.status, answer.headers["connection"]) == (400, "close")


async def test_partial_pictures_are_coarser_steps_of_the_finished_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(sample(), **IMAGES)
        body = {"model": "m", "prompt": "a fox", "size": "16x8", "stream": True, "partial_images": 3, "quality": "low"}
        answer = await found.client.call("POST", "/v1/images/generations", body)
        assert answer.headers["content-type"] == "text/event-stream"
        *partial, last = events(answer)
        assert [event["type"] for event in partial] == ["image_generation.partial_image"] * 3
        assert [event["partial_image_index"] for event in partial] == [0, 1, 2]
        assert last["type"] == "image_generation.completed"
        assert (last["size"], last["output_format"], last["quality"]) == ("16x8", "png", "low")
        assert last["usage"] == {
            "input_tokens": 2, "input_tokens_details": {"text_tokens": 2, "image_tokens": 0}, "output_tokens": 1,
            "total_tokens": 3,
        }  # fmt: skip
        finished = pixels(last["b64_json"])
        for step, event in enumerate(partial):
            side = 1 << step
            coarse = pixels(event["b64_json"])
            assert len(set(coarse)) == side * side
            for row in range(side):
                for column in range(side):
                    places = [
                        y * 16 + x
                        for y in range(row * 8 // side, (row + 1) * 8 // side)
                        for x in range(column * 16 // side, (column + 1) * 16 // side)
                    ]
                    mean = tuple(sum(finished[at][channel] for at in places) // len(places) for channel in range(3))
                    assert {coarse[at] for at in places} == {mean}
        assert worker.requests[0]["response_format"] == "b64_json"


async def test_an_edit_streams_events_of_its_own_name(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sample(), **IMAGES)
        answer = await edit(found, ("image", SQUARE), ("stream", "true"), ("partial_images", "1"), ("n", "2"))
        kinds = [event["type"] for event in events(answer)]
        assert kinds == ["image_edit.partial_image"] * 2 + ["image_edit.completed"] * 2


async def test_an_engine_that_yields_once_gives_the_completed_event_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        picture = base64.b64encode(SQUARE).decode()
        await found.worker(sends({"created": 1, "data": [{"b64_json": picture}]}), **IMAGES)
        body = {"model": "m", "prompt": "x", "stream": True, "partial_images": 2}
        (event,) = events(await found.client.call("POST", "/v1/images/generations", body))
        assert (event["type"], event["b64_json"], event["usage"]) == ("image_generation.completed", picture, None)


PICTURE = base64.b64encode(SQUARE).decode()
DONE = {"data": [{"b64_json": PICTURE}]}
WRONG: list[list[Any]] = [
    [{"partial_image_index": 2, "b64_json": PICTURE}], [{"partial_image_index": 0}], [{"partial_image_index": 0, "b64_json": "?"}],
    [{"data": [{"url": "data:,"}]}], [{"data": [{"b64_json": "AAAA"}]}], [7], [None], [],
]  # fmt: skip


@each_case("objects", WRONG)
async def test_a_stream_of_a_worker_that_breaks_the_contract_is_an_error_with_a_status(
    tmp_path: Path, objects: list[Any]
) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sends(*objects), **IMAGES)
        body = {"model": "m", "prompt": "x", "stream": True, "partial_images": 2}
        answer = await found.client.call("POST", "/v1/images/generations", body)
        assert answer.status in (500, 503), answer.body
        assert answer.json["error"]["message"]


async def test_a_failure_behind_a_partial_picture_is_an_event(tmp_path: Path) -> None:
    partial = {"partial_image_index": 0, "b64_json": PICTURE}
    async with cluster(tmp_path) as found:
        for script in (sends(partial, fails=ValueError("broken")), sends(partial), sends(DONE, DONE)):
            worker = await found.worker(script, **IMAGES)
            body = {"model": "m", "prompt": "x", "stream": True, "partial_images": 1}
            answer = await found.client.call("POST", "/v1/images/generations", body)
            assert answer.status == 200
            *_, failed, done = answer.events
            assert "error" in json.loads(failed.removeprefix("data: "))
            assert done == "data: [DONE]"
            await worker.stop()
            await found.gone("m")


async def test_a_failed_status_of_an_engine_is_an_error(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sends({"status": "failed", "error": {"message": "no paint"}}), **IMAGES)
        answer = await found.client.call("POST", "/v1/images/generations", {"model": "m", "prompt": "x"})
        assert (answer.status, answer.json["message"]) == (500, "no paint")


def test_every_row_filter_of_a_png_is_undone() -> None:
    rows: list[list[Colour]] = [[(y * 7 + x * 31 & 255, x * y & 255, 255 - x) for x in range(5)] for y in range(5)]
    raw = [bytes(value for pixel in row for value in pixel) for row in rows]

    def filtered(kind: int, y: int) -> bytes:
        row, above = raw[y], raw[y - 1] if y else bytes(15)
        out = bytearray()
        for at, value in enumerate(row):
            left, corner = (row[at - 3], above[at - 3]) if at >= 3 else (0, 0)
            near = left + above[at] - corner
            paeth = min((left, above[at], corner), key=lambda one: abs(near - one))
            out.append(value - (0, left, above[at], (left + above[at]) // 2, paeth)[kind] & 255)
        return bytes([kind]) + bytes(out)

    plain = png(rows)
    packed = zlib.compress(b"".join(filtered(kind, kind) for kind in range(5)))
    at = plain.index(b"IDAT") - 4
    made = plain[:at] + struct.pack(">I", len(packed)) + b"IDAT" + packed + bytes(4) + plain[-12:]
    assert read_png(made, 25).pixels == read_png(plain, 25).pixels
