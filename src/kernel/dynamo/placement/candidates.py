"""What a choice is made from, what it gives, and the one function through which every choice goes.

`place` decides what every policy has in common: a pinned worker is taken as it is, excluded workers never, busy workers and
workers with an open circuit only by the rules below. A `Policy` chooses among what is left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from dynamo.errors import InvalidArgument, Overloaded, WorkerUnavailable
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.gaps import Gaps
from dynamo.placement.kv_query import KvQuery
from dynamo.placement.kv_transfer import TransferRule

WorkerKey = tuple[str, int]
"""(endpoint, instance id). One process may serve a model on several endpoints under one id."""

MAX_PARTS: Final = 8  # shapes of a list without some of its ids that are kept
MOST_LOAD: Final = 255  # streams of one worker; in `loads` more count as so many


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One worker as a choice sees it. The record is made for one choice and knows nothing of the way to the worker."""

    instance_id: int
    endpoint: str = ""  # "namespace.component.endpoint"
    device: str | None = None
    in_flight: int = 0  # streams that this process has open there
    is_busy: bool = False  # its reported load exceeds a threshold
    is_circuit_open: bool = False  # it failed a moment ago

    @property
    def key(self) -> WorkerKey:
        return self.endpoint, self.instance_id


class _Shape:
    """The ids of a list, and the shapes of lists without some of them. One object for all lists of the same ids."""

    __slots__ = ("_known", "_parts", "ids")

    def __init__(self, ids: list[int]) -> None:
        """`ids`: in order."""
        self.ids = ids
        self._known: frozenset[int] | None = None
        self._parts: dict[frozenset[int], tuple[Gaps, _Shape]] = {}

    @property
    def known(self) -> frozenset[int]:
        """The ids as a set: one object, as long as there is this one."""
        if self._known is None:
            self._known = frozenset(self.ids)
        return self._known

    def find(self, instance_id: int) -> int:
        """Return where an id is; -1: nowhere."""
        at = bisect_left(self.ids, instance_id)
        return at if at < len(self.ids) and self.ids[at] == instance_id else -1

    def without(self, ids: frozenset[int]) -> tuple[Gaps, _Shape]:
        """Find where some of the ids are, and the shape of what is left without them."""
        part = self._parts.get(ids)
        if part is None:
            if len(self._parts) >= MAX_PARTS:
                self._parts.clear()
            gaps = Gaps(sorted(map(self.find, ids)), len(self.ids))
            part = self._parts[ids] = gaps, _Shape(gaps.left(self.ids))
        return part


class CandidateList(list[Candidate]):
    """The workers of one endpoint, by id, as they are kept between choices. It never changes: a new one comes in its place.

    `loads`: how many streams each has, `MOST_LOAD` at most, in the order of the list; `unfit`: the ids of those that are busy
    or have an open circuit; `shape.ids`: the ids in the same order.
    """

    __slots__ = ("loads", "shape", "unfit")

    def __init__(self, candidates: Iterable[Candidate], changes: Mapping[int, Candidate] | None = None) -> None:
        """`changes`: `candidates` is such a list, and these come in the place of others with the same ids, by position."""
        super().__init__(candidates)
        if changes is None or not isinstance(candidates, CandidateList):
            self.shape = _Shape([each.instance_id for each in self])
            self.loads = bytearray([min(MOST_LOAD, each.in_flight) for each in self])
            self.unfit = frozenset([each.instance_id for each in self if each.is_busy or each.is_circuit_open])
            return
        self.shape, self.loads, self.unfit = candidates.shape, candidates.loads.copy(), candidates.unfit
        for at, candidate in changes.items():
            self[at], self.loads[at] = candidate, min(MOST_LOAD, candidate.in_flight)
            if (candidate.is_busy or candidate.is_circuit_open) != (candidate.instance_id in self.unfit):
                self.unfit ^= {candidate.instance_id}

    def without(self, ids: Collection[int]) -> CandidateList:
        """Return the list without some of the ids. It costs little where the same ones were left out a moment ago."""
        known = frozenset([each for each in ids if self.shape.find(each) >= 0])
        if not known:
            return self
        gaps, shape = self.shape.without(known)
        return _list_of(gaps.left(self), gaps.left(self.loads), shape, self.unfit - known)

    def joined_by(self, candidate: Candidate) -> CandidateList:
        """Return the list with one more, which is fit."""
        ids, loads, found = [*self.shape.ids], self.loads.copy(), [*self]
        at = bisect_left(ids, candidate.instance_id)
        ids.insert(at, candidate.instance_id)
        loads.insert(at, min(MOST_LOAD, candidate.in_flight))
        found.insert(at, candidate)
        return _list_of(found, loads, _Shape(ids), self.unfit)


def _list_of(candidates: Iterable[Candidate], loads: bytearray, shape: _Shape, unfit: frozenset[int]) -> CandidateList:
    """Return a list whose figures are known."""
    found = CandidateList(())
    found.extend(candidates)
    found.loads, found.shape, found.unfit = loads, shape, unfit
    return found


