"""The KV events of a model's workers, whole and in order: gaps are seen, and filled by asking the worker.

A worker that joins is asked for everything it holds; from then on its events are followed. An event id that is too high is a
gap: what is missing is asked for, and live events wait meanwhile. What cannot be had is no error: routing goes on with less,
and the trust in the rank says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from dynamo.errors import DynamoException
from dynamo.kv.events import BadEvents, KvAnswer, RouterEvent, read_answer, read_events
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import Trust
from dynamo.runtime.client import Client
from dynamo.runtime.context import Context
from dynamo.runtime.discovery.base import EVENT_SOURCES, Change, Put
from dynamo.runtime.discovery.follow import follow
from dynamo.runtime.endpoint import Endpoint
from dynamo.runtime.event_plane.base import Event

__all__ = ["MAX_RECOVERIES", "KvEventFeed", "KvSink"]

logger = logging.getLogger(__name__)

TOPIC: Final = "kv-events"
MAX_WAITING: Final = 1024  # live events of one rank that wait for an answer; more are dropped, which is one more gap
MAX_RANKS: Final = 65_536  # that events are taken of; a publisher gone wild must not take the router's memory
MAX_RECOVERIES: Final = 16  # at once: each may bring the whole cache of a rank
ASK_SECONDS: Final = 30.0
ATTEMPTS: Final = 8
FIRST_RETRY_SECONDS: Final = 0.2  # doubled with each further attempt
PAUSE_SECONDS: Final = 30.0  # after the last attempt; then the next event of the rank begins another recovery

OnTrust = Callable[[WorkerRank, Trust], None]
"""Called whenever the trust in what a rank holds has changed."""


class KvSink(Protocol):
    """What keeps the blocks: a router's index. Called on the event loop."""

    def apply(self, event: RouterEvent) -> object:
        """Apply one event; what is returned is not read. The events of a rank arrive once each and in order."""

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Drop all blocks of a rank: the rank left, or is about to send a fresh state. From then on it holds nothing."""


class _Source(msgspec.Struct):
    """What is needed of a `v1/event_sources` record."""

    metadata: _Metadata


class _Metadata(msgspec.Struct):
    worker: _Worker
    recovery_target: _Target


class _Worker(msgspec.Struct):
    worker_id: int
    dp_rank: int = 0


class _Target(msgspec.Struct):
    namespace: str
    component: str
    endpoint: str
    instance_id: int


@dataclass(slots=True)
class _State:
    """One rank."""

    next_id: int | None = None  # None: nothing was heard yet
    target: _Target | None = None  # where missing events can be requested; None: nowhere
    waiting: deque[RouterEvent] = field(default_factory=deque)
    asking: asyncio.Task[None] | None = None
    trust: Trust = Trust.NONE
    paused_until: float = 0.0  # no recovery before: the last one failed for good


class KvEventFeed:
    """`async with KvEventFeed(endpoint, sink): ...` follows until the block is left."""

    def __init__(
        self,
        endpoint: Endpoint,
        sink: KvSink,
        *,
        on_trust: OnTrust | None = None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """`endpoint`: the one whose workers' events are meant. `slots`: shared by feeds that recover side by side."""
        self._endpoint = endpoint
        self._runtime = endpoint.runtime
        self._sink = sink
        self._on_trust = on_trust
        self._slots = slots or asyncio.Semaphore(MAX_RECOVERIES)
        self._states: dict[WorkerRank, _State] = {}
        self._ranks: dict[str, WorkerRank] = {}  # by key of the source
        self._clients: dict[str, Client] = {}  # by endpoint path
        self._stack = AsyncExitStack()
        self.gaps = 0  # how often events were missing
        self.dumps = 0  # how often everything was told anew

    async def __aenter__(self) -> KvEventFeed:
        events = await self._stack.enter_async_context(
            self._runtime.events.subscribe(self._endpoint.event_scope, TOPIC)
        )
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._group = group
        following = [
            group.create_task(self._follow_events(events), name="kv events"),
            group.create_task(self._follow_sources(), name="kv event sources"),
        ]

        def end() -> None:
            for task in following:
                task.cancel()
            for state in self._states.values():
                if state.asking is not None:
                    state.asking.cancel()

        self._stack.callback(end)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    def forget(self, rank: WorkerRank) -> None:
        """Drop a rank whose worker has gone. A rank with a record of its own is dropped when that record goes."""
        state = self._states.get(rank)
        if state is not None and state.target is None:
            self._drop(rank)

    def forget_all(self) -> None:
        """Drop every rank: its events are no longer followed."""
        for rank in list(self._states):
            self._drop(rank)

    def _drop(self, rank: WorkerRank) -> None:
        state = self._states.pop(rank, None) or _State()
        if state.asking is not None:
            state.asking.cancel()
        self._sink.forget(*rank)
        self._trust(rank, state, Trust.NONE)

    # -- live --------------------------------------------------------------------------------------------------------

    async def _follow_events(self, events: AsyncIterator[Event]) -> None:
        async for message in events:
            try:
                found = read_events(message.payload)
            except BadEvents as error:
                logger.warning("a KV event message of publisher %x is not read: %s", message.publisher_id, error)
                continue
            for event in found:
                self._take(event)

    def _take(self, event: RouterEvent) -> None:
        rank = WorkerRank(event.worker_id, event.event.dp_rank)
        state = self._states.get(rank)
        if state is None:
            if len(self._states) >= MAX_RANKS:
                return
            state = self._states[rank] = _State()
        if state.asking is not None:
            if len(state.waiting) >= MAX_WAITING:
                state.waiting.clear()
            state.waiting.append(event)
            return
        self._advance(rank, state, event)

    def _advance(self, rank: WorkerRank, state: _State, event: RouterEvent) -> None:
        """Apply the event if it is the next one."""
        event_id = event.event.event_id
        if state.next_id is None:
            # Without a dump only a rank that is heard from its first event on is known whole.
            self._trust(rank, state, Trust.EXACT if event_id <= 1 else Trust.DEGRADED)
        elif event_id < state.next_id:
            return
        elif event_id > state.next_id:
            self.gaps += 1
            logger.info("worker %x rank %d: KV events %d to %d are missing", *rank, state.next_id, event_id - 1)
            self._trust(rank, state, Trust.DEGRADED)
            if self._can_ask(state):
                state.waiting.append(event)
                self._ask(rank, state, state.next_id)
                return
            # What the rank said before may be wrong in any part of it.
            self._sink.forget(*rank)
        elif state.trust is Trust.DEGRADED and self._can_ask(state):
            state.waiting.append(event)
            self._ask(rank, state, None)
            return
        state.next_id = event_id + 1
        self._sink.apply(event)
        if event.event.data == "cleared":  # nothing from before counts any more
            self._trust(rank, state, Trust.EXACT)

    def _trust(self, rank: WorkerRank, state: _State, trust: Trust) -> None:
        if state.trust is not trust:
            state.trust = trust
            if self._on_trust is not None:
                self._on_trust(rank, trust)

    # -- asking ------------------------------------------------------------------------------------------------------

    def _can_ask(self, state: _State) -> bool:
        return state.target is not None and asyncio.get_running_loop().time() >= state.paused_until

    def _ask(self, rank: WorkerRank, state: _State, start: int | None) -> None:
        state.asking = self._group.create_task(self._recover(rank, state, start), name=f"kv recovery {rank[0]:x}")

    async def _recover(self, rank: WorkerRank, state: _State, start: int | None) -> None:
        """Request what is missing from `start` on (None: everything), apply it, and then what has waited."""
        cause = state.waiting[0].event.event_id if state.waiting else 0
        answer = await self._answer(rank, state, start)
        if answer is not None:
            self._apply_answer(rank, state, answer)
            if state.next_id is not None and cause > state.next_id and state.waiting:
                # The worker does not know what came before this event. Another question would have the same answer.
                logger.warning("worker %x rank %d: KV event %d is not one of its own", *rank, cause)
                if state.waiting[0].event.event_id == cause:
                    state.waiting.popleft()
                self._trust(rank, state, Trust.DEGRADED)
        state.asking = None
        while state.waiting and state.asking is None:  # another gap among them asks again; the rest waits on
            self._advance(rank, state, state.waiting.popleft())

    async def _answer(self, rank: WorkerRank, state: _State, start: int | None) -> KvAnswer | None:
        """Return what the worker answers; None when every attempt has failed."""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_RETRY_SECONDS * 2 ** (attempt - 1))
            assert state.target is not None
            try:
                answer = await self._query(rank, state.target, start)
                if answer.kind in ("TooNew", "InvalidRange") and start is not None:
                    # It counts from the beginning again: another life of the same worker.
                    start = None
                    answer = await self._query(rank, state.target, None)
            except (DynamoException, OSError, BadEvents) as error:  # TimeoutError is an OSError
                level = logging.WARNING if attempt == ATTEMPTS - 1 else logging.DEBUG
                logger.log(level, "worker %x rank %d does not report what it holds: %s", *rank, error)
            else:
                return answer
        state.paused_until = asyncio.get_running_loop().time() + PAUSE_SECONDS
        self._trust(rank, state, Trust.DEGRADED)
        return None

    def _apply_answer(self, rank: WorkerRank, state: _State, answer: KvAnswer) -> None:
        is_dump = answer.kind == "TreeDump"
        if is_dump:
            self.dumps += 1
            self._sink.forget(*rank)
        for event in answer.events:
            if is_dump or state.next_id is None or event.event.event_id >= state.next_id:
                self._sink.apply(event)
        state.next_id = answer.last_event_id + 1
        self._trust(rank, state, Trust.EXACT)

    async def _query(self, rank: WorkerRank, target: _Target, start: int | None) -> KvAnswer:
        path = f"{target.namespace}.{target.component}.{target.endpoint}"
        body = {"worker_id": rank[0], "dp_rank": rank[1], "start_event_id": start, "end_event_id": None}
        context = Context()
        async with self._slots, asyncio.timeout(ASK_SECONDS):
            client = self._clients.get(path)
            if client is None:
                client = self._clients[path] = await self._runtime.endpoint(path).client()
            stream = await client.open(client.named(target.instance_id), body, context)
            try:
                items = await stream.next_batch()
            finally:
                stream.close()
        if not items:
            raise BadEvents("an empty answer")
        answer = read_answer(items[0].extra)
        if answer.kind == "Error":
            raise BadEvents(answer.text)
        return answer

    # -- sources ---------------------------------------------------------------------------------------------------------

    async def _follow_sources(self) -> None:
        prefix = f"{EVENT_SOURCES}/{self._endpoint.event_scope.path_encoded}/topic/{TOPIC}"
        async with aclosing(follow(self._runtime.discovery, prefix)) as changes:
            async for batch in changes:
                for change in batch:
                    await self._source_changed(change)

    async def _source_changed(self, change: Change) -> None:
        if isinstance(change, Put):
            try:
                source = msgspec.json.decode(change.value, type=_Source)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                logger.warning("KV event source %s is not read: %s", change.key, error)
                return
            rank = WorkerRank(source.metadata.worker.worker_id, source.metadata.worker.dp_rank)
            self._ranks[change.key] = rank
            state = self._states.setdefault(rank, _State())
            if state.target != source.metadata.recovery_target:
                state.target = source.metadata.recovery_target
                if state.asking is None:
                    self._ask(rank, state, None)
            return
        gone = self._ranks.pop(change.key, None)
        if gone is None or gone in self._ranks.values():
            return
        target = self._states[gone].target if gone in self._states else None
        self._drop(gone)
        if target is not None:
            path = f"{target.namespace}.{target.component}.{target.endpoint}"
            client = self._clients.pop(path, None)
            if client is not None:
                await client.close()
