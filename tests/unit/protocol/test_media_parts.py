"""Media in the messages of a chat: what is taken out of them, what templates see, and what is refused by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import ChatRequest, parse_chat


def parse(*messages: dict[str, Any]) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": messages}).encode())


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


TEXT = {"type": "text", "text": "what?"}


@pytest.mark.parametrize(
    ("part", "kind", "url", "uuid"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}}, "image", "https://a/b.png", None),
        ({"type": "image_url", "image_url": "https://a/b.png"}, "image", "https://a/b.png", None),
        ({"type": "image_url", "image_url": {"url": "https://a/b"}, "uuid": "u1"}, "image", "https://a/b", "u1"),
        ({"type": "image_url", "image_url": None, "uuid": "abc"}, "image", None, "abc"),
        ({"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, "video", "https://a/b.mp4", None),
        ({"type": "audio_url", "audio_url": {"url": "https://a/b.wav"}}, "audio", "https://a/b.wav", None),
        ({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, "audio", "data:audio/wav;base64,UklG", None),
        ({"type": "file", "file": {"file_data": "data:image/png;base64,AA==", "filename": "x.png"}}, "image", "data:image/png;base64,AA==", None),
        ({"type": "file", "file": {"file_data": "data:audio/mpeg;base64,AA=="}}, "audio", "data:audio/mpeg;base64,AA==", None),
    ],
)  # fmt: skip
def test_each_kind_of_part_is_taken(part: dict[str, Any], kind: str, url: str | None, uuid: str | None) -> None:
    request = parse({"role": "system", "content": "s"}, user(TEXT, part))
    assert request.media is not None
    (found,) = request.media.parts
    assert (found.kind, found.url, found.uuid, found.where) == (kind, url, uuid, "messages[1].content[1]")
    assert request.messages[1]["content"] == [TEXT, {"type": kind}]


def test_a_tool_may_answer_with_an_image() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = parse(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": "https://a/b"}]},
    )
    assert request.media is not None
    assert request.media.parts[0].where == "messages[2].content[0]"


def test_parts_keep_the_order_of_the_messages() -> None:
    first, second, third = ({"type": "image_url", "image_url": f"https://a/{n}"} for n in range(3))
    request = parse(user(first, TEXT, second), {"role": "assistant", "content": "x"}, user(third))
    assert request.media is not None
    assert [part.url for part in request.media.parts] == ["https://a/0", "https://a/1", "https://a/2"]
    assert request.messages[0]["content"] == [{"type": "image"}, TEXT, {"type": "image"}]


def test_engines_see_the_messages_without_the_content_of_data_urls() -> None:
    request = parse(
        user(
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
            {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
            {"type": "image_url", "image_url": {"url": "https://a/b"}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "file", "file": {"file_data": "data:image/png;base64,AAAA"}},
        )
    )
    assert request.media is not None
    assert [dict(part) for part in request.media.messages[0]["content"]] == [
        {"type": "image_url", "image_url": {"url": "", "detail": "low"}},
        {"type": "image_url", "image_url": ""},
        {"type": "image_url", "image_url": {"url": "https://a/b"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_data": ""}},
    ]


def test_a_request_of_text_has_no_media_and_keeps_its_messages() -> None:
    message = user(TEXT, TEXT)
    request = parse(message)
    assert request.media is None
    assert request.messages == [message]


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        (user({"type": "image_url"}), "messages[0].content[0]", "needs a URL"),
        (user(TEXT, {"type": "image_url", "image_url": {}}), "messages[0].content[1]", "needs a URL"),
        (user({"type": "image_url", "image_url": ""}), "messages[0].content[0]", "empty"),
        (user({"type": "image_url", "image_url": "https://a", "uuid": ""}), "messages[0].content[0]", "uuid"),
        (user({"type": "image", "image": "x"}), "messages[0].content[0].type", "'image'"),
        (user({"type": "pdf"}), "messages[0].content[0].type", "'pdf'"),
        (user({"type": "image_url", "image_url": {"url": "https://a", "detail": "x"}}), "messages[0].content[0].image_url.detail", "x"),
        (user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}), "messages[0].content[0]", "empty"),
        (user({"type": "input_audio", "input_audio": {"data": "AA", "format": "exe"}}), "messages[0].content[0].input_audio.format", "exe"),
        (user({"type": "file", "file": {"file_id": ""}}), "messages[0].content[0]", "file_id"),
        (user({"type": "file", "file": {}}), "messages[0].content[0]", "uploaded"),
        (user({"type": "file", "file": {"file_data": "data:application/pdf;base64,AA"}}), "messages[0].content[0]", "data URL of an image"),
        ({"role": "system", "content": [{"type": "image_url", "image_url": "https://a"}]}, "messages[0].content[0].type", "image_url"),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": "https://a"}]}, "messages[0].content[0].type", "image_url"),
    ],
)  # fmt: skip
def test_what_is_not_a_part_is_a_400_with_its_place(message: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        parse(message)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert text in caught.value.message
