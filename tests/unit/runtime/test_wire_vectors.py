"""The vectors that every implementation of the mux wire must agree on: here the Python one; `rust/` reads the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynamo.runtime.calls.request_plane.base import INITIAL_CREDITS
from dynamo.runtime.calls.request_plane.mux.frames import (
    FrameDecoder,
    Kind,
    decode_body,
    decode_credits,
    decode_hello,
    decode_items,
    decode_open,
)
from support.cases import each_case

VECTORS = json.loads((Path(__file__).parents[3] / "rust" / "wire-vectors.json").read_text())


def only_frame(vector: dict[str, Any]) -> tuple[int, int, int, bytes]:
    (frame,) = FrameDecoder().feed(bytes.fromhex(vector["bytes"]))
    return frame


@each_case("vector", VECTORS["caller"], ids=lambda vector: vector["name"])
def test_what_a_caller_sends_is_read(vector: dict[str, Any]) -> None:
    kind, flags, stream_id, payload = only_frame(vector)
    assert (kind, flags, stream_id) == (vector["kind"], vector["flags"], vector["stream"])
    means = vector["means"]
    match kind:
        case Kind.HELLO:
            hello = decode_hello(payload)
            assert {"version": hello.version, "credits": hello.credits} == means
            assert hello.credits == INITIAL_CREDITS or "credits" in means
        case Kind.OPEN:
            head, body = decode_open(payload)
            read = {name: getattr(head, name) for name in means if name != "body"}
            assert read | {"body": None if body is None else decode_body(body)} == means
        case Kind.CREDIT:
            assert [list(one) for one in decode_credits(payload)] == means["credits"]
        case Kind.CANCEL:
            assert {"kill": payload == b"\x01"} == means
        case _:
            assert payload.hex() == means["payload"]


@each_case("vector", VECTORS["worker"], ids=lambda vector: vector["name"])
def test_what_a_worker_sends_is_read(vector: dict[str, Any]) -> None:
    kind, flags, stream_id, payload = only_frame(vector)
    assert (kind, flags, stream_id) == (Kind.ITEMS, 0, 0)
    read = [
        [item.stream_id, item.index, item.offset, list(item.token_ids), item.finish_reason, item.extra]
        for item in decode_items(payload)
    ]
    assert read == vector["items"]


def test_every_kind_of_frame_has_a_vector() -> None:
    seen = {vector["kind"] for vector in VECTORS["caller"]}
    assert seen == {Kind.HELLO, Kind.PING, Kind.OPEN, Kind.BODY, Kind.CANCEL, Kind.CREDIT}
