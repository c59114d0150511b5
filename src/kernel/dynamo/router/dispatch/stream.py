"""From a request to the items of its answer, whatever happens to the workers. `router/dispatch/course.py` decides; this does it.

`Dispatcher.open` returns a `RoutedStream`. It is read like the stream of one worker; behind it the request may move to
another worker, before its first token (a retry) or after (a migration).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from dynamo.errors import DynamoException, EngineShutdown
from dynamo.placement import PlacementRequest
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.answer_leg import AnswerLeg, Silence
from dynamo.router.dispatch.course import Again, CourseState, Fail, Failed, Finish, NextStage
from dynamo.router.dispatch.drive import CANCELLED, ITEMS, drive
from dynamo.router.dispatch.failover import NO_WAIT, DispatchRequest, WorkerWait
from dynamo.router.dispatch.migration import Move, continued
from dynamo.router.dispatch.query_of_death import QueriesOfDeath
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stages import DispatchStage, StageJob, StageResult, run_stages
from dynamo.router.workers.pool import ModelPool
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseStream, StreamItem, TokenLane

logger = logging.getLogger(__name__)


class Dispatcher:
    """Opens requests at the workers of one model."""

    __slots__ = ("pool", "queries_of_death", "stages", "worker_wait")

    def __init__(
        self,
        pool: ModelPool,
        *,
        worker_wait: WorkerWait = NO_WAIT,
        queries_of_death: QueriesOfDeath | None = None,
    ) -> None:
        """`pool`: the workers that answer. `worker_wait`: how a request waits while there is none. `queries_of_death`: shared by all dispatchers of a process."""
        self.pool = pool
        self.queries_of_death = queries_of_death or QueriesOfDeath()
        self.worker_wait = worker_wait
        self.stages: Sequence[DispatchStage] = ()  # before the worker that answers

    def open(self, request: DispatchRequest, context: Context) -> RoutedStream:
        """Return the stream of a request's answer. Nothing is sent before it is read; close it on every path."""
        stream = RoutedStream(self, request, context)
        if request.stall_detector is not None:
            request.stall_detector.add(stream)
        return stream

    async def advise(self, body: WorkerRequest, record: DispatchRecord, *, pinned: int | None) -> None:
        """Note in `record` where a request would go now. Nothing is sent, and nothing is booked.

        Raises what the choice of a worker raises.
        """
        transfer = worker = None
        for stage in self.stages:
            body, transfer, worker, *_ = await stage.advise(body, record)
        if worker is not None:
            record.placement = worker.placement
            return
        pool, kv = self.pool, self.pool.kv
        query = None if kv is None else await kv.query(body, record, pinned=pinned)
        prompt = body.get("token_ids") or ()
        bound = None if pool.sessions is None else pool.sessions.bound_rank(body)
        request = PlacementRequest(
            token_ids=prompt, pinned_instance_id=pinned, bound=bound, kv=query, transfer=transfer
        )
        record.placement = pool.choose(request).placement


