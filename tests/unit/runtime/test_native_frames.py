"""The native wire as values: the golden bytes of its description, every split, every limit."""

from __future__ import annotations

import contextlib
import itertools
import json
import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo import errors
from dynamo.errors import DynamoException, HttpError, InvalidArgument, http_assertion, rule_of
from dynamo.runtime.calls.request_plane.base import StreamItem
from dynamo.runtime.calls.request_plane.core import typed_error
from dynamo.runtime.calls.request_plane.native.frames import (
    ACCEPTED,
    KILL,
    MAX_CONTROL_BYTES,
    PROLOGUE_OK,
    SENTINEL,
    STOP,
    AckDecoder,
    Codec,
    ControlMessage,
    MalformedFrame,
    RequestDecoder,
    RequestFrame,
    TwoPart,
    TwoPartDecoder,
    control_word,
    decode_body,
    decode_call_home,
    decode_control,
    decode_payload,
    encode_ack,
    encode_body,
    encode_request,
    encode_two_part,
    handshake,
    prologue,
)
from dynamo.runtime.calls.request_plane.native.items import (
    FINAL_ITEM,
    MOST_MISSES,
    AnnotatedItem,
    ChunkReader,
    append_item,
    bare_item,
    decode_item,
    error_item,
    error_record,
    failure_of,
    stream_item,
)
from support.cases import each_case

PATH = "1a/ns/c/e"
HEADERS = {"request-id": "r1", "x-endpoint-path": PATH}
INFO = '{"address":"127.0.0.1:4242","subject":"s1","context":"r1","stream_type":"response"}'
CONTROL = (
    '{"id":"r1","request_type":"single_in","response_type":"many_out","payload_codec":"msgpack",'
    f'"connection_info":{{"transport":"tcp_server","info":{json.dumps(INFO)}}}}}'
).encode()
BODY = bytes.fromhex("81a16e02")  # {"n": 2}
PAYLOAD = len(CONTROL).to_bytes(8, "big") + (4).to_bytes(8, "big") + bytes(8) + CONTROL + BODY
REQUEST = (
    bytes.fromhex("0009")
    + b"1a/ns/c/e"
    + bytes.fromhex("0031")
    + b'{"request-id":"r1","x-endpoint-path":"1a/ns/c/e"}'
    + len(PAYLOAD).to_bytes(4, "big")
    + PAYLOAD
)


def drain(decoder: RequestDecoder | TwoPartDecoder, *pieces: bytes) -> list[Any]:
    found: list[Any] = []
    for piece in pieces:
        decoder.feed(piece)
        while (frame := decoder.next_frame()) is not None:
            found.append(frame)
    return found


def item_bytes(annotated: dict[str, Any], codec: Codec = "msgpack") -> bytes:
    out = bytearray(b"before")
    append_item(out, annotated, codec)
    assert out.startswith(b"before")
    return bytes(out[6:])


# -- golden bytes -------------------------------------------------------------------------------------------------


def test_the_golden_request_is_written_and_read() -> None:
    assert encode_two_part(CONTROL, BODY) == PAYLOAD
    assert encode_request(PATH, HEADERS, PAYLOAD) == REQUEST
    assert drain(RequestDecoder(), REQUEST) == [RequestFrame(PATH, HEADERS, PAYLOAD)]
    assert decode_payload(PAYLOAD) == TwoPart(CONTROL, BODY)
    control = decode_control(CONTROL)
    assert (control.id, control.payload_codec, control.metadata) == ("r1", "msgpack", None)
    call_home = decode_call_home(control)
    assert (call_home.subject, call_home.host_and_port()) == ("s1", ("127.0.0.1", 4242))
    assert decode_body(BODY, "msgpack") == {"n": 2}


GOLDEN_STREAM = [
    (handshake("s1"), b'{"subject":"s1","stream_type":"response"}', b"", 65),
    (prologue(), b'{"error":null}', b"", 38),
    (
        item_bytes({"data": {"i": 0}}),
        b"",
        b"\x82\xa4data\x81\xa4data\x81\xa1i\x00\xaecomplete_final\xc2",
        56,
    ),
    (FINAL_ITEM["msgpack"], b"", b"\x81\xaecomplete_final\xc3", 41),
    (SENTINEL, b'"sentinel"', b"", 34),
    (STOP, b'"stop"', b"", 30),
    (KILL, b'"kill"', b"", 30),
    (FINAL_ITEM["json"], b"", b'{"complete_final":true}', 47),
]


