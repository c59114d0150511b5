"""The candidates that are kept between choices are at any time those that would be made anew."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import Overloaded, WorkerUnavailable
from dynamo.placement import Booking, Candidate, CandidateList, PlacementRequest, RouterMode, place, policy_for
from dynamo.placement.candidates import find
from dynamo.router.workers.worker_holds import WorkerHold, WorkerHolds
from dynamo.runtime.calls.instances import MAX_KEPT, InstanceSet
from dynamo.runtime.calls.request_plane.base import Instance

ENDPOINT = "ns.c.e"
ACTS = st.tuples(
    st.sampled_from(["book", "release", "put", "remove", "fail", "answer", "busy", "choose"]), st.integers(0, 9)
)


def instance(number: int) -> Instance:
    return Instance(namespace="ns", component="c", endpoint="e", instance_id=number, transport={"mem": str(number)})


def anew(instances: InstanceSet, now: float, members: frozenset[int] | None, busy: frozenset[int]) -> list[Candidate]:
    opened = instances.breaker.open_circuits(now)
    return [
        Candidate(
            each.instance_id,
            ENDPOINT,
            each.device_type,
            instances.loads.in_flight(each.instance_id),
            each.instance_id in busy,
            each.instance_id in opened,
        )
        for each in instances.discovered
        if members is None or each.instance_id in members
    ]


@given(st.lists(ACTS, max_size=60))
def test_kept_candidates_are_those_that_would_be_made_anew(acts: list[tuple[str, int]]) -> None:
    instances, now, busy = InstanceSet(ENDPOINT), 0.0, frozenset[int]()
    bookings: list[Booking] = []
    groups = (None, frozenset(range(5)), frozenset(range(3, 9)))
    seen: list[tuple[list[Candidate], list[Candidate]]] = []
    for act, number in acts:
        now += 0.1
        if act == "book":
            bookings.append(instances.book(number))
        elif act == "release" and bookings:
            bookings.pop(number % len(bookings)).release()
        elif act == "put":
            instances.put(f"ns/c/e/{number:x}", instance(number))
        elif act == "remove":
            instances.remove(f"ns/c/e/{number:x}")
        elif act == "fail":
            instances.inhibit(number, now)
        elif act == "answer":
            instances.breaker.record_answer(number)
        elif act == "busy":
            busy ^= {number}
        for members in groups:
            found = instances.candidates(now, members=members, busy=busy)
            assert found == anew(instances, now, members, busy)
            seen.append((found, list(found)))
            if isinstance(found, CandidateList):
                assert [*found.loads] == [each.in_flight for each in found]
                assert found.shape.ids == [each.instance_id for each in found]
                assert found.unfit == {each.instance_id for each in found if each.is_busy or each.is_circuit_open}
                without_some(found, frozenset({number, 3}))
            for wanted in range(10):
                assert find(found, wanted) == next((each for each in found if each.instance_id == wanted), None)
            chosen_alike(found)
    assert all(found == copy for found, copy in seen)  # what was handed out never changes


def without_some(candidates: CandidateList, ids: frozenset[int]) -> None:
    """A list without some ids is that of the others, also where one that is without ids already loses more."""
    for left_out in (ids, candidates.unfit):
        left = candidates.without(left_out).without(frozenset({7}))
        made = CandidateList([each for each in candidates if each.instance_id not in {*left_out, 7}])
        assert (left, left.loads, left.shape.ids, left.unfit) == (made, made.loads, made.shape.ids, made.unfit)


def chosen_alike(candidates: list[Candidate]) -> None:
    """Every mode chooses from kept candidates what it chooses from a plain list of them."""
    tried = frozenset({(ENDPOINT, 3), ("other", 4), (ENDPOINT, 99)})
    requests = [PlacementRequest(), PlacementRequest(excluded=tried), PlacementRequest()]
    for mode in (RouterMode.ROUND_ROBIN, RouterMode.RANDOM, RouterMode.POWER_OF_TWO, RouterMode.LEAST_LOADED):
        found = []
        for given_list in (candidates, [*candidates]):
            policy = policy_for(mode, rng=random.Random(4))
            try:
                placed = [place(policy, each, given_list, 0.0, scope="s").candidate for each in requests]
            except (WorkerUnavailable, Overloaded) as error:
                found.append(type(error).__name__)
            else:
                found.append(str(placed))
        assert found[0] == found[1]


def test_the_groups_that_are_kept_are_bounded() -> None:
    instances = InstanceSet(ENDPOINT)
    instances.put("ns/c/e/1", instance(1))
    groups = [frozenset({1, 1000 + number}) for number in range(2 * MAX_KEPT)]
    for members in groups:
        assert len(instances.candidates(0.0, members=members)) == 1
    assert len(instances.loads.changed) == 1 + MAX_KEPT  # and that of all instances
    instances.book(1)
    assert [instances.candidates(0.0, members=members)[0].in_flight for members in groups] == [1] * len(groups)


def test_groups_of_before_a_join_cost_later_bookings_nothing() -> None:
    instances = InstanceSet(ENDPOINT)
    for number in range(20):  # each join makes new members of the group
        instances.put(f"ns/c/e/{number:x}", instance(number))
        members = frozenset(range(number + 1))
        assert len(instances.candidates(0.0, members=members)) == number + 1
    assert len(instances.loads.changed) == 2  # that of all instances, and that of the group


@given(st.dictionaries(st.integers(0, 6), st.sampled_from(["drain", "quarantine"])))
def test_holds_leave_the_same_of_a_kept_list_as_of_a_plain_one(kinds: dict[int, str]) -> None:
    holds = WorkerHolds()
    for number, kind in kinds.items():
        holds.put(WorkerHold(number, kind, seconds=None if number else 0.5), 0.0)
    candidates = [Candidate(number, ENDPOINT, in_flight=number, is_busy=number == 4) for number in range(1, 6)]
    kept, plain = holds.apply(CandidateList(candidates), 1.0), holds.apply(candidates, 1.0)
    assert kept == plain
    assert [each.instance_id for each in plain] == [each for each in range(1, 6) if kinds.get(each) != "drain"]
    assert {each.instance_id for each in plain if each.is_circuit_open} == {
        number for number, kind in kinds.items() if kind == "quarantine" and 1 <= number < 6
    }
    assert isinstance(kept, CandidateList)
    assert [*kept.loads] == [each.in_flight for each in kept]
    assert kept.unfit == {each.instance_id for each in kept if each.is_busy or each.is_circuit_open}
