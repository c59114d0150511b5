"""The router's queue: targets for the first token, and tenants that share it with respect to prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import RouterQueueLimitExceeded
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_state import RankState
from dynamo.placement.queueing import (
    InvalidPolicy,
    PolicyClass,
    PolicyProfile,
    QueueOrder,
    QueueRequest,
    RankPrefill,
    RouterQueue,
    UncachedIslBucket,
)
from dynamo.placement.queueing.lanes import MAX_TENANTS, TenantLanes
from dynamo.placement.queueing.targets import check_target, expected_ttft_ms
from dynamo.placement.timing import RankTiming, TimeCurve
from support.properties import examples

A, B = WorkerRank(1), WorkerRank(2)


class Ranks:
    """Two ranks, each free or busy."""

    def __init__(self, *free: WorkerRank) -> None:
        self.free = free

    def eligible(self, request: QueueRequest[str]) -> Iterable[RankPrefill]:
        ranks = (A, B) if request.pinned is None else (request.pinned,)
        return [RankPrefill(0 if rank in self.free else 1000, 100) for rank in ranks]

    def workers(self) -> int:
        return 1


BUSY, FREE = Ranks(), Ranks(A, B)


def a_class(**more: Any) -> PolicyClass:
    given: dict[str, Any] = {"name": "c", "quantum": 1, "policy_family": "c", "cache_bucket": "b"}
    return PolicyClass(**{**given, "prefill_busy_threshold": 0, **more})


def queue_of(
    order: QueueOrder = QueueOrder.DLPM, cached: dict[str, int] | None = None, **more: Any
) -> RouterQueue[str]:
    """Make a queue of one class; `cached`: the tokens that are held now, by request."""
    profile = PolicyProfile((a_class(queue_policy=order, **more),), (UncachedIslBucket(0, "b"),), "c")
    return RouterQueue(profile, cached_now=lambda request: (cached or {}).get(request.request_id, 0))


def request(name: str, tokens: int = 10, **more: Any) -> QueueRequest[str]:
    return QueueRequest(name, name, tokens, **more)


def park(queue: RouterQueue[str], *requests: QueueRequest[str]) -> None:
    """Park requests, one second apart."""
    for number, each in enumerate(requests):
        assert not queue.arrive(each, BUSY, float(number))


def drained(queue: RouterQueue[str], most: int = 10**6) -> list[str]:
    found = []
    for each in queue.ready(FREE, 1000.0):
        found.append(each.payload)
        if len(found) >= most:
            break
    return found


# -- due times -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [QueueOrder.FCFS, QueueOrder.WSPT, QueueOrder.DLPM])
def test_what_is_due_first_goes_first_below_strict_priority_and_before_what_has_no_target(order: QueueOrder) -> None:
    queue = queue_of(order, tenant_quantum=10**6)
    park(
        queue,
        request("none", 1, priority=100),
        request("late", due=50.0),
        request("soon", 1000, due=20.0),
        request("strict", strict_priority=1),
        request("strict and due", strict_priority=1, due=99.0),
    )
    assert drained(queue) == ["strict and due", "strict", "soon", "late", "none"]


@examples(60)
@given(
    order=st.sampled_from([QueueOrder.FCFS, QueueOrder.WSPT]),
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.none() | st.integers(0, 30), st.integers(1, 50), st.sampled_from([None, A, B])),
        max_size=30,
    ),
    at_once=st.integers(1, 5),
)
def test_a_due_request_never_waits_behind_a_later_due_one_of_its_strict_priority(
    order: QueueOrder, rows: list[tuple[int, int | None, int, WorkerRank | None]], at_once: int
) -> None:
    queue = queue_of(order)
    waiting: dict[str, QueueRequest[str]] = {}
    served: list[str] = []
    for number, (strict, due, tokens, pinned) in enumerate(rows):
        each = request(
            f"r{number}", tokens, strict_priority=strict, due=None if due is None else float(due), pinned=pinned
        )
        park(queue, each)
        waiting[each.request_id] = each
        if number % 3:
            continue
        for name in drained(queue, at_once):
            gone = waiting.pop(name)
            served.append(name)
            for left in waiting.values():
                if left.strict_priority == gone.strict_priority and left.due is not None:
                    assert gone.due is not None
                    assert gone.due <= left.due
    assert sorted(served + drained(queue)) == sorted(f"r{number}" for number in range(len(rows)))


def learned(prefill_tokens: int = 0, per_token_ms: float = 1.0, batch: int | None = 100) -> RankState:
    timing = RankTiming(TimeCurve(0.0, per_token_ms), TimeCurve(5.0, 1.0))
    return RankState(rank=A, prefill_tokens=prefill_tokens, max_num_batched_tokens=batch, timing=timing)


UNKNOWN = RankState(rank=B, prefill_tokens=0, max_num_batched_tokens=100)


@pytest.mark.parametrize(
    ("ranks", "ahead", "own", "expected"),
    [
        ([learned()], 0, 50, 50.0),  # its own prompt
        ([learned(200)], 300, 50, 550.0),  # what the rank has to do, and what waits
        ([learned(200), learned()], 300, 50, 300.0),  # two share that
        ([learned(200), learned(0, 3.0)], 300, 50, 50.0 + 500 / (1 + 1 / 3)),  # each by its speed
        ([learned(200), UNKNOWN], 300, 50, 300.0),  # one that has shown nothing counts as the others
        ([learned(0, 1.0, None)], 8192, 50, 8242.0),
        ([UNKNOWN], 10**9, 50, None),
        ([], 10**9, 50, None),
    ],
)
def test_the_first_token_is_expected_by_what_waits_and_the_speed_that_was_shown(
    ranks: list[RankState], ahead: int, own: int, expected: float | None
) -> None:
    assert expected_ttft_ms(ranks, ahead, own) == (None if expected is None else pytest.approx(expected))


def test_a_target_that_cannot_be_kept_is_refused_with_when_it_could_and_never_without_an_estimate() -> None:
    asked = request("r", 50, due=10.5)
    with pytest.raises(RouterQueueLimitExceeded) as caught:
        check_target("c", asked, [learned(200)], 3000, 10.0)
    error = caught.value
    assert (error.limit_kind, error.current, error.limit, error.retry_after_seconds) == ("ttft_target_ms", 3250, 500, 3)
    with pytest.raises(RouterQueueLimitExceeded) as caught:
        check_target("c", asked, [learned()], 10**9, 10.0)
    assert caught.value.retry_after_seconds == 60
    check_target("c", asked, [learned(200)], 250, 10.0)
    check_target("c", asked, [UNKNOWN], 10**9, 10.0)
    check_target("c", msgspec.structs.replace(asked, due=None), [learned()], 10**9, 10.0)


def test_what_would_go_before_a_request_counts_its_order_its_lane_and_the_shares_of_others() -> None:
    queue = queue_of(QueueOrder.FCFS)
    park(queue, request("a", 100, due=5.0), request("b", 40, cached_tokens=30, due=9.0), request("c", 7, pinned=A))
    only = queue.profile.classes["c"]

    def ahead(**more: Any) -> int:
        return queue.tokens_ahead(request("new", **more), only, 10.0)

    assert [ahead(due=due) for due in (4.0, 6.0, 10.0, None)] == [0, 100, 110, 117]
    assert [ahead(pinned=rank) for rank in (A, B)] == [7, 0]
    shared = queue_of(tenant_quantum=50)
    park(shared, *(request(f"x{each}", 100, tenant="x") for each in range(5)), request("y", 30, tenant="y"))
    only = shared.profile.classes["c"]
    assert [shared.tokens_ahead(request("n", tenant=tenant), only, 9.0) for tenant in ("x", "y", "z")] == [530, 60, 0]
    quick, slow = a_class(quantum=3), a_class(name="slow", policy_family=None, cache_bucket=None)
    both: RouterQueue[str] = RouterQueue(PolicyProfile((quick, slow), (UncachedIslBucket(0, "b"),), "c"))
    park(both, request("a", 90), request("b", 1000, policy_class="slow"))
    assert both.tokens_ahead(request("new"), quick, 9.0) == 90 + 30
    assert both.tokens_ahead(request("new", policy_class="slow"), slow, 9.0) == 1000 + 90


# -- tenants ---------------------------------------------------------------------------------------------------------------


def test_tenants_take_turns_of_one_quantum_and_what_exceeds_it_is_owed() -> None:
    queue = queue_of(tenant_quantum=20)
    park(
        queue,
        *(request(f"a{each}", tenant="a") for each in range(8)),
        *(request(f"b{each}", tenant="b") for each in range(4)),
    )
    assert drained(queue) == ["a0", "a1", "b0", "b1", "a2", "a3", "b2", "b3", "a4", "a5", "a6", "a7"]
    queue = queue_of(tenant_quantum=10)
    park(
        queue,
        *(request(f"a{each}", 35, tenant="a") for each in range(2)),
        *(request(f"b{each}", tenant="b") for each in range(5)),
    )
    assert drained(queue) == ["a0", "b0", "b1", "b2", "a1", "b3", "b4"]


def test_within_a_turn_the_longest_cached_prefix_goes_first_and_each_turn_begins_with_the_oldest() -> None:
    cached = {"a1": 50, "a3": 90, "a4": 70}
    queue = queue_of(cached=cached, tenant_quantum=210)
    park(queue, *(request(f"a{each}", 100, tenant="a") for each in range(6)))
    assert drained(queue) == ["a0", "a3", "a4", "a1", "a2", "a5"]


def test_a_turn_is_paid_with_what_is_uncached_when_it_goes() -> None:
    cached: dict[str, int] = {}
    queue = queue_of(cached=cached, tenant_quantum=100)
    park(queue, *(request(f"{name}{each}", 100, tenant=name) for name in "ab" for each in range(5)))
    cached |= {f"{name}{each}": 90 for name in "ab" for each in range(1, 5)}
    assert drained(queue) == ["a0", "b0", "a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4"]


def test_targets_and_strict_priorities_of_a_tenant_order_its_own_requests_only() -> None:
    queue = queue_of(tenant_quantum=10, cached={"plain": 9})
    park(
        queue,
        request("plain", tenant="a"),
        request("due", tenant="a", due=1.0),
        request("strict", tenant="a", strict_priority=9),
    )
    park(queue, *(request(f"b{each}", tenant="b") for each in range(3)))
    assert drained(queue) == ["strict", "b0", "due", "b1", "plain", "b2"]


def test_requests_without_a_key_are_one_tenant() -> None:
    queue = queue_of(tenant_quantum=10)
    park(queue, *(request(f"none{each}") for each in range(3)), *(request(f"a{each}", tenant="a") for each in range(3)))
    assert drained(queue) == ["none0", "a0", "none1", "a1", "none2", "a2"]


def test_a_tenant_whose_workers_are_busy_holds_up_no_other() -> None:
    queue = queue_of()
    park(queue, request("a", tenant="a", pinned=A), request("b", tenant="b"), request("c", tenant="c", pinned=A))
    assert [each.payload for each in queue.ready(Ranks(B), 9.0)] == ["b"]
    assert len(queue) == 2
    assert sorted(drained(queue)) == ["a", "c"]


def test_a_tenant_with_little_to_do_need_not_wait_for_a_long_turn_and_gets_no_more_than_its_quantum() -> None:
    queue = queue_of(tenant_quantum=100)
    park(queue, *(request(f"a{each}", tenant="a") for each in range(100)))
    assert drained(queue, 5)[-1] == "a4"
    found = []
    for number in range(20):
        park(queue, request(f"b{number}", tenant="b"))
        found += drained(queue, 1)
    assert found[:10] == [f"b{each}" for each in range(10)]  # its quantum of this round
    assert found[10:15] == [f"a{each}" for each in range(5, 10)]  # the rest of the other's


def test_what_a_tenant_owes_is_not_forgotten_while_others_wait() -> None:
    queue = queue_of(tenant_quantum=10)
    park(queue, *(request(f"a{each}", tenant="a") for each in range(30)), request("large", 100, tenant="b"))
    assert drained(queue, 2) == ["a0", "large"]
    park(queue, request("more0", 100, tenant="b"))
    found = drained(queue, 11)
    assert found == [f"a{each}" for each in range(1, 11)] + ["more0"]


def test_accounts_are_bounded_and_tenants_beyond_them_share() -> None:
    queue = queue_of(tenant_quantum=10)
    names = [f"t{number}" for number in range(3 * MAX_TENANTS)]
    park(queue, *(request(name, tenant=name) for name in names))
    lanes = queue._queues["c"].lanes
    assert isinstance(lanes, TenantLanes)
    assert len(lanes.tenants) == len(lanes._credit) == MAX_TENANTS
    assert sorted(drained(queue)) == sorted(names)
    assert (len(lanes), len(lanes.tenants), len(lanes._credit)) == (0, 0, 0)


def test_a_full_class_lets_in_a_tenant_below_its_share_and_no_more_of_the_others() -> None:
    queue = queue_of(request_queue_limit_per_worker=10)
    park(queue, *(request(f"a{each}", tenant="a") for each in range(10)))
    with pytest.raises(RouterQueueLimitExceeded):
        park(queue, request("a10", tenant="a"))
    park(queue, *(request(f"b{each}", tenant="b") for each in range(5)))
    for tenant in "ab":
        with pytest.raises(RouterQueueLimitExceeded):
            park(queue, request("more", tenant=tenant))
    by_tokens = queue_of(raw_isl_token_queue_limit_per_worker=100)
    park(by_tokens, request("a", 100, tenant="a"), request("b", 60, tenant="b"))
    with pytest.raises(RouterQueueLimitExceeded):
        park(by_tokens, request("b2", 1, tenant="b"))


@pytest.mark.parametrize("name", ["tenant_quantum", "slo_ttft_ms"])
def test_a_quantum_and_a_target_are_at_least_1(name: str) -> None:
    with pytest.raises(InvalidPolicy, match=f"{name}: must be at least 1"):
        a_class(**{name: 0}).check("c")


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abc"),  # whose
        st.integers(1, 60),  # tokens
        st.integers(0, 60),  # of these cached, at most all
        st.sampled_from([None, None, A, B]),
        st.none() | st.integers(0, 9),  # due
        st.sampled_from(["go", "go to A", "leave", "wait", "wait"]),  # what happens then
    ),
    max_size=60,
)


@examples(60)
@given(
    steps=STEPS, order=st.sampled_from([QueueOrder.FCFS, QueueOrder.WSPT, QueueOrder.DLPM]), quantum=st.integers(1, 90)
)
def test_everything_that_is_queued_leaves_once(steps: list[Any], order: QueueOrder, quantum: int) -> None:
    cached: dict[str, int] = {}
    queue = queue_of(order, cached, tenant_quantum=quantum)
    left: Counter[str] = Counter()
    waiting: list[str] = []
    for number, (tenant, tokens, held, pinned, due, then) in enumerate(steps):
        name = f"r{number}"
        cached[name] = min(tokens, held)
        park(queue, request(name, tokens, tenant=tenant, pinned=pinned, due=due))
        waiting.append(name)
        gone: list[str] = []
        if then.startswith("go"):
            gone = [
                each.payload
                for _, each in zip(range(2), queue.ready(FREE if then == "go" else Ranks(A), 0.0), strict=False)
            ]
        elif then == "leave":
            gone = [waiting[number % len(waiting)]]
            assert queue.remove(gone[0])
        left.update(gone)
        waiting = [each for each in waiting if each not in gone]
        assert len(queue) == len(waiting) == queue.usage_of("c").requests
    left.update(drained(queue))
    assert left == Counter(f"r{number}" for number in range(len(steps)))
    assert queue.usage_of("c") == type(queue.usage_of("c"))()


@examples(50)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 80)), min_size=1, max_size=12),
    noisy=st.integers(1, 80),
    quantum=st.integers(1, 200),
)
def test_no_tenant_starves(sizes: list[tuple[int, int]], noisy: int, quantum: int) -> None:
    cached: dict[str, int] = {}
    queue = queue_of(cached=cached, tenant_quantum=quantum)
    for number, (tokens, held) in enumerate(sizes):
        cached[f"quiet{number}"] = min(tokens, held)
        park(queue, request(f"quiet{number}", tokens, tenant="quiet"))
    park(queue, *(request(f"first{number}", noisy, tenant=f"noisy{number % 3}") for number in range(6)))
    costs = [max(1, tokens - min(tokens, held)) for tokens, held in sizes]
    served: Counter[str] = Counter()
    for number in range(10_000):  # the noisy ones never end
        (name,) = drained(queue, 1)
        if name.startswith("quiet"):
            served["quiet"] += costs[int(name[5:])]
            if served["quiet"] == sum(costs):
                break
            continue
        served["noisy"] += noisy
        park(queue, request(f"more{number}", noisy, tenant=f"noisy{number % 3}"))
        # Three others, each with its share, and what one turn may exceed it by.
        assert served["noisy"] <= 3 * (served["quiet"] + max(costs) + 2 * quantum + 2 * noisy)
    assert served["quiet"] == sum(costs)
