"""The router's queue: when a request parks, in which order requests leave, what each class may hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import RouterQueueLimitExceeded
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.queueing import (
    DeficitRoundRobin,
    PolicyClass,
    PolicyProfile,
    QueueOrder,
    QueueRequest,
    RankPrefill,
    RouterQueue,
    UncachedIslBucket,
)
from support.properties import examples

A, B = WorkerRank(1), WorkerRank(2)
BATCH = 100  # max_num_batched_tokens of every rank


class Ranks:
    """Ranks with as many active prefill tokens as a test says."""

    def __init__(self, **prefill: int) -> None:
        self.prefill = {WorkerRank(ord(name) - ord("a") + 1): tokens for name, tokens in prefill.items()}

    def eligible(self, request: QueueRequest[str]) -> Iterable[RankPrefill]:
        ranks = self.prefill if request.pinned is None else {request.pinned} & self.prefill.keys()
        return [RankPrefill(self.prefill[rank], BATCH) for rank in ranks]

    def workers(self) -> int:
        return len({rank.worker_id for rank in self.prefill})


def request(name: str, tokens: int = 10, **more: Any) -> QueueRequest[str]:
    return QueueRequest(name, name, tokens, **more)


def one_class(order: QueueOrder = QueueOrder.FCFS, threshold: float = 0.5) -> PolicyProfile:
    return PolicyProfile.of_one_class(queue_threshold=threshold, order=order)


def classes(**quanta: int) -> PolicyProfile:
    """Explicit classes beside the default family, all parking as soon as a rank has anything to prefill."""
    fallback = PolicyClass(name="rest", quantum=1, policy_family="rest", cache_bucket="all", prefill_busy_threshold=0)
    explicit = [PolicyClass(name=name, quantum=quantum, prefill_busy_threshold=0) for name, quantum in quanta.items()]
    return PolicyProfile((*explicit, fallback), (UncachedIslBucket(0, "all"),), "rest")


def drained(queue: RouterQueue[str], ranks: Ranks, now: float = 0.0) -> list[str]:
    return [each.payload for each in queue.ready(ranks, now)]


def parked(queue: RouterQueue[str], *requests: QueueRequest[str], now: float = 0.0) -> None:
    """Park requests one second apart."""
    busy = Ranks(a=1000, b=1000)
    for number, each in enumerate(requests):
        assert not queue.arrive(each, busy, now + number)


# -- parking ---------------------------------------------------------------------------------------------------------


def test_without_a_threshold_nothing_is_ever_parked() -> None:
    queue: RouterQueue[str] = RouterQueue(PolicyProfile.of_one_class(queue_threshold=None))
    assert queue.arrive(request("r"), Ranks(a=10**9), 0.0)


def test_a_request_parks_when_every_rank_is_above_the_threshold_and_leaves_when_one_is_not() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class())
    assert queue.arrive(request("first"), Ranks(a=51, b=50), 0.0)  # b is at the threshold and not above it
    assert not queue.arrive(request("second"), Ranks(a=51, b=51), 0.0)
    assert drained(queue, Ranks(a=51, b=51)) == []
    assert drained(queue, Ranks(a=51, b=50)) == ["second"]
    assert len(queue) == 0


def test_a_worker_that_gives_no_batch_size_is_busy_above_ten_million_tokens_only() -> None:
    policy = one_class(threshold=1.0).classes["default"]
    assert not policy.is_busy(RankPrefill(10_000_000))
    assert policy.is_busy(RankPrefill(10_000_001))


def test_a_request_does_not_overtake_those_of_its_class_that_wait() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class())
    parked(queue, request("first"))
    assert not queue.arrive(request("second"), Ranks(a=0), 1.0)
    assert drained(queue, Ranks(a=0)) == ["first", "second"]


def test_a_request_that_no_rank_may_serve_is_not_parked() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class())
    parked(queue, request("first"))
    assert queue.arrive(request("second", pinned=WorkerRank(9)), Ranks(a=1000), 1.0)
    assert queue.arrive(request("third"), Ranks(), 1.0)
    assert drained(queue, Ranks()) == ["first"]  # its workers have left: the choice of a worker says so


def test_a_pinned_request_looks_at_its_rank_and_waits_in_a_lane_of_its_own() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class())
    half = Ranks(a=1000, b=0)
    assert not queue.arrive(request("to a", pinned=A), half, 0.0)
    assert queue.arrive(request("to b", pinned=B), half, 1.0)
    assert queue.arrive(request("to any"), half, 1.0)
    assert not queue.arrive(request("to a too", pinned=A), Ranks(a=0, b=0), 2.0)
    parked(queue, request("general"), now=3.0)
    assert drained(queue, half) == ["general"]
    assert drained(queue, Ranks(a=0, b=1000)) == ["to a", "to a too"]


def test_lanes_and_the_general_queue_compete_by_their_order() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class())
    parked(queue, request("1"), request("2", pinned=A), request("3"), request("4", pinned=B), request("5", pinned=A))
    assert drained(queue, Ranks(a=0, b=0)) == ["1", "2", "3", "4", "5"]


def test_the_first_of_a_class_blocks_those_behind_it() -> None:
    class OnlySmall(Ranks):
        def eligible(self, request: QueueRequest[str]) -> Iterable[RankPrefill]:
            return [RankPrefill(0 if request.prompt_tokens < 10 else 1000, BATCH)]

    queue: RouterQueue[str] = RouterQueue(one_class())
    parked(queue, request("large", 20), request("small", 1))
    assert drained(queue, OnlySmall(a=0)) == []


def test_the_loads_are_read_again_after_each_dispatch() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class())
    parked(queue, *(request(str(number), 40) for number in range(4)))
    ranks, sent = Ranks(a=0, b=1000), []
    for each in queue.ready(ranks, 0.0):
        sent.append(each.payload)
        ranks.prefill[A] += each.uncached_tokens
    assert sent == ["0", "1"]  # 40 tokens are not above half of 100, 80 are
    assert len(queue) == 2


def test_a_parked_request_can_be_taken_out() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class())
    parked(queue, *(request(str(number)) for number in range(200)))
    for number in range(200):
        assert queue.remove(str(number)) is True
        assert queue.remove(str(number)) is False
        if number % 50 == 10:
            parked(queue, request(f"late {number}"), now=1000.0)
    usage = queue.usage()["default"]
    assert (usage.requests, usage.raw_isl_tokens) == (4, 40)
    assert drained(queue, Ranks(a=0)) == ["late 10", "late 60", "late 110", "late 160"]
    assert queue.usage()["default"].raw_isl_tokens == 0


def test_an_overlap_older_than_ten_seconds_is_found_anew_before_the_dispatch() -> None:
    refreshed: list[str] = []
    queue: RouterQueue[str] = RouterQueue(one_class(), refresh_overlap=lambda each: refreshed.append(each.payload))
    parked(queue, request("old"), request("young"))  # at 0 and 1
    assert drained(queue, Ranks(a=0), now=10.5) == ["old", "young"]
    assert refreshed == ["old"]


# -- order -----------------------------------------------------------------------------------------------------------


def test_first_come_first_served_moves_a_request_ahead_by_its_priority_in_seconds() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class())
    parked(queue, request("0"), request("1"), request("2", priority=-9), request("3", priority=2))
    assert drained(queue, Ranks(a=0)) == ["0", "1", "3", "2"]  # at 1 s by its priority, behind "1", which came first


def test_strict_priority_beats_every_other_order() -> None:
    for order in QueueOrder:
        queue: RouterQueue[str] = RouterQueue(one_class(order))
        parked(queue, request("plain", 1, priority=9), request("strict", 900, strict_priority=1))
        assert drained(queue, Ranks(a=0)) == ["strict", "plain"]


def test_weighted_shortest_processing_time_counts_uncached_tokens_for_each_point_of_priority() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class(QueueOrder.WSPT))
    parked(
        queue,
        request("100 tokens", 100),
        request("40 uncached", 1000, cached_tokens=960),
        request("150 tokens by 4", 150, priority=3),
        request("40 uncached, later", 40),
    )
    assert drained(queue, Ranks(a=0)) == ["150 tokens by 4", "40 uncached", "40 uncached, later", "100 tokens"]


def test_last_come_first_served() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class(QueueOrder.LCFS))
    parked(queue, request("0"), request("1"), request("2"))
    assert drained(queue, Ranks(a=0)) == ["2", "1", "0"]


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "kind", "admitted", "current"),
    [
        ({"request_queue_limit_per_worker": 2}, "requests", 4, 4),
        ({"raw_isl_token_queue_limit_per_worker": 15}, "raw_isl_tokens", 3, 30),
        ({"raw_isl_token_queue_limit_per_worker": 14}, "raw_isl_tokens", 3, 30),  # the third crosses the limit of 28
        ({"cached_token_queue_limit_per_worker": 7}, "cached_tokens", 4, 16),
        ({"request_queue_limit_per_worker": 0}, "requests", 0, 0),
    ],
)
def test_the_request_that_crosses_a_limit_is_let_in_and_the_next_is_not(
    limit: dict[str, Any], kind: str, admitted: int, current: int
) -> None:
    policy = PolicyClass(name="only", quantum=1, policy_family="f", cache_bucket="b", prefill_busy_threshold=0, **limit)
    queue: RouterQueue[str] = RouterQueue(PolicyProfile((policy,), (UncachedIslBucket(0, "b"),), "f"))
    parked(queue, *(request(str(number), cached_tokens=4) for number in range(admitted)))
    with pytest.raises(RouterQueueLimitExceeded) as caught:
        queue.arrive(request("refused", cached_tokens=4), Ranks(a=1, b=1), 9.0)
    error, (most,) = caught.value, limit.values()
    found = (error.policy_class, error.limit_kind, error.current, error.limit)
    assert found == ("only", kind, current, 2 * most)  # for each of two workers
    assert len(queue) == admitted
    assert drained(queue, Ranks(a=0)) == [str(number) for number in range(admitted)]


def test_the_whole_queue_has_a_bound() -> None:
    queue: RouterQueue[str] = RouterQueue(one_class(), max_parked=2)
    parked(queue, request("0"), request("1"))
    with pytest.raises(RouterQueueLimitExceeded):
        parked(queue, request("2"))


# -- between classes -------------------------------------------------------------------------------------------------


def test_quanta_of_four_to_one_give_four_to_one_service() -> None:
    queue: RouterQueue[str] = RouterQueue(classes(gold=4000, bronze=1000))
    for number in range(500):
        parked(queue, request(f"g{number}", 1000, policy_class="gold"))
        parked(queue, request(f"b{number}", 1000, policy_class="bronze"))
    first = drained(queue, Ranks(a=0))[:500]
    assert Counter(name[0] for name in first) == {"g": 400, "b": 100}
    assert "".join(name[0] for name in first[:10]) == "ggggbggggb"


@given(
    quanta=st.lists(st.integers(1, 50), min_size=2, max_size=4),
    costs=st.lists(st.integers(1, 200), min_size=1, max_size=12) | st.lists(st.integers(1, 3), min_size=1),
)
@examples(100)
def test_each_class_gets_its_share_where_a_quantum_pays_for_a_request(quanta: list[int], costs: list[int]) -> None:
    names = [str(number) for number in range(len(quanta))]
    turns = DeficitRoundRobin(dict(zip(names, quanta, strict=True)))
    served, count, largest = dict.fromkeys(names, 0), Counter[str](), max(costs)
    run, last = 0, ""
    for _ in range(300):
        heads = {name: costs[(count[name] + int(name)) % len(costs)] for name in names}
        name = turns.take(heads)
        assert name is not None
        count[name] += 1
        served[name] += heads[name]
        run, last = (run + heads[name] if name == last else heads[name]), name
        if min(quanta) >= largest:  # else a class may be visited again before another one can pay
            assert run <= quanta[int(name)] + largest  # a burst is bounded
        assert 0 <= turns.credit(name) < quanta[int(name)] + largest
    if min(quanta) < largest:
        return  # rounds that are added at once bring credit that a visit spends in place of its quantum, so shares drift
    rounds = [served[name] / quanta[int(name)] for name in names]
    slack = [(quanta[int(name)] + largest) / quanta[int(name)] for name in names]
    assert max(rounds) - min(rounds) <= 2 * max(slack) + 1


def test_requests_far_above_their_quanta_are_paid_for_at_once() -> None:
    turns = DeficitRoundRobin({"a": 1, "b": 3})
    assert turns.take({"a": 10**12, "b": 10**12}) == "b"  # needs a third of the rounds
    assert turns.credit("b") < 3
    assert 10**12 / 3 - 1 < turns.credit("a") < 10**12 / 3 + 2


def test_a_class_that_empties_loses_its_credit() -> None:
    queue: RouterQueue[str] = RouterQueue(classes(gold=4000, bronze=1000))
    parked(queue, request("g", 10, policy_class="gold"))
    assert drained(queue, Ranks(a=0)) == ["g"]
    assert queue._turns.credit("gold") == 0
    parked(queue, *(request(f"g{number}", 1000, policy_class="gold") for number in range(8)))
    parked(queue, *(request(f"b{number}", 1000, policy_class="bronze") for number in range(2)))
    assert [name[0] for name in drained(queue, Ranks(a=0))] == list("bggggbgggg")  # its turn had passed


def test_a_class_that_cannot_dispatch_saves_nothing_up() -> None:
    turns = DeficitRoundRobin({"a": 10, "b": 10})
    for _ in range(20):
        assert turns.take({"b": 10}) == "b"
    assert turns.credit("a") == 0
    assert turns.take({}) is None


def test_a_class_with_credit_left_goes_first_next_time() -> None:
    turns = DeficitRoundRobin({"a": 30, "b": 30})
    both = {"a": 10, "b": 10}
    assert [turns.take(both) for _ in range(2)] == ["a", "a"]
    assert turns.take({"b": 10}) == "b"  # a cannot for a moment: its visit is over
    assert [turns.take(both) for _ in range(5)] == ["b", "b", "a", "b", "b"]
