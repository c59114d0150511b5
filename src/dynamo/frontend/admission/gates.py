"""The limits of a key, of its project, and of the key with a model, as gates over the records of one table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from dynamo.access.rates import Rate
from dynamo.access.records import Budget, KeyRing, LimitSet, Period
from dynamo.access.spending import period_end, period_number, units_of
from dynamo.frontend.access.identity import Identity
from dynamo.frontend.admission.limit_table import UNDIVIDED, LimitTable

__all__ = ["BudgetGate", "GateBook", "Gates", "PlaceGate", "RateGate", "Spent"]

FRONTENDS: Final = "frontends of the cluster"
"""The record whose value says among how many frontends limits are divided; 0: they are not."""

_TOKENS: Final = ("tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")
_SMALLEST_PART: Final = 1e-3  # of a rate of which nothing was granted: its waits are long, and finite


class Spent(NamedTuple):
    """What a budget has given in a period."""

    period: int
    units: int


class RateGate:
    """One rate of a scope, and its record."""

    __slots__ = ("at", "counts_input", "counts_output", "granted", "id", "name", "rate", "scope", "whole")

    def __init__(self, name: str, scope: str, rate: Rate, at: int) -> None:
        self.name, self.scope, self.at, self.id = name, scope, at, f"{scope} {name}"
        self.whole = rate
        self.rate = rate
        """What of it was granted to this frontend."""
        self.granted = UNDIVIDED
        """The grant that `rate` was made for."""
        self.counts_input = name != "output_tokens_per_minute"
        self.counts_output = name != "input_tokens_per_minute"

    def units(self, input: int, output: int) -> int:
        """Return what tokens take of it."""
        if not self.counts_output:
            return input
        return input + output if self.counts_input else output

    def fit(self, granted: float) -> Rate:
        """Make the rate the one that was granted, and return it."""
        if granted != self.granted:
            whole = self.whole
            self.granted = granted
            if granted >= whole.limit:
                self.rate = whole
            else:
                self.rate = whole.part(max(granted, whole.limit * _SMALLEST_PART))
        return self.rate


@dataclass(frozen=True, slots=True)
class PlaceGate:
    """How many requests of a scope may run at once, and its record."""

    scope: str
    limit: int
    at: int

    @property
    def id(self) -> str:
        return f"{self.scope} concurrent"


@dataclass(frozen=True, slots=True)
class BudgetGate:
    """The budget of a scope, and its record."""

    name: str  # by which what it has given is stored
    scope: str
    budget: Budget
    units: int
    at: int

    @property
    def id(self) -> str:
        return f"{self.name} budget"


@dataclass(frozen=True, slots=True)
class Gates:
    """The limits of one scope, or of several together."""

    sizes: tuple[int, ...] = ()
    places: tuple[PlaceGate, ...] = ()
    requests: tuple[RateGate, ...] = ()
    tokens: tuple[RateGate, ...] = ()
    budgets: tuple[BudgetGate, ...] = ()

    @property
    def counts_money(self) -> bool:
        """Whether the prices of models matter."""
        return any(gate.budget.money is not None for gate in self.budgets)

    def __add__(self, other: Gates) -> Gates:
        return Gates(
            self.sizes + other.sizes,
            self.places + other.places,
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.budgets + other.budgets,
        )


_UNLIMITED: Final = Gates()
_NO_PERIOD: Final = (math.inf, math.inf, 0)


class GateBook:
    """The gates of all keys, made when they are first needed, and again when the key file has changed."""

    def __init__(
        self,
        ring: Callable[[], KeyRing],
        table: LimitTable,
        *,
        spent: Mapping[str, Spent] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`ring` returns what the key file holds now; `spent`: what budgets had given when this process began, by name."""
        self.ring, self.table, self.wall_clock = ring, table, wall_clock
        self.frontends_at = table.record(FRONTENDS)
        self._spent = dict(spent or {})
        self._known: dict[str, tuple[Identity, Gates]] = {}
        self._by_model: dict[tuple[str, str], tuple[Identity, Gates]] = {}
        self._periods: dict[Period, tuple[float, float, int]] = {}
        self._known_ring: KeyRing | None = None

    def of(self, identity: Identity) -> Gates:
        """Return the limits of a key and its project."""
        ring = self.ring()
        if ring is not self._known_ring:
            self._known_ring = ring
            self._known.clear()
            self._by_model.clear()
        known = self._known.get(identity.id)
        if known is not None and known[0] is identity:
            return known[1]
        record, gates = identity.record, _UNLIMITED
        if record.limits is not None or record.budget is not None:
            gates += self._make(f"key {record.id}", record.limits, record.budget)
        project = None if record.project is None else ring.projects.get(record.project)
        if project is not None:
            gates += self._make(f"project {record.project}", project.limits, project.budget)
        self._known[identity.id] = identity, gates
        return gates

    def with_model(self, identity: Identity, gates: Gates, model: str) -> Gates:
        """Return the limits of a key together with those that it has with a model only."""
        found = identity.record.limits_of(model)
        return gates if found is None else self._with_pattern(identity, gates, *found)

    def _with_pattern(self, identity: Identity, gates: Gates, pattern: str, limits: LimitSet) -> Gates:
        known = self._by_model.get((identity.id, pattern))
        if known is not None and known[0] is identity:
            return known[1]
        made = gates + self._make(f"key {identity.id} with {pattern}", limits, None)
        self._by_model[identity.id, pattern] = identity, made
        return made

    def all(self, identities: Iterable[Identity]) -> dict[str, RateGate | PlaceGate | BudgetGate]:
        """Return every limit of these keys, by its name."""
        found: dict[str, RateGate | PlaceGate | BudgetGate] = {}
        for identity in identities:
            gates = self.of(identity)
            every = [gates]
            for pattern, limits in (identity.record.model_limits or {}).items():
                every.append(self._with_pattern(identity, gates, pattern, limits))
            for each in every:
                every_gate: tuple[RateGate | PlaceGate | BudgetGate, ...] = (
                    *each.places, *each.requests, *each.tokens, *each.budgets,
                )  # fmt: skip
                found |= {one.id: one for one in every_gate}
        return found

    def _make(self, scope: str, limits: LimitSet | None, budget: Budget | None) -> Gates:
        limits = limits or LimitSet()
        frontends = self.table.value(self.frontends_at)

        def record(name: str, limit: int) -> int:
            # A limit that is new begins with an equal part, until the frontends have divided it.
            return self.table.record(f"{scope} {name}", granted=limit / frontends if frontends else UNDIVIDED)

        def rate(name: str, seconds: float) -> Iterator[RateGate]:
            limit: int | None = getattr(limits, name)
            if limit is not None:
                made = Rate(limit, seconds, max(1, round(limit * limits.burst)))
                yield RateGate(name, scope, made, record(name, limit))

        at_once, size = limits.concurrent, limits.max_tokens_per_request
        return Gates(
            () if size is None else (size,),
            () if at_once is None else (PlaceGate(scope, at_once, record("concurrent", at_once)),),
            (*rate("requests_per_minute", 60.0), *rate("requests_per_day", 86_400.0)),
            tuple([gate for name in _TOKENS for gate in rate(name, 60.0)]),
            () if budget is None else (self._make_budget(scope, budget, frontends),),
        )

    def _make_budget(self, scope: str, budget: Budget, frontends: float) -> BudgetGate:
        unit = "money" if budget.tokens is None else "tokens"
        name = f"{scope} {budget.period} {unit}"
        now = period_number(budget.period, self.wall_clock())
        spent, units = self._spent.get(name, Spent(now, 0)), units_of(budget)
        part = spent.units + max(0, units - spent.units) / frontends if frontends else UNDIVIDED
        at = self.table.record(f"{name} budget", value=float(spent.units), period=spent.period, granted=part)
        return BudgetGate(name, scope, budget, units, at)

    # -- budgets, under the lock -----------------------------------------------------------------------------------------

    def turn(self, gate: BudgetGate) -> int:
        """Begin a new period where one has come; return its number. A clock that goes back begins none."""
        wall, period = self.wall_clock(), gate.budget.period
        begin, end, now = self._periods.get(period, _NO_PERIOD)
        if not begin <= wall < end:
            now, later = period_number(period, wall), period_end(period, wall)
            self._periods[period] = wall, math.inf if later is None else later, now
        table, at = self.table, gate.at
        known = table.period(at)
        if now <= known:
            return known
        table.grant(at, table.granted(at) - table.value(at))  # the same is left of it as before
        table.set_period(at, now)
        table.set_value(at, 0.0)
        table.set_elsewhere(at, 0.0)
        return now

    def left(self, gate: BudgetGate) -> int:
        """Return what is left of a budget for this frontend."""
        table, at = self.table, gate.at
        whole, granted = gate.units - table.elsewhere(at), table.granted(at)
        return int((granted if granted < whole else whole) - table.value(at) - table.held(at))

    def left_of_whole(self, gate: BudgetGate) -> int:
        """Return what is left of a budget at all frontends, as far as is known here."""
        table, at = self.table, gate.at
        return int(gate.units - table.elsewhere(at) - table.value(at) - table.held(at))
