"""The instance set: who may be chosen, and who is."""

from __future__ import annotations

import random
from collections import Counter
from enum import Enum

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.runtime.instances import InstanceSet, RouterMode, Turn, decode_instance, encode_instance
from dynamo.runtime.request_plane.base import Instance

BALANCING = [mode for mode in RouterMode if mode is not RouterMode.DIRECT]


def instance(instance_id: int, device: str | None = "cuda") -> Instance:
    return Instance(
        namespace="ns",
        component="c",
        endpoint="e",
        instance_id=instance_id,
        transport={"tcp": f"127.0.0.1:1/{instance_id:x}/ns/c/e"},
        device_type=device,
    )


def make(*ids: int, seed: int = 0, inhibit_seconds: float = 5.0) -> InstanceSet:
    found = InstanceSet("ns/c/e", rng=random.Random(seed), inhibit_seconds=inhibit_seconds)
    for instance_id in ids:
        found.add(instance(instance_id))
    return found


@pytest.mark.parametrize("mode", list(RouterMode))
def test_without_instances_every_mode_says_so(mode: RouterMode) -> None:
    with pytest.raises(WorkerUnavailable, match=r"^No workers available for endpoint ns/c/e$"):
        make().pick(mode, 0)


@pytest.mark.parametrize("mode", BALANCING)
def test_every_balancing_mode_reaches_every_instance(mode: RouterMode) -> None:
    found = make(1, 2, 3)
    seen: Counter[int] = Counter()
    for _ in range(300):
        chosen = found.pick(mode, 0).instance_id
        found.book(chosen)
        seen[chosen] += 1
    assert set(seen) == {1, 2, 3}
    assert min(seen.values()) > 50


def test_those_who_share_an_endpoint_each_have_their_own_turn() -> None:
    # A request of two halves: the first has one to choose from, the second two. With one turn for both, 3 never had its.
    found, first, second = make(1, 2, 3), Turn(), Turn()
    seen: Counter[int] = Counter()
    for _ in range(10):
        assert found.pick(RouterMode.ROUND_ROBIN, 0, {2, 3}, turn=first).instance_id == 1
        seen[found.pick(RouterMode.ROUND_ROBIN, 0, {1}, turn=second).instance_id] += 1
    assert seen == {2: 5, 3: 5}


@pytest.mark.parametrize("mode", BALANCING)
@given(seed=st.integers(), down=st.sets(st.integers(1, 6)), exclude=st.sets(st.integers(1, 6)))
def test_no_mode_picks_an_excluded_instance_or_one_in_quarantine_while_there_are_others(
    mode: RouterMode, seed: int, down: set[int], exclude: set[int]
) -> None:
    found = make(1, 2, 3, 4, 5, 6, seed=seed)
    for instance_id in down:
        found.inhibit(instance_id, 0)
    allowed = {1, 2, 3, 4, 5, 6} - down - exclude
    if not allowed:
        with pytest.raises(WorkerUnavailable):
            found.pick(mode, 1, exclude, only_well=True)
        return
    for _ in range(12):
        assert found.pick(mode, 1, exclude).instance_id in allowed


def test_round_robin_takes_turns_and_survives_comings_and_goings() -> None:
    found = make(10, 30, 50)
    assert [found.pick(RouterMode.ROUND_ROBIN, 0).instance_id for _ in range(4)] == [10, 30, 50, 10]
    found.add(instance(20))
    found.remove(30)
    assert [found.pick(RouterMode.ROUND_ROBIN, 0).instance_id for _ in range(4)] == [20, 50, 10, 20]


def test_least_loaded_takes_the_fewest_open_streams() -> None:
    found = make(1, 2, 3)
    for instance_id in (1, 1, 2, 3, 3):
        found.book(instance_id)
    assert found.pick(RouterMode.LEAST_LOADED, 0).instance_id == 2
    found.release(1)
    found.release(1)
    assert found.pick(RouterMode.LEAST_LOADED, 0).instance_id == 1