@each_case(("frame", "header", "data", "size"), GOLDEN_STREAM)
def test_the_golden_stream_frames(frame: bytes, header: bytes, data: bytes, size: int) -> None:
    assert len(frame) == size
    assert frame == len(header).to_bytes(8, "big") + len(data).to_bytes(8, "big") + bytes(8) + header + data


def test_acks() -> None:
    assert ACCEPTED == encode_ack() == bytes(4)
    assert encode_ack("no") == b"\x00\x00\x00\x02no"
    decoder = AckDecoder()
    decoder.feed(encode_ack("Server overloaded: x")[:-1])
    assert decoder.next_ack() is None
    decoder.feed(b"x" + ACCEPTED)
    assert [decoder.next_ack(), decoder.next_ack(), decoder.next_ack()] == ["Server overloaded: x", "", None]
    decoder.feed(b"\xff\xff\xff\xff")
    with pytest.raises(MalformedFrame):
        decoder.next_ack()


# -- splits -------------------------------------------------------------------------------------------------------


@each_case("cut", range(len(REQUEST) * 2 + 1))
def test_two_requests_survive_any_split(cut: int) -> None:
    whole = REQUEST + REQUEST
    assert len(drain(RequestDecoder(), whole[:cut], whole[cut:])) == 2


def test_everything_survives_one_byte_at_a_time() -> None:
    expected = [RequestFrame(PATH, HEADERS, PAYLOAD)] * 2
    assert drain(RequestDecoder(), *(bytes([b]) for b in REQUEST * 2)) == expected
    stream = b"".join(frame for frame, *_ in GOLDEN_STREAM)
    expected_parts = [TwoPart(header, data) for _, header, data, _ in GOLDEN_STREAM]
    assert drain(TwoPartDecoder(), *(bytes([b]) for b in stream)) == expected_parts


