"""Rates and budgets as arithmetic."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.parts.keys.rules.rates import Rate
from dynamo.frontend.parts.keys.rules.records import Budget, Period, Price
from dynamo.frontend.parts.keys.rules.spending import cost_of, period_end, period_number, units_of


def passed(rate: Rate, times: list[float], units: float = 1) -> int:
    """How many uses at these times are allowed."""
    full_at, count = 0.0, 0
    for now in times:
        if rate.wait_seconds(full_at, units, now) == 0:
            full_at = rate.after(full_at, units, now)
            count += 1
    return count


def test_at_once_a_rate_allows_its_burst_and_over_time_its_limit() -> None:
    rate = Rate(10, 60.0, burst=2)
    assert passed(rate, [100.0] * 1000) == 2
    assert passed(rate, [100.0 + n * 0.06 for n in range(1000)]) == 10 + 2 - 1  # one more would come at second 60


@given(
    limit=st.integers(1, 1000),
    burst=st.integers(1, 200),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=200),
    units=st.integers(1, 50),
)
def test_no_stretch_of_time_allows_more_than_the_limit_and_the_burst(
    limit: int, burst: int, gaps: list[float], units: int
) -> None:
    rate, full_at, now = Rate(limit, 60.0, burst), 0.0, 1000.0
    taken: list[float] = []
    for gap in gaps:
        now += gap
        if rate.wait_seconds(full_at, units, now) == 0:
            full_at = rate.after(full_at, units, now)
            taken.append(now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            used = (last - first + 1) * units
            allowed = (taken[last] - taken[first]) * limit / 60 + max(burst, units)
            assert used <= allowed + units * 1e-3 + (units if units > burst else 0)


@given(st.integers(1, 10_000), st.integers(1, 100), st.floats(0, 100), st.integers(1, 30))
def test_who_waits_as_long_as_the_rate_says_is_let_in(limit: int, burst: int, owed: float, units: int) -> None:
    rate, now = Rate(limit, 60.0, burst), 500.0
    wait = rate.wait_seconds(now + owed, units, now)
    assert rate.wait_seconds(now + owed, units, now + wait + 1e-5) == 0


def test_a_use_of_more_than_the_burst_is_allowed_once_nothing_is_owed_and_is_paid_back() -> None:
    rate = Rate(60, 60.0, burst=10)
    assert rate.wait_seconds(0.0, 30, 100.0) == 0
    full_at = rate.after(0.0, 30, 100.0)
    assert rate.wait_seconds(full_at, 1, 100.0) == pytest.approx(21.0)
    assert rate.remaining(full_at, 100.0)[0] == 0
    assert rate.remaining(full_at, 125.0)[0] == 5
    assert rate.remaining(full_at, 1000.0) == (10, 0.0)
    assert rate.remaining(full_at, 110.0)[1] == pytest.approx(20.0)


def test_periods_of_budgets_are_those_of_utc() -> None:
    last = datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
    for period, steps, end in (
        (Period.DAY, 1, datetime(2027, 1, 1, tzinfo=UTC)),
        (Period.MONTH, 1, datetime(2027, 1, 1, tzinfo=UTC)),
        (Period.TOTAL, 0, None),
    ):
        assert period_number(period, last + 1) - period_number(period, last) == steps
        assert period_end(period, last) == (None if end is None else end.timestamp())
    leap = datetime(2028, 2, 29, 12, tzinfo=UTC).timestamp()
    assert period_end(Period.MONTH, leap) == datetime(2028, 3, 1, tzinfo=UTC).timestamp()


def test_money_is_counted_without_rounding_off_small_prices() -> None:
    budget = Budget(period=Period.MONTH, money=2.5)
    assert units_of(budget) == 2_500_000_000
    price = Price(input=0.15, cached=0.075, output=0.6)
    assert cost_of(budget, price, input=1, cached=0, output=0) == 150
    assert cost_of(budget, price, input=1_000_000, cached=400_000, output=100_000) == round(
        (0.6 * 0.15 + 0.4 * 0.075 + 0.1 * 0.6) * 10**9
    )
    assert cost_of(budget, Price(input=1.0), input=10, cached=10, output=0) == 10_000
    assert cost_of(budget, None, input=10, cached=0, output=10) == 0
    assert cost_of(Budget(period=Period.DAY, tokens=5), price, input=3, cached=2, output=4) == 7
