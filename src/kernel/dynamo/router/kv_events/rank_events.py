"""The events of each rank in order: the next event is applied, and missing events are requested first.

A loss at the end of a rank's events shows when its worker publishes its last event again, as ours do after a silence, for the first
time after 0.2 s. A worker that does not publish it again gets a request after each silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from dynamo.kv.events import BadEvents, KvAnswer, RouterEvent, blocks_of, pieces_of, read_answered
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import Trust
from dynamo.router.kv_events.queues import EventQueue, Room
from dynamo.router.kv_events.sources import UNANSWERED, RecoveryTarget, SourceClients
from dynamo.runtime.base.tasks import Work

logger = logging.getLogger(__name__)

MAX_RANKS: Final = 65_536  # that events are taken of; a publisher gone wild must not take the router's memory
ATTEMPTS: Final = 8
FIRST_RETRY_SECONDS: Final = 0.2  # doubled with each further attempt
PAUSE_SECONDS: Final = 30.0  # after the last attempt; then the next event of the rank begins another recovery
QUIET_SECONDS: Final = 0.7  # after which a worker that does not repeat its last event gets a request for later ones

FOREIGN_SECONDS: Final = 5.0  # after an event that its worker does not know, gaps of the rank wait for one request

TURN_BLOCKS: Final = 2_048  # applied before others on the event loop get a turn
EVENT_COST: Final = 8  # blocks that an event counts as, beside its own
CLEAR_COST: Final = 512

OnTrust = Callable[[WorkerRank, Trust], None]
"""Called whenever the trust in what a rank holds has changed."""


class KvSink(Protocol):
    """What keeps the blocks: a router's index. Called on the event loop."""

    def apply(self, event: RouterEvent) -> object:
        """Apply one event; what is returned is not read. The events of a rank arrive once each and in order.

        A long event of a worker's answer arrives in pieces, which have its id.
        """

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Drop all blocks of a rank: the rank left, or is about to send a fresh state. From then on it holds nothing."""


class Turns:
    """Lets others on the event loop run between pieces of work."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = TURN_BLOCKS

    async def spend(self, event: RouterEvent) -> None:
        """Count an event that was read or applied; give others a turn where it was enough for once."""
        self._left -= EVENT_COST + (CLEAR_COST if event.event.data == "cleared" else blocks_of(event))
        if self._left <= 0:
            self._left = TURN_BLOCKS
            await asyncio.sleep(0)


class _Gap(NamedTuple):
    """What is missing before the next event of a rank can be applied."""

    start: int | None  # the first event that is missing; None: everything


@dataclass(slots=True)
class CacheEvents:
    """What the events of one rank have come to since it is followed. It goes with the rank."""

    evicted_blocks: int = 0  # that its worker removed, in all tiers; a cleared cache is no eviction
    gaps: int = 0  # how often events were missing
    resyncs: int = 0  # how often it had to send its whole state again, after that of the beginning

    def count(self, event: RouterEvent) -> None:
        """Count the removals of an event."""
        data = event.event.data
        if not isinstance(data, str) and data.removed is not None:
            self.evicted_blocks += len(data.removed.block_hashes)


@dataclass(slots=True)
class _State:
    """One rank."""

    waiting: EventQueue
    target: RecoveryTarget | None = None  # where missing events can be requested; None: nowhere
    next_id: int | None = None  # None: no event has arrived yet
    recovery: asyncio.Task[None] | None = None
    trust: Trust = Trust.NONE
    paused_until: float = 0.0  # no recovery before: the last one failed for good
    repeats: bool = False  # the worker publishes its last event again after a silence
    foreign_until: float = 0.0  # events came in its name that it does not know: until then no gap is acted on at once
    has_answered: bool = False  # what it held at the beginning is known
    counts: CacheEvents = field(default_factory=CacheEvents)


class _Silences:
    """The ranks whose last event may have been lost, the one that has been silent for longest first."""

    __slots__ = ("_begun", "_due")

    def __init__(self) -> None:
        self._due: OrderedDict[WorkerRank, float] = OrderedDict()
        self._begun = asyncio.Event()

    def begin(self, rank: WorkerRank, now: float) -> None:
        """Begin the silence behind an event that was applied."""
        self._due[rank] = now + QUIET_SECONDS
        self._due.move_to_end(rank)
        self._begun.set()

    def begin_once(self, rank: WorkerRank, now: float) -> None:
        """Begin a silence that further events do not make longer."""
        if rank not in self._due:
            self.begin(rank, now)

    def end(self, rank: WorkerRank) -> None:
        """End the silence of a rank that needs no request; unknown is fine."""
        self._due.pop(rank, None)

    async def next(self) -> WorkerRank:
        """Wait for a rank that was silent for long enough."""
        clock = asyncio.get_running_loop().time
        while True:
            if not self._due:
                self._begun.clear()
                await self._begun.wait()
                continue
            rank, due = next(iter(self._due.items()))
            if due <= clock():
                del self._due[rank]
                return rank
            await asyncio.sleep(due - clock())


