"""The parked requests of one policy class, in the order in which they go.

Requests that any worker may serve wait in one lane, where the first blocks those behind it. A request that names its rank
waits in a lane of that rank, so that a busy rank holds up nothing but its own requests.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final, Generic, TypeVar
from zlib import crc32

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.queueing.order import OrderKey

R = TypeVar("R")
SLACK: Final = 64  # removed entries that a lane may hold in its middle before it is built anew
MAX_TENANTS: Final = 128  # with an account of their own; the loads of all ranks are read for each where nothing may go
EXAMINED: Final = 8  # requests of one lane whose cached prefixes are compared: each costs a search in the index


class LaneEntry(Generic[R]):
    """One parked request and its place in the order."""

    __slots__ = ("cost", "is_parked", "key", "rank", "request", "tenant")

    def __init__(self, request: R, key: OrderKey, rank: WorkerRank | None, cost: int = 1, tenant: str = "") -> None:
        """`rank`: the rank that the request names; None: any worker may serve it. `cost`: its uncached tokens, at least 1."""
        self.request, self.key, self.rank = request, key, rank
        self.cost, self.tenant = cost, tenant
        self.is_parked = True

    def __lt__(self, other: LaneEntry[R]) -> bool:
        return self.key < other.key


class ClassLanes(Generic[R]):
    """The lanes of one class. A lane exists while a request waits in it."""

    __slots__ = ("_lanes", "_parked")

    def __init__(self) -> None:
        self._lanes: dict[WorkerRank | None, list[LaneEntry[R]]] = {}  # heaps; their first entry is parked
        self._parked: dict[WorkerRank | None, int] = {}  # entries of a lane that are still parked

    def __len__(self) -> int:
        return sum(self._parked.values())

    def waiting(self, rank: WorkerRank | None) -> int:
        """Return how many requests wait in one lane; None: in that of the requests that name no rank."""
        return self._parked.get(rank, 0)

    def ahead(self, key: OrderKey, tenant: str, rank: WorkerRank | None) -> int:
        """Return the uncached tokens of what goes before a request with this key; where it names its `rank`, in that lane."""
        lanes = self._lanes.values() if rank is None else (self._lanes.get(rank, []),)
        return sum(each.cost for lane in lanes for each in lane if each.is_parked and each.key < key)

    def push(self, entry: LaneEntry[R]) -> None:
        """Park a request."""
        heapq.heappush(self._lanes.setdefault(entry.rank, []), entry)
        self._parked[entry.rank] = self._parked.get(entry.rank, 0) + 1

    def head(self, is_ready: Callable[[R], bool]) -> LaneEntry[R] | None:
        """Return the first of the lanes' first requests that are ready; None when none is ready."""
        return _first(self._lanes, is_ready)

    def charge(self, entry: LaneEntry[R]) -> None:
        """Take note of a request that is dispatched: here, its tenant has no account."""

    def remove(self, entry: LaneEntry[R]) -> None:
        """Take a request out, wherever it stands."""
        rank = entry.rank
        entry.is_parked = False
        self._parked[rank] -= 1
        left, lane = self._parked[rank], self._lanes[rank]
        if not left:
            del self._lanes[rank], self._parked[rank]
            return
        while not lane[0].is_parked:
            heapq.heappop(lane)
        if len(lane) > 2 * left + SLACK:
            self._lanes[rank] = [each for each in lane if each.is_parked]
            heapq.heapify(self._lanes[rank])


