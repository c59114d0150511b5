"""Where faults can be injected: around a worker's engine and handler, and around a frontend's calls.

Injection itself is a room of the laboratory, loaded by name and only where the settings have a plan.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from dynamo.runtime.base.settings import ChaosSettings
from dynamo.runtime.calls.request_plane.base import Handler, RequestPlaneClient

if TYPE_CHECKING:
    from dynamo.runtime.discovery.base import Discovery

HOME: Final = "dynamo.chaos.injection"


class WorkerFaults(Protocol):
    """The faults of one worker process."""

    def engine(self, engine: Any) -> Any:
        """Return a stand-in for the engine where requests are served: it has `generate` and `abort`."""

    def handler(self, inner: Handler) -> Handler:
        """Serve with `inner`, under the plan."""

    async def close(self) -> None:
        """End the faults under way. Idempotent."""


class Injection(Protocol):
    """What a module that injects faults offers. `settings` have a plan in every call."""

    def check(self, settings: ChaosSettings) -> None:
        """Raise InvalidArgument for a plan that is not permitted, cannot be read, or is not for real processes."""

    def worker_faults(self, settings: ChaosSettings, discovery: Discovery) -> WorkerFaults:
        """Return the faults of this worker. Raises InvalidArgument for one that its store cannot have."""

    def frontend_faults(self, settings: ChaosSettings) -> Callable[[RequestPlaneClient], RequestPlaneClient]:
        """Return what puts the faults of this frontend around its client. Raises InvalidArgument."""


def injection() -> Injection:
    """Load the module that injects faults."""
    return cast(Injection, importlib.import_module(HOME))
