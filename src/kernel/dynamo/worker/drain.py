"""The drain of a worker by an operator: `POST /engine/drain` and `/engine/resume`, `GET /engine/status` of the admin listener.

    SERVING ──DRAIN──> DRAINING ──EMPTIED──> DRAINED
       ^                  │                     │
       └─RESUME, UNDONE───┴───────RESUME────────┘        STOP leads from each of them to STOPPING, which nothing leaves

A drain takes the instance out of discovery, which is when its caller is answered; serves what still comes for the time that
routers need to learn of it; then declines requests and waits, without a limit, for those that run. It never ends the process:
`safe_to_delete` is for what does, such as an orchestrator. A frontend that sends a request too late gets the error on which it tries another worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypedDict

from dynamo.errors import InvalidArgument
from dynamo.runtime.base.tasks import Background
from dynamo.worker.hooks import await_hook
from dynamo.worker.instance_record import GuardedRecord, Hold, InstanceRecord
from dynamo.worker.lifecycle import AdminGate

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.25  # between two calls of is_quiescent()

AdminCallback = Callable[[object], Awaitable[object]]


class DrainState(Enum):
    """Where the drain of a worker is."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    STOPPING = "stopping"


class DrainEvent(Enum):
    """What moves it."""

    DRAIN = "drain"
    UNDONE = "undone"  # discovery did not take the instance out
    EMPTIED = "emptied"  # no request runs, and no peer needs the memory of the engine
    RESUME = "resume"  # discovery has the instance again
    STOP = "stop"


DRAIN_TABLE: Final[Mapping[DrainState, Mapping[DrainEvent, DrainState]]] = {
    DrainState.SERVING: {DrainEvent.DRAIN: DrainState.DRAINING, DrainEvent.STOP: DrainState.STOPPING},
    DrainState.DRAINING: {
        DrainEvent.UNDONE: DrainState.SERVING,
        DrainEvent.EMPTIED: DrainState.DRAINED,
        DrainEvent.RESUME: DrainState.SERVING,
        DrainEvent.STOP: DrainState.STOPPING,
    },
    DrainState.DRAINED: {DrainEvent.RESUME: DrainState.SERVING, DrainEvent.STOP: DrainState.STOPPING},
    DrainState.STOPPING: {},
}


class Transfers(Enum):
    """Whether peers still pull from the memory of this worker, which only those of prefill workers do."""

    NOT_APPLICABLE = "not_applicable"
    UNKNOWN = "unknown"
    PENDING = "pending"
    COMPLETE = "complete"


class DrainStatus(TypedDict, total=False):
    """What the three routes answer; only `last_error` may be missing."""

    state: str
    inflight_requests: int  # those that wait for a place included
    kv_transfers: str
    safe_to_delete: bool
    discovery_registered: bool
    last_error: str


@dataclass(slots=True)
class _Progress:
    """Where a drain is, and what went wrong last."""

    kv_transfers: Transfers
    state: DrainState = DrainState.SERVING
    last_error: str = ""

    def apply(self, event: DrainEvent) -> None:
        """Move, unless the event has no place in this state: a stop may come first."""
        self.state = DRAIN_TABLE[self.state].get(event, self.state)

    def begin(self, transfers: Transfers) -> None:
        """Forget what the last drain found."""
        self.kv_transfers, self.last_error = transfers, ""

    def fail(self, reason: str) -> DrainRefused:
        """Note and log what went wrong; return it for the caller."""
        self.last_error = reason
        logger.warning("%s", reason)
        return DrainRefused(reason)


class DrainRefused(InvalidArgument):
    """A change that was not made."""


class DrainedEndpoint(InstanceRecord, Protocol):
    """The endpoint of a worker; the runtime's `ServedEndpoint`."""

    @property
    def unfinished(self) -> int: ...

    async def wait_idle(self, timeout: float) -> bool: ...

    def stop_accepting(self) -> None: ...

    async def accept_again(self) -> None: ...


class QuiescentEngine(Protocol):
    """The part of an engine that knows whether peers still need its memory."""

    async def is_quiescent(self) -> bool | None: ...