class TenantLanes(Generic[R]):
    """The lanes of a class in which tenants share the turns, and a turn respects prefixes (DLPM, arXiv 2501.14312).

    Each round brings every tenant one quantum of uncached tokens. The shortest turn goes first: that of the tenant with the
    least to do, or the least credit left. So a tenant stays until its credit is spent, unless one comes that has little to do;
    what its last request costs beyond its credit it owes to the rounds after. A turn begins with the tenant's first request, so
    that none waits for ever; then come those with the longest cached prefix, where strict priority and due time are the same.

    Tenants beyond `MAX_TENANTS` share the account of another one.
    """

    __slots__ = ("_count", "_credit", "_held", "_visited", "_waiting", "quantum", "tenants")

    def __init__(self, quantum: int, held: Callable[[R], tuple[int, int]]) -> None:
        """`held`: the cached and the uncached tokens of a request as they are now."""
        self.quantum, self._held = quantum, held
        self.tenants: dict[str, dict[WorkerRank | None, list[LaneEntry[R]]]] = {}  # that wait; sorted lists, none empty
        self._waiting: dict[str, int] = {}  # what the waiting requests of each tenant cost
        self._credit: dict[str, int] = {}  # of this round, or owed to later ones; of some tenants that have left, too
        self._visited: str | None = None  # the tenant whose turn has begun
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, tenant: str) -> list[R]:
        """Return what waits for one tenant."""
        return [each.request for lane in self.tenants.get(self._account(tenant), {}).values() for each in lane]

    def waiting(self, rank: WorkerRank | None) -> int:
        """Return how many requests wait in one lane. See `ClassLanes.waiting`."""
        return sum(len(lanes.get(rank, ())) for lanes in self.tenants.values())

    def ahead(self, key: OrderKey, tenant: str, rank: WorkerRank | None) -> int:
        """Return the uncached tokens that go before a request: of its tenant by their order, of the others as many at most."""
        account, tokens = self._account(tenant), dict.fromkeys(self.tenants, 0)
        for name, lanes in self.tenants.items():
            for lane in lanes.values() if rank is None else (lanes.get(rank, []),):
                tokens[name] += sum(each.cost for each in lane if name != account or each.key < key)
        own = tokens.pop(account, 0)
        return own + sum(min(waiting, own) for waiting in tokens.values())

    def push(self, entry: LaneEntry[R]) -> None:
        """Park a request."""
        name = entry.tenant = self._account(entry.tenant)
        if name not in self.tenants:
            self._credit.setdefault(name, self.quantum)
            self._waiting[name] = 0
        self._waiting[name] += entry.cost
        insort(self.tenants.setdefault(name, {}).setdefault(entry.rank, []), entry)
        self._count += 1

    def head(self, is_ready: Callable[[R], bool]) -> LaneEntry[R] | None:
        """Return the request whose turn it is, of those that are ready; None when none is ready."""
        owing: dict[str, LaneEntry[R]] = {}
        for name in sorted(self.tenants, key=self._turn):
            first = _first(self.tenants[name], is_ready)
            if first is not None and self._credit[name] > 0:
                return self._chosen(name, first, is_ready)
            if first is not None:
                owing[name] = first
        if not owing:
            return None
        self._begin_round(owing)
        name = min((name for name in owing if self._credit[name] > 0), key=self._turn)
        return self._chosen(name, owing[name], is_ready)

    def charge(self, entry: LaneEntry[R]) -> None:
        """Take what a request costs from the credit of its tenant: it is dispatched."""
        name = entry.tenant
        self._credit[name] -= entry.cost
        self._visited = name if self._credit[name] > 0 else None

    def remove(self, entry: LaneEntry[R]) -> None:
        """Take a request out, wherever it stands."""
        entry.is_parked = False
        lanes = self.tenants[entry.tenant]
        lane = lanes[entry.rank]
        del lane[bisect_left(lane, entry)]
        if not lane:
            del lanes[entry.rank]
        self._waiting[entry.tenant] -= entry.cost
        if not lanes:
            del self.tenants[entry.tenant], self._waiting[entry.tenant]
        self._count -= 1
        if not self._count:  # nothing is shared any more
            self._credit.clear()
            self._visited = None

    def _account(self, tenant: str) -> str:
        if tenant in self._credit or len(self._credit) < MAX_TENANTS:
            return tenant
        return list(self._credit)[crc32(tenant.encode(errors="backslashreplace")) % len(self._credit)]

    def _begin_round(self, ready: dict[str, LaneEntry[R]]) -> None:
        """Give a quantum to each tenant that is ready, as often as the first of them needs to have paid what it owes."""
        brought = self.quantum * (1 + min(-self._credit[name] // self.quantum for name in ready))
        self._visited = None
        for name in list(self._credit):
            if name in ready or name not in self.tenants:
                self._credit[name] += brought
            if name not in self.tenants and self._credit[name] > 0:  # it owes nothing any more
                del self._credit[name]

    def _chosen(self, name: str, first: LaneEntry[R], is_ready: Callable[[R], bool]) -> LaneEntry[R]:
        """Return the request that a tenant dispatches, with what it costs now."""
        alike = [first]
        if self._visited == name:
            lanes = self.tenants[name].values()
            alike = [each for lane in lanes for each in lane[:EXAMINED] if each.key[:2] == first.key[:2]]
        cached = {each: self._held(each.request) for each in alike}
        alike.sort(key=lambda each: (-cached[each][0], each.key))
        found = next((each for each in alike if each is first or is_ready(each.request)), first)
        cost = max(1, cached[found][1])
        self._waiting[name] += cost - found.cost
        found.cost = cost
        return found

    def _turn(self, name: str) -> tuple[bool, int]:
        """Return the key of a tenant in the order of turns: those with credit left, the shortest turn first."""
        credit = self._credit[name]
        return credit <= 0, min(credit, self._waiting[name])


def _first(lanes: dict[WorkerRank | None, list[LaneEntry[R]]], is_ready: Callable[[R], bool]) -> LaneEntry[R] | None:
    """Return the first of the lanes' first requests that are ready; None when none is ready."""
    found: LaneEntry[R] | None = None
    for lane in lanes.values():
        if (found is None or lane[0] < found) and is_ready(lane[0].request):
            found = lane[0]
    return found
