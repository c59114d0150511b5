"""The limits of a key, of its project, and of the key with a model, as gates over the records of one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.limit_table import (
    ELSEWHERE,
    GRANTED,
    PERIOD,
    REFUSED,
    UNDIVIDED,
    VALUE,
    LimitTable,
    Spent,
)
from dynamo.frontend.parts.keys.pledges import Pledges
from dynamo.frontend.parts.keys.rules.rates import Rate
from dynamo.frontend.parts.keys.rules.records import Budget, KeyRing, LimitSet, Period, Price
from dynamo.frontend.parts.keys.rules.spending import cost_of, period_end, period_number, units_of
from dynamo.runtime.base.steady_wall import steady_wall

FRONTENDS: Final = "frontends of the cluster"
"""The record whose value is among how many frontends limits are divided; 0: they are not."""

_TOKENS: Final = ("tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")
_SMALLEST_PART: Final = 1e-3  # of a rate of which nothing was granted: its waits are long, and finite


class RateGate:
    """One rate of a scope, and its record. All but the constructor is called under the table's lock."""

    __slots__ = (
        "_cells", "_granted", "at", "counts_input", "counts_output", "name", "rate", "scope", "whole",
    )  # fmt: skip

    def __init__(self, name: str, scope: str, rate: Rate, table: LimitTable, at: int) -> None:
        self.name, self.scope, self.at = name, scope, at
        self.whole = rate
        """The whole limit, as answers show it."""
        self.rate = rate
        """What of it was granted to this frontend."""
        self._granted = UNDIVIDED  # the grant that `rate` was made for
        self.counts_input = name != "output_tokens_per_minute"
        self.counts_output = name != "input_tokens_per_minute"
        self._cells = table.cells

    @property
    def id(self) -> str:
        """The name of its record."""
        return f"{self.scope} {self.name}"

    def units(self, input: int, output: int) -> int:
        """Return what tokens take of it."""
        if not self.counts_output:
            return input
        return input + output if self.counts_input else output

    def fit(self, granted: float) -> Rate:
        """Make the rate the one that was granted, and return it."""
        if granted != self._granted:
            whole = self.whole
            self._granted = granted
            if granted >= whole.limit:
                self.rate = whole
            else:
                self.rate = whole.part(max(granted, whole.limit * _SMALLEST_PART))
        return self.rate

    def wait_seconds(self, units: int, now: float) -> float:
        """Return how long a use has to wait, and remember it for the other frontends; 0.0: it may come now."""
        cells, granted = self._cells, self._cells[self.at + GRANTED]
        rate = self.rate if granted == self._granted else self.fit(granted)
        wait = rate.wait_seconds(cells[self.at + VALUE], units, now)
        if wait > 0.0 and units > cells[self.at + REFUSED]:
            cells[self.at + REFUSED] = units
        return wait

    def is_used_up(self, now: float) -> bool:
        """Return whether not even one unit may come now, as far as is known without the lock."""
        return self.rate.wait_seconds(self._cells[self.at + VALUE], 1, now) > 0.0

    def take(self, units: int, now: float) -> None:
        """Use units that `wait_seconds` has found to be free."""
        cells, at = self._cells, self.at + VALUE
        cells[at] = self.rate.after(cells[at], units, now)

    def settle(self, reserved: int, used: int, now: float) -> None:
        """Give back what was taken and not used, or take what was used beyond it."""
        cells, at, more = self._cells, self.at + VALUE, used - reserved
        cells[at] = self.rate.after(cells[at], more, now) if more > 0 else cells[at] + more * self.rate.interval

    def room(self, now: float) -> tuple[int, float]:
        """Return how many units may come at once now, and in how many seconds the whole burst may. Needs no lock."""
        return self.rate.remaining(self._cells[self.at + VALUE], now)


class PlaceGate:
    """How many requests of a scope may run at once, and its record. Its methods are called under the table's lock."""

    __slots__ = ("_granted_at", "_table", "at", "id", "limit", "scope")

    def __init__(self, scope: str, limit: int, table: LimitTable, at: int) -> None:
        self.scope, self.limit, self.at, self.id = scope, limit, at, f"{scope} concurrent"
        self._table, self._granted_at = table, at + GRANTED

    def is_full(self) -> bool:
        """Return whether no place is free, and remember that for the other frontends."""
        table = self._table
        held = table.held(self.at)
        if held < self.limit and held + 1 <= table.cells[self._granted_at]:
            return False
        table.note_refused(self.at, 1)
        return True

    def hold(self, places: int) -> None:
        """Take places; a negative number gives back."""
        self._table.hold(self.at, places)