def find(candidates: Sequence[Candidate], instance_id: int) -> Candidate | None:
    """Return the first candidate with this id; None: there is none."""
    if isinstance(candidates, CandidateList):
        at = candidates.shape.find(instance_id)
        return None if at < 0 else candidates[at]
    return next((each for each in candidates if each.instance_id == instance_id), None)


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """The members of a request that a choice may use."""

    token_ids: Sequence[int] = ()
    lora_name: str | None = None
    pinned_instance_id: int | None = None  # the request names its worker
    bound: WorkerRank | None = None  # where the request's session is bound
    priority: int = 0
    excluded: Collection[WorkerKey] = ()  # workers that this request has tried
    healthy_only: bool = False  # the caller has another way: no worker with an open circuit
    kv: KvQuery | None = None  # the same request as the kv mode sees it; None in the other modes
    transfer: TransferRule | None = None  # where the KV blocks of its prompt can be sent; None: anywhere


class PlacementReason(msgspec.Struct, frozen=True, gc=False):
    """One fact that decided a choice."""

    code: str  # a word of a fixed set, such as "turn" or "fewest_in_flight"
    value: float | None = None

    def __str__(self) -> str:
        return self.code if self.value is None else f"{self.code}={self.value:g}"


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The worker that was chosen, and why."""

    candidate: Candidate
    policy: str
    reasons: tuple[PlacementReason, ...] = ()
    dp_rank: int | None = None  # the data-parallel rank that is to serve; None: the worker decides

    def __str__(self) -> str:
        why = ", ".join(map(str, self.reasons))
        return f"{self.candidate.instance_id:x} by {self.policy}" + (f" ({why})" if why else "")


class Policy(Protocol):
    """Chooses one of several workers. `dynamo.placement.policies` has one file for each."""

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate], now: float) -> Placement:
        """Choose one of `candidates`: at least one, in the order of `Candidate.instance_id` within each endpoint.

        A call counts as a turn. `now` is the time of the caller's clock in seconds; it never goes backwards.
        Raises `InvalidArgument` for a request that the policy cannot place.
        """
        ...


_PINNED: Final = (PlacementReason("pinned"),)
_SESSION: Final = (PlacementReason("session"),)
_ALL_CIRCUITS_OPEN: Final = PlacementReason("all_circuits_open")


def place(
    policy: Policy, request: PlacementRequest, candidates: Sequence[Candidate], now: float, *, scope: str
) -> Placement:
    """Choose the worker of `request`. `scope` names the group in errors, such as "model m".

    A worker with an open circuit is chosen only where no other worker is left, as a network that was away for a moment must
    not cost more than that moment; never with `healthy_only`. A request whose session is bound goes to that worker unless it
    has failed, is busy or is not there: then the policy chooses.

    Raises:
        InvalidArgument: the request names a worker that is not there, or the policy cannot place the request.
        WorkerUnavailable: no worker is left.
        Overloaded: every worker that is left is busy.
    """
    if request.pinned_instance_id is not None:
        pinned = find(candidates, request.pinned_instance_id)
        if pinned is not None:
            return Placement(pinned, "pinned", _PINNED)
        raise InvalidArgument("Invalid request")  # the native text for an unknown worker id
    found = eligible(request, candidates, scope=scope)
    if request.bound is not None:
        bound = find(found, request.bound.worker_id)
        if bound is not None and not bound.is_circuit_open:
            return Placement(bound, "session", _SESSION, dp_rank=request.bound.dp_rank)
    placement = policy.choose(request, found, now)
    if placement.candidate.is_circuit_open:
        return msgspec.structs.replace(placement, reasons=(*placement.reasons, _ALL_CIRCUITS_OPEN))
    return placement


def eligible(request: PlacementRequest, candidates: Sequence[Candidate], *, scope: str) -> Sequence[Candidate]:
    """Return the candidates that may take a request that is not pinned: at least one.

    Raises `WorkerUnavailable` when no worker is left, `Overloaded` when every worker that is left is busy.
    """
    excluded = request.excluded
    if isinstance(candidates, CandidateList) and candidates:
        unfit = candidates.unfit
        if excluded:
            unfit |= {worker for endpoint, worker in excluded if endpoint == candidates[0].endpoint}
        found = candidates.without(unfit) if unfit else candidates
        if found:
            return found
    left = [each for each in candidates if each.key not in excluded] if excluded else candidates
    fit = [each for each in left if not (each.is_circuit_open or each.is_busy)]
    return fit or _second_choice(request, left, scope)


def _second_choice(request: PlacementRequest, left: Sequence[Candidate], scope: str) -> Sequence[Candidate]:
    """Return the candidates that may take a request although no worker is both healthy and free."""
    if request.healthy_only:
        left = [each for each in left if not each.is_circuit_open]
    if not left:
        raise WorkerUnavailable(f"No workers available for {scope}")
    found = [each for each in left if not each.is_busy]
    if not found:
        raise Overloaded
    return found
