"""What a trace is replayed over: how many workers and frontends, and what is late, lost or restarted. Pure."""

from __future__ import annotations

import msgspec

from dynamo.errors import InvalidArgument


class Restart(msgspec.Struct, frozen=True):
    """A process that is lost in the middle of a trace, and comes back empty."""

    at: float  # share of the trace's duration, 0 to 1
    what: str  # "worker" or "router"
    number: int = 0
    down_ms: float = 1000.0


class Throttle(msgspec.Struct, frozen=True):
    """A worker that becomes slower or quicker in the middle of a trace."""

    at: float  # share of the trace's duration, 0 to 1
    number: int = 0
    speed: float = 0.5  # beside that of the engine


class ReplaySetup(msgspec.Struct, frozen=True):
    """What a trace is replayed over."""

    workers: int = 8
    frontends: int = 1
    block_size: int = 16
    seed: int = 0
    arrival_speedup_ratio: float = 1.0
    concurrency: int | None = None  # so many requests in flight; the trace's times are not used
    publishes_events: bool = True
    kv_event_lag_ms: float = 0.0
    event_loss: float = 0.0  # share of the events that a frontend never gets
    answer_ms: float = 20.0  # until a worker has answered a router that missed events
    replica_sync_ms: float | None = 1.0  # until the other frontends know of a booking; None: they never do
    restarts: tuple[Restart, ...] = ()
    speeds: tuple[float, ...] = ()  # of the workers in turn, beside that of the engine; (): all are as quick as that
    throttles: tuple[Throttle, ...] = ()
    compares_frontends: bool = False  # compute, too, what the other frontends would choose

    def check(self) -> None:
        """Raise InvalidArgument, naming the member."""
        for name in ("workers", "frontends", "block_size"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidArgument(f"concurrency must be at least 1, got {self.concurrency}")
        if not 0 < self.arrival_speedup_ratio < float("inf"):
            raise InvalidArgument(f"arrival_speedup_ratio must be above 0, got {self.arrival_speedup_ratio}")
        if not 0 <= self.event_loss <= 1:
            raise InvalidArgument(f"event_loss must be a share from 0 to 1, got {self.event_loss}")
        for name in ("kv_event_lag_ms", "answer_ms"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidArgument(f"{name} must be at least 0, got {getattr(self, name)}")
        if not all(0 < speed < float("inf") for speed in (*self.speeds, *(each.speed for each in self.throttles))):
            raise InvalidArgument(f"speeds must be above 0, got {self.speeds} and {self.throttles}")
        if not all(0 <= each.at <= 1 and 0 <= each.number < self.workers for each in self.throttles):
            raise InvalidArgument(f"throttles: a worker's number, at a share from 0 to 1, got {self.throttles}")
        for restart in self.restarts:
            if restart.what not in ("worker", "router") or not 0 <= restart.at <= 1:
                raise InvalidArgument(f"restarts: a worker or a router, at a share from 0 to 1, got {restart}")