class BudgetGate:
    """The budget of a scope, and its record. Its methods are called under the table's lock."""

    __slots__ = ("_pledge", "_table", "at", "budget", "counts_money", "id", "name", "scope", "units")

    def __init__(self, name: str, scope: str, budget: Budget, book: GateBook, at: int) -> None:
        """`name`: by which what it has given is stored."""
        self.name, self.scope, self.at, self.id = name, scope, at, f"{name} budget"
        self.budget, self.units = budget, units_of(budget)
        self.counts_money = budget.tokens is None
        self._table, self._pledge = book.table, book.pledges.on(name)

    def left(self) -> int:
        """Return what is left of the budget for this frontend."""
        table, at = self._table, self.at
        cells = table.cells
        whole, granted = self.units - cells[at + ELSEWHERE], cells[at + GRANTED]
        return int((granted if granted < whole else whole) - cells[at + VALUE] - table.held(at))

    def left_of_whole(self) -> int:
        """Return what is left of the budget at all frontends, as far as is known here."""
        table, at = self._table, self.at
        return int(self.units - table.elsewhere(at) - table.value(at) - table.held(at))

    def cost(self, price: Price | None, input: int, cached: int, output: int) -> int:
        """Return what tokens take of it."""
        if not self.counts_money:
            return input + output
        return cost_of(self.budget, price, input=input, cached=cached, output=output)

    def hold(self, units: int) -> None:
        """Reserve units; a negative number gives back."""
        table, at = self._table, self.at
        table.hold(at, units)
        self._pledge(table.cells[at + PERIOD], units)

    def spend(self, reserved: int, units: int) -> None:
        """Give back what was reserved, and use what it was reserved for."""
        table, at = self._table, self.at
        table.hold(at, -reserved)
        table.cells[at + VALUE] += units
        self._pledge(table.cells[at + PERIOD], units - reserved)


class Gates:
    """The limits of one scope, or of several together."""

    __slots__ = ("budgets", "counts_money", "places", "requests", "sizes", "tokens")

    def __init__(
        self,
        sizes: tuple[int, ...] = (),
        places: tuple[PlaceGate, ...] = (),
        requests: tuple[RateGate, ...] = (),
        tokens: tuple[RateGate, ...] = (),
        budgets: tuple[BudgetGate, ...] = (),
    ) -> None:
        self.sizes, self.places, self.requests, self.tokens, self.budgets = sizes, places, requests, tokens, budgets
        self.counts_money = any(gate.counts_money for gate in budgets)
        """Whether the prices of models matter."""

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


class Generation:
    """The records that the gates of one version of the key file use, and the charges that were opened under it."""

    __slots__ = ("charges", "records")

    def __init__(self) -> None:
        self.charges = 0
        self.records: set[int] = set()


class _Made:
    """The gates that were made since the key file last changed, by key, and by key and model."""

    __slots__ = ("by_key", "by_model", "generation", "ring")

    def __init__(self, ring: KeyRing | None) -> None:
        self.ring = ring  # None: nothing was made yet
        self.by_key: dict[str, tuple[Identity, Gates]] = {}
        self.by_model: dict[tuple[str, str], tuple[Identity, Gates]] = {}
        self.generation = Generation()


