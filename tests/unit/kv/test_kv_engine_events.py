from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv.engine_events import BadPayload, Cleared, EngineBatch, Removed, Stored, read_payload
from dynamo.kv.events import BlocksAdded, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.hashing import sequence_hashes
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import Overlap
from support.cases import each_case


def read(*events: Any, rank: Any = ...) -> EngineBatch:
    payload = [1.5, list(events)] if rank is ... else [1.5, list(events), rank]
    return read_payload(msgspec.msgpack.encode(payload))


MAP = {
    "type": "BlockStored",
    "block_hashes": [-1, 7],
    "parent_block_hash": -2,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
}


def test_maps_and_arrays_say_the_same_and_signed_hashes_become_unsigned() -> None:
    array = ["BlockStored", [-1, 7], -2, [1, 2, 3, 4], 2, None, "GPU"]
    expected = Stored([2**64 - 1, 7], 2**64 - 2, [1, 2, 3, 4], 2)
    assert read(MAP, array).events == [expected, expected]
    assert read(MAP | {"later": {"x": 1}}, [*array, None, None, None, None, None, None, "new"]).events == [expected] * 2


def test_removed_and_cleared() -> None:
    batch = read(
        ["BlockRemoved", [5], "CPU"], {"type": "BlockRemoved", "block_hashes": [6]}, ["AllBlocksCleared"], rank=3
    )
    assert batch.events == [Removed([5], "host_pinned"), Removed([6]), Cleared()]
    assert batch.dp_rank == 3


@each_case(
    ("medium", "tier"),
    [
        (None, "device"),
        ("", "device"),
        ("GPU", "device"),
        ("DEVICE", "device"),
        ("CPU", "host_pinned"),
        ("CPU_PINNED", "host_pinned"),
        ("CPU_TIER1", "host_pinned"),
        ("CPU_TIER2", "disk"),
        ("STORAGE", "disk"),
        ("DISK", "disk"),
        ("NVME", "disk"),
        ("REMOTE", "external"),
        ("EXTERNAL", "external"),
        ("SHARED", "external"),
        ("NETWORK", "external"),
    ],
)
def test_media_are_tiers(medium: str | None, tier: str) -> None:
    """What is read of an engine's event, and what a router that gets it counts: each tier lies behind the one before."""
    for locality in ({}, {"locality": None}, {"locality": "LOCAL"}):
        (event,) = read(MAP | {"medium": medium} | locality).events
        assert isinstance(event, Stored)
        assert event.tier == tier
    index = PrefixIndex()
    blocks = [HeldBlock(name, name) for name in (1, 2)]
    assert index.apply(RouterEvent(7, KvChange(0, BlockUpdate(stored=BlocksAdded(blocks))), tier)) == "ok"
    (overlap,) = index.find(sequence_hashes([1, 2])).values()
    counted = {"device": Overlap(device=2), "host_pinned": Overlap(host=2)}
    assert overlap == counted.get(tier, Overlap(disk=2))


@each_case(
    "where",
    [
        *({"medium": medium} for medium in ("gpu", "cpu", "storage", "FS", "OBJ", "TAPE", 7)),
        *({"medium": medium, "locality": "REMOTE"} for medium in (None, "GPU", "CPU", "STORAGE", "REMOTE", "SHARED")),
        *({"medium": "STORAGE", "locality": locality} for locality in ("local", "remote", "NEAR", 7)),
    ],
)
def test_blocks_that_lie_elsewhere_are_dropped(where: dict[str, Any]) -> None:
    """The locality REMOTE drops an event; the medium REMOTE does not."""
    for event in (MAP, {"type": "BlockRemoved", "block_hashes": [7]}):
        batch = read(event | where)
        assert (batch.events, batch.filtered, batch.issues) == ([], 1, [])


@pytest.mark.parametrize(
    "members", [{"medium": "TAPE"}, {"kv_cache_spec_kind": "sliding_window"}, {"locality": "remote"}]
)
def test_what_is_not_of_the_main_cache_is_left_out_and_counted(members: dict[str, Any]) -> None:
    batch = read(MAP | members, ["AllBlocksCleared"])
    assert (batch.events, batch.filtered) == ([Cleared()], 1)


