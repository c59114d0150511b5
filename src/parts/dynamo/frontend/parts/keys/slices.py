"""What this frontend holds of one limit that is divided among frontends, and what it could use."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple
from zlib import crc32

from dynamo.frontend.parts.keys.gates import BudgetGate, PlaceGate, RateGate
from dynamo.frontend.parts.keys.limit_table import NOT_REPORTED
from dynamo.frontend.parts.keys.quotas import Quotas
from dynamo.frontend.parts.keys.rules.division import Division, Holding, LimitKind, Own, SharedLimit, Turn, take_turn
from dynamo.frontend.parts.keys.rules.rates import Rate

PAGES: Final = 64  # of records in the store
OVERDUE_SECONDS: Final = 1.5  # without a share: frontends that live give it up within milliseconds
REMEMBERED_SECONDS: Final = 4.0  # a need lasts so long beyond its cause
MARGIN: Final = 1.5  # of what was used lately: a need
AHEAD_SECONDS: Final = 5.0  # of spending: what a budget's slice should last for


class Slice:
    """One limit. All but the constructor is called under the table's lock."""

    def __init__(self, gate: RateGate | PlaceGate | BudgetGate, quotas: Quotas, now: float) -> None:
        self.gate, self.id = gate, gate.id
        self.page = crc32(self.id.encode()) % PAGES
        """The page of its record; every frontend finds the same one."""
        self._quotas = quotas
        self._demand = _Demand(now)
        self._pending: _Pending | None = None
        self._seen: tuple[float, ...] | None = None  # the numbers of the table at the last check
        self._short_since: float | None = None
        self._has_fallen_back = False

    @property
    def limit(self) -> SharedLimit:
        """The limit as the key file has it."""
        match self.gate:
            case RateGate(whole=rate):
                return SharedLimit(LimitKind.RATE, float(rate.limit), float(rate.burst))
            case PlaceGate(limit=limit):
                return SharedLimit(LimitKind.PLACES, float(limit))
            case BudgetGate(units=units):
                return SharedLimit(LimitKind.BUDGET, float(units))

    def has_changed(self) -> bool:
        """Return whether there may be something to do, without any news of others."""
        return self._short_since is not None or self._demand.need > 0 or self._seen != self._numbers()

    def look_again(self) -> None:
        """Mark this limit as changed."""
        self._seen = None

    def look(self, division: Division | None, member: str, alive: Collection[str], now: float) -> Turn | None:
        """Take the turn, and obey what is lost in it; `take` does the rest, once the record is written.

        None: there is nothing to do, because the record belongs to a later period than this clock's.
        """
        self._pending = None
        table, gate = self._quotas.table, self.gate
        period = self._quotas.book.turn(gate) if isinstance(gate, BudgetGate) else 0
        if division is not None and division.period > period:
            return None
        if division is not None and division.period < period:
            division = None
        mine = None if division is None else division.members.get(member)
        value = table.value(gate.at)
        self._find_base(division, mine, value)
        turn = take_turn(division, member, self._own(mine, period, value, now), alive, self.limit)
        if not turn.is_short:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        granted = value + turn.units if isinstance(gate, BudgetGate) else turn.units
        change = turn.level_change
        if isinstance(gate, RateGate) and mine is None:
            change = min(0.0, change - self._level())
        if isinstance(gate, BudgetGate):
            table.set_elsewhere(gate.at, max(0.0, turn.division.spent_beside(member) - table.base(gate.at)))
        if granted < table.granted(gate.at):
            self._set(granted, change)
            change = 0.0
        self._pending = _Pending(granted, change, value)
        self._seen = self._numbers()
        return turn

    def take(self) -> None:
        """Use what the last turn gave, which is in the record now."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        table, at = self._quotas.table, self.gate.at
        table.set_reported(at, pending.value)
        if pending.granted != table.granted(at):
            self._set(pending.granted, pending.level_change)
        self._seen = self._numbers()

    def fall_back(self, frontends: int, *, may_grow: bool) -> None:
        """Go on with an equal part, because nothing can be divided now. `may_grow`: also where that is more than before."""
        table, gate = self._quotas.table, self.gate
        if isinstance(gate, BudgetGate):
            if not may_grow or self._has_fallen_back:
                return
            self._quotas.book.turn(gate)
            rest = max(0, gate.left_of_whole()) / frontends
            granted = table.value(gate.at) + table.held(gate.at) + rest
        else:
            granted = self.limit.total / frontends
            if isinstance(gate, PlaceGate):
                granted = max(1.0, float(int(granted)))
            if not may_grow:
                granted = min(granted, table.granted(gate.at))
        self._has_fallen_back = may_grow
        if granted != table.granted(gate.at):
            self._set(granted, 0.0)

    # -- the parts of a turn -----------------------------------------------------------------------------------------

    def _find_base(self, division: Division | None, mine: Holding | None, value: float) -> None:
        """Find the value of the table at which the record begins to count what this frontend has spent."""
        table, at = self._quotas.table, self.gate.at
        if division is None:
            table.set_base(at, 0.0)  # no frontend has reported anything: what this frontend knows goes into the record
        elif mine is None:
            known = table.reported(at)
            table.set_base(at, value if known == NOT_REPORTED else min(value, known))
        self._has_fallen_back = False

    def _own(self, mine: Holding | None, period: int, value: float, now: float) -> Own:
        table, gate, total = self._quotas.table, self.gate, self.limit.total
        units, held = 0.0 if mine is None else mine.units, table.held(gate.at)
        refused = table.take_refused(gate.at)
        match gate:
            case RateGate():
                level = self._level()
                used = self._demand.used_of_rate(level, gate.rate, now)
                need = self._demand.observe(used, level < gate.rate.burst / 2, units, refused, total, now)
                # What it had before it is in the record does not count: it has what comes with its units.
                return Own(need, level=0.0 if mine is None else level, is_overdue=self._is_overdue(now))
            case PlaceGate():
                need = self._demand.observe(held, held >= units, units, held + refused if refused else 0.0, total, now)
                return Own(need, held, is_overdue=self._is_overdue(now))
            case BudgetGate():
                left = table.granted(gate.at) - value - held
                used = held + AHEAD_SECONDS * self._demand.spent_a_second(value, now)
                wanted = held + MARGIN * refused if refused else 0.0
                need = self._demand.observe(used, used > max(left, 0.0), units, wanted, total, now)
                asked = self._demand.asked_in_vain(refused)
                return Own(need, held, spent=value - table.base(gate.at), asked=asked, period=period)

    def _is_overdue(self, now: float) -> bool:
        return self._short_since is not None and now - self._short_since > OVERDUE_SECONDS

    def _numbers(self) -> tuple[float, ...]:
        table, at = self._quotas.table, self.gate.at
        return table.value(at), table.held(at), table.granted(at)

    def _level(self) -> float:
        """Return how many units of a rate may come at once now."""
        assert isinstance(self.gate, RateGate)
        table, at = self._quotas.table, self.gate.at
        return self.gate.fit(table.granted(at)).level(table.value(at), self._quotas.clock())

    def _set(self, granted: float, level_change: float) -> None:
        """Change what this frontend may use. What it may use at once of a rate stays, but for the change."""
        table, gate = self._quotas.table, self.gate
        if not isinstance(gate, RateGate):
            table.grant(gate.at, granted)
            return
        level = self._level() + level_change
        table.grant(gate.at, granted)
        rate = gate.fit(granted)
        table.set_value(gate.at, rate.full_at(min(level, rate.burst), self._quotas.clock()))
        self._demand.begin_rate(min(level, rate.burst))


class _Pending(NamedTuple):
    """What a turn gave, until it is in the record."""

    granted: float
    level_change: float
    value: float


class _Demand:
    """How much of a limit this frontend could use."""

    __slots__ = ("_asked", "_average", "_last", "_looked_at", "_until", "need")

    def __init__(self, now: float) -> None:
        self.need = 0.0
        self._average = self._asked = 0.0
        self._until = now
        self._last = 0.0  # a level, or what was spent
        self._looked_at = now

    def observe(self, used: float, is_pressed: bool, units: float, refused: float, total: float, now: float) -> float:
        """Return the need, after a check of what is used of `units`; `refused`: what was refused."""
        self._average += (used - self._average) * 0.3
        if refused > 0 or (is_pressed and used > 0):
            self.need = min(total, max(self.need, 2 * units, MARGIN * used, refused))
            self._until = now + REMEMBERED_SECONDS
        elif now >= self._until:
            lately = MARGIN * self._average
            self.need = lately if lately > total / 100 else 0.0
            self._until = now + REMEMBERED_SECONDS
        return self.need

    def asked_in_vain(self, refused: float) -> float:
        """Return the most that was refused since the need began."""
        self._asked = max(self._asked, refused) if self.need > 0 else 0.0
        return self._asked

    def begin_rate(self, level: float) -> None:
        """Count the use of a rate from another level on."""
        self._last = level

    def used_of_rate(self, level: float, rate: Rate, now: float) -> float:
        """Return the use since the last check, for a whole period."""
        seconds = max(now - self._looked_at, 1e-3)
        had = min(rate.burst, self._last + seconds / rate.interval)
        self._last, self._looked_at = level, now
        return max(0.0, had - level) / seconds * rate.period_seconds

    def spent_a_second(self, value: float, now: float) -> float:
        """Return what was spent since the last check, for a second."""
        seconds = max(now - self._looked_at, 0.1)
        spent = max(0.0, value - self._last)
        self._last, self._looked_at = value, now
        return spent / seconds
