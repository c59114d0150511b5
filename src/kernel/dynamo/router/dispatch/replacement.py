"""The wait of a request for a worker in place of the last one."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple

from dynamo.errors import DynamoException, NoReplacement, WorkerUnavailable
from dynamo.placement import WorkerKey
from dynamo.router.dispatch.course import Event, NoWorker, Tick
from dynamo.router.dispatch.drive import CANCELLED
from dynamo.router.workers.pool import ModelPool
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance

logger = logging.getLogger(__name__)


class WorkerWait(NamedTuple):
    """How a request waits while its model has no worker."""

    seconds: float = 0.0  # 0: not at all
    is_from_arrival: bool = False  # else from the loss of the last worker on


NO_WAIT: Final = WorkerWait()


class _Deadline:
    """One wait, by the time of the loop."""

    __slots__ = ("at", "began", "is_announced")

    def __init__(self, began: float, at: float) -> None:
        self.began, self.at = began, at
        self.is_announced = False  # in the log


class ReplacementWait:
    """Whether one request waits for a worker, and how. Its course decides that it does."""

    __slots__ = ("_context", "_deadline", "_is_pinned", "_pool", "_rule", "lost")

    def __init__(self, pool: ModelPool, context: Context, rule: WorkerWait, *, is_pinned: bool) -> None:
        """`is_pinned`: the request names its worker, so it waits for no other one."""
        self._pool, self._context, self._rule, self._is_pinned = pool, context, rule, is_pinned
        self._deadline: _Deadline | None = None  # of the wait that runs, or may begin now
        self.lost: dict[WorkerKey, Instance] = {}  # the workers that failed, as they were registered then

    def no_worker(self, error: WorkerUnavailable, last: DynamoException | None, *, is_after_wait: bool) -> NoWorker:
        """Return whether and how long the request may wait. `last`: why the worker before was lost; None: none was."""
        now, found = _now(), self._deadline
        if found is not None and is_after_wait:
            if now >= found.at:
                logger.info(
                    "request %s: gave up after %.1f s: no replacement came for the last worker of model %s",
                    self._context.id(),
                    now - found.began,
                    self._pool.name,
                )
        elif (until := self._waits_until(last, now)) is None:
            return NoWorker(error)
        else:
            self._deadline = found = _Deadline(now, until)
        return NoWorker(error if last is not None else NoReplacement(self._pool.name), True, found.at - now)

    async def wait(self, seconds: float) -> Event:
        """Return when the pool has changed, after `seconds`, or when the request is stopped."""
        context, pool, deadline = self._context, self._pool, self._deadline
        assert deadline is not None, "a request waits only after a choice that found no worker"
        if not deadline.is_announced:
            deadline.is_announced = True
            logger.info(
                "request %s: no worker of model %s is left; waiting up to %.1f s for a replacement",
                context.id(),
                pool.name,
                seconds,
            )
            if restarted := self._restarted():
                return Tick(restarted)
        if seconds > 0:
            await pool.wait_for_change(context, deadline.at)
        return CANCELLED if context.is_stopped() else Tick(self._restarted())

    def end(self) -> None:
        """Log how long it took until a worker was there."""
        if (deadline := self._deadline) is not None:
            self._deadline = None
            waited = _now() - deadline.began
            logger.info("request %s: a replacement came after %.1f s", self._context.id(), waited)

    def _waits_until(self, last: DynamoException | None, now: float) -> float | None:
        """Return until when a request may wait for a worker, where one was there moments ago; None: it may not wait."""
        rule, context = self._rule, self._context
        if rule.seconds <= 0 or self._is_pinned or context.is_stopped():
            return None
        began = now
        if last is None:
            emptied_at = self._pool.emptied_at
            if emptied_at is None or (not rule.is_from_arrival and now >= emptied_at + rule.seconds):
                return None
            if not rule.is_from_arrival:
                began = emptied_at
        deadline = began + rule.seconds
        return deadline if context.deadline is None else min(deadline, context.deadline)

    def _restarted(self) -> tuple[WorkerKey, ...]:
        """Return the workers that failed and have registered anew under their old id since."""
        found = []
        for key, instance in self.lost.items():
            current = self._pool.instance(key[1])
            if current is not None and current is not instance and current.endpoint == instance.endpoint:
                found.append(key)
        for key in found:
            del self.lost[key]
        return tuple(found)


def _now() -> float:
    return asyncio.get_running_loop().time()
