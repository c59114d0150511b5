"""What processes request of each other so that any of them answers for all, and the workers that an operator keeps from new requests.

The processes are those of one port, and the other frontends of the cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.other_frontends import OtherFrontends, PeerAnswers
from dynamo.frontend.parts.inspector.pictures import PictureQuery
from dynamo.frontend.parts.inspector.stream_rows import worker_name
from dynamo.frontend.parts.inspector.tables import Tables
from dynamo.frontend.parts.inspector.visitors import Visitor
from dynamo.frontend.pipeline.exchange import Exchange, RequestAborted
from dynamo.protocol.inspector.actions import AbortResult, BulkAbortResult, WorkerActionRequest
from dynamo.protocol.inspector.filters import parse_filter
from dynamo.router.workers.worker_holds import WorkerHold

# What an operator may do: end requests. Every action is noted, also one that was refused.

logger = logging.getLogger(__name__)


# What the processes of one port, and the frontends of a cluster, request of each other, so that any of them answers for all.

"""Under which the parent of a group shares the token that all processes let in."""

OTHER_VERSION: Final = "a frontend of another version"


T = TypeVar("T")


class AskPicture(Struct, frozen=True, tag=True):
    """What do you show?"""

    query: PictureQuery
    hides_texts: bool = False  # of errors: they may repeat what clients wrote


class AskDetail(Struct, frozen=True, tag=True):
    """What do you know of this request?"""

    id: str
    with_content: bool = False


class AskBundle(Struct, frozen=True, tag=True):
    """What is kept of this failure?"""

    id: str
    with_content: bool = False


class AskAbort(Struct, frozen=True, tag=True):
    """End this request, if you have it."""

    id: str
    reason: str


class AskAbortMatching(Struct, frozen=True, tag=True):
    """End, or count, the requests that a filter holds for."""

    filter: str
    reason: str
    dry_run: bool


class AskHold(Struct, frozen=True, tag=True):
    """Keep this worker from new requests, or take that back. Only frontends call each other: a group shares its holds.

    The answer is empty; a process that does not do so is named as silent.
    """

    worker: str
    kind: str  # as `WorkerHold` has it
    by: str
    reason: str
    ends_ms: int | None  # since the epoch; None: no end


Question = AskPicture | AskDetail | AskBundle | AskAbort | AskAbortMatching | AskHold


class GroupPeer(Protocol):
    """What is needed of the other processes."""

    async def ask(self, question: bytes) -> tuple[list[bytes], list[str]]: ...

    def on_asked(self, answer: Callable[[bytes], bytes]) -> None: ...

    async def share(self, key: str, value: bytes) -> None: ...

    def on_shared(self, take: Callable[[str, bytes], None]) -> None: ...


class Members:
    """The other processes of the port, and the other frontends; none where this one is alone."""

    def __init__(self, peers: GroupPeer | None, answer: Callable[[Question], Any]) -> None:
        """`answer`: the answer of this process to a question."""
        self.peers, self._answer = peers, answer
        self.others: OtherFrontends | None = None  # where the inspectors of a cluster call each other
        if peers is not None:
            peers.on_asked(self._on_asked)

    async def ask(self, question: Question, kind: type[T]) -> tuple[list[T], list[str]]:
        """Return the answers of the other processes, and of the other frontends, and the names of those that gave none."""
        asked = msgspec.msgpack.encode(question)
        if self.others is None:
            answers, silent = await self._ask_group(asked)
        else:
            own, others = await asyncio.gather(self._ask_group(asked), self.others.ask(asked))
            answers, silent = [*own[0], *others[0]], [*own[1], *others[1]]
        found = []
        for each in answers:
            try:
                found.append(msgspec.msgpack.decode(each, type=kind))
            except msgspec.MsgspecError as error:  # of another version, as while a cluster is upgraded
                logger.info("an answer of another frontend is not understood, and is left out: %s", error)
                silent = [*silent, OTHER_VERSION]
        return found, silent

    async def ask_frontends(self, question: Question) -> list[str]:
        """Let the other frontends do something; return the names of those that did not, or not in time."""
        if self.others is None:
            return []
        _, silent = await self.others.ask(msgspec.msgpack.encode(question))
        return silent

    async def answer_for_all(self, question: Question) -> PeerAnswers:
        """Return the answers of the processes of this frontend to a question of another frontend."""
        asked = msgspec.msgpack.encode(question)
        answers, silent = await self._ask_group(asked)
        return PeerAnswers([self._on_asked(asked), *answers], silent)

    async def _ask_group(self, question: bytes) -> tuple[list[bytes], list[str]]:
        if self.peers is None:
            return [], []
        try:
            return await self.peers.ask(question)
        except TimeoutError:
            return [], ["the other processes"]

    def _on_asked(self, question: bytes) -> bytes:
        return msgspec.msgpack.encode(self._answer(msgspec.msgpack.decode(question, type=Question)))


MAX_SHOWN_IDS: Final = 100


class ActionRate:
    """A bound on how often operators act: some at once, then one each half a second."""

    AT_ONCE: Final = 20.0
    PER_SECOND: Final = 2.0

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._left = self.AT_ONCE
        self._at: float | None = None

    def take(self) -> bool:
        """Return whether one more action may take place now."""
        now = self._now()
        if self._at is not None:
            self._left = min(self.AT_ONCE, self._left + (now - self._at) * self.PER_SECOND)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Actions:
    """The actions of one process. Used on the event loop only."""

    def __init__(self, tables: Tables, now: Callable[[], float]) -> None:
        self._streams, self._recent, self._events = tables.streams, tables.recent, tables.events
        self._frontend_id = tables.frontend_id
        self.rate = ActionRate(now)

    def note(
        self, what: str, by: str, outcome: str, *, request_id: str | None = None, worker: str | None = None
    ) -> None:
        """Note an action, or that it was refused, in the log and among the events."""
        logger.info("inspector: %s by %s: %s", what, by, outcome)
        self._events.add("action", f"{what}: {outcome}", request_id=request_id, worker=worker, by=by)

    def abort(self, id: str, reason: str) -> AbortResult | None:
        """End the request with this id, ours or its client's; None: there is none, and none was aborted."""
        exchange = self._streams.find(id)
        if exchange is not None:
            return self._abort(exchange, reason)
        ended = self._recent.find(id)
        if ended is None or ended.outcome != "aborted":
            return None
        return AbortResult(
            id=ended.exchange_id, status="aborted", frontend=self._frontend_id, message="It had ended so before."
        )

    def abort_matching(self, filter: str, reason: str, *, dry_run: bool) -> BulkAbortResult:
        """End the requests that a filter holds for, or count them. Raises FilterError."""
        found = self._streams.matching(parse_filter(filter))
        if not dry_run:
            for exchange in found:
                exchange.abort(RequestAborted(reason))
        ids = [exchange.response_id for exchange in found[:MAX_SHOWN_IDS]]
        return BulkAbortResult(matched=len(found), aborted=0 if dry_run else len(found), dry_run=dry_run, ids=ids)

    def _abort(self, exchange: Exchange, reason: str) -> AbortResult:
        row = self._streams.row(exchange)
        running = () if exchange.work is None else exchange.work.running
        workers = [worker_name(each.instance_id) for each in running if each.instance_id is not None]
        exchange.abort(RequestAborted(reason))
        told = f"worker {', '.join(dict.fromkeys(workers))} got a kill" if workers else "no worker had it"
        return AbortResult(
            id=row.id,
            status="aborting",
            frontend=self._frontend_id,
            phase=row.phase,
            workers=list(dict.fromkeys(workers)),
            message=f"The client gets the error request_aborted; {told}.",
        )


