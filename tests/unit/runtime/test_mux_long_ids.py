"""Long lists of ids: plain msgpack, however they are cut, and read in slices where that is possible."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime.calls.request_plane.mux import bodies
from dynamo.runtime.calls.request_plane.mux.bodies import (
    DecodedTooLarge,
    InSlices,
    decode_long,
    encode_long,
    has_long_ids,
)

LIMIT = 1 << 28
NUMBER = st.integers(-(2**63), 2**64 - 1)  # what msgpack has
ID = st.sampled_from([0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1])


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SLICE_IDS", 4)
    monkeypatch.setattr(bodies, "LONG_BODY_BYTES", 1)


def result_of(work: InSlices[Any]) -> tuple[Any, int]:
    """Return what came of it, and in how many slices."""
    slices = 0
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value, slices
        slices += 1


@given(ids=st.lists(ID, min_size=1, max_size=20), others=st.dictionaries(st.text(max_size=9), NUMBER, max_size=3))
def test_the_ids_come_back_in_slices_and_every_reader_of_msgpack_reads_them(
    ids: list[int], others: dict[str, int]
) -> None:
    body = {"token_ids": ids, **{name: value for name, value in others.items() if name != "token_ids"}}
    encoded, written = result_of(encode_long(body))
    assert msgspec.msgpack.decode(encoded) == body
    assert result_of(decode_long(encoded, LIMIT)) == (body, written)
    assert written == -(-len(ids) // 4)


@given(body=st.fixed_dictionaries({"a": st.binary(max_size=4), "token_ids": st.lists(ID, max_size=20)}))
def test_what_another_writer_wrote_is_read_too(body: dict[str, Any]) -> None:
    encoded = msgspec.msgpack.encode(body)
    assert result_of(decode_long(encoded, LIMIT))[0] == body
    count = len(body["token_ids"]).to_bytes(4, "big")
    wide = msgspec.msgpack.encode({"a": body["a"], "token_ids": []})[:-1] + b"\xdd" + count
    mixed = wide + b"".join(msgspec.msgpack.encode(id) for id in body["token_ids"])
    assert result_of(decode_long(mixed, LIMIT))[0] == body


@pytest.mark.parametrize("last", [-1, 2**32, 1.5])
def test_ids_that_no_column_holds_are_encoded_as_before(last: float) -> None:
    body = {"token_ids": [1, 2, 3, 4, 5, last]}
    assert result_of(encode_long(body))[0] == msgspec.msgpack.encode(body)


def test_text_that_looks_like_the_ids_is_text() -> None:
    body = {"note": "\xa9token_ids\xdd\0\0\0\1", "raw": b"\xa9token_ids\xdd\0\0\0\1", "token_ids": [1, 2]}
    encoded, _ = result_of(encode_long(body))
    assert result_of(decode_long(encoded, LIMIT))[0] == body


def test_a_message_that_was_cut_or_goes_on_is_refused() -> None:
    encoded, _ = result_of(encode_long({"a": 1, "token_ids": [7] * 6 + [700] * 6}))
    for end in range(len(encoded)):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            result_of(decode_long(encoded[:end], LIMIT))
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        result_of(decode_long(encoded + b"\0", LIMIT))


@pytest.mark.parametrize(("id", "bytes_each"), [(1, 8), (200, 8), (256, 40), (150_000, 40)])
def test_what_ids_take_is_judged_before_they_are_made(id: int, bytes_each: int) -> None:
    encoded, _ = result_of(encode_long({"token_ids": [id] * 100}))
    with pytest.raises(DecodedTooLarge):
        result_of(decode_long(encoded, 100 * bytes_each - 1))
    assert result_of(decode_long(encoded, 100 * bytes_each))[1] == 25


def test_only_long_lists_are_worth_it() -> None:
    long = [0] * bodies.LONG_IDS
    assert has_long_ids({"token_ids": long})
    assert [has_long_ids(body) for body in ({"token_ids": long[1:]}, {"token_ids": None}, {}, long, None)] == [
        False
    ] * 5
