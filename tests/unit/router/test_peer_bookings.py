"""What a router that lies can do to the account of another one: nothing beyond its bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.rank_states import RankStates
from dynamo.placement.replica_events import (
    MAX_ID_LENGTH,
    MAX_MESSAGE_BYTES,
    MAX_PROMPT_BLOCKS,
    MAX_TOKENS,
    BadReplicaEvents,
    BookedPrompt,
    BookedWorker,
    BookingEvent,
    PrefillHint,
    check_booking,
    decode_bookings,
    encode_bookings,
)
from dynamo.placement.session_affinity import AffinityRecord, SessionAffinity, SessionLease
from dynamo.placement.timing_learner import TimingLearner
from dynamo.router.peers import bookings as peer_bookings
from dynamo.router.peers.bookings import PeerBookings
from support.cases import each_case
from support.properties import examples

A, B = WorkerRank(1), WorkerRank(2, 1)
PROMPT = BookedPrompt([1, 2], True, None, PrefillHint(32))


def peers_of(load: ActiveLoad) -> PeerBookings:
    return PeerBookings(load, 16, lambda rank: rank in (A, B))


def test_no_peer_pushes_out_what_this_router_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_bookings, "MAX_PEER_REQUESTS", 10)
    monkeypatch.setattr(peer_bookings, "MAX_REQUESTS", 25)
    load = ActiveLoad(16)
    load.add("own", A, [7], prompt_tokens=16, cached_tokens=0, now=0.0)
    peers = peers_of(load)
    peers.add(1, (1, "honest"), A, PROMPT, 0.0)
    for liar in (2, 3, 4):
        for number in range(100):
            peers.add(liar, (number, f"r{number}"), A, PROMPT, 1.0)
    assert (len(peers), len(load)) == (25, 26)
    assert "own" in load
    assert "1/honest" in load
    peers.forget(4, 2.0)
    assert len(load) == len(peers) + 1
    for publisher in (1, 2, 3):
        peers.forget(publisher, 2.0)
    assert load.requests(A) == 1
    assert load.of(A).blocks == {7: 1}


def test_blocks_beyond_the_bound_of_a_peer_count_by_their_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_bookings, "MAX_PEER_BLOCKS", 5)
    load = ActiveLoad(16)
    peers = peers_of(load)
    for number in range(4):
        peers.add(9, (9, str(number)), A, BookedPrompt([2 * number, 2 * number + 1], True, None, PrefillHint(32)), 0.0)
    assert (load.decode_blocks(A), load.prefill_tokens(A)) == (4, 128)
    peers.free((9, "0"), A, 1.0)
    peers.add(9, (9, "more"), A, BookedPrompt([8, 9]), 1.0)
    assert load.decode_blocks(A) == 4


def test_ranks_that_are_not_there_get_no_account_and_lose_the_one_they_had() -> None:
    load = ActiveLoad(16)
    states = RankStates(load, TimingLearner())
    peers = peers_of(load)
    for number in range(1000):
        peers.add(9, (9, str(number)), WorkerRank(number + 100), PROMPT, 0.0)
    assert load.ranks() == []
    peers.add(9, (9, "r"), A, PROMPT, 0.0)
    states.set({})  # the rank came and went between two looks
    assert (load.ranks(), len(load)) == ([], 0)
    peers.add(9, (9, "s"), B, PROMPT, 100.0)  # what the account has ended is forgotten here, too
    assert len(peers) == 1


def test_a_peer_that_is_silent_leaves_and_too_many_peers_push_out_the_one_silent_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_bookings, "MAX_PEERS", 3)
    load = ActiveLoad(16)
    peers = peers_of(load)
    for publisher in range(4):
        peers.add(publisher, (publisher, "r"), A, PROMPT, float(publisher))
    assert [publisher in peers for publisher in range(4)] == [False, True, True, True]
    assert len(load) == 3
    for publisher in range(1, 4):
        peers.free((publisher, "r"), A, 5.0)
    peers.add(8, (8, "r"), A, PROMPT, 400.0)
    assert [publisher in peers for publisher in (*range(4), 8)] == [False] * 4 + [True]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 3), st.integers(0, 400)), max_size=60))
@examples(100)
def test_what_is_counted_here_is_in_the_account_and_nothing_else_is(steps: list[tuple[int, int, int, int]]) -> None:
    load = ActiveLoad(16, expiry_seconds=300.0)
    peers, now = peers_of(load), 0.0
    for kind, publisher, number, pause in steps:
        request = publisher, f"r{number}"
        match kind:
            case 0 | 1:
                peers.add(publisher, request, (A, B)[number % 2], PROMPT, now)
            case 2:
                peers.free(request, (A, B)[number % 2], now)
            case 3:
                peers.prefill_completed_anywhere(f"r{number}", now)
            case _:
                peers.forget(publisher, now)
        assert len(load) <= len(peers) <= 12
        now += pause
    for publisher in range(3):
        peers.forget(publisher, now)
    assert len(load) == len(peers) == 0
    assert load.of(A).blocks == load.of(B).blocks == {}
    assert (peers._names, peers._blocks) == ({}, 0)


@each_case(
    "members",
    [
        {"request_id": "x" * (MAX_ID_LENGTH + 1)},
        {"router_id": -1},
        {"data": BookedPrompt(range(MAX_PROMPT_BLOCKS + 1))},
        {"data": BookedPrompt(None, prefill_load_hint=PrefillHint(MAX_TOKENS + 1))},
        {"data": BookedPrompt(None, prefill_load_hint=PrefillHint(-1))},
        {"data": BookedPrompt(None, expected_output_tokens=-1)},
    ],
)
def test_a_booking_that_cannot_be_is_refused(members: dict[str, Any]) -> None:
    given: dict[str, Any] = {"request_id": "r", "worker": BookedWorker(1), "data": PROMPT, "router_id": 9}
    check_booking(BookingEvent(**given))
    with pytest.raises(BadReplicaEvents):
        check_booking(BookingEvent(**{**given, **members}))


def test_a_message_beyond_its_bounds_is_refused_unread() -> None:
    with pytest.raises(BadReplicaEvents, match="bytes"):
        decode_bookings(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(BadReplicaEvents, match="events"):
        decode_bookings(encode_bookings([BookingEvent("r", BookedWorker(1), "Free", 9)] * 5000))


def test_advice_of_other_routers_takes_half_of_the_sessions_at_most() -> None:
    table = SessionAffinity(60.0, writer_id=1, is_known=lambda rank: True, max_sessions=10)
    taken = [table.advise(AffinityRecord(f"s{number}", 1, 0, 5, 2), 0.0) for number in range(20)]
    assert taken == [True] * 5 + [False] * 15
    for number in range(5):
        assert isinstance(table.acquire(f"own{number}", 0.0), SessionLease)
    assert len(table) == 10
    used = SessionAffinity(60.0, writer_id=1, is_known=lambda rank: True, max_sessions=10)
    for number in range(8):  # a session that is used here is one of ours
        assert used.advise(AffinityRecord(f"s{number}", 1, 0, 5, 2), 0.0)
        assert isinstance(used.acquire(f"s{number}", 0.0), SessionLease)
