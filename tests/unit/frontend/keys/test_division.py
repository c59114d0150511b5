"""How frontends divide a limit: whatever the order of their turns, together they hold no more than it."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dynamo.frontend.parts.keys.rules.division import (
    Division,
    LimitKind,
    Own,
    ShareClaim,
    SharedLimit,
    Turn,
    take_turn,
    targets,
)

FRONTENDS = ("a", "b", "c", "d")
RATE = SharedLimit(LimitKind.RATE, 600.0, 100.0)
PLACES = SharedLimit(LimitKind.PLACES, 7.0)
BUDGET = SharedLimit(LimitKind.BUDGET, 10_000.0)
LIMITS = (RATE, PLACES, BUDGET)


def settle(limit: SharedLimit, needs: dict[str, float], before: Division | None = None) -> Division:
    """Let everybody take turns until nothing changes any more."""
    for _ in range(20):
        is_news = False
        for id, need in needs.items():
            mine = before.members.get(id) if before is not None else None
            own = Own(need, level=0.0 if mine is None else mine.level, spent=0.0 if mine is None else mine.spent)
            turn = take_turn(before, id, own, needs.keys(), limit)
            if turn.is_news:
                before, is_news = turn.division, True
        if not is_news:
            assert before is not None
            return before
    raise AssertionError("it never settles")


def units(division: Division) -> dict[str, float]:
    return {id: one.units for id, one in division.members.items()}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.kind.name)
@settings(max_examples=60, phases=[Phase.explicit, Phase.generate, Phase.shrink])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(FRONTENDS), st.floats(0, 20_000), st.floats(0, 10), st.floats(0, 1), st.booleans()),
        max_size=20,
    )
)
def test_frontends_together_never_hold_more_than_the_limit(
    limit: SharedLimit, steps: list[tuple[str, float, float, float, bool]]
) -> None:
    division: Division | None = None
    spent = dict.fromkeys(FRONTENDS, 0.0)
    alive: set[str] = set()
    for id, need, floor, part, dies in steps:
        mine = None if division is None else division.members.get(id)
        if dies and mine is not None:
            alive.discard(id)
            continue
        if id not in alive and mine is not None and division is not None:
            continue  # dead: it takes no turn
        alive.add(id)
        held = 0.0 if mine is None else mine.units
        spent[id] = mine.spent + part * held if mine is not None and limit.kind is LimitKind.BUDGET else 0.0
        level = part * mine.level if mine is not None else 0.0
        turn = take_turn(division, id, Own(need, min(floor, held), level, spent[id]), alive, limit)
        division = turn.division
        total = sum(one.units for one in division.members.values())
        used = division.spent + sum(one.spent for one in division.members.values())
        assert total + (used if limit.kind is LimitKind.BUDGET else 0.0) <= limit.total + 1e-6
        assert division.level + sum(one.level for one in division.members.values()) <= limit.burst + 1e-6
        assert all(one.units >= 0 for one in division.members.values())


@given(
    st.dictionaries(
        st.sampled_from(FRONTENDS),
        st.builds(ShareClaim, st.floats(0, 9), st.floats(0, 2_000), st.floats(0, 20_000)),
        min_size=1,
    )
)
@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.kind.name)
def test_shares_are_at_most_what_there_is(limit: SharedLimit, claims: dict[str, ShareClaim]) -> None:
    pot = limit.total
    found = targets(pot, claims, limit)
    floors = sum(claim.floor for claim in claims.values())
    assert sum(found.values()) <= max(pot, floors) + 1e-6
    if limit.kind is LimitKind.RATE:
        assert min(found.values()) > 0  # the first request of a quiet frontend gets through


def test_quiet_frontends_have_equal_parts_and_the_burst_with_them() -> None:
    found = settle(RATE, dict.fromkeys(FRONTENDS, 0.0))
    assert units(found) == dict.fromkeys(FRONTENDS, 150.0)
    assert found.level + sum(one.level for one in found.members.values()) == pytest.approx(100.0)


def test_a_busy_frontend_gets_what_quiet_ones_do_not_use() -> None:
    found = units(settle(RATE, {"a": 600.0, "b": 0.0}))
    assert found["a"] == pytest.approx(562.5)
    assert found["b"] == pytest.approx(37.5)
    back = units(settle(RATE, {"a": 600.0, "b": 600.0}, settle(RATE, {"a": 600.0, "b": 0.0})))
    assert back["a"] == pytest.approx(back["b"], abs=15)


def test_places_are_whole_and_one_that_is_taken_is_not_given_back() -> None:
    alone = settle(PLACES, {"a": 7.0})
    assert units(alone) == {"a": 7.0}
    taken = take_turn(alone, "a", Own(7.0, 6.0), {"a", "b"}, PLACES)
    joined = take_turn(taken.division, "b", Own(3.0), {"a", "b"}, PLACES)
    taken = take_turn(joined.division, "a", Own(7.0, 6.0), {"a", "b"}, PLACES)
    assert taken.units == 6.0
    assert taken.division.members["a"].stuck
    assert take_turn(taken.division, "b", Own(3.0, is_overdue=True), {"a", "b"}, PLACES).units == 1.0


def test_what_a_dead_frontend_spent_stays_spent_and_what_it_held_is_free() -> None:
    both = settle(BUDGET, {"a": 0.0, "b": 0.0})
    held = both.members["a"].units
    spends = take_turn(both, "a", Own(spent=held / 2), {"a", "b"}, BUDGET).division
    alone = take_turn(spends, "b", Own(10_000.0), {"b"}, BUDGET)
    assert alone.division.members.keys() == {"b"}
    assert alone.division.spent == pytest.approx(held / 2)
    assert alone.units == pytest.approx(10_000 - held / 2)


def test_a_frontend_takes_over_the_share_of_one_that_does_not_answer_but_no_budget() -> None:
    for limit in (RATE, PLACES):
        alone = settle(limit, {"dead": 0.0})
        late = take_turn(alone, "new", Own(is_overdue=True), {"dead", "new"}, limit)
        assert late.units >= limit.total // 2
    alone = settle(BUDGET, {"dead": 10_000.0})
    assert take_turn(alone, "new", Own(is_overdue=True), {"dead", "new"}, BUDGET).units == 0.0


def test_a_new_period_begins_with_nothing_spent() -> None:
    old = settle(BUDGET, {"a": 0.0, "b": 0.0})
    spends = take_turn(old, "a", Own(spent=3_000.0), {"a", "b"}, BUDGET).division
    new: Turn = take_turn(spends, "b", Own(period=1), {"a", "b"}, BUDGET)
    assert (new.division.period, new.division.spent, new.division.members.keys()) == (1, 0.0, {"b"})


def test_a_rest_that_is_too_small_for_two_goes_to_one_frontend() -> None:
    claims = {"b": ShareClaim(0.0, 100.0, 40.0), "a": ShareClaim(0.0, 100.0, 40.0), "c": ShareClaim(0.0, 0.0)}
    assert targets(50.0, claims, BUDGET) == {"a": 50.0, "b": 0.0, "c": 0.0}
    assert targets(300.0, claims, BUDGET)["b"] >= 100.0