@given(
    st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40)), max_size=6),
    st.lists(st.integers(min_value=0, max_value=600), max_size=8),
)
def test_two_part_frames_survive_any_cuts(frames: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(encode_two_part(header, data) for header, data in frames)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert drain(TwoPartDecoder(), *pieces) == [TwoPart(*frame) for frame in frames]
    in_passes, found = TwoPartDecoder(), []
    for piece in pieces:
        while passed := in_passes.take(piece):
            piece = b""
            found += passed
    assert found == frames


def test_frames_before_one_over_the_limit_are_returned_first() -> None:
    decoder = TwoPartDecoder(max_data_bytes=4)
    assert decoder.take(encode_two_part(b"", b"good") + encode_two_part(b"", b"worse")) == [(b"", b"good")]
    with pytest.raises(MalformedFrame, match="exceeds the limits"):
        decoder.take(b"")


def test_a_missing_header_set_is_tolerated() -> None:
    frame = b"\x00\x01p" + b"\x00\x00" + b"\x00\x00\x00\x00"
    assert drain(RequestDecoder(), frame) == [RequestFrame("p", {}, b"")]


# -- limits and garbage -------------------------------------------------------------------------------------------


def test_an_over_limit_message_is_refused_before_it_is_read() -> None:
    decoder = RequestDecoder(max_message_bytes=len(REQUEST) - 1)
    decoder.feed(REQUEST[:-100])
    with pytest.raises(MalformedFrame, match=f"{len(REQUEST)} bytes exceeds the limit of {len(REQUEST) - 1}"):
        decoder.next_frame()
    assert drain(RequestDecoder(max_message_bytes=len(REQUEST)), REQUEST)


@each_case(
    "frame",
    [
        b"\x00\x02\xff\xfe" + b"\x00\x00" + b"\x00\x00\x00\x00",
        b"\x00\x01p" + b"\x00\x02[]" + b"\x00\x00\x00\x00",
        b"\x00\x01p" + b'\x00\x07{"a":1}' + b"\x00\x00\x00\x00",
        b"\x00\x01p" + b"\x00\x01{" + b"\x00\x00\x00\x00",
        b"\x00\x01p" + b'\x00\x07{"a":"\xff' + b"\x00\x00\x00\x00",
    ],
)
def test_a_request_frame_of_garbage_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        drain(RequestDecoder(), frame)


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_but_malformed(data: bytes) -> None:
    for decoder in (RequestDecoder(1024), TwoPartDecoder(1024, 1024)):
        try:
            frames = drain(decoder, data)
        except MalformedFrame:
            continue
        for frame in frames:
            try:
                decode_control(decode_payload(frame[-1]).header)
            except MalformedFrame:
                continue


def test_an_over_limit_two_part_frame_is_refused_before_it_is_read() -> None:
    for header, data in ((MAX_CONTROL_BYTES + 1, 0), (0, 2**63), (2**64 - 1, 2**64 - 1)):
        decoder = TwoPartDecoder()
        decoder.feed(header.to_bytes(8, "big") + data.to_bytes(8, "big") + bytes(8))
        with pytest.raises(MalformedFrame, match="exceeds the limits"):
            decoder.next_frame()


@each_case("payload", [b"", PAYLOAD[:-1], PAYLOAD + b"\x00", b"\x00" * 23])
def test_a_payload_is_exactly_one_frame(payload: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_payload(payload)


def test_a_checksum_is_never_verified() -> None:
    assert decode_payload(PAYLOAD[:16] + b"\xab" * 8 + PAYLOAD[24:]) == TwoPart(CONTROL, BODY)


@each_case("missing", ["id", "request_type", "response_type", "connection_info"])
def test_a_control_message_names_the_field_it_lacks(missing: str) -> None:
    message = json.loads(CONTROL)
    del message[missing]
    with pytest.raises(MalformedFrame, match=missing):
        decode_control(json.dumps(message).encode())


def call_home_of(info: str, transport: str = "tcp_server") -> Any:
    message = json.loads(CONTROL)
    message["connection_info"] = {"transport": transport, "info": info}
    return decode_call_home(msgspec.convert(message, ControlMessage))


@each_case(
    ("info", "transport", "complaint"),
    [
        (INFO, "quic-response", "quic-response"),
        ("{}", "tcp_server", "address"),
        ("no json", "tcp_server", "info"),
        (INFO.replace('"context":"r1"', '"context":"r2"'), "tcp_server", "r2"),
        (INFO.replace('"response"', '"request"'), "tcp_server", "stream_type"),
    ],
)
def test_a_call_home_that_cannot_be_followed_is_refused(info: str, transport: str, complaint: str) -> None:
    with pytest.raises(MalformedFrame, match=complaint):
        call_home_of(info, transport)


@each_case(
    ("address", "expected"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:65535", ("::1", 65535)),
        ("10.0.0.1", None),
        (":80", None),
        ("h:0", None),
        ("h:65536", None),
        ("h:-1", None),
        ("h:٣", None),
        ("h:", None),
        ("h:" + "9" * 5000, None),
    ],
)
def test_call_home_addresses(address: str, expected: tuple[str, int] | None) -> None:
    call_home = call_home_of(INFO.replace("127.0.0.1:4242", address))
    if expected is None:
        with pytest.raises(MalformedFrame, match="HOST:PORT"):
            call_home.host_and_port()
    else:
        assert call_home.host_and_port() == expected


@given(st.binary(max_size=60), st.sampled_from(["json", "msgpack"]))
def test_a_random_body_never_raises_anything_but_malformed(data: bytes, codec: str) -> None:
    with contextlib.suppress(MalformedFrame):
        decode_body(data, codec)


def test_codecs_of_a_body() -> None:
    assert decode_body(b'{"n":2}', "json") == {"n": 2}
    for data, codec in ((b"{", "json"), (b"\xc1", "msgpack"), (b"", "msgpack"), (b"{}", "xml"), (b"[" * 99999, "json")):
        with pytest.raises(MalformedFrame):
            decode_body(data, codec)
    for data in (b"\x81\x81\x01\x02\x03", b"\x91" * 99999):
        with pytest.raises(MalformedFrame):
            decode_body(data, "msgpack")


@each_case(
    "frame",
    [
        TwoPart(b'"sentinel"', b""),
        TwoPart(b'"stop"', b"data"),
        TwoPart(b"", b"data"),
        TwoPart(b"", b""),
        TwoPart(b"{", b""),
        TwoPart(b"\xff", b""),
    ],
)
def test_a_caller_may_only_say_stop_or_kill(frame: TwoPart) -> None:
    with pytest.raises(MalformedFrame):
        control_word(frame)
    assert control_word(TwoPart(b'"stop"', b"")) == "stop"
    assert control_word(TwoPart(b' "kill" ', b"")) == "kill"


# -- items --------------------------------------------------------------------------------------------------------


@each_case("value", ["text", 7, None, [1, "a", None], {"k": [1, 2]}, True, 1.5, 2**63, {"bytes": b"\x00\xff"}, b"x"])
def test_any_value_survives_msgpack(value: Any) -> None:
    (frame,) = drain(TwoPartDecoder(), item_bytes({"data": value}))
    assert msgspec.msgpack.decode(frame.data) == {"data": {"data": value}, "complete_final": False}


def test_json_writes_bytes_as_numbers_wherever_they_are() -> None:
    nested = {"a": b"\x00\xff", "b": [b"\x01", "s", [1, 2]], "c": {"d": bytearray(b"\x02")}, "e": (b"\x03",), "f": 1}
    (frame,) = drain(TwoPartDecoder(), item_bytes({"data": nested}, "json"))
    expected = {"a": [0, 255], "b": [[1], "s", [1, 2]], "c": {"d": [2]}, "e": [[3]], "f": 1}
    assert json.loads(frame.data) == {"data": {"data": expected}, "complete_final": False}


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_a_value_that_cannot_travel_leaves_the_buffer_as_it_was(codec: Codec) -> None:
    out = bytearray(b"before")
    for value in (object(), "\ud800", {"deep": [object()]}):
        with pytest.raises((TypeError, ValueError)):
            append_item(out, {"data": value}, codec)
    assert out == b"before"


def test_a_set_becomes_a_list() -> None:
    (frame,) = drain(TwoPartDecoder(), item_bytes({"data": {3}}))
    assert msgspec.msgpack.decode(frame.data)["data"] == {"data": [3]}


# -- errors -------------------------------------------------------------------------------------------------------

# What 1.6.1 accepts as the reason of each class; any other pair is answered with a 500 there.
REASONS = {
    "Internal": {"backend.unknown"},
    "InvalidRequest": {"backend.invalid_argument", "request.invalid"},
    "Cancelled": {"backend.cancelled"},
    "Unavailable": {
        *("backend.cannot_connect", "backend.disconnected", "backend.engine_shutdown"),
        *("backend.stream_incomplete", "backend.worker_unavailable"),
    },
    "DeadlineExceeded": {"backend.connection_timeout", "backend.response_timeout"},
    "CapacityExhausted": {"capacity.worker_overloaded", "capacity.exhausted"},
}
TYPES = {
    *("Unknown", "InvalidArgument", "CannotConnect", "Disconnected", "ConnectionTimeout", "ResponseTimeout"),
    *("Cancelled", "EngineShutdown", "StreamIncomplete", "ResourceExhausted", "WorkerOverloaded", "WorkerUnavailable"),
}


def error_of(kind: type[BaseException]) -> BaseException:
    if kind is errors.RouterQueueLimitExceeded:
        return errors.RouterQueueLimitExceeded("bulk", "depth", 9, 8)
    return kind("because")


@each_case("kind", errors.RULES, ids=lambda kind: kind.__name__)
def test_every_kind_of_error_has_a_record_that_1_6_1_understands(kind: type[BaseException]) -> None:
    record = error_record(error_of(kind))
    assert record["reason"] in REASONS[record["class"]]
    error_type = record["error_type"]
    assert (error_type["Backend"] if isinstance(error_type, dict) else error_type) in TYPES
    assert ("public" in record) == (kind is InvalidArgument)


@each_case(
    ("status", "kind"),
    [
        (400, ("InvalidArgument", "InvalidRequest", "request.invalid")),
        (404, ("Unknown", "NotFound", "request.not_found")),
        (408, ("ResponseTimeout", "DeadlineExceeded", "request.deadline_exceeded")),
        (418, ("InvalidArgument", "InvalidRequest", "request.invalid")),
        (429, ("ResourceExhausted", "RateLimited", "request.rate_limited")),
        (500, ("Unknown", "Internal", "runtime.internal")),
        (503, ("Unavailable", "Unavailable", "backend.unavailable")),
        (529, ("ResourceExhausted", "CapacityExhausted", "capacity.exhausted")),
    ],
)
def test_an_asserted_status_travels_as_1_6_1_sends_it(status: int, kind: tuple[str, str, str]) -> None:
    record = error_record(typed_error(HttpError(status, "words")))
    assert (record["error_type"], record["class"], record["reason"]) == kind
    assert json.loads(record["message"]) == {"message": "words", "code": status}
    assert "public" not in record


@each_case("status", [400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 431, 500, 501, 502, 504, 511])
def test_a_status_that_a_native_engine_asserts_is_read_whatever_its_type(status: int) -> None:
    error = failure_of(AnnotatedItem(event="error", error=error_record(typed_error(HttpError(status, "words")))))
    assert error is not None
    assert http_assertion(error) == (status, "words")
    assert not rule_of(error).retryable


def test_an_error_item_keeps_its_causes() -> None:
    outer = DynamoException("outer")
    outer.__cause__ = KeyError("inner")
    envelope = error_item(outer)
    assert envelope["event"] == "error"
    assert envelope["error"]["error_type"] == {"Backend": "Unknown"}
    assert envelope["error"]["caused_by"]["message"] == "KeyError: 'inner'"


def test_a_prologue_may_carry_why_the_stream_was_not_set_up() -> None:
    assert prologue() is PROLOGUE_OK
    (frame,) = drain(TwoPartDecoder(), prologue("no room"))
    assert frame == TwoPart(b'{"error":"no room"}', b"")


def test_an_error_text_that_is_not_unicode_still_travels() -> None:
    (frame,) = drain(TwoPartDecoder(), item_bytes(error_item(InvalidArgument("file \udcff is odd"))))
    assert msgspec.msgpack.decode(frame.data)["data"]["error"]["message"] == "file \\udcff is odd"


CHUNKS = st.fixed_dictionaries(
    {},
    optional={
        "token_ids": st.lists(st.integers(0, 9), max_size=3) | st.sampled_from([None, [1, True], ["x"]]),
        "index": st.sampled_from([0, 1, None, -1, True, 0.0]),
        "output_type": st.sampled_from(["text", None, "image"]),
        "log_probs": st.sampled_from([None, None, None, "stop"]),
        "finish_reason": st.sampled_from([None, None, None, "stop"]),
        "completion_usage": st.none(),
    },
)


@example({"data": {"token_ids": [1]}}, False, "json")
@given(
    st.fixed_dictionaries({"data": CHUNKS | st.none()}, optional=dict.fromkeys(("id", "event", "comment"), st.none())),
    st.booleans(),
    st.sampled_from(["msgpack", "json"]),
)
def test_what_is_read_as_plain_token_ids_is_what_any_item_would_be(envelope: Any, is_final: bool, codec: Codec) -> None:
    encode = msgspec.msgpack.encode if codec == "msgpack" else msgspec.json.encode
    wire = encode({"data": envelope, "complete_final": is_final})
    chunk = ChunkReader(codec).read(wire)
    if chunk is not None:
        annotated = decode_item(wire, codec).data
        assert annotated is not None
        assert (chunk, is_final) == (stream_item(annotated), False)


def test_a_stream_of_other_items_is_no_longer_tried_as_token_ids() -> None:
    """The members are those that 1.6 sends."""
    reader, plain = ChunkReader("json"), b'{"data":{"data":{"token_ids":[7],"index":2,"text":null,"log_probs":null}}}'
    assert reader.read(plain) == StreamItem(0, 2, 0, [7])
    for _ in range(MOST_MISSES):
        assert reader.read(b'{"data":{"data":{"token_ids":[7],"log_probs":[0.5]}}}') is None
    assert reader.read(plain) is None


@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_an_item_that_is_no_envelope_is_read_as_it_came(codec: Codec) -> None:
    encode = msgspec.msgpack.encode if codec == "msgpack" else msgspec.json.encode
    wire = encode({"data": {"TooNew": {"newest_available": 3}}, "complete_final": False})
    annotated = decode_item(wire, codec).data
    assert annotated is not None
    assert stream_item(annotated).extra == {}
    assert bare_item(wire, codec) == {"TooNew": {"newest_available": 3}}


def test_a_uuid_in_a_request_is_sixteen_bytes_in_msgpack_and_text_in_json() -> None:
    """1.6.1 refuses it otherwise."""
    handoff_id = uuid.UUID(int=7)
    assert msgspec.msgpack.decode(encode_body({"id": handoff_id}, "msgpack")) == {"id": handoff_id.bytes}
    assert json.loads(encode_body({"id": handoff_id}, "json")) == {"id": str(handoff_id)}
