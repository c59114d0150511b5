"""What a process loads that has a fault plan: `dynamo.runtime.calls.faults.Injection` as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dynamo.chaos.admission import Role, admitted, faults_of
from dynamo.chaos.plan import Fault
from dynamo.runtime.base.settings import ChaosSettings
from dynamo.runtime.calls.request_plane.base import RequestPlaneClient
from dynamo.runtime.discovery.base import Discovery

if TYPE_CHECKING:
    from dynamo.chaos.worker import WorkerChaos


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