def test_power_of_two_never_takes_the_busiest_of_three() -> None:
    found = make(1, 2, 3)
    found.book(2)
    assert {found.pick(RouterMode.POWER_OF_TWO, 0).instance_id for _ in range(50)} == {1, 3}


def test_device_aware_gives_a_gpu_eight_times_the_streams_of_a_cpu() -> None:
    found = InstanceSet("ns/c/e", rng=random.Random(1))
    found.add(instance(1, "cuda"))
    found.add(instance(2, "cpu"))
    for _ in range(90):
        found.book(found.pick(RouterMode.DEVICE_AWARE_WEIGHTED, 0).instance_id)
    assert (found.inflight(1), found.inflight(2)) == (80, 10)


def test_direct_needs_a_name_unless_one_is_left() -> None:
    found = make(1, 2)
    with pytest.raises(InvalidArgument, match="name the instance"):
        found.pick(RouterMode.DIRECT, 0)
    assert found.pick(RouterMode.DIRECT, 0, exclude={1}).instance_id == 2
    assert found.named(1).instance_id == 1
    with pytest.raises(WorkerUnavailable, match=r"^instance_id=7 not found for endpoint ns/c/e$"):
        found.named(7)


def test_an_inhibited_instance_returns_after_its_time_or_when_it_appears_again() -> None:
    found = make(1, 2)
    found.inhibit(1, now=100.0)
    found.inhibit(2, now=100.0)
    assert [i.instance_id for i in found.routable(104.9)] == []
    assert [i.instance_id for i in found.discovered] == [1, 2]
    found.add(instance(2))
    assert [i.instance_id for i in found.routable(104.9)] == [2]
    assert [i.instance_id for i in found.routable(105.0)] == [1, 2]


def test_inhibition_can_be_switched_off_and_ignores_strangers() -> None:
    found = make(1, inhibit_seconds=0)
    found.inhibit(1, now=0)
    found.inhibit(99, now=0)
    assert len(found.routable(0)) == 1


def test_load_of_a_removed_instance_is_forgotten_with_its_last_stream() -> None:
    found = make(1)
    found.book(1)
    found.remove(1)
    assert found.inflight(1) == 1
    found.release(1)
    found.release(1)
    assert found.inflight(1) == 0


def test_the_same_seed_makes_the_same_choices() -> None:
    def choices(seed: int) -> list[int]:
        found = make(1, 2, 3, 4, seed=seed)
        return [found.pick(RouterMode.RANDOM, 0).instance_id for _ in range(20)]

    assert choices(7) == choices(7) != choices(8)


class Foreign(Enum):
    RoundRobin = 1
    PowerOfTwoChoices = 2
    DeviceAwareWeighted = 3


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("round-robin", RouterMode.ROUND_ROBIN),
        ("ROUND_ROBIN", RouterMode.ROUND_ROBIN),
        (RouterMode.RANDOM, RouterMode.RANDOM),
        (Foreign.RoundRobin, RouterMode.ROUND_ROBIN),
        (Foreign.PowerOfTwoChoices, RouterMode.POWER_OF_TWO),
        (Foreign.DeviceAwareWeighted, RouterMode.DEVICE_AWARE_WEIGHTED),
    ],
)
def test_a_mode_is_understood_in_every_spelling(value: object, mode: RouterMode) -> None:
    assert RouterMode.of(value) is mode


@pytest.mark.parametrize("value", ["", "kv", "fastest", 3])
def test_an_unknown_mode_names_those_there_are(value: object) -> None:
    with pytest.raises(InvalidArgument, match="round-robin"):
        RouterMode.of(value)


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


@pytest.mark.parametrize("value", [b"", b"[]", b"{", b'{"instance_id":1.5}', b'{"instance_id":"1"}'])
def test_rubbish_is_no_record(value: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_instance(value)
