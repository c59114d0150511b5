"""Budgets: the period that a moment is in, when the next one begins, and what tokens cost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from dynamo.frontend.parts.keys.rules.records import Budget, Period, Price

MONEY_UNITS: Final = 10**9  # of one unit of the currency: prices are for a million tokens, and have decimals
_TOKENS_OF_A_PRICE: Final = 10**6


def period_number(period: Period, at: float) -> int:
    """Return the number of the period that a moment (seconds since the epoch) is in; a later one has a higher number."""
    if period is Period.TOTAL:
        return 0
    if period is Period.DAY:
        return int(at // 86_400)
    moment = datetime.fromtimestamp(at, UTC)
    return moment.year * 12 + moment.month - 1


def period_end(period: Period, at: float) -> float | None:
    """Return when the period of a moment ends (seconds since the epoch); None: never."""
    if period is Period.TOTAL:
        return None
    moment = datetime.fromtimestamp(at, UTC)
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    if period is Period.DAY:
        return (day + timedelta(days=1)).timestamp()
    return (day.replace(day=1) + timedelta(days=32)).replace(day=1).timestamp()


def units_of(budget: Budget) -> int:
    """Return the size of a budget in the units that are counted: tokens, or billionths of the currency."""
    if budget.tokens is not None:
        return budget.tokens
    assert budget.money is not None
    return round(budget.money * MONEY_UNITS)


def cost_of(budget: Budget, price: Price | None, *, input: int, cached: int, output: int) -> int:
    """Return what tokens take of a budget, in its units; `cached` of the `input` tokens were cached.

    A model without a price costs nothing where money is counted.
    """
    if budget.tokens is not None:
        return input + output
    if price is None:
        return 0
    cached_price = price.input if price.cached is None else price.cached
    money = (input - cached) * price.input + cached * cached_price + output * price.output
    return round(money * (MONEY_UNITS // _TOKENS_OF_A_PRICE))
