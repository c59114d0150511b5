"""The attempts at the workers that answer a request: what `drive` carries out of its course, up to the first items."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from dynamo.errors import DynamoException, StreamIncomplete, WorkerUnavailable
from dynamo.router.dispatch.course import Choose, Event, NoWorker
from dynamo.router.dispatch.drive import CANCELLED, ITEMS, OPENED
from dynamo.router.dispatch.failover import DispatchRequest, Failover
from dynamo.router.dispatch.migration import Move
from dynamo.router.dispatch.query_of_death import Suspect
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseStream, StreamItem

if TYPE_CHECKING:
    from dynamo.router.dispatch.stream import Dispatcher

logger = logging.getLogger(__name__)


class Silence:
    """Why a worker is left that sends nothing."""

    __slots__ = ("error", "is_exempt", "is_taken")

    def __init__(self, error: DynamoException, *, is_exempt: bool) -> None:
        """`is_exempt`: it does not count against the worker."""
        self.error, self.is_exempt = error, is_exempt
        self.is_taken = False  # the stream has ended for that reason


class AnswerLeg:
    """The stream of an answer at the worker that has the request now (`drive.Leg`)."""

    __slots__ = (
        "_failover", "_first", "_is_closed", "_lost_at", "_retry", "_silence", "_stream",
        "_suspect", "is_reading",
    )  # fmt: skip

    def __init__(self, dispatcher: Dispatcher, request: DispatchRequest, context: Context) -> None:
        self._failover = Failover(dispatcher, request, context)
        request.record.courses.append(self._failover.course)
        self._suspect: Suspect | None = None  # made where there is something to suspect
        self._stream: ResponseStream | None = None
        self._first: list[StreamItem] = []  # what a worker sent first; [] when the request was cancelled before
        self._retry: tuple[Move, float] | None = None  # the move to the worker that is tried now, and when it began
        self._silence: Silence | None = None
        self._lost_at: float | None = None  # when the last worker was lost that had begun to answer
        self._is_closed = False
        self.is_reading = False  # waiting for the worker, and not for the reader

    @property
    def request(self) -> DispatchRequest:
        return self._failover.request

    @property
    def request_id(self) -> str:
        return self._failover.context.id()

    def choose(self, order: Choose) -> Awaitable[Event]:
        """Choose a worker."""
        return self._failover.choose(order)

    def no_worker(self, error: WorkerUnavailable) -> NoWorker:
        """Return what the course is to know of a choice that found no worker."""
        return self._failover.no_worker(error)

    def wait(self, seconds: float) -> Awaitable[Event]:
        """Wait for a change of the workers."""
        return self._failover.wait(seconds)

    async def attempt(self) -> Event:
        """OpenStream the stream at the worker that was chosen, and wait for its first items."""
        failover = self._failover
        request, context = failover.request, failover.context
        timer, record, worker = request.timer, request.record, failover.worker
        assert worker is not None
        clock = asyncio.get_running_loop().time
        if self._suspect is not None:
            self._suspect.sent(worker.instance.instance_id)
        timer.routed()
        sent_at = clock()
        try:
            given = failover.given
            self._stream = stream = await worker.open(request.body if given is None else given.body, context)
            failover.course.step(OPENED)
            timer.dispatched()
            if failover.session is not None:
                failover.session.sent(worker.instance.instance_id, worker.placement.dp_rank)
            self.is_reading = True
            self._first = items = await stream.next_batch()
            if not items and not context.is_stopped():
                raise self._missing_end("the worker ended the stream without a single chunk")
        except DynamoException as error:
            self.is_reading = False
            timer.arrived(failed=True)
            self._release()
            is_exempt = self._is_exempt(error)
            lost = failover.lost(worker, error, is_exempt=is_exempt, has_begun=False)
            if not is_exempt:
                self._suspected().count_failure(failover.pool, worker, error, sent_at=sent_at, now=clock())
            return lost
        if self._retry is not None:
            (move, lost_at), self._retry = self._retry, None
            move.outcome, move.seconds = "success", clock() - lost_at
        self.is_reading = False
        timer.arrived()
        record.instances.append(worker.instance)
        record.placement = worker.placement
        if not items:
            return CANCELLED
        if self._suspect is not None or self._failover.dispatcher.queries_of_death.remembered:
            self._suspected().acquit()
        return ITEMS

    async def again(self, error: DynamoException) -> bool:
        """Prepare another attempt after a worker that failed before its first token."""
        failover = self._failover
        worker = failover.worker
        assert worker is not None
        logger.info(
            "request %s: worker %x failed before its first token (%s: %s)",
            self.request_id, worker.instance.instance_id, type(error).__name__, error,
        )  # fmt: skip
        if not await failover.next_body(error):
            return False
        move = Move(is_ongoing=False)
        self._failover.request.record.moves.append(move)
        self._retry = (move, self._now())
        return True

    def _suspected(self) -> Suspect:
        if self._suspect is None:
            self._suspect = Suspect(
                self._failover.request.body, self.request_id, self._failover.dispatcher.queries_of_death
            )
        return self._suspect

    def _release(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _missing_end(self, text: str) -> DynamoException:
        silence = self._silence
        if silence is None or silence.is_taken:
            return StreamIncomplete(text)
        silence.is_taken = True
        return silence.error

    def _is_exempt(self, error: DynamoException) -> bool:
        return self._silence is not None and self._silence.is_exempt and self._silence.error is error
