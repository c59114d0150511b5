"""The worker's life as a table, and the times of its end. Pure: no clock, no environment, no I/O.

    INIT ─START─> STARTING ────STARTED───> PREPARING ──PREPARED──> SERVING ──STOP, FAILED──> DRAINING ─DRAINED─┐
                     │ STOP                     │ STOP                                          ^              │
                     v                          v                                               │              │
                  STOPPING_START           STOPPING_SETUP ──────────PREPARED────────────────────┤              │
                     └──────────────────────STARTED─────────────────────────────────────────────┘              │
                  FAILED in any of these four ────────────────────────────────────────────> CLEANING <─────────┘
                                                                                               └─CLEANED─> CLOSED

STARTING is the engine's `start()`: a stop does not cancel it before the time of the end is nearly up
(`ShutdownTimes.start_until_seconds`), the table remembers it. PREPARING is everything between
`start()` and the first request. A failure before serving skips the drain, not the cleanup. SERVING begins before the
instance is published, so a failure of that goes the long way. A second STOP changes nothing anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dynamo.contract.modes import DisaggregationMode
from dynamo.settings.readers import integer, seconds
from dynamo.settings.table import setting


class State(Enum):
    """Where a worker is. The comments name the states in which `cleanup()` is due."""

    INIT = "init"  # start() was never entered: no cleanup
    STARTING = "starting"  # start() runs
    PREPARING = "preparing"  # the engine runs; metrics, card and handler are being set up
    STOPPING_START = "stopping start"  # a stop was requested while start() runs; it gets most of the time there is
    STOPPING_SETUP = "stopping setup"  # a stop was requested during the set-up; its current step may finish
    SERVING = "serving"
    DRAINING = "draining"  # unregistered: grace, in-flight streams, drain()
    CLEANING = "cleaning"  # cleanup() runs, exactly once
    CLOSED = "closed"


class WorkerEvent(Enum):
    """What moves a worker."""

    START = "start"  # about to call start()
    STARTED = "started"
    PREPARED = "prepared"
    STOP = "stop"  # a signal, the endpoint's end, or a request of the process that embeds the worker
    FAILED = "failed"
    DRAINED = "drained"
    CLEANED = "cleaned"  # cleanup() returned or raised: either way it is not called again


TRANSITIONS: Final[Mapping[State, Mapping[WorkerEvent, State]]] = {
    State.INIT: {WorkerEvent.START: State.STARTING, WorkerEvent.STOP: State.CLOSED, WorkerEvent.FAILED: State.CLOSED},
    State.STARTING: {
        WorkerEvent.STARTED: State.PREPARING,
        WorkerEvent.FAILED: State.CLEANING,
        WorkerEvent.STOP: State.STOPPING_START,
    },
    State.PREPARING: {
        WorkerEvent.PREPARED: State.SERVING,
        WorkerEvent.FAILED: State.CLEANING,
        WorkerEvent.STOP: State.STOPPING_SETUP,
    },
    State.STOPPING_START: {
        WorkerEvent.STARTED: State.DRAINING,
        WorkerEvent.FAILED: State.CLEANING,
        WorkerEvent.STOP: State.STOPPING_START,
    },
    State.STOPPING_SETUP: {
        WorkerEvent.PREPARED: State.DRAINING,
        WorkerEvent.FAILED: State.CLEANING,
        WorkerEvent.STOP: State.STOPPING_SETUP,
    },
    State.SERVING: {WorkerEvent.STOP: State.DRAINING, WorkerEvent.FAILED: State.DRAINING},
    State.DRAINING: {WorkerEvent.DRAINED: State.CLEANING, WorkerEvent.STOP: State.DRAINING},
    State.CLEANING: {WorkerEvent.CLEANED: State.CLOSED, WorkerEvent.STOP: State.CLEANING},
}  # CLOSED has no row: nothing leaves it


class AdminGate(Enum):
    """Whether engine controls and updates are answered; the value completes the sentence of the refusal: "the worker is ..."."""

    STARTING = "starting"
    OPEN = "open"
    CLOSED = "shutting down"


_STOPPING: Final = frozenset({State.STOPPING_START, State.STOPPING_SETUP, State.DRAINING, State.CLEANING, State.CLOSED})
_BEFORE_SERVING: Final = frozenset({State.INIT, State.STARTING, State.PREPARING})


class IllegalTransition(RuntimeError):
    """An event that has no place in a state: a programming error in the worker."""

    def __init__(self, state: State, event: WorkerEvent) -> None:
        super().__init__(f"worker is {state.name}: {event.name} has no place here")
        self.state, self.event = state, event


class Lifecycle:
    """One worker's place in the table."""

    def __init__(self) -> None:
        self._state = State.INIT

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_stopping(self) -> bool:
        """Whether no more set-up step may begin."""
        return self._state in _STOPPING

    @property
    def gate(self) -> AdminGate:
        """The gate of the admin routes in this state."""
        if self._state in _BEFORE_SERVING:
            return AdminGate.STARTING
        return AdminGate.OPEN if self._state is State.SERVING else AdminGate.CLOSED

    def apply(self, event: WorkerEvent) -> State:
        """Move, and return the new state. Raises IllegalTransition; the state is then unchanged."""
        following = TRANSITIONS.get(self._state, {}).get(event)
        if following is None:
            raise IllegalTransition(self._state, event)
        self._state = following
        return following


CLEANUP_RESERVE_SECONDS: Final = 5.0  # kept of the deadline for drain() and cleanup()
FORCED_EXIT_CODE: Final = 911  # what operators of the native system search for in the log
FORCED_EXIT_STATUS: Final = FORCED_EXIT_CODE & 0xFF  # 143: what the process really returns, as POSIX keeps 8 bits


@dataclass(frozen=True, slots=True)
class ShutdownTimes:
    """How long the phases of the end may last, in seconds. All offsets count from the request to stop."""

    # fmt: off
    # Routers need time to learn that the instance left.
    grace_seconds: float = setting(5.0, "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", seconds(),
        "After SIGTERM: how long the worker, already out of discovery, still takes requests")
    timeout_seconds: int = setting(30, "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", integer(0, unit="s"),
        "Then, how long until the process ends by force. The last 5 s are kept for `drain()` and `cleanup()`: streams "
        "that still run are cut")
    prefill_drain_seconds: float = setting(30.0, "DYN_PREFILL_DRAIN_TIMEOUT_S", seconds(),
        "How long a prefill worker's `is_quiescent()` is polled")
    # fmt: on

    @property
    def deadline_seconds(self) -> float:
        """Then the process is ended by force. Grace comes on top, so a long grace still reaches the cleanup."""
        return self.timeout_seconds + self.grace_seconds

    @property
    def streams_until_seconds(self) -> float:
        """Until then streams in flight are waited for; what is left is cut."""
        return max(0.0, self.deadline_seconds - CLEANUP_RESERVE_SECONDS)

    @property
    def start_until_seconds(self) -> float:
        """Until then a `start()` that was running may return; then it is cancelled, which leaves `cleanup()` some time."""
        return self.deadline_seconds - min(CLEANUP_RESERVE_SECONDS, self.deadline_seconds / 2)

    def quiescence_seconds(self, mode: DisaggregationMode) -> float:
        """Return how long `is_quiescent` may be polled: prefill workers only, as their peers still pull from them."""
        if mode is not DisaggregationMode.PREFILL:
            return 0.0
        return min(self.prefill_drain_seconds, max(0.0, self.timeout_seconds - CLEANUP_RESERVE_SECONDS))
