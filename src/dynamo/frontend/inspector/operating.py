"""Workers that an operator keeps from new requests, in all processes of the port."""

from __future__ import annotations

from typing import Final

import msgspec

from dynamo.frontend.inspector.clock import InspectorClock
from dynamo.frontend.inspector.members import Members
from dynamo.frontend.inspector.streams import worker_name
from dynamo.frontend.inspector.visitors import Visitor
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.protocol.inspector.actions import WorkerActionRequest
from dynamo.router.operator_desk import WorkerHold

__all__ = ["WorkerOperator"]

HOLD_KEY: Final = "inspector/hold/"
QUARANTINE_SECONDS: Final = 60.0  # where no time is given

_KINDS: Final = {"drain": "drain", "undrain": "", "quarantine": "quarantine"}


class WorkerOperator:
    """Holds workers, and lets them go. Used on the event loop only."""

    def __init__(self, models: ModelDirectory, members: Members, clock: InspectorClock) -> None:
        self._models, self._peers, self._clock = models, members.peers, clock
        if self._peers is not None:
            self._peers.on_shared(self._take)

    def knows(self, id: str) -> bool:
        """Return whether a worker with this id, in hexadecimal digits, is there."""
        return any(worker_name(entry.instance_id) == id for group in self._models.groups() for entry in group.accepted)

    async def act(self, action: str, id: str, asked: WorkerActionRequest, visitor: Visitor) -> None:
        """Do "drain", "undrain" or "quarantine". Raises TimeoutError where the other processes do not answer."""
        kind = _KINDS[action]
        seconds = QUARANTINE_SECONDS if kind == "quarantine" and asked.seconds is None else asked.seconds
        hold = WorkerHold(int(id, 16), kind, visitor.shown_name, asked.reason, seconds)
        self._put(hold)
        if self._peers is not None:
            await self._peers.share(HOLD_KEY + id, msgspec.msgpack.encode(hold))

    def _take(self, key: str, value: bytes) -> None:
        if key.startswith(HOLD_KEY):
            self._put(msgspec.msgpack.decode(value, type=WorkerHold))

    def _put(self, hold: WorkerHold) -> None:
        desk = self._models.desk
        desk.keep_only(frozenset(entry.instance_id for group in self._models.groups() for entry in group.accepted))
        desk.put(hold, self._clock.now())
        for pool in self._models.pools():
            if pool.gate is not None:  # requests that wait for this worker look again
                pool.gate.changed()
