"""One answer of the workers behind a `RoutedEndpoint`: the attempts at them, the booking, and the items."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from dynamo.errors import DynamoException, WorkerUnavailable
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery
from dynamo.placement.kv_state import Selection
from dynamo.router.dispatch.course import (
    Choose,
    Chosen,
    Course,
    CourseRules,
    CourseState,
    Event,
    Failed,
    Lost,
    NoWorker,
    Tick,
    may_be_taken,
)
from dynamo.router.dispatch.drive import ITEMS, OPENED, drive
from dynamo.router.kv.fetch_hints import fetch_hint
from dynamo.router.kv.sessions import SessionHold, session_id_of
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import OBJECT_INDEX, ResponseStream, StreamItem

if TYPE_CHECKING:
    from dynamo.router.standalone.routed_endpoint import RoutedEndpoint

logger = logging.getLogger(__name__)

OTHER_WORKERS: Final = 3  # that a request may be sent to, where workers decline it before they answer

_OPENING: Final = CourseState.OPENING
_READING: Final = CourseState.READING


class RoutedRequest(NamedTuple):
    """One request to the router."""

    body: Mapping[str, object]
    context: Context
    query: KvQuery


class RoutedAnswer:
    """The items of one answer, from whichever worker serves it. The booking ends with the answer, or with `close`."""

    __slots__ = ("_booked", "_endpoint", "_given", "_session", "_stream", "course", "request", "selection")

    def __init__(self, endpoint: RoutedEndpoint, body: Mapping[str, object], context: Context, query: KvQuery) -> None:
        self._endpoint = endpoint
        self.request = RoutedRequest(body, context, query)
        pinned = query.pinned_worker_id is not None
        self.course = Course(
            CourseRules(
                "route", OTHER_WORKERS, is_pinned=pinned, only_unsent=True, is_movable=False, readmits_full=False
            )
        )
        self._booked: str | None = None  # the name of the booking
        self._session: SessionHold | None = None
        self._stream: ResponseStream | None = None
        self._given: Selection | None = None  # the choice for a request that need not wait for its turn; taken once
        self.selection: Selection | None = None  # of the worker that serves it, or was called last

    async def start(self) -> None:
        """Wait for a turn where all workers have too much to prefill, then `begin`; do nothing when cancelled meanwhile."""
        (gate, sessions), context = self._endpoint.pre_dispatch, self.request.context
        try:
            if sessions is not None and (session_id := session_id_of(self.request.body)) is not None:
                own = self.request.query
                self._session = await sessions.hold(
                    session_id, context, pinned_worker_id=own.pinned_worker_id, pinned_dp_rank=own.pinned_dp_rank
                )
            selection: Selection | None = None
            if gate is not None:
                selection, query = self._select()
                policy = gate.parks(selection, query, context)
                if policy is not None and self._session is not None and self._session.may_go_elsewhere:
                    self._session.go_elsewhere()
                    selection, query = self._select()
                    policy = gate.parks(selection, query, context)
                if policy is not None:
                    if not await gate.wait(policy, selection, query, context):
                        self.close()
                        return
                    selection = None
            await self.begin(selection)
        except BaseException:
            self.close()
            raise

    def _select(self) -> tuple[Selection, KvQuery]:
        """Choose a worker: that of the session where it is bound. Return the choice and its query."""
        query, bound = self.request.query, None if self._session is None else self._session.rank
        info = None if bound is None else self._endpoint.router.ranks.get(bound)
        if bound is not None and query.pinned_worker_id is None and info is not None and not info.is_busy:
            query = msgspec.structs.replace(query, pinned_worker_id=bound.worker_id, pinned_dp_rank=bound.dp_rank)
        return self._endpoint.router.select(query, _now()), query

    async def begin(self, selection: Selection | None = None) -> None:
        """Choose a worker and open the stream there; go on with others where it declines. See `RoutedEndpoint.open`."""
        self._given = selection
        await drive(self.course, self)

    async def choose(self, order: Choose) -> Event:
        """Choose a rank that has not declined."""
        self.request.query.excluded = declined = {worker_id for _, worker_id in order.excluded}
        if order.last is not None and declined.issuperset(each.worker_id for each in self._endpoint.router.ranks):
            return Failed(order.last)
        try:
            self.selection = selection = self._given or self._select()[0]
        except WorkerUnavailable as error:
            return Failed(error)
        self._given = None
        return Chosen((self._endpoint.endpoint.path, selection.rank.worker_id))

    def no_worker(self, error: WorkerUnavailable) -> NoWorker:
        """Let the request wait for none."""
        return NoWorker(error)

    async def attempt(self) -> Event:
        """Open the stream; what comes first is awaited by its reader."""
        assert self.selection is not None
        try:
            await self._open_at(self.selection)
        except DynamoException as error:
            return self._lost(error)
        if self._session is not None:
            self._session.sent(*self.selection.rank)
        return OPENED

    async def again(self, error: DynamoException) -> bool:
        """Log the failure."""
        assert self.selection is not None
        logger.info(
            "request %s: worker %x failed before its first token (%s: %s)",
            self.request.context.id(),
            self.selection.rank.worker_id,
            type(error).__name__,
            error,
        )
        return True

    async def wait(self, seconds: float) -> Event:
        """Return at once: no request waits for a worker behind its turn."""
        return Tick()

    async def _open_at(self, selection: Selection) -> None:
        endpoint, rank = self._endpoint, selection.rank
        self._booked = endpoint.booking_id(self.request.context.id())
        endpoint.router.book(self._booked, selection, _now(), expires=False)
        routing = self.request.body.get("routing")
        hints = {**(routing if isinstance(routing, dict) else {}), "dp_rank": rank.dp_rank}
        try:
            instance, fetch = endpoint.client.named(rank.worker_id), fetch_hint(endpoint.router, selection)
            self._stream = await endpoint.client.open(
                instance, {**self.request.body, "routing": hints, **fetch}, self.request.context
            )
        except BaseException:
            self._unbook()
            raise

    def _lost(self, error: DynamoException) -> Lost:
        """Take the failure of a worker; return what the course is to know of it."""
        self._unbook()
        has_declined = not may_be_taken(error)
        if (
            self._session is not None
            and self.selection is not None
            and (has_declined or self.course.state is not _OPENING)
        ):
            self._session.failed(self.selection.rank.worker_id, error)
        return Lost(error)

    async def next_batch(self) -> list[StreamItem]:
        """Return all that has arrived since the last call, waiting for at least one item; [] at the end.

        The first part of the answer names its worker (`routing_data`). Raises the error that the answer ends with.
        """
        while self._stream is not None:
            try:
                items = await self._next_items()
            except BaseException:
                self.close()
                raise
            if items is None:
                continue
            if items:
                return self._counted(items)
            self.close()
        return []

    async def _next_items(self) -> list[StreamItem] | None:
        """Return what the worker sent next; None: it declined, and another one was called."""
        assert self._stream is not None
        try:
            return await self._stream.next_batch()
        except DynamoException as error:
            if type(self.course.step(self._lost(error))) is Choose:
                await self.again(error)
            await drive(self.course, self)  # raises the error where no other worker is tried
            return None

    def close(self) -> None:
        """End the answer and its booking, and let its session go. Idempotent."""
        self._unbook()
        if self._session is not None:
            self._session.release()

    def _unbook(self) -> None:
        stream, self._stream = self._stream, None
        booked, self._booked = self._booked, None
        if stream is not None:
            stream.close()
        if booked is not None:
            self._endpoint.router.free(booked, _now())

    def _counted(self, items: list[StreamItem]) -> list[StreamItem]:
        """Count what has come for the router, and name the worker in the first part."""
        router, booked = self._endpoint.router, self._booked
        assert booked is not None
        assert self.selection is not None
        has_begun = self.course.state is _READING
        if not has_begun:
            router.first_token(booked, now := _now())
            if (reached := self.request.query.aim.reached) is not None:
                reached(now)
        tokens = 0
        for item in items:
            if item.index != OBJECT_INDEX:
                tokens += len(item.token_ids)
                if not has_begun:
                    item.extra = _with_worker(item.extra or {}, self.selection.rank)
            elif (chunk := _chunk_of(item)) is not None:
                tokens += len(chunk["token_ids"])
                if not has_begun:
                    item.extra = {**(item.extra or {}), "data": _with_worker(chunk, self.selection.rank)}
            else:
                continue
            if not has_begun:
                has_begun = True
                self.course.step(ITEMS)
        router.output(booked, tokens, _now())
        return items


def _chunk_of(item: StreamItem) -> dict[str, Any] | None:
    """Return the chunk of a plain handler, where an object is one."""
    data = (item.extra or {}).get("data")
    return data if isinstance(data, dict) and isinstance(data.get("token_ids"), list) else None


def _with_worker(members: dict[str, object], rank: WorkerRank) -> dict[str, object]:
    """Return the members of the first chunk, with the worker that serves the request."""
    data = members.get("routing_data")
    served_by = {
        "prefill_worker_id": rank.worker_id,
        "prefill_dp_rank": rank.dp_rank,
        "decode_worker_id": rank.worker_id,
        "decode_dp_rank": rank.dp_rank,
    }
    return {**members, "routing_data": {"worker_id": served_by, **(data if isinstance(data, dict) else {})}}


def _now() -> float:
    return asyncio.get_running_loop().time()