class GateBook:
    """The gates of all keys, made when they are first needed, and again when the key file has changed."""

    def __init__(
        self,
        ring: Callable[[], KeyRing],
        table: LimitTable,
        *,
        spent: Mapping[str, Spent] | None = None,
        pledges: Pledges | None = None,
        wall_clock: Callable[[], float] = steady_wall,
    ) -> None:
        """`ring` returns what the key file holds now; `spent`: what budgets had given when this process began, by name."""
        self.ring, self.table, self.wall_clock = ring, table, wall_clock
        self.pledges = pledges or Pledges()
        self.frontends_at = table.record(FRONTENDS)
        self._spent = dict(spent or {})
        self._periods: dict[Period, tuple[float, float, int]] = {}
        self._made = _Made(None)
        self._past: list[Generation] = []  # a charge of each is still open, or its records have not been released yet

    def of(self, identity: Identity) -> Gates:
        """Return the limits of a key and its project."""
        known = self._made.by_key.get(identity.id)
        if known is not None and known[0] is identity:  # a file that is read again makes new ones of all
            return known[1]
        ring = self.ring()
        if ring is not self._made.ring:
            self._past.append(self._made.generation)
            self._made = _Made(ring)
        record, gates = identity.record, _UNLIMITED
        if record.limits is not None or record.budget is not None:
            gates += self._make(f"key {record.id}", record.limits, record.budget)
        project = None if record.project is None else ring.projects.get(record.project)
        if project is not None:
            gates += self._make(f"project {record.project}", project.limits, project.budget)
        self._made.by_key[identity.id] = identity, gates
        return gates

    def begin_charge(self) -> Generation:
        """Count a charge that was opened: the records of its gates stay until `end_charge`."""
        generation = self._made.generation
        generation.charges += 1
        return generation

    def end_charge(self, generation: Generation) -> None:
        """Count off a charge that has ended, and release the records of older key files that no charge uses any more."""
        generation.charges -= 1
        if self._past and not generation.charges:
            self.release_past()

    def release_past(self) -> None:
        """Release the records that only older versions of the key file name, once their charges have ended."""
        over = [each for each in self._past if not each.charges]
        self._past = [each for each in self._past if each.charges]
        still = self._made.generation.records.union(*(each.records for each in self._past))
        for at in set().union(*(each.records for each in over)) - still:
            self.table.release(at)

    def _record(self, name: str, *, granted: float, budget: Spent | None = None) -> int:
        at = self.table.record(name, granted=granted, budget=budget)
        self._made.generation.records.add(at)
        return at

    def with_model(self, identity: Identity, gates: Gates, model: str) -> Gates:
        """Return the limits of a key together with those that it has with a model only."""
        found = identity.record.limits_of(model)
        return gates if found is None else self._with_pattern(identity, gates, *found)

    def _with_pattern(self, identity: Identity, gates: Gates, pattern: str, limits: LimitSet) -> Gates:
        known = self._made.by_model.get((identity.id, pattern))
        if known is not None and known[0] is identity:
            return known[1]
        made = gates + self._make(f"key {identity.id} with {pattern}", limits, None)
        self._made.by_model[identity.id, pattern] = identity, made
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
            return self._record(f"{scope} {name}", granted=limit / frontends if frontends else UNDIVIDED)

        def rate(name: str, seconds: float) -> Iterator[RateGate]:
            limit: int | None = getattr(limits, name)
            if limit is not None:
                made = Rate(limit, seconds, max(1, round(limit * limits.burst)))
                yield RateGate(name, scope, made, self.table, record(name, limit))

        at_once, size = limits.concurrent, limits.max_tokens_per_request
        return Gates(
            () if size is None else (size,),
            () if at_once is None else (PlaceGate(scope, at_once, self.table, record("concurrent", at_once)),),
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
        at = self._record(f"{name} budget", granted=part, budget=spent)
        return BudgetGate(name, scope, budget, self, at)

    # -- budgets, under the lock -----------------------------------------------------------------------------------------

    def turn(self, gate: BudgetGate) -> int:
        """Begin a new period where one has come; return its number. A clock that goes back begins none."""
        wall, period = self.wall_clock(), gate.budget.period
        begin, end, now = self._periods.get(period, _NO_PERIOD)
        if not begin <= wall < end:
            now, later = period_number(period, wall), period_end(period, wall)
            self._periods[period] = wall, math.inf if later is None else later, now
        table, at = self.table, gate.at
        known = table.cells[at + PERIOD]
        if now <= known:
            return int(known)
        table.grant(at, table.granted(at) - table.value(at))  # the same is left of it as before
        table.set_period(at, now)
        table.set_value(at, 0.0)
        for reset in (table.set_elsewhere, table.set_base, table.set_reported):
            reset(at, 0.0)
        return now
