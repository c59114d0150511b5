"""The instance of a worker in discovery: what keeps it out, and one change after the other.

An engine that sleeps and an operator that drains the worker both take it out. It comes back when neither does, so that
waking the engine of a drained worker brings it no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from dynamo.runtime.base.tasks import Background
from dynamo.worker.lifecycle import AdminGate


class InstanceRecord(Protocol):
    """The instance's place in discovery; the runtime's `ServedEndpoint`."""

    async def advertise(self) -> None: ...

    async def withdraw(self) -> None: ...


class Hold(Enum):
    """Why the instance is out of discovery."""

    PAUSED = "paused"  # by a control of the engine
    DRAINED = "drained"


class GuardedRecord:
    """The instance in discovery: whether it may be changed, and one change after the other."""

    def __init__(self, gate: Callable[[], AdminGate]) -> None:
        """`gate` is checked at every change."""
        self._gate = gate
        self._record: InstanceRecord | None = None
        self._holds: frozenset[Hold] = frozenset()
        self._lock = asyncio.Lock()  # held only while discovery is written
        self._writes = Background()
        self.is_closed = False

    def attach(self, record: InstanceRecord) -> None:
        """Attach the instance; call it before the gate opens."""
        self._record = record

    @property
    def gate(self) -> AdminGate:
        """Whether the instance may be changed now."""
        gate = AdminGate.CLOSED if self.is_closed else self._gate()
        if gate is AdminGate.OPEN and self._record is None:
            return AdminGate.STARTING  # the instance is still on its way into discovery
        return gate

    @property
    def is_registered(self) -> bool:
        """Whether the instance is in discovery, as far as this worker wrote it."""
        return self.gate is AdminGate.OPEN and not self._holds

    async def hold(self, reason: Hold) -> AdminGate:
        """Take the instance out of discovery until `release`. Unless the gate that is returned is open, nothing was done.

        Raises what discovery raises; then nothing has changed.
        """
        return await self._change(reason, is_held=True)

    async def release(self, reason: Hold) -> AdminGate:
        """Register the instance again, unless something else keeps it out. Returns and raises as `hold` does."""
        return await self._change(reason, is_held=False)

    async def _change(self, reason: Hold, *, is_held: bool) -> AdminGate:
        async def write() -> AdminGate:
            async with self._lock:
                gate, record = self.gate, self._record
                if gate is not AdminGate.OPEN or record is None:
                    return gate
                holds = self._holds | {reason} if is_held else self._holds - {reason}
                if is_held:
                    await record.withdraw()
                elif not holds:
                    await record.advertise()
                self._holds = holds
                return gate

        # A cancelled caller must not leave a write in flight that overtakes the final withdrawal: the write holds the
        # lock, which close() takes.
        return await asyncio.shield(self._writes.start(write(), f"discovery record: {reason.value}", is_awaited=True))

    async def close(self) -> None:
        """Refuse every change from here on. Idempotent."""
        async with self._lock:  # an advertisement under way lands before, never after, the final withdrawal
            self.is_closed = True
        await self._writes.wait()
