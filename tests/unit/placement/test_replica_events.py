"""What routers report to each other, byte for byte as the native system writes it."""

from __future__ import annotations

import msgspec
import pytest

from dynamo.placement.replica_events import (
    BadReplicaEvents,
    BookedPrompt,
    BookedWorker,
    BookingEvent,
    PrefillHint,
    decode_binding,
    decode_bookings,
    encode_binding,
    encode_booking,
    encode_bookings,
)
from dynamo.placement.session_affinity import AffinityRecord

ADD = BookingEvent("r", BookedWorker(7, 1), BookedPrompt([1, 2**64 - 1], True, 5, PrefillHint(16)), 9)
MARK = BookingEvent("r", BookedWorker(7), "MarkPrefillCompleted", 9)
FREE = BookingEvent("r", BookedWorker(7), "Free", 9, "lora")

ADD_BYTES = (
    b"\x85\xaarequest_id\xa1r\xa6worker\x82\xa9worker_id\x07\xa7dp_rank\x01"
    b"\xa4data\x81\xaaAddRequest\x84"
    b"\xaetoken_sequence\x92\x01\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xb4track_prefill_tokens\xc3"
    b"\xb6expected_output_tokens\x05\xb1prefill_load_hint\x82"
    b"\xd9\x20initial_effective_prefill_tokens\x10\xb9expected_prefill_duration\xc0"
    b"\xa9router_id\x09\xa9lora_name\xc0"
)
FREE_BYTES = (
    b"\x85\xaarequest_id\xa1r\xa6worker\x82\xa9worker_id\x07\xa7dp_rank\x00\xa4data\xa4Free\xa9router_id\x09"
    b"\xa9lora_name\xa4lora"
)


def test_the_bytes_of_a_booking_and_of_a_batch() -> None:
    assert encode_booking(ADD) == ADD_BYTES
    assert encode_booking(FREE) == FREE_BYTES
    assert encode_bookings([ADD, FREE]) == b"\x81\xa6events\x92" + ADD_BYTES + FREE_BYTES


def test_every_event_comes_back_from_a_batch_and_alone() -> None:
    assert decode_bookings(encode_bookings([ADD, MARK, FREE])) == [ADD, MARK, FREE]
    for event in (ADD, MARK, FREE):
        assert decode_bookings(encode_booking(event)) == [event]


def test_a_router_that_counts_neither_blocks_nor_prompt_tokens() -> None:
    event = BookingEvent("r", BookedWorker(7), BookedPrompt(None, False), 9)
    raw = msgspec.msgpack.decode(encode_booking(event))["data"]["AddRequest"]
    assert (raw["token_sequence"], raw["prefill_load_hint"], raw["expected_output_tokens"]) == (None, None, None)
    assert decode_bookings(encode_booking(event)) == [event]


def test_blocks_that_are_nobody_elses_travel_as_unsigned_numbers_of_their_router() -> None:
    names = set[int]()
    for router_id in (0, 1, 2, 9, 2**63, 2**64 - 1):
        event = BookingEvent("r", BookedWorker(7), BookedPrompt(range(-1000, -1)), router_id)
        (found,) = decode_bookings(encode_booking(event))
        assert isinstance(found.data, BookedPrompt)
        assert found.data.token_sequence is not None
        names |= set(found.data.token_sequence)
    assert len(names) == 6 * 999  # routers count their blocks from the same number on
    assert min(names) >= 0
    assert max(names) < 2**64


def test_what_is_not_known_is_left_out_and_what_cannot_be_read_is_an_error() -> None:
    unknown = {"request_id": "r", "worker": {"worker_id": 7}, "router_id": 9, "more": 1}
    later = [{**unknown, "data": "Paused"}, {**unknown, "data": {"OutputBlock": {}}}, {**unknown, "data": "Free"}]
    assert [each.data for each in decode_bookings(msgspec.msgpack.encode({"events": later}))] == ["Free"]
    duration = {"secs": 1, "nanos": 5}
    hint = {"initial_effective_prefill_tokens": 3, "expected_prefill_duration": duration}
    add = {**unknown, "data": {"AddRequest": {"token_sequence": [1], "prefill_load_hint": hint}}}
    (found,) = decode_bookings(msgspec.msgpack.encode(add))
    assert isinstance(found.data, BookedPrompt)
    assert found.data.prefill_load_hint == PrefillHint(3, duration)
    for wrong in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"events": [{"request_id": "r"}]}),
        msgspec.msgpack.encode({**unknown, "data": {"AddRequest": {"token_sequence": ["x"]}}}),
    ):
        with pytest.raises(BadReplicaEvents, match="not a message of bookings"):
            decode_bookings(wrong)


def test_the_bytes_of_a_sessions_binding() -> None:
    record = AffinityRecord("s", 7, 1, 2**33, 9)
    raw = (
        b"\x85\xaasession_id\xa1s\xa9worker_id\x07\xa7dp_rank\x01"
        b"\xa8sequence\xcf\x00\x00\x00\x02\x00\x00\x00\x00\xa9writer_id\x09"
    )
    assert encode_binding(record) == raw
    assert decode_binding(raw) == record
    with pytest.raises(BadReplicaEvents, match="not a binding"):
        decode_binding(b"\x80")
