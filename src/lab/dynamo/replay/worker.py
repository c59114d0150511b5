"""One worker of a replay: a scheduler core that takes passes, and the KV events that they bring. Pure.

A worker has one data-parallel rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from dynamo.kv.events import BlocksAdded, BlocksDropped, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.replay.flight import Flight
from dynamo.scheduling import BlockRun, EvictedBlocks, PassResult, PassTiming, ScheduledRequest, SchedulerCore

# What one worker of a replay publishes of its cache, and keeps for routers that lost some of it. Pure.


KEPT_EVENTS: Final = 1024  # as native workers keep
MAX_DUMP_RUN: Final = 128  # blocks of one event of a dump


class EventJournal:
    """Numbers the events of one worker; with `keeps_blocks` it can also answer routers that missed some."""

    __slots__ = ("_blocks", "_events", "_keeps_blocks", "_worker_id", "last_event_id")

    def __init__(self, worker_id: int, *, keeps_blocks: bool) -> None:
        self.last_event_id = 0
        self._worker_id = worker_id
        self._keeps_blocks = keeps_blocks
        self._events: deque[RouterEvent] = deque(maxlen=KEPT_EVENTS)
        self._blocks: dict[int, tuple[int | None, int]] = {}  # sequence hash -> (the one before, the block's own hash)

    def record(self, change: BlockRun | EvictedBlocks) -> RouterEvent:
        """Return a change of the cache as routers read it."""
        self.last_event_id += 1
        if isinstance(change, EvictedBlocks):
            data = BlockUpdate(removed=BlocksDropped(change.identities))
        else:
            data = _stored(change.parent, change.identities, change.content)
        event = RouterEvent(self._worker_id, KvChange(self.last_event_id, data))
        if self._keeps_blocks:
            self._events.append(event)
            if isinstance(change, EvictedBlocks):
                for block in change.identities:
                    del self._blocks[block]
            else:
                parent = change.parent
                for block, own in zip(change.identities, change.content, strict=True):
                    self._blocks[block] = parent, own
                    parent = block
        return event

    def events_since(self, event_id: int) -> list[RouterEvent] | None:
        """Return the events from `event_id` on; None where the first of them is kept no more."""
        if event_id > self.last_event_id:
            return []
        if not self._events or self._events[0].event.event_id > event_id:
            return None
        return [event for event in self._events if event.event.event_id >= event_id]

    def dump(self) -> Iterator[RouterEvent]:
        """Yield all blocks that the worker holds, parents first, numbered afresh from 0."""
        run: list[tuple[int, int]] = []
        parent: int | None = None
        number = 0
        for block, (before, own) in self._blocks.items():
            if run and (run[-1][0] != before or len(run) >= MAX_DUMP_RUN):
                yield self._dumped(number, parent, run)
                number, run = number + 1, []
            if not run:
                parent = before
            run.append((block, own))
        if run:
            yield self._dumped(number, parent, run)

    def _dumped(self, number: int, parent: int | None, run: list[tuple[int, int]]) -> RouterEvent:
        data = _stored(parent, [block for block, _ in run], [own for _, own in run])
        return RouterEvent(self._worker_id, KvChange(number, data))


def _stored(parent: int | None, identities: list[int], content: list[int]) -> BlockUpdate:
    """Return blocks that follow each other as an event names them."""
    blocks = [HeldBlock(block, own) for block, own in zip(identities, content, strict=True)]
    return BlockUpdate(stored=BlocksAdded(blocks, parent))


FRUITLESS_PASSES: Final = 10_000  # in a row, in no time and without a token: a scheduler that hangs


class WorkerSpeed:
    """How quick one worker is beside its engine's timing. It may change while the worker runs."""

    __slots__ = ("factor",)

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor


class ScaledTiming:
    """A timing at the speed of one worker. See `PassTiming`."""

    __slots__ = ("_speed", "_timing")

    def __init__(self, timing: PassTiming, speed: WorkerSpeed) -> None:
        self._timing, self._speed = timing, speed

    def prefill_ms(self, requests: int, mean_input: int, mean_prefix: int) -> float:
        """Return the time to compute prompt tokens."""
        return self._timing.prefill_ms(requests, mean_input, mean_prefix) / self._speed.factor

    def decode_ms(self, active_tokens: int, mean_context: int, total_tokens: int) -> float:
        """Return the time of one decode step."""
        return self._timing.decode_ms(active_tokens, mean_context, total_tokens) / self._speed.factor


MakeCore = Callable[[int, WorkerSpeed], SchedulerCore]
"""(seed) -> the core of a new worker"""


@dataclass(slots=True)
class Prefilled:
    """The prompts that a worker computed, repeated ones included."""

    ms: float = 0.0
    tokens: int = 0


class ReplayWorker:
    """A core, its pass that runs, and its account of time and events."""

    __slots__ = (
        "core",
        "flights",
        "fruitless",
        "is_in_pass",
        "journal",
        "number",
        "prefilled",
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
        self.prefilled = Prefilled()
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
        self.prefilled.ms += plan.prefill_ms
        self.prefilled.tokens += plan.prefill_tokens
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
