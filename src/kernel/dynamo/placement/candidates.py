"""What a choice is made from, what it gives, and the one function through which every choice goes.

`place` decides what every policy has in common: a pinned worker is taken as it is, excluded workers never, busy workers and
workers with an open circuit only by the rules below. A `Policy` chooses among what is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from dynamo.errors import InvalidArgument, Overloaded, WorkerUnavailable
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery
from dynamo.placement.kv_transfer import TransferRule

WorkerKey = tuple[str, int]
"""(endpoint, instance id). One process may serve a model on several endpoints under one id."""


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


class CandidateList(list[Candidate]):
    """The workers of one endpoint, by id, as they are kept between choices. It never changes: a new one comes in its place.

    `positions`: where each id is; `in_flight`: of each, in the order of the list; `are_free`: none is busy or has an open circuit.
    """

    __slots__ = ("are_free", "in_flight", "positions")

    def __init__(
        self, candidates: Iterable[Candidate], changes: Mapping[int, Candidate] | None = None, *, are_free: bool = False
    ) -> None:
        """`changes`: `candidates` is such a list, and these come in the place of others with the same ids, by position."""
        super().__init__(candidates)
        if changes is None or not isinstance(candidates, CandidateList):
            self.positions = {each.instance_id: at for at, each in enumerate(self)}
            self.in_flight = [each.in_flight for each in self]
            self.are_free = not any(each.is_busy or each.is_circuit_open for each in self)
            return
        self.positions, self.in_flight, self.are_free = candidates.positions, [*candidates.in_flight], are_free
        for at, candidate in changes.items():
            self[at], self.in_flight[at] = candidate, candidate.in_flight


def find(candidates: Sequence[Candidate], instance_id: int) -> Candidate | None:
    """Return the first candidate with this id; None: there is none."""
    if isinstance(candidates, CandidateList):
        at = candidates.positions.get(instance_id)
        return None if at is None else candidates[at]
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
    if not excluded and isinstance(candidates, CandidateList) and candidates and candidates.are_free:
        return candidates
    left = [each for each in candidates if each.key not in excluded] if excluded else candidates
    found = [each for each in left if not (each.is_circuit_open or each.is_busy)]
    return found or _second_choice(request, left, scope)


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
