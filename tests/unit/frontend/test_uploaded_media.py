"""Uploaded files as parts of messages: whose they are, what they were uploaded for, and what they are by their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.protocol.records import MEDIA_KINDS, ModelRuntimeConfig
from support.access import bearer, closed_cluster, key
from support.asgi_client import Exchange
from support.batch_client import FORM_HEADERS, form
from support.frontend_cluster import Cluster, cluster, say
from support.pictures import RED, WAV, data_url

SEES = ModelRuntimeConfig(runtime_data={MEDIA_KINDS: ["image", "audio"]})
Body = dict[str, Any]


async def upload(house: Cluster, content: bytes, purpose: str = "vision", **headers: str) -> str:
    answer = await house.client.call(
        "POST", "/v1/files", form(content, purpose=purpose), headers={**FORM_HEADERS, **headers}
    )
    assert answer.status == 200, answer.body
    id: str = answer.json["id"]
    return id


async def chat(house: Cluster, *parts: Body, **headers: str) -> Exchange:
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, *parts]}]}
    return await house.client.call("POST", "/v1/chat/completions", body, headers=headers)


def file_part(id: str) -> Body:
    return {"type": "file", "file": {"file_id": id}}


async def test_a_file_becomes_what_its_bytes_are(tmp_path: Path) -> None:
    async with cluster(tmp_path, files_dir=tmp_path / "files") as house:
        worker = await house.worker(say("hello"), runtime_config=SEES)
        picture, sound = await upload(house, RED), await upload(house, WAV, "user_data")
        answer = await chat(house, file_part(sound), file_part(picture))
        assert answer.status == 200, answer.body
        assert worker.requests[0]["multi_modal_data"] == {
            "image_url": [{"Url": data_url(RED)}], "audio_url": [{"Url": data_url(WAV, "audio/wav")}]
        }  # fmt: skip
        shown = worker.requests[0]["extra_args"]["messages"][0]["content"]
        assert shown[1:] == [file_part(sound), file_part(picture)]
        assert house.media.held_bytes == 0


async def test_the_messages_and_responses_apis_name_uploaded_images_too(tmp_path: Path) -> None:
    async with cluster(tmp_path, files_dir=tmp_path / "files") as house:
        worker = await house.worker(say("hello"), runtime_config=SEES)
        id = await upload(house, RED)
        block = {"type": "image", "source": {"type": "file", "file_id": id}}
        messages = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
        part = {"type": "input_image", "file_id": id, "detail": "auto"}
        responses = {"model": "m", "input": [{"role": "user", "content": [part]}]}
        for path, body in (("/v1/messages", messages), ("/v1/responses", responses)):
            answer = await house.client.call("POST", path, body)
            assert answer.status == 200, answer.body
            assert worker.requests[-1]["multi_modal_data"] == {"image_url": [{"Url": data_url(RED)}]}
        sound = await upload(house, WAV)
        wrong = {"model": "m", "input": [{"role": "user", "content": [{**part, "file_id": sound}]}]}
        answer = await house.client.call("POST", "/v1/responses", wrong)
        assert (answer.status, answer.json["error"]["param"]) == (400, "input[0].content[0]")
        assert len(worker.requests) == 2


async def test_a_file_of_another_project_is_not_there(tmp_path: Path) -> None:
    records = (key("alice", project="blue"), key("bob", project="blue"), key("carol", project="red"))
    async with closed_cluster(tmp_path, *records, files_dir=tmp_path / "files") as house:
        worker = await house.worker(say("hello"), runtime_config=SEES)
        id = await upload(house, RED, **bearer("alice"))
        assert (await chat(house, file_part(id), **bearer("bob"))).status == 200
        refused = await chat(house, file_part(id), **bearer("carol"))
        nobody = await chat(house, file_part("file-none"), **bearer("carol"))
        assert (refused.status, refused.json["error"]["param"]) == (400, "messages[0].content[1]")
        assert refused.json["message"].replace(id, "file-none") == nobody.json["message"]
        assert len(worker.requests) == 1


async def test_what_cannot_be_is_a_400_that_names_the_part(tmp_path: Path) -> None:
    settings = MediaSettings(file_bytes=1000)
    async with cluster(tmp_path, files_dir=tmp_path / "files", media=settings) as house:
        worker = await house.worker(say("hello"), runtime_config=SEES)
        for content, purpose, reason in (
            (b"plain text", "vision", "no image, video or sound"),
            (b"", "vision", "no image, video or sound"),
            (RED, "evals", "purpose"),
            (RED + bytes(1000), "vision", "1000 bytes"),
        ):
            answer = await chat(house, file_part(await upload(house, content, purpose)))
            assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[1]"), answer.body
            assert reason in answer.json["message"]
        for id in ("", "../../etc/passwd", "x" * 10_000):
            assert (await chat(house, file_part(id))).status == 400
        assert worker.requests == []


async def test_without_files_the_400_says_so(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker(say("hello"), runtime_config=SEES)
        answer = await chat(house, file_part("file-1"))
        assert answer.status == 400
        assert "--files-dir" in answer.json["message"]


async def test_a_model_without_sight_refuses_a_file_like_any_image(tmp_path: Path) -> None:
    async with cluster(tmp_path, files_dir=tmp_path / "files") as house:
        worker = await house.worker(say("hello"))
        answer = await chat(house, file_part(await upload(house, RED)))
        assert answer.status == 400
        assert "does not take image input" in answer.json["message"]
        assert worker.requests == []
