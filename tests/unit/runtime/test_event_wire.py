"""Events as bytes, to the letter of the native wire."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.runtime.base.settings import EventPlaneSettings, NatsSettings, ZmqBroker
from dynamo.runtime.calls.event_plane.base import Event, EventScope
from dynamo.runtime.calls.event_plane.envelope import (
    BadEvent,
    channel_record,
    decode_envelope,
    decode_parts,
    encode_envelope,
    encode_parts,
    zmq_broker,
    zmq_endpoint,
)
from dynamo.runtime.calls.event_plane.nats import subject_of
from support.cases import each_case
from support.properties import examples

LOAD = {
    "worker_id": 7,
    "dp_rank": 0,
    "active_decode_blocks": None,
    "active_prefill_tokens": None,
    "kv_used_blocks": 6,
}
SAMPLE = Event("kv_metrics", 5, 1, 0x0000018BCFE56800, msgspec.msgpack.encode(LOAD))


def test_a_zmq_message_is_the_native_one_byte_by_byte() -> None:
    topic, publisher, sequence, frame = encode_parts(b"kv_metrics", SAMPLE)
    assert (topic, publisher, sequence) == (b"kv_metrics", bytes(7) + b"\x05", bytes(7) + b"\x01")
    assert frame[:5] == bytes.fromhex("01 0000009c".replace(" ", ""))  # version, 156 bytes
    assert frame[5:].startswith(
        b"\x85\xacpublisher_id\x05\xa8sequence\x01\xacpublished_at\xcf\x00\x00\x01\x8b\xcf\xe5h\x00"
    )
    payload = msgspec.msgpack.encode(LOAD)
    assert len(payload) == 0x52
    assert frame.endswith(b"\xa5topic\xaakv_metrics\xa7payload\xc4\x52" + payload)
    assert len(frame) == 5 + 0x9C


def test_a_nats_message_is_the_bare_envelope() -> None:
    assert encode_envelope(SAMPLE) == encode_parts(b"x", SAMPLE)[3][5:]
    assert decode_envelope(encode_envelope(SAMPLE)) == SAMPLE
    assert subject_of(EventScope("ns", "c", "e"), "kv-events") == "namespace.ns.component.c.endpoint.e.kv-events"
    assert subject_of(EventScope("a b", "c*"), ">") == "namespace.a_b.component.c_._"


@examples(50)
@given(
    st.builds(
        Event,
        topic=st.text(max_size=20),
        publisher_id=st.integers(0, 2**64 - 1),
        sequence=st.integers(0, 2**64 - 1),
        published_at_ms=st.integers(0, 2**53),
        payload=st.binary(max_size=300),
    )
)
def test_what_is_encoded_is_read_back(event: Event) -> None:
    assert decode_parts(encode_parts(event.topic.encode(), event)) == event


GOOD = encode_parts(b"t", SAMPLE)


@each_case(
    ("parts", "sentence"),
    [
        ([], "4 parts"),
        (GOOD[:3], "4 parts"),
        ([*GOOD, b""], "4 parts"),
        ([*GOOD[:3], b"\x01"], "no header"),
        ([*GOOD[:3], b"\x02" + GOOD[3][1:]], "version 2"),
        ([*GOOD[:3], GOOD[3] + b"x"], "161 bytes|says 156 bytes and has 157"),
        ([*GOOD[:3], GOOD[3][:-1]], "says 156 bytes and has 155"),
        ([*GOOD[:3], b"\x01\x00\x00\x00\x01\xc1"], "no envelope"),
        ([*GOOD[:3], b"\x01\x00\x00\x00\x01\x80"], "no envelope"),
    ],
)
def test_what_is_no_event_is_refused_with_a_reason(parts: list[bytes], sentence: str) -> None:
    with pytest.raises(BadEvent, match=sentence):
        decode_parts(parts)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: decode_envelope(data),
        lambda: decode_parts([b"t", b"", b"", data]),
    ]
    for attempt in attempts:
        with pytest.raises(BadEvent):
            attempt()


def test_members_of_a_later_version_are_ignored() -> None:
    envelope = msgspec.msgpack.decode(encode_envelope(SAMPLE)) | {"later": 1}
    assert decode_envelope(msgspec.msgpack.encode(envelope)) == SAMPLE


def test_a_channel_record_is_the_native_one() -> None:
    record = channel_record(
        EventScope("ns", "c", "e"), "kv_metrics", 255, {"kind": "Zmq", "config": {"endpoint": "tcp://10.0.0.1:5"}}
    )
    assert json.loads(record) == {
        "type": "EventChannel",
        "scope": {"kind": "endpoint", "endpoint": {"namespace": "ns", "component": "c", "name": "e"}},
        "topic": "kv_metrics",
        "instance_id": 255,
        "transport": {"kind": "Zmq", "config": {"endpoint": "tcp://10.0.0.1:5"}},
    }
    assert zmq_endpoint(record) == "tcp://10.0.0.1:5"
    assert zmq_broker(record) is None


def test_records_of_other_transports_are_told_apart() -> None:
    scope = EventScope("ns")
    nats = channel_record(scope, "t", 1, {"kind": "Nats", "config": {"subject_prefix": "namespace.ns"}})
    sides = {"xsub_endpoints": ["tcp://a:1"], "xpub_endpoints": ["tcp://a:2", "tcp://b:2"]}
    broker = channel_record(scope, "t", 1, {"kind": "ZmqBroker", "config": sides})
    assert (zmq_endpoint(nats), zmq_broker(nats), zmq_endpoint(broker)) == (None, None, None)
    assert zmq_broker(broker) == (("tcp://a:1",), ("tcp://a:2", "tcp://b:2"))


@each_case("record", [b"", b"[]", b"{}", b'{"transport":{"kind":"Zmq","config":{"endpoint":"ipc://x"}}}'])
def test_a_record_that_cannot_be_read_is_refused(record: bytes) -> None:
    with pytest.raises(BadEvent):
        zmq_endpoint(record)
    assert zmq_broker(record) is None


# -- settings -------------------------------------------------------------------------------------------------------------


def test_a_broker_url_has_two_sides() -> None:
    found = EventPlaneSettings.from_env({"DYN_ZMQ_BROKER_URL": "xsub=tcp://a:1;tcp://b:1 , xpub=tcp://a:2"})
    assert found.broker == ZmqBroker(("tcp://a:1", "tcp://b:1"), ("tcp://a:2",))
    assert found.broker_enabled


@each_case("url", ["tcp://a:1", "xsub=tcp://a:1", "xsub=a,xpub=b", "xsub=tcp://a:1,xpub=tcp://a:2,y=z"])
def test_a_broker_url_that_cannot_be_read_names_the_variable(url: str) -> None:
    with pytest.raises(InvalidArgument, match="DYN_ZMQ_BROKER_URL"):
        EventPlaneSettings.from_env({"DYN_ZMQ_BROKER_URL": url})


def test_nats_settings_come_from_the_environment_and_keep_secrets() -> None:
    found = NatsSettings.from_env(
        {
            "NATS_SERVER": "nats://u:secret@a:1, b:2",
            "NATS_AUTH_USERNAME": "me",
            "NATS_AUTH_PASSWORD": "secret",
            "NATS_AUTH_TOKEN": "secret",
        }
    )
    assert found.servers == ("nats://u:secret@a:1", "nats://b:2")
    assert found.address == "nats://***@a:1, nats://b:2"
    assert (found.username, found.password) == ("me", "secret")
    assert "secret" not in repr(found).replace("u:secret@", "")
    assert NatsSettings.from_env({"NATS_AUTH_USERNAME": "me"}).username is None
    assert NatsSettings.from_env({}).servers == ("nats://localhost:4222",)