def test_pairs_of_tokens_are_an_eagle_block() -> None:
    (event,) = read(MAP | {"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]}).events
    assert isinstance(event, Stored)
    assert (event.token_ids, event.is_eagle) == ([1, 2, 3, 4, 5], True)


def test_a_removal_of_another_group_of_layers_leaves_the_main_cache_alone() -> None:
    """vLLM's removals name the group and not its kind; a sliding window's block has the hash of the main group's."""
    groups: set[int] = set()

    def read_on(*events: Any) -> EngineBatch:
        return read_payload(msgspec.msgpack.encode([1.5, list(events)]), groups)

    read_on(
        MAP | {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
        MAP | {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"},
    )
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
    later = read_on(removed | {"group_idx": 1}, removed | {"group_idx": 0}, ["BlockRemoved", [7], "GPU", 1])
    assert (later.events, later.filtered) == ([Removed([7])], 2)
    read_on(MAP | {"group_idx": 1, "kv_cache_spec_kind": "full_attention"})  # another engine at the same address
    assert read_on(removed | {"group_idx": 1}).events == [Removed([7])]


@each_case("salt, expected", [("tenant", "tenant"), ("dynamo-cache-salt:tenant", "tenant"), ("", None), (None, None)])
def test_sglang_has_a_member_for_the_salt(salt: str | None, expected: str | None) -> None:
    (event,) = read(MAP | {"cache_salt": salt, "lora_name": "a", "session_id": "s"}).events
    assert isinstance(event, Stored)
    assert (event.cache_salt, event.lora_name) == (expected, "a")


def test_the_groups_that_are_remembered_are_bounded() -> None:
    groups: set[int] = set()
    side = {"kv_cache_spec_kind": "sliding_window"}
    read_payload(msgspec.msgpack.encode([1.5, [MAP | side | {"group_idx": n} for n in range(5000)]]), groups)
    assert len(groups) == 1024


def test_adapters_salts_and_media_are_found() -> None:
    digest = "00000000000000ff" + "0" * 48
    keys = [["dynamo-cache-salt:tenant"], [digest]]
    (event,) = read(MAP | {"lora_name": "a", "extra_keys": keys}).events
    assert isinstance(event, Stored)
    assert (event.lora_name, event.cache_salt) == ("a", "tenant")
    assert event.mm_infos == [None, {"mm_objects": [{"mm_hash": 255, "offsets": []}]}]
    (numbered,) = read(MAP | {"lora_id": 4}).events
    assert isinstance(numbered, Stored)
    assert numbered.lora_name == "4"


@pytest.mark.parametrize("members", [{"parent_block_hash": 7}, {"block_hashes": [7, 7]}])
def test_blocks_that_contradict_themselves_become_an_empty_removal(members: dict[str, Any]) -> None:
    batch = read(MAP | members)
    assert (batch.events, batch.suspicious) == ([Removed([])], 1)


@each_case(
    ("event", "said"),
    [
        ({"block_hashes": []}, "needs a type"),
        (["Explode"], "unknown event 'Explode'"),
        (7, "map or an array"),
        (MAP | {"block_hashes": "x"}, "block_hashes must be a list"),
        (MAP | {"block_hashes": [1.5]}, "must be an integer"),
        (MAP | {"block_hashes": [-(2**63)], "block_size": 0}, "block_size"),
        (MAP | {"token_ids": [-1]}, "token id"),
        (MAP | {"token_ids": [[1, 2], 3]}, "mix"),
        (MAP | {"lora_name": 7}, "lora_name must be a text"),
    ],
)
def test_an_event_that_cannot_be_read_is_named_and_the_others_count(event: Any, said: str) -> None:
    batch = read(event, ["AllBlocksCleared"])
    assert batch.events == [Cleared()]
    assert len(batch.issues) == 1
    assert "events[0]" in batch.issues[0]
    assert said in batch.issues[0]


@each_case("payload", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode([1]), msgspec.msgpack.encode([1, 2])])
def test_what_is_no_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(BadPayload):
        read_payload(payload)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.lists(
        json_values
        | json_values.map(lambda v: ["BlockStored", v, v, v, 1])
        | json_values.map(lambda v: MAP | {"token_ids": v, "extra_keys": v, "block_mm_infos": v})
    )
)
def test_nothing_an_engine_says_crashes_the_reader(events: list[Any]) -> None:
    batch = read(*events)
    assert len(batch.events) + batch.filtered + len(batch.issues) == len(events)
