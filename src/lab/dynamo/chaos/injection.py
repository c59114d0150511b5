"""What a process loads that has a fault plan: `dynamo.runtime.calls.faults.Injection` as a module."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from dynamo.chaos.actions import crash, drain, freeze
from dynamo.chaos.fault_plan import FaultPlan, Visit
from dynamo.chaos.plan import ALL_KINDS, Fault, FaultKind, InvalidPlan, read_plan
from dynamo.errors import DynamoException, InvalidArgument
from dynamo.runtime.base.settings import ChaosSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, RequestPlaneClient, ResponseStream, StreamItem, TokenLane
from dynamo.runtime.discovery.base import Discovery

if TYPE_CHECKING:
    from dynamo.chaos.worker import WorkerChaos


# A frontend that breaks as planned: it dies, stands still, or receives a SIGTERM when an item of an answer arrives.


class FrontendChaos:
    """The faults of one frontend process. A request is one that is sent to a worker: each choice, each try."""

    def __init__(self, faults: Iterable[Fault], *, name: str) -> None:
        self._faults = FaultPlan(faults, name=name)
        if any(fault.kind is FaultKind.LEASE for fault in self._faults.pending):
            raise InvalidArgument("chaos plan: lease: a frontend holds no records that it could lose; name a worker")

    def client(self, inner: RequestPlaneClient) -> RequestPlaneClient:
        """Return a stand-in for the caller's side of a request plane."""
        return _Client(inner, self)

    def begin(self, context: Context) -> Visit:
        visit = self._faults.begin(context)
        self._reach(visit)
        return visit

    def arrived(self, visit: Visit, count: int) -> None:
        """So many items more have come."""
        for _ in range(count):
            visit.items += 1
            self._reach(visit)

    def _reach(self, visit: Visit) -> None:
        for fault in self._faults.due(visit, visit.items, ALL_KINDS):
            # Not inside the reader's own call.
            asyncio.get_running_loop().call_soon(_inflict, fault)


def _inflict(fault: Fault) -> None:
    match fault.kind:
        case FaultKind.CRASH | FaultKind.FRONTEND_CRASH:
            crash()
        case FaultKind.DRAIN | FaultKind.FRONTEND_DRAIN:
            drain()
        case FaultKind.FREEZE:
            freeze(fault.seconds)
        case _:
            raise AssertionError(fault)


class _Client:
    def __init__(self, inner: RequestPlaneClient, chaos: FrontendChaos) -> None:
        self._inner, self._chaos = inner, chaos

    async def open(self, instance: Instance, body: Any, context: Context) -> ResponseStream:
        stream = await self._inner.open(instance, body, context)
        return _Stream(stream, self._chaos, self._chaos.begin(context))

    async def close(self) -> None:
        await self._inner.close()


class _Stream:
    """Counts what arrives."""

    def __init__(self, stream: ResponseStream, chaos: FrontendChaos, visit: Visit) -> None:
        self._stream, self._chaos, self._visit = stream, chaos, visit

    async def next_batch(self) -> list[StreamItem]:
        items = await self._stream.next_batch()
        self._chaos.arrived(self._visit, len(items))
        return items

    def take(self) -> list[StreamItem] | None:
        items = self._stream.take()
        self._chaos.arrived(self._visit, len(items or ()))
        return items

    def listen(self, arrived: Callable[[], None] | None) -> None:
        self._stream.listen(arrived)

    def open_lane(self, lane: TokenLane, closed: Callable[[BaseException | None], None]) -> bool:
        return False  # a fault comes after a number of items, and a lane passes on tokens of several at a time

    def book(
        self, *, first: Callable[[DynamoException | None], None] | None, released: Callable[[], None] | None
    ) -> None:
        self._stream.book(first=first, released=released)

    @property
    def tokens_taken(self) -> int:
        return self._stream.tokens_taken

    @property
    def failure(self) -> DynamoException | None:
        return self._stream.failure

    def stop(self) -> None:
        self._stream.stop()

    def kill(self) -> None:
        self._stream.kill()

    def finish(self) -> None:
        self._stream.finish()

    def close(self) -> None:
        self._stream.close()


