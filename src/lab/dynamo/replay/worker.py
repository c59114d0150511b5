"""One worker of a replay: a scheduler core that takes passes, and the KV events that they bring. Pure.

A worker has one data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dynamo.kv.events import RouterEvent
from dynamo.replay.flight import Flight
from dynamo.replay.journal import EventJournal
from dynamo.scheduling import PassResult, ScheduledRequest, SchedulerCore

__all__ = ["MakeCore", "ReplayWorker"]

FRUITLESS_PASSES: Final = 10_000  # in a row, in no time and without a token: a scheduler that hangs

MakeCore = Callable[[int], SchedulerCore]
"""(seed) -> the core of a new worker"""


class ReplayWorker:
    """A core, its pass that runs, and its account of time and events."""

    __slots__ = (
        "core",
        "flights",
        "fruitless",
        "is_in_pass",
        "journal",
        "number",
        "prefill_ms",
        "prefill_tokens",
        "requests",
        "worker_id",
    )

    def __init__(self, number: int, worker_id: int, core: SchedulerCore, *, keeps_blocks: bool) -> None:
        """`number` is the worker's place in the report, which its replacements share; `worker_id` is of this life."""
        self.number = number
        self.worker_id = worker_id
        self.core = core
        self.is_in_pass = False
        self.flights: dict[Flight, ScheduledRequest] = {}
        self.fruitless = 0
        self.requests = 0
        self.prefill_ms = 0.0
        self.prefill_tokens = 0
        self.journal = EventJournal(worker_id, keeps_blocks=keeps_blocks)

    def submit(self, flight: Flight, now_ms: float) -> None:
        """Queue a request, or the rest of one that began at another worker."""
        blocks = flight.blocks
        request = ScheduledRequest(
            flight.booking_id,
            flight.request.prompt_tokens + flight.tokens,
            flight.request.output_tokens - flight.tokens,
            identities=blocks.sequence.copy(),
            content=blocks.local.copy(),
            owner=flight,
        )
        self.flights[flight] = request
        self.requests += 1
        self.core.submit(request, now_ms)

    def begin_pass(self, now_ms: float) -> float | None:
        """Begin a pass and return how long it takes; None when there is nothing to do."""
        plan = self.core.begin_pass(now_ms)
        if plan is None:
            return None
        self.is_in_pass = True
        self.prefill_ms += plan.prefill_ms
        self.prefill_tokens += plan.prefill_tokens
        return plan.duration_ms

    def end_pass(self) -> PassResult:
        """End the pass and return what it brought. Raises RuntimeError when the scheduler gets nowhere."""
        self.is_in_pass = False
        result = self.core.end_pass()
        if result.emitted or result.rejected or result.events:
            self.fruitless = 0
        else:
            self.fruitless += 1
            if self.fruitless > FRUITLESS_PASSES:
                raise RuntimeError(f"worker {self.number} takes passes that bring nothing")
        return result

    def router_events(self, result: PassResult) -> list[RouterEvent]:
        """Return the changes of the cache that a pass brought, as routers read them."""
        return [self.journal.record(change) for change in result.events]
