"""What the picker reads and writes of protocol buffers, against the library of their makers."""

from __future__ import annotations

import pytest
from google.protobuf import struct_pb2
from hypothesis import given, strategies

from dynamo.picker.messages import CHUNK_BYTES, MessagePhase, body_chunks, read_message
from dynamo.picker.wire import MalformedMessage, of_bytes, of_number, read, read_struct, struct_of, text_value
from support.gateway import body_message, read_answer, request_headers


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**32, 2**63])
def test_numbers_of_every_length_come_back(number: int) -> None:
    assert read(of_number(3, number)) == {3: [number]}


def test_a_struct_is_read_as_the_library_writes_it() -> None:
    made = struct_pb2.Struct()
    members = {"text": "ä", "number": 2.5, "yes": True, "none": None, "list": ["a", "b"], "inner": {"a": {"b": "c"}}}
    made.update(members)
    assert read_struct(made.SerializeToString()) == members


def test_a_struct_is_written_as_the_library_reads_it() -> None:
    read_back = struct_pb2.Struct.FromString(struct_of([("where", text_value("10.0.0.1:8000"))]))
    assert dict(read_back) == {"where": "10.0.0.1:8000"}


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_message_that_is_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(MalformedMessage):
        read(of_bytes(4, b"0123456789")[:cut])


def test_a_message_without_a_phase_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="without a phase"):
        read_message(of_bytes(99, b""))


def test_headers_are_read_raw_or_as_text() -> None:
    message = read_message(request_headers("/x", host="a"))
    assert (message.phase, dict(message.headers)[b"host"]) == (MessagePhase.REQUEST_HEADERS, b"a")
    header = of_bytes(1, b"Name") + of_bytes(2, b"value")
    old = read_message(of_bytes(2, of_bytes(1, of_bytes(1, header))))
    assert old.headers == [(b"name", b"value")]


TEXTS = strategies.binary(max_size=6) | strategies.sampled_from([b"x" * 125, b"x" * 127, b"x" * 128, b"x" * 300])
FORMS = strategies.sampled_from(["raw", "text", "value first", "more", "no name"])


@given(strategies.lists(strategies.tuples(TEXTS, TEXTS, FORMS), max_size=5))
def test_headers_are_the_same_in_each_form_that_a_proxy_may_write(headers: list[tuple[bytes, bytes, str]]) -> None:
    written, expected = b"", []
    for name, value, form in headers:
        fields = {
            "raw": of_bytes(1, name) + of_bytes(3, value),
            "text": of_bytes(1, name) + of_bytes(2, value),
            "value first": of_bytes(3, value) + of_bytes(1, name),
            "more": of_bytes(1, name) + of_bytes(3, value) + of_number(9, 7),
            "no name": of_bytes(3, value),
        }[form]
        written += of_bytes(1, fields)
        expected.append((b"" if form == "no name" else name.lower(), value))
    message = of_bytes(2, of_bytes(1, written))
    assert list(read_message(message).headers) == expected
    cut = of_bytes(2, of_bytes(1, written[:-1]))
    if written:
        with pytest.raises(MalformedMessage):
            read_message(cut)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_a_body_is_passed_on_whole_in_parts_that_every_proxy_takes(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    parts = [read_answer(part) for part in body_chunks(MessagePhase.REQUEST_BODY, body[:size], is_last=True)]
    assert b"".join(part.body for part in parts) == body[:size]
    assert all(len(part.body) <= CHUNK_BYTES for part in parts)
    assert [part.is_last for part in parts] == [*[False] * (len(parts) - 1), True]


def test_the_end_of_a_body_is_read() -> None:
    assert [read_message(body_message(4, b"x", is_last=each)).is_last for each in (True, False)] == [True, False]