HOLD_KEY: Final = "inspector/hold/"
QUARANTINE_SECONDS: Final = 60.0  # where no time is given

_KINDS: Final = {"drain": "drain", "undrain": "", "quarantine": "quarantine"}


class _SharedHold(Struct):
    """A hold as the processes report it to each other. One that starts later gets it, too, and may not begin its time anew."""

    hold: WorkerHold
    ends_ms: int | None  # since the epoch


class WorkerOperator:
    """Holds workers, and lets them go. Used on the event loop only."""

    def __init__(self, models: ModelDirectory, members: Members, clock: InspectorClock) -> None:
        self._models, self._members, self._peers, self._clock = models, members, members.peers, clock
        self._ends: dict[int, asyncio.TimerHandle] = {}  # of the holds with an end, by worker
        if self._peers is not None:
            self._peers.on_shared(self._take)

    def knows(self, id: str) -> bool:
        """Return whether a worker with this id, in hexadecimal digits, is there."""
        return any(worker_name(entry.instance_id) == id for group in self._models.groups() for entry in group.accepted)

    async def act(self, action: str, id: str, asked: WorkerActionRequest, visitor: Visitor) -> list[str]:
        """Do "drain", "undrain" or "quarantine"; return the names of the other frontends that did not do so.

        Raises TimeoutError where the other processes of this frontend do not answer.
        """
        kind = _KINDS[action]
        seconds = QUARANTINE_SECONDS if kind == "quarantine" and asked.seconds is None else asked.seconds
        ends_ms = None if seconds is None else self._clock.now_ms() + round(seconds * 1000)
        hold = WorkerHold(int(id, 16), kind, visitor.shown_name, asked.reason, seconds)
        question = AskHold(id, kind, hold.by, hold.reason, ends_ms)
        _, silent = await asyncio.gather(self._hold(id, hold, ends_ms), self._members.ask_frontends(question))
        return silent

    async def take(self, asked: AskHold) -> str | None:
        """Do what an operator has requested of another frontend; return why not, where it is not done.

        A worker that is not known here is refused: a hold on it would not last until it comes.
        """
        if not self.knows(asked.worker):
            return f"knows no worker {asked.worker[:64]}"
        seconds = None if asked.ends_ms is None else max(0.0, (asked.ends_ms - self._clock.now_ms()) / 1000)
        hold = WorkerHold(int(asked.worker, 16), asked.kind, asked.by, asked.reason, seconds)
        try:
            await self._hold(asked.worker, hold, asked.ends_ms)
        except TimeoutError:
            return "its other processes did not answer"
        return None

    async def _hold(self, id: str, hold: WorkerHold, ends_ms: int | None) -> None:
        self._put(hold)
        if self._peers is not None:
            await self._peers.share(HOLD_KEY + id, msgspec.msgpack.encode(_SharedHold(hold, ends_ms)))

    def close(self) -> None:
        """Wait for no end of a hold any more. Idempotent."""
        for handle in self._ends.values():
            handle.cancel()
        self._ends.clear()

    def _take(self, key: str, value: bytes) -> None:
        if not key.startswith(HOLD_KEY):
            return
        shared = msgspec.msgpack.decode(value, type=_SharedHold)
        hold = shared.hold
        if shared.ends_ms is not None:
            left = (shared.ends_ms - self._clock.now_ms()) / 1000
            hold = msgspec.structs.replace(hold, seconds=max(0.0, left))
        self._put(hold)

    def _put(self, hold: WorkerHold) -> None:
        holds = self._models.holds
        present = frozenset(entry.instance_id for group in self._models.groups() for entry in group.accepted)
        holds.keep_only(present)
        holds.put(hold, self._clock.now())
        for id in [id for id in self._ends if id == hold.instance_id or id not in present]:
            self._ends.pop(id).cancel()
        if hold.kind and hold.seconds is not None:
            loop = asyncio.get_running_loop()
            self._ends[hold.instance_id] = loop.call_later(hold.seconds, self._end, hold.instance_id)
        self._look_again()

    def _end(self, instance_id: int) -> None:
        """Let requests that wait for a worker know that its hold is over."""
        self._ends.pop(instance_id, None)
        self._look_again()

    def _look_again(self) -> None:
        for pool in self._models.pools():
            if pool.gate is not None:
                pool.gate.changed()
