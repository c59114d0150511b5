"""The instances of an endpoint: records, health, load, and records that claim the same id."""

from __future__ import annotations

import logging

import msgspec
import pytest

from dynamo.errors import WorkerUnavailable
from dynamo.runtime.calls.instances import InstanceSet, decode_instance, encode_instance
from dynamo.runtime.calls.request_plane.base import Instance
from support.cases import each_case

FOREIGN = "v1/instances/ns/c/e/foreign"


def instance(instance_id: int, address: str = "127.0.0.1:1") -> Instance:
    return Instance(
        namespace="ns",
        component="c",
        endpoint="e",
        instance_id=instance_id,
        transport={"tcp": f"{address}/{instance_id:x}/ns/c/e"},
        device_type="cuda",
    )


def add(found: InstanceSet, record: Instance) -> None:
    found.put(f"v1/instances/{record.key}", record)


def make(*ids: int, inhibit_seconds: float = 5.0) -> InstanceSet:
    found = InstanceSet("ns.c.e", inhibit_seconds=inhibit_seconds)
    for instance_id in ids:
        add(found, instance(instance_id))
    return found


def healthy(found: InstanceSet, now: float) -> list[int]:
    return [each.instance_id for each in found.candidates(now) if not each.is_circuit_open]


def test_an_instance_is_found_by_its_name_and_an_unknown_one_is_named() -> None:
    found = make(1)
    assert found.named(1).instance_id == 1
    with pytest.raises(WorkerUnavailable, match=r"^instance_id=7 not found for endpoint ns/c/e$"):
        found.named(7)


def test_an_inhibited_instance_returns_after_its_time_or_when_it_appears_again() -> None:
    found = make(1, 2)
    found.inhibit(1, now=100.0)
    found.inhibit(2, now=100.0)
    assert healthy(found, 104.9) == []
    assert [i.instance_id for i in found.discovered] == [1, 2]
    add(found, instance(2))
    assert healthy(found, 104.9) == [2]
    assert healthy(found, 105.0) == [1, 2]


def test_inhibition_can_be_switched_off_and_ignores_strangers() -> None:
    found = make(1, inhibit_seconds=0)
    found.inhibit(1, now=0)
    found.inhibit(99, now=0)
    assert healthy(found, 0) == [1]


def test_load_of_a_removed_instance_is_forgotten_with_its_last_stream() -> None:
    found = make(1)
    booking = found.book(1)
    found.remove(f"v1/instances/{instance(1).key}")
    assert found.loads.in_flight(1) == 1
    booking.release()
    booking.release()
    assert found.loads.in_flight(1) == 0


def test_candidates_are_the_members_with_their_device_and_load() -> None:
    found = make(3, 1, 2)
    found.book(2)
    (one, two) = found.candidates(0.0, members={1, 2}, busy={1})
    assert (one.key, one.device, one.in_flight, one.is_busy) == (("ns.c.e", 1), "cuda", 0, True)
    assert (two.key, two.in_flight, two.is_busy) == (("ns.c.e", 2), 1, False)


@pytest.mark.parametrize("foreign_first", [True, False])
def test_of_two_records_of_one_id_the_one_under_its_own_key_is_used(
    foreign_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own, foreign, found = instance(1), instance(1, "10.0.0.9:9"), make()
    records = [(FOREIGN, foreign), (f"v1/instances/{own.key}", own)]
    for key, record in records if foreign_first else reversed(records):
        found.put(key, record)
    found.put(FOREIGN, foreign)  # once is enough for the log
    assert found.named(1) is own
    assert [each.instance_id for each in found.discovered] == [1]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "2 records of ns.c.e claim instance id 1" in caplog.text
    found.remove(FOREIGN)
    assert found.named(1) is own


def test_a_collision_ends_at_the_record_behind_which_a_worker_lives() -> None:
    own, foreign, found = instance(1), instance(1, "10.0.0.9:9"), make()
    found.put(f"v1/instances/{own.key}", own)
    assert not found.use_next_record(own)  # there is no other
    found.put(FOREIGN, foreign)
    assert found.use_next_record(own)
    assert found.named(1) is foreign
    assert found.use_next_record(own)  # the failure of an older attempt changes nothing
    assert found.named(1) is foreign
    found.remove(FOREIGN)
    assert found.named(1) is own
    found.remove(f"v1/instances/{own.key}")
    assert not found.discovered


def test_a_record_has_the_native_members_in_the_native_order() -> None:
    transport = {
        "transport": {"tcp": "h:1/1f/ns/c/e"},
        "device_type": "cuda",
        "request_plane_codec": "msgpack",
        "mux": 1,
    }
    assert encode_instance("ns", "c", "e", 17512140874996437413, transport) == (
        b'{"type":"Endpoint","component":"c","endpoint":"e","namespace":"ns","instance_id":17512140874996437413,'
        b'"transport":{"tcp":"h:1/1f/ns/c/e"},"device_type":"cuda","request_plane_codec":"msgpack","mux":1}'
    )


def test_a_native_record_is_understood_and_unknown_members_are_ignored() -> None:
    found = decode_instance(
        b'{"type":"Endpoint","component":"backend","endpoint":"generate","namespace":"ns","instance_id":'
        b'17512140874996437413,"transport":{"tcp":"127.0.0.1:44285/f3/ns/backend/generate"},"future":[1]}'
    )
    assert found.instance_id == 17512140874996437413
    assert (found.mux, found.request_plane_codec, str(found)) == (
        None,
        None,
        "ns/backend/generate/17512140874996437413",
    )


@each_case("value", [b"", b"[]", b"{", b'{"instance_id":1.5}', b'{"instance_id":"1"}'])
def test_rubbish_is_no_record(value: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_instance(value)
