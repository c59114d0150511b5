"""Bodies of megabytes are decoded in steps: to the same request, and with no step that holds the interpreter lock for long."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocol.openai import body as body_module
from dynamo.protocol.openai.body import LARGE_BYTES, decode_in_steps, read_json
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import decode_chat, decode_completion
from support.properties import examples

PIECES = ["a", "\u00e9", "\u20ac", "\U0001f600", "\\", '"', "\n", "\x85", "\ud7ff", "u", "d83d", ":", "{", "x" * 30]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(value=VALUES, is_ascii=st.booleans(), indent=st.none() | st.just(1), slice_bytes=st.integers(12, 40))
@examples(300)
def test_any_json_is_decoded_to_the_same_value(
    value: Any, is_ascii: bool, indent: int | None, slice_bytes: int
) -> None:
    body = json.dumps({"value": value}, ensure_ascii=is_ascii, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "TEXT_SLICE_BYTES", slice_bytes)
        patch.setattr(body_module, "LONG_BYTES", 8)
        assert decode_in_steps(body, msgspec.json.decode) == {"value": value}
        mutable: Any = bytearray(body)
        assert decode_in_steps(mutable, msgspec.json.decode) == {"value": value}


@given(
    st.lists(
        st.sampled_from([b"\\", b"u", b"d83d", b"de00", b'"', b"\xe2", b"\x82", b"\xac", b"a", b"\n"]), max_size=40
    )
)
@examples(300)
def test_what_is_not_json_is_refused_as_by_the_decoder(parts: list[bytes]) -> None:
    body = b'{"value":"%b"}' % (b"a" * 10 + b"".join(parts))

    def outcome(decode: Any) -> Any:
        try:
            return decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "refused"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "TEXT_SLICE_BYTES", 12)
        patch.setattr(body_module, "LONG_BYTES", 8)
        assert outcome(lambda body: decode_in_steps(body, msgspec.json.decode)) == outcome(msgspec.json.decode)


def test_a_large_request_has_its_texts_wherever_they_are() -> None:
    long = '\u20ac\\ "x" \U0001f600' * 100_000
    members: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": long}]}, {"role": "user", "content": long}],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": long, "parameters": {"type": "object"}}}
        ],
        "user": "u" * 100,
    }
    body = json.dumps(members).encode()
    assert len(body) > LARGE_BYTES
    request = decode_chat(body)
    assert msgspec.to_builtins(request.messages) == members["messages"]
    assert msgspec.to_builtins(request.tools) == members["tools"]
    assert request.user == members["user"]
    assert decode_completion(json.dumps({"model": "m", "prompt": [long, "short"]}).encode()).prompt == [long, "short"]


def test_unknown_members_of_a_large_body_are_named() -> None:
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "a" * LARGE_BYTES}], "odd": "b" * 99}
    ).encode()
    assert decode_chat(body).unsupported == ("odd",)


def test_no_step_decodes_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode_text = body_module._decode_text
    monkeypatch.setattr(body_module, "_decode_text", lambda data: sizes.append(len(data)) or decode_text(data))

    def decode(data: bytes) -> Any:
        sizes.append(len(data))
        return msgspec.json.decode(data)

    messages = [{"content": "\u00e9\u20ac y " * 300} for _ in range(1000)] + [{"content": "\n" * 2_000_000}]
    body = json.dumps({"messages": messages}).encode()
    value, mended = read_json(body, decode)
    assert (value, mended) == ({"messages": messages}, False)
    assert max(sizes) <= body_module.TEXT_SLICE_BYTES + 2 < len(body)


def test_megabytes_of_short_strings_are_refused() -> None:
    body = json.dumps({"model": "m", "prompt": ["\u20ac" * 8] * 60_000}).encode()
    with pytest.raises(RequestRejected) as caught:
        decode_completion(body)
    assert caught.value.limit == "json_structure"
