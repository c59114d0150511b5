"""Requests with media, from the HTTP API to what the worker gets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.protocol.records import MEDIA_KINDS, ModelRuntimeConfig
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, ScriptedWorker, cluster, say
from support.media_server import MediaServer, media_server, ok
from support.patience import PATIENCE_SECONDS
from support.pictures import BLUE, RED, WAV, data_url, image_part, plain_png, png_of
from support.tiny_model import write_tiny_model

SEES = ModelRuntimeConfig(runtime_data={MEDIA_KINDS: ["image", "audio", "video"]})
PARTS_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<pad>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
)
GRID = {"image_processor_type": "ColourGridProcessor"}
Settings = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, media=MediaSettings(allow_internal=True)) as found:
        yield found


@pytest.fixture
async def server() -> AsyncIterator[MediaServer]:
    async with media_server() as found:
        found.answers["/red.png"] = ok(RED)
        found.answers["/blue.png"] = ok(BLUE)
        yield found


async def ask(house: Cluster, *parts: Any, **fields: Any) -> Exchange:
    return await begin(house, *parts, **fields).done()


def begin(house: Cluster, *parts: Any, **fields: Any) -> Exchange:
    content = [{"type": "text", "text": "what?"}, *parts]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return house.client.begin("POST", "/v1/chat/completions", body)


async def sees(house: Cluster, **members: Any) -> ScriptedWorker:
    return await house.worker(say("hello"), runtime_config=SEES, **members)


def vision_model(directory: Path, template: str = PARTS_TEMPLATE) -> Path:
    """A directory of a model that has `<pad>` for an image, which becomes 16 tokens."""
    write_tiny_model(directory, chat_template=template)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "image_token_id": 2}))
    (directory / "preprocessor_config.json").write_text(json.dumps(GRID))
    return directory


# -- what the worker gets ----------------------------------------------------------------------------------------------


async def test_the_worker_gets_the_content_of_a_url_and_the_hash_of_it(house: Cluster, server: MediaServer) -> None:
    worker = await sees(house)
    url = server.url("/red.png")
    answer = await ask(house, image_part(url, uuid=None), mm_processor_kwargs={"a": 1}, media_io_kwargs={"image": {}})
    assert answer.status == 200, answer.body
    (request,) = worker.requests
    assert request["multi_modal_data"] == {"image_url": [{"Url": data_url(RED)}]}
    assert "multi_modal_uuids" not in request
    assert request["mm_processor_kwargs"] == {"a": 1}
    assert request["media_io_kwargs"] == {"image": {}}
    extra = request["extra_args"]
    assert extra["mm_hashes"] == [f"{xxhash.xxh3_64_intdigest(RED):016x}"]
    assert extra["messages"][0]["content"][1]["image_url"]["url"] == url
    assert extra["formatted_prompt"] == bytes(request["token_ids"]).decode()
    head = server.heads[0]
    assert f"Host: 127.0.0.1:{server.port}\r\n" in head
    assert "User-Agent: dynamo-ai/dynamo\r\n" in head


async def test_slots_are_in_the_order_of_the_messages_within_each_kind(house: Cluster) -> None:
    worker = await sees(house)
    answer = await ask(
        house,
        image_part(data_url(BLUE), uuid="b"),
        {"type": "input_audio", "input_audio": {"data": data_url(WAV).partition(",")[2], "format": "wav"}},
        image_part(data_url(RED)),
        {"type": "image_url", "uuid": "known"},
    )
    assert answer.status == 200, answer.body
    (request,) = worker.requests
    assert request["multi_modal_data"] == {
        "image_url": [{"Url": data_url(BLUE)}, {"Url": data_url(RED)}, {"UuidOnly": "known"}],
        "audio_url": [{"Url": data_url(WAV, "audio/wav")}],
    }
    assert request["multi_modal_uuids"] == {"image_url": ["b", None, "known"]}
    assert "mm_hashes" not in request["extra_args"]  # the client's names count


async def test_a_request_of_text_has_none_of_the_fields(house: Cluster) -> None:
    worker = await sees(house)
    await house.client.chat("hi")
    keys = {"multi_modal_data", "multi_modal_uuids", "mm_routing_info", "media_io_kwargs"}
    assert keys.isdisjoint(worker.requests[0])
    assert worker.requests[0]["extra_args"] is None


async def test_the_data_url_in_the_clients_messages_is_not_sent_twice(house: Cluster) -> None:
    worker = await sees(house)
    await ask(house, image_part(data_url(RED)))
    assert json.dumps(worker.requests[0]).count(data_url(RED)) == 1


async def test_a_data_url_is_named_by_what_it_holds(house: Cluster) -> None:
    worker = await sees(house)
    await ask(house, image_part(data_url(RED, "image/jpeg")))
    assert worker.requests[0]["multi_modal_data"] == {"image_url": [{"Url": data_url(RED)}]}


async def test_the_messages_and_responses_apis_take_images_too(house: Cluster, server: MediaServer) -> None:
    worker = await sees(house)
    source = {"type": "base64", "media_type": "image/png", "data": data_url(RED).partition(",")[2]}
    result = [{"type": "image", "source": {"type": "url", "url": server.url("/blue.png")}}]
    content = [{"type": "text", "text": "a"}, {"type": "image", "source": source}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}]},
    ]
    body = {"model": "m", "max_tokens": 5, "messages": messages}
    answer = await house.client.call("POST", "/v1/messages", body)
    assert answer.status == 200, answer.body
    assert worker.requests[-1]["multi_modal_data"] == {"image_url": [{"Url": data_url(RED)}, {"Url": data_url(BLUE)}]}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": data_url(RED), "detail": "auto"}]
    answer = await house.client.call(
        "POST", "/v1/responses", {"model": "m", "input": [{"role": "user", "content": parts}]}
    )
    assert answer.status == 200, answer.body
    assert worker.requests[-1]["multi_modal_data"] == {"image_url": [{"Url": data_url(RED)}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "file:///x"}}]}], "max_tokens": 5}, "messages[0].content[0]"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///x"}]}]}, "input[0].content[0]"),
    ],
)  # fmt: skip
async def test_other_apis_name_the_part_as_their_client_wrote_it(
    house: Cluster, path: str, body: dict[str, Any], param: str
) -> None:
    worker = await sees(house)
    answer = await house.client.call("POST", path, {"model": "m", **body})
    assert answer.status == 400
    assert param in answer.json["error"]["message"], answer.body
    assert worker.requests == []


# -- tokens ------------------------------------------------------------------------------------------------------------


async def test_images_become_pad_tokens_for_routers_and_count_in_the_usage(house: Cluster, tmp_path: Path) -> None:
    worker = await house.worker(say([70]), directory=vision_model(tmp_path / "vision"))
    answer = await ask(house, image_part(data_url(RED)), image_part(data_url(BLUE)))
    assert answer.status == 200, answer.body
    (request,) = worker.requests
    ids = list(request["token_ids"])
    assert ids.count(2) == 2  # unexpanded
    routing = request["mm_routing_info"]
    pads = [1_000_000 + (xxhash.xxh3_64_intdigest(content) & (2**30 - 1)) for content in (RED, BLUE)]
    first, second = (place for place, token in enumerate(ids) if token == 2)
    expected = [*ids[:first], *[pads[0]] * 16, *ids[first + 1 : second], *[pads[1]] * 16, *ids[second + 1 :]]
    assert routing["expanded_prompt_len"] == len(expected) == len(ids) + 30
    assert routing["routing_token_ids"] == expected + [0] * (-len(expected) % 16)
    assert routing["block_mm_infos"] == []
    assert answer.json["usage"]["prompt_tokens"] == len(expected)
    assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 32}
    assert house.metric("dynamo_frontend_images_per_request_sum") == 2
    assert house.metric("dynamo_frontend_image_tokens_per_request_sum") == 32


async def test_a_uuid_switches_the_expansion_off(house: Cluster, tmp_path: Path) -> None:
    worker = await house.worker(say([70]), directory=vision_model(tmp_path / "vision"))
    await ask(house, image_part(data_url(RED), uuid="mine"))
    assert "mm_routing_info" not in worker.requests[0]


async def test_a_template_without_a_place_for_images_still_gets_the_text(
    house: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    worker = await house.worker(say([70]), directory=vision_model(tmp_path / "vision", template))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (await ask(house, image_part(data_url(RED)))).status == 200
    assert worker.requests[0]["extra_args"]["formatted_prompt"] == "what?|"
    assert len([record for record in caplog.records if "has no place for media" in record.message]) == 1


# -- who takes media -----------------------------------------------------------------------------------------------------


async def test_a_model_that_takes_no_media_says_so_before_anything_is_fetched(
    house: Cluster, server: MediaServer
) -> None:
    worker = await house.worker(say("hello"))
    answer = await ask(house, image_part(server.url("/red.png")))
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[1]")
    assert "the model 'm' does not take image input" in answer.json["error"]["message"]
    assert (server.hits, worker.requests) == ([], [])


async def test_a_card_lists_the_kinds_that_its_engine_takes(house: Cluster, tmp_path: Path) -> None:
    only_images = ModelRuntimeConfig(runtime_data={MEDIA_KINDS: ["image"]})
    await house.worker(say("x"), runtime_config=only_images)
    sound = {"type": "audio_url", "audio_url": data_url(WAV, "audio/wav")}
    answer = await ask(house, sound)
    assert answer.status == 400
    assert "does not take audio input. It takes image." in answer.json["error"]["message"]
    assert (await ask(house, image_part(data_url(RED)))).status == 200


async def test_an_engine_may_take_nothing_of_what_its_model_could(house: Cluster, tmp_path: Path) -> None:
    blind = ModelRuntimeConfig(runtime_data={MEDIA_KINDS: []})
    await house.worker(say([70]), directory=vision_model(tmp_path / "vision"), runtime_config=blind)
    assert (await ask(house, image_part(data_url(RED)))).status == 400


async def test_the_decoder_of_a_card_bounds_its_images(house: Cluster) -> None:
    await sees(house, media_decoder={"image": {"limits": {"max_image_width": 4, "max_alloc": 128 * 1024 * 1024}}})
    answer = await ask(house, image_part(data_url(RED)))
    assert answer.status == 400
    assert "max_image_width 4" in answer.json["error"]["message"]
    assert (await ask(house, image_part(data_url(plain_png((1, 2, 3), 4, 9))))).status == 200
    assert (await ask(house, {"type": "audio_url", "audio_url": data_url(WAV)})).status == 400  # not enabled


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_the_parts_of_a_request_are_bounded_in_number_and_size(tmp_path: Path) -> None:
    async with cluster(tmp_path, media=MediaSettings(parts=2, request_bytes=2 * len(RED), held_bytes=1000)) as house:
        worker = await sees(house)
        answer = await ask(house, *[image_part(data_url(RED))] * 3)
        assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[3]")
        assert "at most 2 parts" in answer.json["error"]["message"]
        big = plain_png((1, 2, 3), 99, 99)
        answer = await ask(house, image_part(data_url(RED)), image_part(data_url(big)))
        assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[2]")
        assert "together" in answer.json["error"]["message"]
        assert worker.requests == []
        assert (await ask(house, *[image_part(data_url(RED))] * 2)).status == 200
        assert house.media.held_bytes == 0


async def test_what_requests_in_flight_hold_is_bounded_and_given_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, media=MediaSettings(held_bytes=int(len(data_url(RED)) * 1.5))) as house:
        worker = await sees(house)
        worker.script = worker.hold
        first = begin(house, image_part(data_url(RED)))
        await worker.started.wait()
        assert (await ask(house, image_part(data_url(BLUE)))).status == 529
        first.disconnect()
        await first.done()
        worker.script = say("x")
        assert (await ask(house, image_part(data_url(BLUE)))).status == 200
        assert house.media.held_bytes == 0


async def test_an_image_of_too_many_pixels_is_refused_by_its_header(house: Cluster) -> None:
    worker = await sees(house)
    answer = await ask(house, image_part(data_url(png_of(10_000, 10_000, b"x"))))
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[1]")
    assert "10000 x 10000 pixels" in answer.json["error"]["message"]
    assert worker.requests == []


# -- fetching ----------------------------------------------------------------------------------------------------------


async def test_a_url_is_fetched_once_for_all_who_ask_at_the_same_time_and_then_kept(
    house: Cluster, server: MediaServer
) -> None:
    worker = await sees(house)
    go = asyncio.Event()

    async def slowly(writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(ok(RED))

    server.answers["/slow.png"] = slowly
    asked = [begin(house, image_part(server.url("/slow.png"))) for _ in range(5)]
    await server.came.wait()
    shared = "dynamo_frontend_media_fetches_total"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while house.metric(shared, outcome="shared") < 4:
            await asyncio.sleep(0)
    go.set()
    assert [(await each.done()).status for each in asked] == [200] * 5
    assert (await ask(house, image_part(server.url("/slow.png")))).status == 200
    assert server.hits == ["/slow.png"]
    assert len(worker.requests) == 6
    counts = [house.metric(shared, outcome=outcome) for outcome in ("fetched", "shared", "cached")]
    assert counts == [1, 4, 1]


async def test_the_fetch_ends_when_its_last_client_leaves(house: Cluster, server: MediaServer) -> None:
    worker = await sees(house)

    async def never(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
        await asyncio.Event().wait()

    server.answers["/never.png"] = never
    first, second = (begin(house, image_part(server.url("/never.png"))) for _ in range(2))
    await server.came.wait()
    first.disconnect()
    await first.done()
    assert not server.left.is_set()
    second.disconnect()
    await second.done()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await server.left.wait()
    assert worker.requests == []
    assert house.metric("dynamo_frontend_requests_total", model="m", endpoint="chat_completions", request_type="unary", status="error", error_type="cancelled") == 2  # fmt: skip


async def test_a_worker_may_fetch_for_itself_what_is_checked_here(tmp_path: Path, server: MediaServer) -> None:
    async with cluster(tmp_path, media=MediaSettings(fetch="worker")) as house:
        worker = await sees(house)
        assert (await ask(house, image_part("https://example.com/a.png?key=1"))).status == 200
        assert worker.requests[0]["multi_modal_data"] == {"image_url": [{"Url": "https://example.com/a.png?key=1"}]}
        for url in (server.url("/red.png"), "file:///etc/passwd", "ftp://example.com/x", "http://localhost/"):
            for kind in ("image", "video", "audio"):
                answer = await ask(house, {"type": f"{kind}_url", f"{kind}_url": {"url": url}})
                assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[1]"), url
        assert (len(worker.requests), server.hits) == (1, [])


async def test_files_are_read_below_one_directory_only(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "red.png").write_bytes(RED)
    (tmp_path / "secret.png").write_bytes(BLUE)
    (shared / "link.png").symlink_to(tmp_path / "secret.png")
    async with cluster(tmp_path, media=MediaSettings(local_path=str(shared), file_bytes=len(RED))) as house:
        worker = await sees(house)
        assert (await ask(house, image_part(f"file://{shared}/red.png"))).status == 200
        assert worker.requests[0]["multi_modal_data"] == {"image_url": [{"Url": data_url(RED)}]}
        (shared / "big.png").write_bytes(RED + b"x")
        for url in (
            f"file://{shared}/../secret.png", f"file://{shared}/%2e%2e/secret.png", f"file://{shared}/link.png", "file:///etc/passwd",
            f"file://host{shared}/red.png", f"file://{shared}", f"file://{shared}/none.png", f"file://{shared}/red.png%00", "file:red.png",
            f"file://{shared}/big.png",
        ):  # fmt: skip
            answer = await ask(house, image_part(url))
            assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[1]"), url
        assert len(worker.requests) == 1