class RankEvents:
    """The ranks of one endpoint, each with its place in its events."""

    def __init__(
        self,
        sink: KvSink,
        sources: SourceClients,
        start: Callable[[Work[None], str], asyncio.Task[None]],
        on_trust: OnTrust | None,
    ) -> None:
        """`start`: runs work with a name for as long as the ranks are followed."""
        self._sink, self._sources, self._start, self._on_trust = sink, sources, start, on_trust
        self._states: dict[WorkerRank, _State] = {}
        self._room = Room()
        self._silences = _Silences()
        self.gaps = 0  # how often events were missing
        self.dumps = 0  # how often a rank sent its whole state

    def __contains__(self, rank: object) -> bool:
        return rank in self._states

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(self._states)

    def counts(self) -> Iterator[tuple[WorkerRank, CacheEvents]]:
        """Yield each rank with what its events have come to."""
        return ((rank, state.counts) for rank, state in self._states.items())

    def set_target(self, rank: WorkerRank, target: RecoveryTarget) -> None:
        """Follow a rank, whose missing events can be requested at `target`."""
        state = self._states.get(rank) or self._begin(rank)
        if state is not None and state.target != target:
            state.target = target
            if state.recovery is None:
                self._start_recovery(rank, state, None)

    def drop(self, rank: WorkerRank) -> None:
        """Drop a rank that has gone, with its blocks; unknown is fine."""
        state = self._states.pop(rank, None)
        if state is None:
            return
        if state.recovery is not None:
            state.recovery.cancel()
        state.waiting.clear()
        self._silences.end(rank)
        self._sink.forget(*rank)
        self._trust(rank, state, Trust.NONE)

    def stop(self) -> None:
        """End every recovery."""
        for state in self._states.values():
            if state.recovery is not None:
                state.recovery.cancel()

    def take(self, event: RouterEvent) -> None:
        """Take an event that has come: apply it, let it wait, or request what is missing before it."""
        rank = WorkerRank(event.worker_id, event.event.dp_rank)
        state = self._states.get(rank) or self._begin(rank)
        if state is None:
            return
        if state.recovery is not None:
            if not state.waiting.put(event):
                state.waiting.clear()  # which is one more gap
                state.waiting.put(event)
            return
        gap = self._advance(rank, state, event)
        if gap is not None and state.waiting.put(event):
            self._start_recovery(rank, state, gap.start)

    async def recover_after_silence(self) -> None:
        """Request from each rank that has become silent what was lost at the end."""
        while True:
            rank = await self._silences.next()
            state = self._states.get(rank)
            if state is not None and state.recovery is None and self._can_recover(state):
                self._start_recovery(rank, state, None if state.trust is Trust.DEGRADED else state.next_id)

    def _begin(self, rank: WorkerRank) -> _State | None:
        """Follow a rank from now on; None: there are too many."""
        if len(self._states) >= MAX_RANKS:
            return None
        state = self._states[rank] = _State(EventQueue(self._room))
        return state

    # -- one event after the other -----------------------------------------------------------------------------------

    def _advance(self, rank: WorkerRank, state: _State, event: RouterEvent) -> _Gap | None:
        """Apply the event if it is the next one; else it is an old one, or return what is missing before it."""
        event_id = event.event.event_id
        if state.next_id is None:
            # Without a dump only a rank whose events arrived from the first one on is known whole.
            self._trust(rank, state, Trust.EXACT if event_id <= 1 else Trust.DEGRADED)
        elif event_id < state.next_id:
            if event_id == state.next_id - 1:
                return self._repeated(rank, state)
            return None
        elif event_id > state.next_id:
            now = asyncio.get_running_loop().time()
            if now < state.foreign_until:  # a request for each of them would be work for both; one answers for all
                self._silences.begin_once(rank, now)
                return None
            self.gaps += 1
            state.counts.gaps += 1
            logger.info("worker %x rank %d: KV events %d to %d are missing", *rank, state.next_id, event_id - 1)
            self._trust(rank, state, Trust.DEGRADED)
            if self._can_recover(state):
                return _Gap(state.next_id)
            # Any part of what the rank has published may be wrong now.
            self._sink.forget(*rank)
        elif state.trust is Trust.DEGRADED and self._can_recover(state):
            return _Gap(None)
        state.next_id = event_id + 1
        self._sink.apply(event)
        state.counts.count(event)
        if event.event.data == "cleared":  # nothing from before counts any more
            self._trust(rank, state, Trust.EXACT)
        if state.target is not None and not state.repeats:
            self._silences.begin(rank, asyncio.get_running_loop().time())
        return None

    def _repeated(self, rank: WorkerRank, state: _State) -> _Gap | None:
        """Take the last event of a worker for the second time: nothing is missing behind it."""
        state.repeats = True
        self._silences.end(rank)
        return _Gap(None) if state.trust is Trust.DEGRADED and self._can_recover(state) else None

    def _trust(self, rank: WorkerRank, state: _State, trust: Trust) -> None:
        if state.trust is not trust:
            state.trust = trust
            if self._on_trust is not None:
                self._on_trust(rank, trust)

    # -- recovery ----------------------------------------------------------------------------------------------------

    def _can_recover(self, state: _State) -> bool:
        return state.target is not None and asyncio.get_running_loop().time() >= state.paused_until

    def _start_recovery(self, rank: WorkerRank, state: _State, start: int | None) -> None:
        self._silences.end(rank)
        state.recovery = self._start(self._recover(rank, state, start), f"kv recovery {rank.worker_id:x}")

    async def _recover(self, rank: WorkerRank, state: _State, start: int | None) -> None:
        """Request what is missing from `start` on (None: everything), apply it, and then what has waited.

        It is cancelled when the rank is dropped.
        """
        try:
            gap: _Gap | None = _Gap(start)
            while gap is not None:
                await self._request(rank, state, gap.start)
                gap = await self._apply_waiting(rank, state)
        except Exception:  # the boundary: a fault of ours about one rank must not end the events of the others
            logger.exception("the KV events of worker %x rank %d cannot be recovered", *rank)
            self._fail(rank, state)
        state.recovery = None

    async def _request(self, rank: WorkerRank, state: _State, start: int | None) -> None:
        first = state.waiting.first
        cause = 0 if first is None else first.event.event_id
        answer = await self._answer(rank, state, start)
        if answer is None:
            return
        await self._apply_answer(rank, state, *answer)
        first = state.waiting.first
        if first is not None and state.next_id is not None and cause > state.next_id:
            # The worker does not know what came before this event. Another request would have the same answer.
            logger.warning("worker %x rank %d: KV event %d is not one of its own", *rank, cause)
            if first.event.event_id == cause:
                state.waiting.take()
            state.foreign_until = asyncio.get_running_loop().time() + FOREIGN_SECONDS
            self._silences.begin_once(rank, asyncio.get_running_loop().time())
            self._trust(rank, state, Trust.DEGRADED)

    async def _apply_waiting(self, rank: WorkerRank, state: _State) -> _Gap | None:
        """Apply what has waited, up to another gap; return it."""
        turns = Turns()
        while state.waiting:
            event = state.waiting.take()
            gap = self._advance(rank, state, event)
            if gap is not None:
                state.waiting.put_back(event)
                return gap
            await turns.spend(event)
        return None

    async def _answer(
        self, rank: WorkerRank, state: _State, start: int | None
    ) -> tuple[KvAnswer, list[RouterEvent]] | None:
        """Return what the worker answers, with its events; None when every attempt has failed."""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_RETRY_SECONDS * 2 ** (attempt - 1))
            assert state.target is not None
            try:
                answer = await self._sources.request(rank, state.target, start)
                if answer.kind == "TooNew" and start == answer.last_event_id + 1 and not state.waiting:
                    return KvAnswer("Events", last_event_id=answer.last_event_id), []  # nothing was lost
                if answer.kind in ("TooNew", "InvalidRange") and start is not None:
                    # It counts from the beginning again: another life of the same worker.
                    start = None
                    answer = await self._sources.request(rank, state.target, None)
                return answer, await _read(answer)
            except UNANSWERED as error:
                level = logging.WARNING if attempt == ATTEMPTS - 1 else logging.DEBUG
                logger.log(level, "worker %x rank %d does not report what it holds: %s", *rank, error)
        self._fail(rank, state)
        return None

    def _fail(self, rank: WorkerRank, state: _State) -> None:
        """Request nothing for a while."""
        state.paused_until = asyncio.get_running_loop().time() + PAUSE_SECONDS
        self._trust(rank, state, Trust.DEGRADED)

    async def _apply_answer(self, rank: WorkerRank, state: _State, answer: KvAnswer, events: list[RouterEvent]) -> None:
        is_dump = answer.kind == "TreeDump"
        if is_dump:
            self.dumps += 1
            state.counts.resyncs += state.has_answered
            self._sink.forget(*rank)
            self._trust(rank, state, Trust.DEGRADED)  # until all of it is there
        turns, next_id = Turns(), state.next_id
        for event in events:
            if is_dump or next_id is None or event.event.event_id >= next_id:
                if state.has_answered:  # else it is history: its worker removed that before the question
                    state.counts.count(event)
                for piece in pieces_of(event):
                    self._sink.apply(piece)
                    await turns.spend(piece)
        state.next_id, state.has_answered = answer.last_event_id + 1, True
        self._trust(rank, state, Trust.EXACT)


async def _read(answer: KvAnswer) -> list[RouterEvent]:
    """Return the events of an answer. Raises BadEvents."""
    if answer.kind not in ("Events", "TreeDump"):
        raise BadEvents(f"an answer of the kind {answer.kind}")
    turns, found = Turns(), []
    for entry in answer.events:
        event = read_answered(entry)
        found.append(event)
        await turns.spend(event)
    return found