# Whether fault injection is permitted in this process, and which faults of its plan a real process can have.


class Role(enum.StrEnum):
    """What a process is."""

    WORKER = "worker"
    FRONTEND = "frontend"


_FRONTENDS: Final = frozenset({FaultKind.FRONTEND_CRASH, FaultKind.FRONTEND_DRAIN})
_EITHERS: Final = frozenset(
    {FaultKind.CRASH, FaultKind.FREEZE, FaultKind.DRAIN, FaultKind.LEASE}
)  # at a frontend only where one is named

_NOT_REAL: Final[Mapping[FaultKind, str]] = {
    FaultKind.STORE_CUT: "the way to the store is not in this process's hands; stop or freeze etcd itself",
    FaultKind.STORE_STOP: "the store is another process; stop etcd itself",
    FaultKind.STORE_WIPE: "the store is another process; stop etcd, remove its data and start it again",
    FaultKind.CLOCK_JUMP: "the clock is the machine's; use freeze: to a frozen process all timers are late when it wakes",
    FaultKind.SLOW_CLIENT: "the client is not one of these processes; let yours read slowly",
    FaultKind.VANISH: "the client is not one of these processes; let yours leave",
}


def admitted(path: str | None, allowed: bool) -> tuple[Fault, ...] | None:
    """Return the faults of a plan; None without a plan. Raises InvalidPlan, and InvalidArgument when the plan is not
    permitted.
    """
    if path is None:
        return None
    if not allowed:
        raise InvalidArgument(
            f"a chaos plan ({path}) injects faults into this process; to permit fault injection, add --allow-chaos "
            f"(DYN_ALLOW_CHAOS=1) as well, else take --chaos (DYN_CHAOS) away"
        )
    return check_real(read_plan(path), path)


def check_real(faults: Iterable[Fault], path: str) -> tuple[Fault, ...]:
    """Return the same faults. Raises InvalidPlan for a kind that real processes cannot have."""
    found = tuple(faults)
    for number, fault in enumerate(found, 1):
        if fault.kind in _NOT_REAL:
            raise InvalidPlan(
                f"chaos plan {path}: fault {number}: {fault.kind} is for the simulation only: {_NOT_REAL[fault.kind]}"
            )
    return found


def faults_of(role: Role, name: str, faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Return the faults of the plan that may fire in this process."""
    return tuple(fault for fault in faults if fault.is_at(name) and _fits(role, fault))


def _fits(role: Role, fault: Fault) -> bool:
    if role is Role.WORKER:
        return fault.kind not in _FRONTENDS
    return fault.kind in _FRONTENDS or (fault.kind in _EITHERS and fault.process is not None)


def check(settings: ChaosSettings) -> None:
    """Raise InvalidPlan, or InvalidArgument when the plan is not permitted."""
    admitted(settings.plan, settings.is_allowed)


def worker_faults(settings: ChaosSettings, discovery: Discovery) -> WorkerChaos:
    """Return the faults of this worker. Raises InvalidArgument for one that its store cannot have."""
    from dynamo.chaos.worker import WorkerChaos

    name, faults = _own(settings, Role.WORKER)
    return WorkerChaos(faults, name=name, discovery=discovery)


def frontend_faults(settings: ChaosSettings) -> Callable[[RequestPlaneClient], RequestPlaneClient]:
    """Return what puts the faults of this frontend around its client. Raises InvalidArgument for one it cannot have."""
    name, faults = _own(settings, Role.FRONTEND)
    return FrontendChaos(faults, name=name).client


def _own(settings: ChaosSettings, role: Role) -> tuple[str, tuple[Fault, ...]]:
    name = settings.name or str(role)
    return name, faults_of(role, name, admitted(settings.plan, settings.is_allowed) or ())