class WorkerDrain:
    """The drain of one worker. Usable on the event loop only."""

    def __init__(
        self, engine: QuiescentEngine, gate: Callable[[], AdminGate], *, is_prefill: bool, grace_seconds: float
    ) -> None:
        """`grace_seconds`: how long requests are still served after the instance has left discovery."""
        self._engine, self._is_prefill, self._grace_seconds = engine, is_prefill, grace_seconds
        self.record = GuardedRecord(gate)
        self._served: DrainedEndpoint | None = None
        self._progress = _Progress(self._unknown)
        self._work: asyncio.Task[None] | None = None  # of the drain under way
        self._resuming = asyncio.Lock()
        self._background = Background()

    def attach(self, served: DrainedEndpoint) -> None:
        """Attach the endpoint; before that there is nothing to drain."""
        self._served = served
        self.record.attach(served)

    @property
    def state(self) -> DrainState:
        return self._progress.state

    @property
    def _unknown(self) -> Transfers:
        """The state of transfers before is_quiescent() was called."""
        return Transfers.UNKNOWN if self._is_prefill else Transfers.NOT_APPLICABLE

    def routes(self) -> dict[str, tuple[str, AdminCallback]]:
        """Route name below `/engine/` -> its method and handler."""
        return {"drain": ("POST", self.drain), "resume": ("POST", self.resume), "status": ("GET", self.shown)}

    async def shown(self, body: object) -> DrainStatus:
        """Answer `GET /engine/status`."""
        return self.status()

    def status(self) -> DrainStatus:
        """Return where the worker is."""
        found = DrainStatus(
            state=self._progress.state.value,
            inflight_requests=0 if self._served is None else self._served.unfinished,
            kv_transfers=self._progress.kv_transfers.value,
            safe_to_delete=self._progress.state is DrainState.DRAINED,
            discovery_registered=self.record.is_registered,
        )
        if self._progress.last_error:
            found["last_error"] = self._progress.last_error
        return found

    async def drain(self, body: object) -> DrainStatus:
        """Begin a drain, and return once the instance has left discovery. Raises DrainRefused where it cannot."""
        served = self._checked(body)
        if self._progress.state is DrainState.SERVING:
            self._progress.apply(DrainEvent.DRAIN)
            self._progress.begin(self._unknown)
            left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            # Apart from the task of this request: its client may hang up.
            self._work = self._background.start(self._drain(served, left), "drain of the worker")
            await asyncio.shield(left)
        return self.status()

    async def resume(self, body: object) -> DrainStatus:
        """Register a drained worker again, and return once it is in discovery. Raises DrainRefused where it cannot."""
        self._checked(body)
        async with self._resuming:
            served = self._checked(body)
            if self._progress.state is not DrainState.SERVING:
                try:
                    gate = await self.record.release(Hold.DRAINED)
                except Exception as error:  # the boundary: becomes the answer
                    raise self._progress.fail(f"failed to re-register worker in discovery: {error}") from error
                self._check_open(gate)
                if self._work is not None:
                    self._work.cancel()
                await served.accept_again()
                self._progress.apply(DrainEvent.RESUME)
                self._progress.begin(self._unknown)
                logger.info("worker serves again")
            return self.status()

    async def close(self) -> DrainState:
        """Refuse every change from here on, and return the state in which the stop found the worker. Idempotent."""
        before = self._progress.state
        if before is not DrainState.STOPPING:
            self._progress.apply(DrainEvent.STOP)
        await self._background.close()
        await self.record.close()
        return before

    async def _drain(self, served: DrainedEndpoint, left: asyncio.Future[None]) -> None:
        try:
            try:
                self._check_open(await self.record.hold(Hold.DRAINED))
            except Exception as error:  # the boundary: becomes the answer of the call
                refusal = self._progress.fail(f"failed to unregister worker from discovery: {error}")
                self._progress.apply(DrainEvent.UNDONE)
                left.set_exception(refusal)
                return
        finally:  # also where a stop or a resumption cancels this
            if not left.done():
                left.set_result(None)
        logger.info("worker drains: it left discovery and serves what still comes for %gs", self._grace_seconds)
        await asyncio.sleep(self._grace_seconds)
        served.stop_accepting()
        while not await served.wait_idle(POLL_SECONDS) or (self._is_prefill and not await self._is_quiescent()):
            if not served.unfinished:
                await asyncio.sleep(POLL_SECONDS)
        self._progress.apply(DrainEvent.EMPTIED)
        logger.info("worker drained and is safe to delete")

    async def _is_quiescent(self) -> bool:
        try:
            answer = await await_hook(self._engine.is_quiescent())
        except Exception as error:  # the boundary: the engine's own code
            if not self._progress.last_error:
                logger.warning("is_quiescent() failed, so the worker is not safe to delete: %s", error)
            self._progress.last_error = f"is_quiescent() failed: {type(error).__name__}: {error}"
            self._progress.kv_transfers = Transfers.UNKNOWN
            return False
        known = Transfers.COMPLETE if answer else Transfers.PENDING
        self._progress.kv_transfers = Transfers.UNKNOWN if answer is None else known
        return answer is True

    def _checked(self, body: object) -> DrainedEndpoint:
        """Return the endpoint. Raises DrainRefused for a body that is no object, and while the worker starts or stops."""
        if not isinstance(body, dict):
            raise DrainRefused("worker Admin API request body must be a JSON object")
        if self._progress.state is DrainState.STOPPING:
            raise DrainRefused("worker shutdown is already in progress")
        self._check_open(self.record.gate)
        assert self._served is not None  # else the gate is not open
        return self._served

    def _check_open(self, gate: AdminGate) -> None:
        if gate is not AdminGate.OPEN:
            raise DrainRefused(
                "worker shutdown is already in progress" if gate is AdminGate.CLOSED else f"the worker is {gate.value}"
            )
