"""How the frontends of a cluster divide one limit among them.

A limit has one record that all of them can read. In it each frontend holds units: requests or tokens per minute, places, or
what it may still spend of a budget. It uses no more than it holds. In its turn a frontend gives units back that others need
more, and takes units that no frontend holds. So at any moment the frontends together hold at most the limit, whichever of them
acts first, and no other process is needed while a request is served.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

BASE_PART: Final = (
    1 / 8
)  # of a rate: is divided equally even while others need all, so that a first request gets through
RESERVE_PART: Final = 1 / 8  # of a budget's rest: stays free unless needed, so that a new frontend gets some at once
KEPT_DAYS: Final = 40  # without a frontend that has the limit: more than the longest period of a budget
SMALLEST_MOVE: Final = 1 / 50  # of a limit: less is not worth a write


class LimitKind(enum.Enum):
    """What the units of a limit are."""

    RATE = enum.auto()
    """Units in a period. They come with the part of the burst that they allow."""
    PLACES = enum.auto()
    """Requests at once: whole numbers, and a place that is taken is not given back."""
    BUDGET = enum.auto()
    """Units that are spent once."""


@dataclass(frozen=True, slots=True)
class SharedLimit:
    """A limit as its key file has it."""

    kind: LimitKind
    total: float
    burst: float = 0.0
    """Of a rate: how many units may come at once, at all frontends together."""


class Holding(Struct, frozen=True, array_like=True):
    """What one frontend holds of a limit."""

    units: float
    need: float = 0.0
    """How many it could use now; 0: it uses few."""
    stuck: float = 0.0
    """Units beyond its share that it cannot give back yet."""
    level: float = 0.0
    """Of a rate: how many units it might have used at once when it wrote this."""
    spent: float = 0.0
    """Of a budget: what it has spent since it is in the record."""
    asked: float = 0.0
    """Of a budget: the most that one request needed and did not get."""


class Division(Struct, frozen=True, omit_defaults=True):
    """The record of one limit."""

    period: int = 0
    """Of a budget: the number of the period that all of this belongs to."""
    spent: float = 0.0
    """Of a budget: what those have spent that are no longer in the record."""
    level: float = 0.0
    """Of a rate: the part of the burst that belongs to units that no frontend holds."""
    members: dict[str, Holding] = field(default_factory=dict)
    unused_since: int = 0
    """The day (since the epoch) on which no frontend had this limit any more; 0: one has it."""

    def spent_beside(self, member: str) -> float:
        """Return what all others have spent."""
        return self.spent + sum([one.spent for id, one in self.members.items() if id != member])


class Own(NamedTuple):
    """What a frontend knows of itself when its turn comes."""

    need: float = 0.0
    floor: float = 0.0
    """Places that are taken, or units of a budget that are reserved: what it cannot give back."""
    level: float = 0.0
    spent: float = 0.0
    asked: float = 0.0
    period: int = 0
    is_overdue: bool = False
    """Waited past the deadline; the current holder is presumed dead."""


class ShareClaim(NamedTuple):
    """What counts when units are divided; see `Holding`."""

    floor: float
    need: float
    asked: float = 0.0


class Turn(NamedTuple):
    """The outcome of a turn. The frontend first obeys what it loses, then writes the record, then uses what it gains."""

    division: Division
    units: float
    """What it holds from now on."""
    level_change: float
    """Of a rate: what it gives to, or gets of, the burst."""
    is_short: bool
    """It holds less than its share."""
    is_news: bool
    """Whether the record has to be written."""


def take_turn(before: Division | None, member: str, own: Own, alive: Collection[str], limit: SharedLimit) -> Turn:
    """Return what one frontend makes of a record. `alive`: all frontends that are there."""
    division = Division(period=own.period) if before is None or before.period < own.period else before
    mine = division.members.get(member)
    others, gone = _parted(division, member, alive)
    spent = division.spent + sum([one.spent for one in gone])
    level = division.level + sum([one.level for one in gone])
    if not others and mine is None:
        level = limit.burst
    is_budget = limit.kind is LimitKind.BUDGET
    held = 0.0 if mine is None else mine.units - (own.spent - mine.spent if is_budget else 0.0)
    held = max(held, 0.0)
    pot = limit.total
    if is_budget:
        pot = max(0.0, pot - spent - own.spent - sum([one.spent for one in others.values()]))
    free = max(0.0, pot - held - sum([one.units for one in others.values()]))
    claims = {id: ShareClaim(one.stuck, one.need, one.asked) for id, one in others.items()}
    floor = min(own.floor, held)
    claims[member] = ShareClaim(floor, own.need, own.asked)
    share = targets(pot, claims, limit)[member]  # at least what it cannot give back
    grain = _grain(limit, claims.values()) if held > 0 else 0.0
    grow = _growth(share - held, grain, free, own, others.values(), limit)
    units = held + grow
    level_change = _level_change(grow, held, free, level, own, limit)
    holding = Holding(
        units,
        _rounded(own.need, limit.total),
        units if _is_stuck(units, floor, {**claims, member: ShareClaim(0.0, own.need)}, member, limit) else 0.0,
        own.level + level_change if limit.kind is LimitKind.RATE else 0.0,
        own.spent if is_budget else 0.0,
        own.asked,
    )
    after = replace(
        division, spent=spent, level=max(0.0, level - level_change), members={**others, member: holding}, unused_since=0
    )
    is_news = (
        before is None
        or division is not before
        or mine is None
        or bool(gone)
        or grow != 0.0
        or _told(holding) != _told(mine)
    )
    return Turn(after, units, level_change, is_short=units < share - grain, is_news=is_news)


def without(division: Division, member: str, alive: Collection[str], today: int) -> Division | None:
    """Return the record of a limit that this frontend does not have, or no more: what it spent stays in it.

    None: no frontend has had the limit for `KEPT_DAYS`, so the record may go. `today`: the day since the epoch.
    """
    mine = division.members.get(member)
    if mine is not None:
        others = {id: one for id, one in division.members.items() if id != member}
        division = replace(
            division, spent=division.spent + mine.spent, level=division.level + mine.level, members=others
        )
    if any(id in alive for id in division.members):
        return division
    if not division.unused_since:
        return replace(division, unused_since=today)
    return division if today - division.unused_since <= KEPT_DAYS else None


def _told(one: Holding) -> tuple[float | bool, ...]:
    """Return what the others have to know of a change."""
    return one.need, bool(one.stuck), one.spent, one.asked


def _is_stuck(units: float, floor: float, claims: Mapping[str, ShareClaim], member: str, limit: SharedLimit) -> bool:
    """Return whether a frontend would give places back if they were free."""
    if limit.kind is not LimitKind.PLACES or floor < units or floor == 0:
        return False
    return targets(limit.total, claims, limit)[member] < units


def _parted(division: Division, member: str, alive: Collection[str]) -> tuple[dict[str, Holding], list[Holding]]:
    """Return what the other frontends hold, and what those held that are gone."""
    others, gone = {}, []
    for id, one in division.members.items():
        if id == member:
            continue
        if id in alive:
            others[id] = one
        else:
            gone.append(one)
    return others, gone


def _growth(
    wanted: float, grain: float, free: float, own: Own, others: Collection[Holding], limit: SharedLimit
) -> float:
    """Return how many units a frontend takes; negative: how many it gives back."""
    if abs(wanted) < grain:
        return 0.0
    may_overtake = own.is_overdue and limit.kind is not LimitKind.BUDGET and not any(one.stuck for one in others)
    change = wanted if wanted < 0 or may_overtake else min(wanted, free)
    return float(math.floor(change + 1e-9)) if limit.kind is LimitKind.PLACES else change


def _grain(limit: SharedLimit, claims: Collection[ShareClaim]) -> float:
    """Return how many units are worth a write."""
    if limit.kind is LimitKind.PLACES:
        return 0.5
    # A request that waits for the rest of a budget may need the last of its units.
    return 1e-6 if any(claim.asked > 0 for claim in claims) else limit.total * SMALLEST_MOVE


def _level_change(grow: float, held: float, free: float, level: float, own: Own, limit: SharedLimit) -> float:
    """Return what a frontend gets of the burst with the units that it takes, or gives with those that it gives back."""
    if limit.kind is not LimitKind.RATE or grow == 0.0:
        return 0.0
    if grow < 0:
        return min(0.0, own.level * grow / held) if own.level > 0 else 0.0
    taken = min(grow, free)
    found = level * taken / free if free > 0 else 0.0
    return found + (grow - taken) * limit.burst / limit.total


def _rounded(need: float, total: float) -> float:
    """Return a need as the record has it: in few steps, so that it seldom changes."""
    part = need / total
    if part >= 1.0 or part <= 0.0:
        return total if part > 0 else 0.0
    return total * min(1.0, math.exp2(math.ceil(2 * math.log2(max(part, SMALLEST_MOVE))) / 2))


def targets(pot: float, claims: Mapping[str, ShareClaim], limit: SharedLimit) -> dict[str, float]:
    """Divide `pot` units among frontends, by what each cannot give back and what it needs.

    Each gets what it cannot give back, then a small base, then what it needs, at most as much as the others that need more.
    What no frontend needs is divided equally; of a budget an eighth stays free.
    """
    count = len(claims)
    base = pot * BASE_PART / count
    if limit.kind is LimitKind.PLACES:
        base = float(max(1, int(base)))
    found = _fill_up(dict.fromkeys(claims, 0.0), {id: claim.floor for id, claim in claims.items()}, pot)
    needing = [id for id, claim in claims.items() if claim.need > 0]
    if limit.kind is LimitKind.BUDGET and any(pot / count < claims[id].asked for id in needing):
        # Equal parts would be too small for any request: the rest goes to one frontend after the other.
        for id in sorted(needing):
            found = _fill_up(found, {id: max(claims[id].need, claims[id].asked)}, pot)
    found = _fill_up(found, dict.fromkeys(claims, base), pot)
    found = _fill_up(found, {id: claim.need for id, claim in claims.items()}, pot)
    kept = pot * RESERVE_PART if limit.kind is LimitKind.BUDGET else 0.0
    rest = max(0.0, pot - sum(found.values()) - kept)
    found = {id: units + rest / count for id, units in found.items()}
    return _whole(found, claims, int(pot)) if limit.kind is LimitKind.PLACES else found


def _fill_up(found: Mapping[str, float], wanted: Mapping[str, float], pot: float) -> dict[str, float]:
    """Give each up to what it needs, of what is still free."""
    rest = max(0.0, pot - sum(found.values()))
    more = _filled(rest, {id: max(0.0, want - found[id]) for id, want in wanted.items()})
    return {id: units + more.get(id, 0.0) for id, units in found.items()}


def _filled(rest: float, wants: Mapping[str, float]) -> dict[str, float]:
    """Give each what it needs, and where that is too much for all, at most the same to each."""
    found = {}
    for left, (id, want) in zip(range(len(wants), 0, -1), sorted(wants.items(), key=lambda each: each[1]), strict=True):
        found[id] = min(want, rest / left)
        rest -= found[id]
    return found


def _whole(found: Mapping[str, float], claims: Mapping[str, ShareClaim], pot: int) -> dict[str, float]:
    """Round to whole places; those left over go to the frontend that needs most, and then by name."""
    whole = {id: float(math.floor(units + 1e-9)) for id, units in found.items()}
    left = pot - int(sum(whole.values()))
    for id in sorted(claims, key=lambda id: (-(found[id] % 1.0), -claims[id].need, id))[: max(0, left)]:
        whole[id] += 1.0
    return whole
