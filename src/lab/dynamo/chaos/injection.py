"""What a process loads that has a fault plan: `dynamo.runtime.calls.faults.Injection` as a module."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from dynamo.chaos.plan import Fault, FaultKind, InvalidPlan, read_plan
from dynamo.errors import InvalidArgument
from dynamo.runtime.base.settings import ChaosSettings
from dynamo.runtime.calls.request_plane.base import RequestPlaneClient
from dynamo.runtime.discovery.base import Discovery

if TYPE_CHECKING:
    from dynamo.chaos.worker import WorkerChaos

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
    from dynamo.chaos.frontend import FrontendChaos

    name, faults = _own(settings, Role.FRONTEND)
    return FrontendChaos(faults, name=name).client


def _own(settings: ChaosSettings, role: Role) -> tuple[str, tuple[Fault, ...]]:
    name = settings.name or str(role)
    return name, faults_of(role, name, admitted(settings.plan, settings.is_allowed) or ())