class RoutedStream(AnswerLeg, AsyncIterator[list[StreamItem]]):
    """The items of one answer, whichever workers they come from. Made by `Dispatcher.open`.

    Read it with `next_batch` (or by iterating); from the second batch on, `push` hands items on without waking a task.
    """

    __slots__ = ()

    # -- reading -----------------------------------------------------------------------------------------------------

    async def __anext__(self) -> list[StreamItem]:
        items = await self.next_batch()
        if not items:
            raise StopAsyncIteration
        return items

    async def next_batch(self) -> list[StreamItem]:
        """Return everything new, waiting for something to arrive; [] when the request was cancelled.

        The reader knows the end by the terminal chunk, and calls `finish` then.

        Raises:
            DynamoException: why the request failed; `errors.rule_of` gives the client's status.
        """
        while not self._is_closed:
            stream = self._stream
            if stream is None:
                if self._lost_at is None:
                    if self._failover.dispatcher.queries_of_death.remembered:
                        self._suspected().check(self._now)
                    is_apart = type(await drive(self._failover.course, self)) is NextStage
                    items = await self._run_stages() if is_apart else self._first
                else:
                    items = await self._go_on(self._lost_at)
                if not items:
                    self._on_missing_terminal_chunk()
                return items
            self.is_reading = True
            try:
                items = await stream.next_batch()
                if not items:
                    self._on_missing_terminal_chunk()
            except DynamoException as error:
                self._on_worker_lost(error)
            else:
                return items
            finally:
                self.is_reading = False
        return []

    async def push(
        self,
        take_items: Callable[[list[StreamItem]], bool],
        lane: TokenLane | None = None,
    ) -> None:
        """Call `take_items` with what arrives, at once and without waking a task for it.

        `lane`, where given, may get the token ids of items that hold nothing else, a whole layer sooner: a plane that
        can do so is free to.

        Returns when that returned False or the worker was lost: go on with `next_batch`, unless the terminal chunk was
        among the items. Raises as `next_batch`, and what `take_items` raises. Call it after `next_batch` has returned items.
        """
        stream = self._stream
        if stream is None or self._is_closed:
            return
        self.is_reading = True
        try:
            await _listen(stream, take_items, lane, self._on_missing_terminal_chunk, self._on_worker_lost)
        finally:
            self.is_reading = False

    def finish(self) -> None:
        """Release the worker's stream: its terminal chunk was read."""
        self._is_closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.finish()

    def stop(self) -> None:
        """Send the worker a stop and read nothing more: the reader has found an end of its own."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.stop()
            self._release()

    def close(self) -> None:
        """Leave; a worker that has not ended the stream receives a kill. Idempotent."""
        self._is_closed = True
        if (stall_detector := self._failover.request.stall_detector) is not None:
            stall_detector.remove(self)
        if self._suspect is not None:
            self._suspect.close()
        if self._stream is not None:
            self._release()
        if self._failover.session is not None:
            self._failover.session.release()

    # -- what the stall detector needs (`stall_detector.WatchedStream`) ----------------------------------------------

    @property
    def tokens(self) -> int:
        return self._failover.request.answer.tokens

    @property
    def attempts(self) -> int:
        return self._failover.course.count

    @property
    def instance_id(self) -> int | None:
        worker = self._failover.worker
        return worker.instance.instance_id if worker is not None and self._stream is not None else None

    def fail_over(self, error: DynamoException, *, is_worker_fault: bool = True, is_last: bool = False) -> bool:
        """Leave a worker that sends nothing, because of `error`; return whether that was done.

        Without `is_last` the stream only leaves the worker if another worker can go on.
        """
        stream = self._stream
        if (
            stream is None
            or self._is_closed
            or (self._silence is not None and not self._silence.is_taken)
            or not (is_last or self._failover.can_move(error))
        ):
            return False
        self._silence = Silence(error, is_exempt=not is_worker_fault)
        stream.kill()  # and whatever reads it finds that it has ended
        return True

    # -- the ends of a worker's stream -------------------------------------------------------------------------------

    def _on_missing_terminal_chunk(self) -> None:
        """Take an end without a terminal chunk: a breach, unless the answer is whole or was cancelled."""
        if not self._failover.request.answer.is_complete and not self._failover.context.is_stopped():
            raise self._missing_end("the worker ended the stream without a finish reason")
        self._is_closed = True

    def _on_worker_lost(self, error: DynamoException) -> None:
        """Take the loss of a worker that had begun to answer. Raises `error` unless another one may go on."""
        failover = self._failover
        worker = failover.worker
        assert worker is not None
        dispatcher = failover.dispatcher
        failover.stages = dispatcher.stages
        dispatcher.queries_of_death.note_loss(dispatcher.pool, worker.instance.instance_id, error, self._now())
        lost = failover.lost(worker, error, is_exempt=self._is_exempt(error), has_begun=True)
        instruction = failover.course.step(lost)
        # That a worker was stopped is expected: its requests go on elsewhere, or their end has a line of its own.
        level = logging.INFO if isinstance(error, EngineShutdown) else logging.WARNING
        if isinstance(instruction, Fail):
            if instruction.why is not None:
                logger.log(level, "request %s cannot go on at another worker: %s", self.request_id, instruction.why)
            raise error
        logger.log(
            level,
            "request %s: lost worker %x after %d tokens (%s: %s)",
            self.request_id,
            worker.instance.instance_id,
            self.tokens,
            type(error).__name__,
            error,
        )
        self._release()
        self._first = []
        self._lost_at = self._now()

    # -- beginning at a worker ---------------------------------------------------------------------------------------

    async def _go_on(self, lost_at: float) -> list[StreamItem]:
        """Return the first items of the continuation after a loss."""
        failover = self._failover
        request = failover.request
        if isinstance(failover.course.instruction, Finish):
            # Everything the request allows had arrived when its worker was lost, all but the word that it was the end.
            return [StreamItem(0, 0, len(request.answer.generated), [], "length")]
        failover.given = StageResult(continued(request.body, request.prompt, request.answer.generated))
        self._failover.context.prompt_tokens = len(request.prompt)
        move = Move(is_ongoing=True)
        request.record.moves.append(move)
        try:
            items = await self._proceed()
            move.outcome = "cancelled" if self._failover.context.is_stopped() else "success"
        finally:
            move.seconds = self._now() - lost_at
        return items

    async def _proceed(self) -> list[StreamItem]:
        """Drive the course until there are items; return them, [] when the request was cancelled."""
        if type(await drive(self._failover.course, self)) is NextStage:
            return await self._run_stages()
        return self._first

    async def _run_stages(self) -> list[StreamItem]:
        """Return the first items from the stages and the worker that answers."""
        failover = self._failover
        request = failover.request
        course = failover.course
        job = StageJob(
            failover.body, self._failover.context, request.record, request.timer, request.limits.retries,
            request.first_token_seconds, self._suspected(), failover, self._begin_again,
        )  # fmt: skip

        async def answer() -> list[StreamItem]:
            self._release()  # a decode that ended with its prefill
            return await self._proceed()

        try:
            items = await run_stages(failover.stages, job, answer)
        except DynamoException as error:
            if course.state is CourseState.STAGING:
                course.step(Failed(error))
            raise
        if course.state is CourseState.STAGING:  # a stage has answered, or seen that the request was cancelled
            course.step(ITEMS if items else CANCELLED)
        return items

    async def _begin_again(self, error: DynamoException, *, readmits_all: bool = False) -> bool:
        """Prepare the last stage for another round because of `error`; False: the request was cancelled.

        Raises the error where no worker could take what the stage makes. `readmits_all`: the workers tried so far as well.
        """
        failover = self._failover
        failover.given = StageResult(failover.body)  # the prompt is computed again, maybe elsewhere
        failover.course.step(Again(error, readmits_all))
        return isinstance(await drive(failover.course, self), NextStage)


async def _listen(
    stream: ResponseStream,
    take_items: Callable[[list[StreamItem]], bool],
    lane: TokenLane | None,
    on_end: Callable[[], None],
    on_failure: Callable[[DynamoException], None],
) -> None:
    """Hand on what arrives until a reader returns False or the stream is over. The hot path: one call per wake-up.

    `on_end` and `on_failure` are called when the stream ends and fails. What any of the four raises is raised here.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    take = stream.take

    def arrived() -> None:
        try:
            try:
                items = take()
                if items is None:
                    on_end()
            except DynamoException as error:
                on_failure(error)
                items = None
            if items is not None and (not items or take_items(items)):
                return
        except BaseException as error:
            settle(error)
        else:
            settle(None)

    def settle(failure: BaseException | None) -> None:
        stream.listen(None)
        if done.done():
            return
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)

    stream.listen(arrived)
    if lane is not None:
        stream.open_lane(lane, settle)
    try:
        await done
    finally:
        stream.listen(None)
