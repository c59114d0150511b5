from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv.ledger import KvLedger
from support.cases import each_case


def wrap(event_id: int, tier: str, data: Any) -> Any:
    return {"storage_tier": tier, "event": {"event_id": event_id, "data": data, "dp_rank": 0}}


def stored(*hashes: int, parent: int | None = None) -> Any:
    blocks = [{"block_hash": h, "tokens_hash": h + 1000, "mm_extra_info": None} for h in hashes]
    return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}


def removed(*hashes: int) -> Any:
    return {"removed": {"block_hashes": list(hashes)}}


def answer(ledger: KvLedger, start: int | None, end: int | None) -> Any:
    return ledger.answer(start, end)


def held_by(events: Iterable[Any]) -> dict[int, int | None]:
    """A router's own reading: block -> parent. Fails for a block whose parent is named but unknown."""
    held: dict[int, int | None] = {}
    for event in events:
        match event["event"]["data"]:
            case "cleared":
                held.clear()
            case {"stored": said}:
                parent = said["parent_hash"]
                for block in said["blocks"]:
                    held[block["block_hash"]] = parent
                    parent = block["block_hash"]
            case {"removed": said}:
                for block_hash in said["block_hashes"]:
                    held.pop(block_hash, None)
    return held


def test_events_are_numbered_from_one_and_given_again() -> None:
    ledger = KvLedger(wrap)
    said = [ledger.add("device", data) for data in (stored(1, 2), stored(3, parent=2), removed(3))]
    assert [event["event"]["event_id"] for event in said if event] == [1, 2, 3]
    assert ledger.answer(2, None) == {"Events": {"events": said[1:], "last_event_id": 3}}
    assert answer(ledger, 1, 1)["Events"]["events"] == said  # more than asked for spares the next question


def test_the_other_answers_are_the_native_ones() -> None:
    ledger = KvLedger(wrap)
    assert ledger.answer(None, None) == {"TreeDump": {"events": [], "last_event_id": 0, "reset_scope": "all"}}
    ledger.add("device", stored(1))
    assert ledger.answer(5, 2) == {"InvalidRange": {"start_id": 5, "end_id": 2}}
    too_new = {"requested_start": 100, "requested_end": 1, "newest_available": 1}
    assert ledger.answer(100, None) == {"TooNew": too_new}


def test_what_is_too_old_is_answered_with_all_blocks() -> None:
    ledger = KvLedger(wrap, max_events=2)
    for number in range(1, 6):
        ledger.add("device", stored(number, parent=number - 1 or None))
    dump = answer(ledger, 1, None)["TreeDump"]
    assert dump["last_event_id"] == 5
    (event,) = dump["events"]
    assert [block["block_hash"] for block in event["event"]["data"]["stored"]["blocks"]] == [1, 2, 3, 4, 5]
    assert "Events" in ledger.answer(4, None)


def test_a_block_stored_twice_is_removed_with_its_second_removal() -> None:
    ledger = KvLedger(wrap)
    ledger.add("device", stored(1, 2))
    ledger.add("device", stored(1))
    assert ledger.add("device", removed(1)) is None
    event = ledger.add("device", removed(1, 2))
    assert event is not None
    assert event["event"]["data"] == removed(1, 2)
    assert event["event"]["event_id"] == 3  # what was not said has no number
    assert ledger.blocks == 0


def test_tiers_are_apart_and_cleared_together() -> None:
    ledger = KvLedger(wrap)
    ledger.add("device", stored(1))
    ledger.add("host_pinned", stored(1))
    ledger.add("device", removed(1))
    assert [event["storage_tier"] for event in answer(ledger, None, None)["TreeDump"]["events"]] == ["host_pinned"]
    ledger.add("device", "cleared")
    assert answer(ledger, None, None)["TreeDump"]["events"] == []


def test_blocks_beyond_the_bound_are_not_tracked() -> None:
    ledger = KvLedger(wrap, max_blocks=2)
    ledger.add("device", stored(1, 2, 3, 4))
    assert ledger.blocks == 2
    assert ledger.add("device", removed(4)) is not None


changes = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(1, 12), st.integers(1, 3)),
        st.tuples(st.just("remove"), st.integers(1, 40), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(changes)
def test_a_dump_says_what_the_events_said(script: list[tuple[str, int, int]]) -> None:
    ledger, fresh = KvLedger(wrap), 100
    said: list[Any] = []
    for verb, number, count in script:
        if verb == "store":
            parent = number if number in held_by(said) else None
            hashes = list(range(fresh, fresh + count))
            fresh += count
            said.append(ledger.add("device", stored(*hashes, parent=parent)))
        elif verb == "remove":
            event = ledger.add("device", removed(number + 99))
            said += [event] if event is not None else []
        else:
            said.append(ledger.add("device", "cleared"))
    dumped = answer(ledger, None, None)["TreeDump"]["events"]
    assert held_by(dumped) == held_by([event for event in said if event is not None])
    seen: set[int] = set()
    held = held_by(dumped)
    for event in dumped:
        run = event["event"]["data"]["stored"]
        assert run["parent_hash"] is None or run["parent_hash"] not in held or run["parent_hash"] in seen
        seen.update(block["block_hash"] for block in run["blocks"])
        assert len(run["blocks"]) <= 128


@each_case("length", [1, 128, 129, 300])
def test_long_runs_are_cut_and_stay_chained(length: int) -> None:
    ledger = KvLedger(wrap)
    ledger.add("device", stored(*range(1, length + 1)))
    dumped = answer(ledger, None, None)["TreeDump"]["events"]
    assert len(dumped) == -(-length // 128)
    assert held_by(dumped) == {n: n - 1 or None for n in range(1, length + 1)}
