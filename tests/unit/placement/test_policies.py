"""The policies: each reaches every worker it may, and keeps its own rule."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument, Overloaded, WorkerUnavailable
from dynamo.placement import Candidate, LoadBook, Placement, PlacementRequest, Policy, RouterMode, place, policy_for
from dynamo.placement.policies import RoundRobinCursor
from dynamo.placement.policies.round_robin import RoundRobin
from dynamo.settings.choices import ROUTER_MODES
from support.cases import each_case

BALANCING = [mode for mode in RouterMode if mode not in (RouterMode.DIRECT, RouterMode.KV)]


def test_the_commands_offer_every_mode() -> None:
    assert set(ROUTER_MODES) == {mode.value for mode in RouterMode}


class Fleet:
    """A few workers with a load book, and one caller that chooses among them."""

    def __init__(self, *ids: int, mode: RouterMode, seed: int = 0, devices: Mapping[int, str] | None = None) -> None:
        self.ids = set(ids)
        self.down: Collection[int] = ()
        self.busy: Collection[int] = ()
        self.loads = LoadBook()
        self.devices = devices or {}
        self.policy: Policy = policy_for(mode, rng=random.Random(seed))

    def choose(
        self, exclude: Collection[int] = (), *, healthy_only: bool = False, pinned: int | None = None
    ) -> Placement:
        candidates = [
            Candidate(
                number,
                "ns.c.e",
                self.devices.get(number),
                self.loads.in_flight(number),
                number in self.busy,
                number in self.down,
            )
            for number in sorted(self.ids)
        ]
        request = PlacementRequest(
            excluded=[("ns.c.e", number) for number in exclude], healthy_only=healthy_only, pinned_instance_id=pinned
        )
        return place(self.policy, request, candidates, 0.0, scope="endpoint ns/c/e")

    def pick(self, exclude: Collection[int] = (), *, healthy_only: bool = False) -> int:
        return self.choose(exclude, healthy_only=healthy_only).candidate.instance_id


@each_case("mode", [*BALANCING, RouterMode.DIRECT])
def test_without_workers_every_mode_reports_it(mode: RouterMode) -> None:
    with pytest.raises(WorkerUnavailable, match=r"^No workers available for endpoint ns/c/e$"):
        Fleet(mode=mode).pick()


@each_case("mode", BALANCING)
def test_every_balancing_mode_reaches_every_worker(mode: RouterMode) -> None:
    fleet = Fleet(1, 2, 3, mode=mode)
    seen: Counter[int] = Counter()
    for _ in range(300):
        chosen = fleet.pick()
        fleet.loads.book(chosen)
        seen[chosen] += 1
    assert set(seen) == {1, 2, 3}
    assert min(seen.values()) > 50


def test_callers_that_share_workers_each_have_their_own_turn() -> None:
    # A request of two halves: the first has one to choose from, the second two. With one turn for both, 3 never had its.
    first, second = Fleet(1, 2, 3, mode=RouterMode.ROUND_ROBIN), Fleet(1, 2, 3, mode=RouterMode.ROUND_ROBIN)
    seen: Counter[int] = Counter()
    for _ in range(10):
        assert first.pick({2, 3}) == 1
        seen[second.pick({1})] += 1
    assert seen == {2: 5, 3: 5}


def test_two_policies_may_share_one_turn() -> None:
    cursor, candidates = RoundRobinCursor(), [Candidate(1), Candidate(2)]
    chosen = [RoundRobin(cursor).choose(PlacementRequest(), candidates, 0.0).candidate.instance_id for _ in range(4)]
    assert chosen == [1, 2, 1, 2]


def test_one_worker_id_on_two_endpoints_has_a_turn_on_each() -> None:
    policy, candidates = RoundRobin(), [Candidate(1, "a"), Candidate(2, "a"), Candidate(1, "b")]
    keys = [policy.choose(PlacementRequest(), candidates, 0.0).candidate.key for _ in range(4)]
    assert keys == [("a", 1), ("b", 1), ("a", 2), ("a", 1)]


@pytest.mark.parametrize("mode", BALANCING)
@given(seed=st.integers(), down=st.sets(st.integers(1, 6)), exclude=st.sets(st.integers(1, 6)))
def test_no_mode_picks_an_excluded_worker_or_an_open_circuit_while_there_are_others(
    mode: RouterMode, seed: int, down: set[int], exclude: set[int]
) -> None:
    fleet = Fleet(1, 2, 3, 4, 5, 6, mode=mode, seed=seed)
    fleet.down = down
    allowed = {1, 2, 3, 4, 5, 6} - down - exclude
    if not allowed:
        with pytest.raises(WorkerUnavailable):
            fleet.pick(exclude, healthy_only=True)
        return
    for _ in range(12):
        assert fleet.pick(exclude) in allowed


@pytest.mark.parametrize("mode", BALANCING)
@given(
    down=st.sets(st.integers(1, 4)),
    busy=st.sets(st.integers(1, 4)),
    exclude=st.sets(st.integers(1, 4)),
    healthy_only=st.booleans(),
)
def test_busy_workers_are_left_out_and_all_busy_is_an_overload_and_not_a_loss(
    mode: RouterMode, down: set[int], busy: set[int], exclude: set[int], healthy_only: bool
) -> None:
    fleet = Fleet(1, 2, 3, 4, mode=mode)
    fleet.down, fleet.busy = down, busy
    left = {1, 2, 3, 4} - exclude - (down if healthy_only else set())
    if not left:
        with pytest.raises(WorkerUnavailable):
            fleet.pick(exclude, healthy_only=healthy_only)
    elif left <= busy:
        with pytest.raises(Overloaded):
            fleet.pick(exclude, healthy_only=healthy_only)
    else:
        assert fleet.pick(exclude, healthy_only=healthy_only) in (left - busy - down or left - busy)


def test_a_pinned_worker_is_taken_as_it_is_and_an_unknown_one_is_the_callers_mistake() -> None:
    fleet = Fleet(1, 2, mode=RouterMode.ROUND_ROBIN)
    fleet.down = fleet.busy = {2}
    placement = fleet.choose({2}, pinned=2)
    assert (placement.candidate.instance_id, str(placement)) == (2, "2 by pinned (pinned)")
    with pytest.raises(InvalidArgument, match=r"^Invalid request$"):
        fleet.choose(pinned=7)


def test_round_robin_takes_turns_and_survives_comings_and_goings() -> None:
    fleet = Fleet(10, 30, 50, mode=RouterMode.ROUND_ROBIN)
    assert [fleet.pick() for _ in range(4)] == [10, 30, 50, 10]
    fleet.ids = {10, 20, 50}
    assert [fleet.pick() for _ in range(4)] == [20, 50, 10, 20]


def test_least_loaded_takes_the_fewest_open_streams() -> None:
    fleet = Fleet(1, 2, 3, mode=RouterMode.LEAST_LOADED)
    bookings = [fleet.loads.book(number) for number in (1, 1, 2, 3, 3)]
    assert str(fleet.choose()) == "2 by least-loaded (in_flight=1)"
    bookings[0].release()
    bookings[1].release()
    assert fleet.pick() == 1


def test_power_of_two_never_takes_the_busiest_of_three() -> None:
    fleet = Fleet(1, 2, 3, mode=RouterMode.POWER_OF_TWO)
    fleet.loads.book(2)
    assert {fleet.pick() for _ in range(50)} == {1, 3}


def test_device_aware_gives_a_gpu_eight_times_the_streams_of_a_cpu() -> None:
    fleet = Fleet(1, 2, mode=RouterMode.DEVICE_AWARE_WEIGHTED, devices={1: "cuda", 2: "cpu"})
    for _ in range(90):
        fleet.loads.book(fleet.pick())
    assert (fleet.loads.in_flight(1), fleet.loads.in_flight(2)) == (80, 10)


def test_direct_needs_a_name_unless_one_is_left() -> None:
    fleet = Fleet(1, 2, mode=RouterMode.DIRECT)
    with pytest.raises(InvalidArgument, match="name the instance"):
        fleet.pick()
    assert fleet.pick({1}) == 2


def test_a_placement_through_an_open_circuit_tells_so() -> None:
    fleet = Fleet(1, mode=RouterMode.ROUND_ROBIN)
    fleet.down = {1}
    assert [reason.code for reason in fleet.choose().reasons] == ["turn", "all_circuits_open"]


def test_the_same_seed_makes_the_same_choices() -> None:
    def choices(seed: int) -> list[int]:
        fleet = Fleet(1, 2, 3, 4, mode=RouterMode.RANDOM, seed=seed)
        return [fleet.pick() for _ in range(20)]

    assert choices(7) == choices(7) != choices(8)


class Foreign(Enum):
    RoundRobin = 1
    PowerOfTwoChoices = 2
    DeviceAwareWeighted = 3


@each_case(
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


@each_case("value", ["", "kvx", "fastest", 3])
def test_an_unknown_mode_names_those_there_are(value: object) -> None:
    with pytest.raises(InvalidArgument, match="round-robin"):
        RouterMode.of(value)
