"""`/v1/images/generations` with the sample engine as a worker gets it, and with workers that answer wrongly."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo.engines.sample.diffusion_engine import SampleDiffusionEngine
from dynamo.frontend.http.routes import NOT_BUILT_ROUTES
from dynamo.protocol.model_types import ModelInput, ModelType
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.worker.serving import RawServing
from support.cases import each_case
from support.frontend_cluster import Cluster, Script, cluster

Body = dict[str, Any]
IMAGES: dict[str, Any] = {"model_type": ModelType.Images, "model_input": ModelInput.Text}


def sample() -> Script:
    serving = RawServing(SampleDiffusionEngine(delay=0))

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await serving.handle(dict(body), context, sink)

    return script


def answers(value: Any) -> Script:
    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        sink.send_object({"data": value})
        sink.end()

    return script


async def ask(found: Cluster, **body: Any) -> tuple[int | None, Any]:
    reply = await found.client.call("POST", "/v1/images/generations", {"model": "m", "prompt": "a fox", **body})
    return reply.status, reply.json


def pixels(png: bytes) -> tuple[int, int, set[bytes]]:
    """The size of a picture, and its colours."""
    width, height = struct.unpack(">II", png[16:24])
    length = struct.unpack(">I", png[33:37])[0]
    raw = zlib.decompress(png[41 : 41 + length])
    rows = [raw[start + 1 : start + 1 + 3 * width] for start in range(0, len(raw), 1 + 3 * width)]
    assert len(rows) == height
    return width, height, {row[at : at + 3] for row in rows for at in range(0, 3 * width, 3)}


async def test_pictures_have_the_size_and_number_that_were_asked_for(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(sample(), **IMAGES)
        status, body = await ask(found, n=3, size="48x32", response_format="b64_json", user="u")
        assert status == 200
        made = [base64.b64decode(entry["b64_json"]) for entry in body["data"]]
        assert len(set(made)) == 3
        for png in made:
            width, height, colours = pixels(png)
            assert (width, height) == (48, 32)
            assert len(colours) > 32
        assert worker.requests[0] == {
            "model": "m", "prompt": "a fox", "n": 3, "size": "48x32", "response_format": "b64_json", "user": "u"
        }  # fmt: skip


async def test_the_same_seed_and_prompt_draw_the_same_picture(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sample(), **IMAGES)
        one = (await ask(found, nvext={"seed": 7}))[1]["data"]
        assert one == (await ask(found, nvext={"seed": 7}))[1]["data"]
        assert one != (await ask(found, nvext={"seed": 8}))[1]["data"]
        assert one != (await ask(found, nvext={"seed": 7}, prompt="a dog"))[1]["data"]
        assert one[0]["url"].startswith("data:image/png;base64,")


REFUSED: list[tuple[Body, int, str]] = [
    ({"prompt": " "}, 400, "prompt"),
    ({"prompt": "x" * 32_001}, 400, "prompt"),
    ({"n": 0}, 400, "n"),
    ({"n": 11}, 400, "n"),
    ({"size": "big"}, 400, "size"),
    ({"size": "0x7"}, 400, "size"),
    ({"response_format": "png"}, 400, "response_format"),
    ({"output_format": "bmp"}, 400, "output_format"),
    ({"steps": 3}, 400, "steps"),
    ({"nvext": {"seeds": 3}}, 400, "nvext.seeds"),
    ({"partial_images": 4, "stream": True}, 400, "partial_images"),
    ({"stream": True, "response_format": "url"}, 400, "response_format"),
    ({"partial_images": 2}, 400, "partial_images"),
]


@each_case("body,status,param", REFUSED)
async def test_a_broken_rule_names_the_field(tmp_path: Path, body: Body, status: int, param: str) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(sample(), **IMAGES)
        found_status, answer = await ask(found, **body)
        assert (found_status, answer["error"]["param"]) == (status, param), answer
        assert worker.requests == []


async def test_what_the_engine_refuses_reaches_the_client(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sample(), **IMAGES)
        status, body = await ask(found, size="4000x10")
        assert status == 400
        assert "size" in body["message"]


WRONG: list[Any] = [
    None, 7, {}, {"data": []}, {"data": [{}]}, {"data": [{"b64_json": "AAAA"}]}, {"data": [{"url": ""}]}, {"data": [1]},
    {"data": [{"url": "data:"}] * 2},
]  # fmt: skip


@each_case("answer", WRONG)
async def test_a_wrong_answer_of_a_worker_is_one_well_formed_error(tmp_path: Path, answer: Any) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(answers(answer), **IMAGES)
        status, body = await ask(found)
        assert status == 500, body
        assert body["error"]["message"]


@each_case("path", list(NOT_BUILT_ROUTES))
async def test_what_is_not_built_is_named(tmp_path: Path, path: str) -> None:
    async with cluster(tmp_path) as found:
        reply = await found.client.call("POST", path, {"model": "m"})
        assert (reply.status, reply.json["error"]["code"]) == (422, "not_built")
        assert "is not in this version" in reply.json["message"]


async def test_a_model_of_images_is_no_model_of_chats(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(sample(), **IMAGES)
        assert (await found.client.chat()).status == 404
