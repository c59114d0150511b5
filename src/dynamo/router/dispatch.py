"""From a request to the items of its answer, whatever happens to the workers: choose, open, retry, migrate, give up.

`Dispatcher.open` returns a `RoutedStream`. It is read like the stream of one worker; behind it the request may move to
another worker, before its first token (a retry) or after (a migration).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from dynamo.errors import DynamoException, StreamIncomplete
from dynamo.placement import PlacementRequest
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.failover import NO_WAIT, DispatchRequest, Failover, WorkerWait
from dynamo.router.migration import Move, continued, tokens_left
from dynamo.router.pool import ChosenWorker, ModelPool
from dynamo.router.query_of_death import QueriesOfDeath, Suspect
from dynamo.router.record import DispatchRecord
from dynamo.router.stages import DispatchStage, Onward, StageJob, run_stages
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseStream, StreamItem, TokenLane

__all__ = ["Dispatcher", "RoutedStream"]

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


class _Loss:
    """The loss of a worker in the middle of an answer."""

    __slots__ = ("at", "error")

    def __init__(self, error: DynamoException, at: float) -> None:
        self.error, self.at = error, at


class RoutedStream(AsyncIterator[list[StreamItem]]):
    """The items of one answer, whichever workers they come from. Made by `Dispatcher.open`.

    Read it with `next_batch` (or by iterating); from the second batch on, `push` hands items on without waking a task.
    """

    __slots__ = (
        "_body",
        "_context",
        "_dispatcher",
        "_failover",
        "_idle_error",
        "_is_closed",
        "_loss",
        "_stream",
        "_suspect",
        "_worker",
        "is_reading",
        "request",
    )

    def __init__(self, dispatcher: Dispatcher, request: DispatchRequest, context: Context) -> None:
        self._dispatcher, self.request, self._context = dispatcher, request, context
        self._body = request.body
        self._failover = Failover(dispatcher.pool, request, context, dispatcher.worker_wait)
        self._suspect = Suspect(request.body, context.id(), dispatcher.queries_of_death)
        self._worker: ChosenWorker | None = None  # the last one that was tried
        self._stream: ResponseStream | None = None
        self._loss: _Loss | None = None  # of the last worker, after it had begun to answer
        self._idle_error: DynamoException | None = None  # set: the worker is left because it sent nothing
        self._is_closed = False
        self.is_reading = False  # waiting for the worker, and not for the reader

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
                if self._loss is None:
                    self._suspect.check(self._now)
                is_plain = self._loss is None and not self._dispatcher.stages  # as nearly every request is
                items = await (self._begin() if is_plain else self._start())
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
        """Ask the worker to stop and read nothing more: the reader has found an end of its own."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.stop()
            self._release()

    def close(self) -> None:
        """Leave; a worker that has not ended the stream receives a kill. Idempotent."""
        self._is_closed = True
        if self.request.stall_detector is not None:
            self.request.stall_detector.remove(self)
        self._release()
        if self._failover.session is not None:
            self._failover.session.release()

    # -- what the stall detector needs (`stall_detector.WatchedStream`) ----------------------------------------------

    @property
    def request_id(self) -> str:
        return self._context.id()

    @property
    def tokens(self) -> int:
        return self.request.tokens

    @property
    def attempts(self) -> int:
        return self._failover.attempts.count

    @property
    def instance_id(self) -> int | None:
        return self._worker.instance.instance_id if self._worker is not None and self._stream is not None else None

    def fail_over(self, error: DynamoException, *, is_worker_fault: bool = True, is_last: bool = False) -> bool:
        """Leave a worker that sends nothing, because of `error`; return whether that was done.

        Without `is_last` the stream only leaves the worker if another worker can go on.
        """
        stream = self._stream
        if (
            stream is None
            or self._is_closed
            or self._idle_error is not None
            or not (is_last or self._failover.can_move(error))
        ):
            return False
        self._idle_error = error
        if not is_worker_fault:
            self._failover.exempt_error = error
        stream.kill()  # and whatever reads it finds that it has ended
        return True

    # -- the ends of a worker's stream -------------------------------------------------------------------------------

    def _on_missing_terminal_chunk(self) -> None:
        """Take an end without a terminal chunk: a breach, unless the answer is whole or was cancelled."""
        if not self.request.is_complete and not self._context.is_stopped():
            raise self._missing_end("the worker ended the stream without a finish reason")
        self._is_closed = True

    def _missing_end(self, text: str) -> DynamoException:
        idle_error, self._idle_error = self._idle_error, None
        return idle_error or StreamIncomplete(text)

    def _on_worker_lost(self, error: DynamoException) -> None:
        """Take the loss of a worker that had begun to answer. Raises `error` unless another one may go on."""
        worker = self._worker
        assert worker is not None
        self._failover.record_failure(worker, error)
        if not self._failover.may_move(error):
            raise error
        if (blocker := self._failover.migration_blocker()) is not None:
            logger.warning("request %s cannot go on at another worker: %s", self.request_id, blocker)
            raise error
        logger.warning(
            "request %s: lost worker %x after %d tokens (%s: %s)",
            self.request_id,
            worker.instance.instance_id,
            self.tokens,
            type(error).__name__,
            error,
        )
        self._release()
        self._failover.attempts.failed(worker, error)
        self._loss = _Loss(error, self._now())

    # -- beginning at a worker ---------------------------------------------------------------------------------------

    async def _start(self) -> list[StreamItem]:
        """Return the first items of the answer, or of its continuation after a loss."""
        request, loss = self.request, self._loss
        if loss is None:
            return await self._run_stages()
        if request.generated and tokens_left(request.body, len(request.generated)) == 0:
            # Everything the request allows had arrived when its worker was lost, all but the word that it was the end.
            return [StreamItem(0, 0, len(request.generated), [], "length")]
        self._body = continued(request.body, request.prompt, request.generated)
        self._context.prompt_tokens = len(request.prompt)
        move = Move(is_ongoing=True)
        request.record.moves.append(move)
        try:
            items = await self._run_stages(loss.error)
            move.outcome = "cancelled" if self._context.is_stopped() else "success"
        finally:
            move.seconds = self._now() - loss.at
        return items

    async def _run_stages(self, lost_by: DynamoException | None = None) -> list[StreamItem]:
        """Return the first items from the stages and the worker that answers. `lost_by`: why the last worker was lost."""
        stages, request = self._dispatcher.stages, self.request
        if not stages:
            return await self._begin(lost_by)
        if lost_by is not None and not await self._failover.has_next(lost_by):
            return []  # while no worker could go on, no prompt was computed again
        job = StageJob(
            self._body, self._context, request.record, request.timer, request.limits.retries, request.first_token_seconds,
            self._suspect, self._failover,
        )  # fmt: skip

        async def answer(onward: Onward) -> list[StreamItem]:
            self._release()  # a decode that ended with its prefill
            failover = self._failover
            self._body, failover.transfer, failover.decided, failover.is_single_use, failover.renew = onward
            return await self._begin(lost_by)

        return await run_stages(stages, job, answer)

    async def _begin(self, last: DynamoException | None = None) -> list[StreamItem]:
        """Open the stream and wait for its first items, trying other workers while nothing has been received.

        `last`: why the worker before was lost.
        """
        context, timer, record = self._context, self.request.timer, self.request.record
        move: Move | None = None
        lost_at = 0.0
        pool, clock = self._dispatcher.pool, asyncio.get_running_loop().time
        kv, failover = pool.kv, self._failover
        choose = failover.choose if pool.on_the_way is None else failover.pass_and_choose
        while True:
            if kv is not None:
                self.request.kv = await kv.query(self._body, record, pinned=self.request.pinned_instance_id)
            worker = await choose(last)
            if worker is None:
                return []  # cancelled while it waited for one
            timer.routed()
            self._worker = worker
            self._failover.attempts.begin(worker)
            sent_at = clock()
            try:
                self._stream = await worker.open(self._body, context)
                timer.dispatched()
                if failover.session is not None:
                    failover.session.sent(worker.instance.instance_id, worker.placement.dp_rank)
                self.is_reading = True
                items = await self._stream.next_batch()
                if not items and not context.is_stopped():
                    raise self._missing_end("the worker ended the stream without a single chunk")
            except DynamoException as error:
                self.is_reading = False
                timer.arrived(failed=True)
                self._release()
                self._failover.record_failure(worker, error)
                if error is not self._failover.exempt_error:
                    self._suspect.count_failure(self._dispatcher.pool, worker, error, sent_at=sent_at, now=self._now())
                self._failover.attempts.failed(worker, error)
                if not self._failover.may_move(error) or self._failover.must_start_over(error):
                    raise
                logger.info(
                    "request %s: worker %x failed before its first token (%s: %s)",
                    context.id(), worker.instance.instance_id, type(error).__name__, error,
                )  # fmt: skip
                last = error
                body = await failover.next_body(self._body, error)
                if body is None:
                    return []  # cancelled while it was made anew
                self._body = body
                move = Move(is_ongoing=False)
                record.moves.append(move)
                lost_at = self._now()
            else:
                if move is not None:
                    move.outcome, move.seconds = "success", self._now() - lost_at
                self.is_reading = False
                timer.arrived()
                if items:
                    self._suspect.acquit()
                record.instances.append(worker.instance)
                record.placement = worker.placement
                return items

    def _release(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


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
