"""The frame codec, sans-io: every split, the limit, the split of large batches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime.calls.request_plane.mux.frames import (
    END_FLAG,
    HEADER,
    MAGIC,
    MAX_PAYLOAD,
    FrameDecoder,
    Kind,
    ProtocolError,
    decode_item,
    decode_items,
    fragments,
    frame,
    items_frames,
)
from support.cases import each_case

WIRE = (
    frame(Kind.OPEN, b"hello", stream_id=7)
    + frame(Kind.PING, b"12345678")
    + frame(Kind.BODY, b"", stream_id=9, flags=1)
)
FRAMES = [(Kind.OPEN, 0, 7, b"hello"), (Kind.PING, 0, 0, b"12345678"), (Kind.BODY, 1, 9, b"")]


@each_case("cut", range(len(WIRE) + 1))
def test_frames_survive_any_split(cut: int) -> None:
    decoder = FrameDecoder()
    assert decoder.feed(WIRE[:cut]) + decoder.feed(WIRE[cut:]) == FRAMES


def test_frames_survive_arriving_byte_by_byte() -> None:
    decoder = FrameDecoder()
    assert [f for i in range(len(WIRE)) for f in decoder.feed(WIRE[i : i + 1])] == FRAMES


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_any_frames_survive_any_cuts(payloads: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(frame(Kind.BODY, p, stream_id=i) for i, p in enumerate(payloads))
    edges = [0, *sorted(min(c, len(wire)) for c in cuts), len(wire)]
    decoder = FrameDecoder()
    got = [f for a, b in itertools.pairwise(edges) for f in decoder.feed(wire[a:b])]
    assert got == [(Kind.BODY, 0, i, p) for i, p in enumerate(payloads)]


def test_a_frame_over_the_limit_is_refused_from_its_header_alone() -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        FrameDecoder().feed(HEADER.pack(MAX_PAYLOAD + 1, Kind.BODY, 0, 0, 1))


def test_the_magic_cannot_be_a_native_request_of_sane_size() -> None:
    assert int.from_bytes(MAGIC[:2], "big") > 65_000


@each_case("size", [0, 1, MAX_PAYLOAD - 1, MAX_PAYLOAD, MAX_PAYLOAD + 1, 3 * MAX_PAYLOAD])
def test_fragments_join_to_the_payload_and_only_the_last_is_flagged(size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    frames = FrameDecoder().feed(b"".join(fragments(Kind.BODY, payload, 3)))
    assert b"".join(f[3] for f in frames) == payload
    assert [f[1] for f in frames] == [0] * (len(frames) - 1) + [END_FLAG]


def test_a_batch_too_large_for_a_frame_is_split_between_items() -> None:
    items = [(1, 0, i, [i], None, {"text": "x" * 1000}) for i in range(200)]
    frames = FrameDecoder().feed(b"".join(items_frames(items)))
    assert len(frames) > 1
    assert all(len(f[3]) <= MAX_PAYLOAD for f in frames)
    assert [item.offset for f in frames for item in decode_items(f[3])] == list(range(200))


def test_an_item_too_large_for_a_frame_travels_in_parts() -> None:
    small, large = (1, 0, 0, [1]), (3, 0, 0, list(range(70_000)))
    frames = FrameDecoder().feed(b"".join(items_frames([small, large])))
    assert next(f[0] for f in frames) == Kind.ITEMS
    parts = [f for f in frames if f[0] == Kind.ITEM_PART]
    assert all(f[2] == 3 for f in parts)
    assert decode_item(b"".join(f[3] for f in parts)).token_ids == list(range(70_000))
