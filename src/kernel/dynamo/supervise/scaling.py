"""Adds and removes workers by their load: between a least and a most, as `dynamo.scaling` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from dynamo.scaling.decide import Decision, ScaleReason, ScaleRules
from dynamo.scaling.follower import ScaleFollower
from dynamo.supervise.backoff import RestartPolicy
from dynamo.supervise.newcomer import Newcomers, NotAccepted
from dynamo.supervise.process import SupervisedProcess
from dynamo.supervise.rolling import WorkerPool

LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class LoadReading:
    """What the frontend reports of the workers' load."""

    load: float  # in workers
    running: dict[int, int] = field(default_factory=dict)  # requests by instance id
    is_known: bool = True  # False: the frontend has started again and knows no such model, as no worker is there


class ScalablePool(WorkerPool, Protocol):
    """Workers that can become more and fewer."""

    def add_worker(self, policy: RestartPolicy) -> SupervisedProcess:
        """Return one more worker, not started yet and not in `workers`."""

    def instance_of(self, worker: SupervisedProcess) -> int | None:
        """Return the instance id that a worker registered with; None: not yet."""


class Scaling:
    """`run` it beside everything else."""

    def __init__(
        self,
        pool: ScalablePool,
        newcomers: Newcomers,
        read_load: Callable[[], Awaitable[LoadReading | None]],
        log: Callable[[str], None],
        rules: ScaleRules,
        *,
        is_advice_only: bool = False,
    ) -> None:
        """`read_load`: None while the frontend does not answer. `is_advice_only`: log what would be done, and do nothing."""
        self._pool, self._newcomers, self._read_load, self._log = pool, newcomers, read_load, log
        self._is_advice_only = is_advice_only
        self._follower = ScaleFollower(rules, len(pool.workers))
        self._starting = 0
        self._said: tuple[int, ScaleReason] | None = None

    async def run(self) -> None:
        """Read the load, decide, act. Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            reading = await self._read_load()
            if reading is not None and not (self._newcomers.changing.locked() and not self._starting):
                await self._look(reading, loop.time())
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, reading: LoadReading, now: float) -> None:
        follower = self._follower
        aimed = len(self._pool.workers) + self._starting
        follower.aim(aimed, now)
        follower.sample(reading.load, now)
        ready = sum(worker.is_ready for worker in self._pool.workers)
        if follower.start_seconds is None:  # of a worker that came with the command
            follower.start_seconds = next(filter(None, [each.start_seconds for each in self._pool.workers]), None)
        decision = follower.decide(ready, now)
        if not reading.is_known and aimed == 0:
            decision = Decision(1, ScaleReason.FIRST_REQUEST, "the frontend was started again and knows no model")
        if decision.target == aimed:
            self._say_why_not(decision)
            return
        self._log_decision(aimed, decision)
        if self._is_advice_only:
            return
        if decision.target > aimed:
            if not self._starting:
                await self._newcomers.changing.acquire()
            for _ in range(decision.target - aimed):
                self._starting += 1
                self._pool.spawn(self._start(), "scale: start")
        else:
            self._remove_one(reading)
        follower.aim(decision.target, now)

    def _log_decision(self, aimed: int, decision: Decision) -> None:
        what = decision.target, decision.reason
        if self._is_advice_only and self._said == what:
            return
        self._said = what
        would = "would go from " if self._is_advice_only else ""
        noun = "worker" if decision.target == 1 else "workers"
        self._log(f"scale: {would}{aimed} -> {decision.target} {noun} ({decision.reason}): {decision.text}")

    def _say_why_not(self, decision: Decision) -> None:
        """Log once, for each spell of it, that more workers are needed and not to be had."""
        what = decision.target, decision.reason
        if decision.reason in (ScaleReason.COOLDOWN, ScaleReason.AT_MAXIMUM):
            if self._said != what:
                self._log(f"scale: stays at {decision.target} ({decision.reason}): {decision.text}")
            self._said = what
        elif not self._is_advice_only:
            self._said = None

    async def _start(self) -> None:
        """Start one worker, until the frontend sends it requests."""
        loop, pool, follower = asyncio.get_running_loop(), self._pool, self._follower
        began = loop.time()
        new = pool.add_worker(RestartPolicy(early_failures=1))
        try:
            await self._newcomers.bring_up(new, "the new worker", f"scale: {new.name}", pool.spawn)
        except NotAccepted as reason:
            follower.failed(loop.time())
            self._log(f"scale: {new.name} does not serve: {reason}")
            await new.stop()
            pool.remove(new)
        else:
            seconds = loop.time() - began
            follower.started(seconds)
            pool.workers.append(new)
            self._log(f"scale: {new.name} serves after {seconds:.1f} s")
        finally:
            self._starting -= 1
            if not self._starting:
                self._newcomers.changing.release()

    def _remove_one(self, reading: LoadReading) -> None:
        """Let the worker go that has the fewest requests; among equals the youngest, whose cache holds least."""
        pool = self._pool
        leaving = min(reversed(pool.workers), key=lambda worker: reading.running.get(pool.instance_of(worker) or 0, 0))
        pool.workers.remove(leaving)
        self._log(f"scale: {leaving.name} goes")
        pool.spawn(self._stop(leaving), f"scale: stop {leaving.name}")

    async def _stop(self, leaving: SupervisedProcess) -> None:
        await leaving.stop()
        self._pool.remove(leaving)
        how = "was killed, as it did not end in time" if leaving.was_killed else "has ended"
        self._log(f"scale: {leaving.name} {how}")
