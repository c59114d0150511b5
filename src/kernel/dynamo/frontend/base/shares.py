"""A share for every owner of whatever is bounded, so that no owner takes what all others need.

An owner is the project of a key, or the key itself where it has no project. Without keys all clients are one owner, and so are
those of a key file with one project: that owner has the whole bound.

With more owners the rule is that of dynamic thresholds in switches with a shared buffer: what an owner has may be at most
`weight` times what stays free. One greedy owner then stops at weight / (weight + 1) of the bound, two at weight / (2 * weight
+ 1) each, and something always stays free for the next owner, which is not known yet. No owner needs a quota of its own, and
nothing has to be taken away again. An owner that has nothing may always have the first piece that fits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct

from dynamo.protocol.openai.errors import RequestRejected

HELD_LONG: Final = 1
"""The weight of what is held for minutes or days (uploads, batches): one owner may have half."""

HELD_SHORTLY: Final = 7
"""The weight of what comes back in seconds (places, bodies), or is as large as a disk: one owner may have seven eighths."""

MAX_SHOWN_OWNERS: Final = 100


def fits_share(own: int, free: int, weight: int) -> bool:
    """Return whether an owner may have `own` while `free` stays for all others."""
    return own <= weight * free


def largest_owner(used: Mapping[str, int]) -> str:
    """Return the owner that has most: what is stored makes room where there is most of it. `used` is not empty."""
    return max(used, key=used.__getitem__)


def share_exceeded(places: str, *, retry_after_seconds: int = 1) -> RequestRejected:
    """Return the 429 of an owner that has its share of some places. `places`: what they are of."""
    text = (
        f"Too many requests at once: some places of {places} are for other projects. Try again when a request has ended"
    )
    return RequestRejected(429, text, code="share_exceeded", retry_after_seconds=retry_after_seconds)


class OwnerUse(Struct, frozen=True):
    """What one owner has of a bound."""

    owner: str  # empty: all clients without a key
    used: int


class BoundUse(Struct, frozen=True):
    """One bound as it is shown: the owners with most come first."""

    name: str
    unit: str
    limit: int | None  # of all owners together; None: what the disk has
    used: int
    owner_limit: int  # what one owner may have while the others have nothing
    owners: list[OwnerUse]


class SharedBound:
    """One bound, and what each owner has of it in this process. Used on one thread."""

    def __init__(self, limit: int, weight: int | None, has_others: Callable[[], bool] = lambda: False) -> None:
        """`weight` None: owners take turns, so that none needs a share. `has_others`: whether there is more than one owner."""
        self.limit = limit
        self._weight, self._has_others = weight, has_others
        self._used: dict[str, int] = {}
        self.used = 0

    def of(self, owner: str) -> int:
        """Return what an owner has."""
        return self._used.get(owner, 0)

    def admits(self, own: int, used: int, more: int = 1) -> bool:
        """Return whether an owner that has `own` of the `used` units may have more of them, wherever they are counted."""
        free = self.limit - used - more
        if free < 0:
            return False
        if own == 0 or self._weight is None or not self._has_others():
            return True
        return fits_share(own + more, free, self._weight)

    def may_take(self, owner: str, more: int = 1) -> bool:
        """Return whether `take` would succeed now."""
        return self.admits(self.of(owner), self.used, more)

    def take(self, owner: str, more: int = 1) -> bool:
        """Take units for an owner; False, and nothing is taken, where its share or the bound has no room."""
        if not self.may_take(owner, more):
            return False
        self.note(owner, more)
        return True

    def note(self, owner: str, count: int = 1) -> None:
        """Count units that an owner has, whatever the bound is."""
        self._used[owner] = self.of(owner) + count
        self.used += count

    def give_back(self, owner: str, count: int = 1) -> None:
        """Give back what was taken."""
        left = self._used[owner] - count
        if left:
            self._used[owner] = left
        else:
            del self._used[owner]  # so that the table holds no more owners than units are taken
        self.used -= count

    async def count(self) -> Mapping[str, int]:
        """Return what each owner has in this process."""
        return dict(self._used)

    def most_of_one(self) -> int:
        """Return how much an owner may have while the others have nothing."""
        if self._weight is None or not self._has_others():
            return self.limit
        return max(1, self.limit * self._weight // (self._weight + 1))


Count = Callable[[], Awaitable[Mapping[str, int]]]


class _Shown(Struct, frozen=True):
    name: str
    unit: str
    limit: int | None
    most_of_one: Callable[[], int]
    count: Count


class Shares:
    """The bounds of a frontend that have a share for each owner."""

    def __init__(self) -> None:
        self._owners: Callable[[], int] = lambda: 1
        self._shown: list[_Shown] = []
        self._more: Callable[[], Iterable[tuple[str, SharedBound]]] = lambda: ()

    def know_owners(self, count: Callable[[], int]) -> None:
        """Take what returns how many owners there may be; without it there is one."""
        self._owners = count

    def has_others(self) -> bool:
        """Return whether there may be more than one owner."""
        return self._owners() > 1

    def bound(
        self, name: str, limit: int, *, weight: int | None = HELD_LONG, unit: str = "", count: Count | None = None
    ) -> SharedBound:
        """Make a bound, and show it. `count`: what each owner has, where that is counted outside this process."""
        made = SharedBound(limit, weight, self.has_others)
        self._shown.append(_Shown(name, unit, limit, made.most_of_one, made.count if count is None else count))
        return made

    def show(self, name: str, limit: int | None, most_of_one: int, count: Count, *, unit: str = "bytes") -> None:
        """Show what owners have of a store that has a limit for each of them, or makes room where there is most."""
        self._shown.append(_Shown(name, unit, limit, lambda: most_of_one, count))

    def show_each(self, bounds: Callable[[], Iterable[tuple[str, SharedBound]]]) -> None:
        """Show the bounds that `bounds` returns with their names, whichever there are when they are read."""
        self._more = bounds

    async def report(self) -> list[BoundUse]:
        """Return the use of each bound by owner."""
        found = []
        more = [_Shown(name, "", made.limit, made.most_of_one, made.count) for name, made in self._more()]
        for shown in [*self._shown, *more]:
            used = await shown.count()
            rows = sorted(used.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_SHOWN_OWNERS]
            owners = [OwnerUse(owner, count) for owner, count in rows]
            total = sum(used.values())
            found.append(BoundUse(shown.name, shown.unit, shown.limit, total, shown.most_of_one(), owners))
        return found
