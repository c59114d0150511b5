"""The way down: out of discovery, grace, streams, drain, clean-up. Nothing here may fail: every step goes on after an error."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Mapping
from typing import Final

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import BaseEngine
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import Disconnected, EngineShutdown
from dynamo.runtime.base.tasks import first_of
from dynamo.runtime.distributed import Endpoint
from dynamo.settings.table import read_settings
from dynamo.worker.drain import DrainState
from dynamo.worker.hooks import await_hook
from dynamo.worker.lifecycle import Lifecycle, ShutdownTimes, WorkerEvent
from dynamo.worker.registration import unregister_model
from dynamo.worker.setup import Parts
from dynamo.worker.signals import Deadline

logger = logging.getLogger(__name__)

QUIESCENCE_POLL_SECONDS: Final = 0.5
CUT_SECONDS: Final = 2.0  # for streams that were cut to let go of the engine; the rest of the reserve is cleanup()'s
HEARTBEAT_SECONDS: Final = 5.0  # how often a long wait is logged


class StopRequest:
    """Whether and when a stop of the worker was requested. Used on the event loop only."""

    def __init__(self, times: ShutdownTimes) -> None:
        self.times = times
        self.requested_at = 0.0  # loop time
        self.deadline: Deadline | None = None
        self.start_scope: asyncio.Timeout | None = None  # while start() runs
        self._event = asyncio.Event()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when a stop was requested."""
        await self._event.wait()

    def begin(self) -> None:
        """Start the clock of the way down and arm the deadline, also for a worker that failed by itself."""
        self.requested_at = asyncio.get_running_loop().time()
        if self.deadline is not None:
            self.deadline.arm()

    def request(self) -> None:
        """Record the request, arm the deadline, and limit a `start()` that still runs."""
        self.begin()
        self._event.set()
        if self.start_scope is not None:
            self.start_scope.reschedule(self.requested_at + self.times.start_until_seconds)

    async def unless_stopped(self, work: Awaitable[object]) -> bool:
        """Await `work` unless a stop comes first (then it is cancelled); whether it was finished."""
        return await first_of(work, self._event.wait()) == 0


class Shutdown:
    """Takes one engine down: what was set up for it, and the engine itself."""

    def __init__(
        self,
        engine: BaseEngine,
        config: WorkerConfig,
        endpoint: Endpoint,
        life: Lifecycle,
        stop: StopRequest,
        parts: Parts,
    ) -> None:
        self._engine = engine
        self._config = config
        self._endpoint = endpoint
        self._life = life
        self._stop = stop
        self.parts = parts
        self.skip_waiting = False  # streams in flight are cut at once
        self.engine_died: EngineShutdown | None = None  # nothing is called on it any more but its clean-up
        self.cancelled: asyncio.CancelledError | None = None  # `run` was cancelled on its way down

    async def drain(self, *, owns_runtime: bool) -> None:
        """Leave discovery, let the streams end, drain the engine."""
        if owns_runtime:
            self._endpoint.runtime.health.begin_shutdown()
        if self.engine_died is not None:
            self.skip_waiting = True
            why = EngineShutdown(str(self.engine_died))
            why.__cause__ = Disconnected("the worker lost its engine")  # so that a request that kills engines is found
            self._cut(why)  # before all else, which may take time: the streams can continue elsewhere
        # Routers have learnt before that a drained worker left.
        was_drained = self.parts.drain is not None and self.parts.drain.state is DrainState.DRAINED
        await self._run_despite_cancel(self._unregister())
        if not self.skip_waiting and not was_drained and self._stop.times.grace_seconds > 0:
            logger.info("Grace period %.2fs before drain", self._stop.times.grace_seconds)
            await self._run_despite_cancel(asyncio.sleep(self._stop.times.grace_seconds))
        began = time.perf_counter()
        await self._run_despite_cancel(self._await_streams())
        await self._run_despite_cancel(self._cut_streams())
        if self.engine_died is None:
            await self._run_despite_cancel(self._drain())
            await self._run_despite_cancel(self._await_quiescence())
        if self.parts.metrics is not None:
            self.parts.metrics.drain_time_seconds.set(time.perf_counter() - began)

    async def finish(self) -> None:
        """Clean the engine up, once, and take back what this worker put into a runtime that may outlive it."""
        await self._run_despite_cancel(self._clean_up_once())
        await self._leave()

    async def _run_despite_cancel(self, step: Awaitable[None]) -> None:
        """Await a step of the end. A cancellation ends the step, not the way down: an engine is owed its clean-up."""
        try:
            await step
        except asyncio.CancelledError as error:
            self.cancelled = error
            self.skip_waiting = True

    async def _unregister(self) -> None:
        try:
            if self.parts.drain is not None:
                await self.parts.drain.close()
            if self.parts.admin is not None:
                await self.parts.admin.close()
            for beside in (self.parts.rl, self.parts.adapters):
                if beside is not None:
                    await beside.close()
            if self.parts.served is not None:
                await self.parts.served.withdraw()
        except Exception as error:
            logger.warning("discovery unregister failed: %s", error)
            return
        logger.info("Endpoint unregistered from discovery")

    async def _await_streams(self) -> None:
        """Wait for streams in flight until the deadline less a reserve."""
        served = self.parts.served
        if served is None or self.skip_waiting:
            return
        until = self._stop.requested_at + self._stop.times.streams_until_seconds
        loop = asyncio.get_running_loop()
        while served.inflight and loop.time() < until:
            logger.info("Waiting for %d streams in flight, at most %.1fs more", served.inflight, until - loop.time())
            if await served.wait_idle(min(HEARTBEAT_SECONDS, until - loop.time())):
                return

    def _cut(self, why: EngineShutdown) -> None:
        """Decline new requests and end the streams that are left: a frontend migrates them."""
        served = self.parts.served
        if served is None:
            return
        served.stop_accepting()
        cut = served.cut(why)
        if cut:
            logger.warning("%d streams were still running and were cut; frontends may migrate them", cut)

    async def _cut_streams(self) -> None:
        """Cut what is left, and wait a moment for it to let go of the engine."""
        if self.engine_died is None:
            self._cut(EngineShutdown("the worker is shutting down"))
        served = self.parts.served
        # Their aborts and the `finally` of their generators need a living engine: neither may run after cleanup().
        if served is not None and served.inflight and not await served.wait_idle(CUT_SECONDS):
            logger.warning("%d of them ignored it and are left to the clean-up", served.inflight)

    async def _drain(self) -> None:
        try:
            await await_hook(self._engine.drain())
        except Exception:
            logger.warning("engine drain failed", exc_info=True)

    async def _await_quiescence(self) -> None:
        """Prefill only, and only for an engine that overrides `is_quiescent`: peers may still pull from its memory."""
        if type(self._engine).is_quiescent is BaseEngine.is_quiescent:
            return
        if self._config.disaggregation_mode is not DisaggregationMode.PREFILL:
            return
        loop = asyncio.get_running_loop()
        budget = self._stop.times.quiescence_seconds(self._config.disaggregation_mode)
        ends_at, said_at = loop.time() + budget, None
        while not await self._is_quiescent():
            now = loop.time()
            if now >= ends_at:
                logger.warning("drain: timed out at %.1fs; peers may lose what they still pull", budget)
                return
            if said_at is None or now - said_at >= HEARTBEAT_SECONDS:
                logger.info("drain: the engine is not quiescent, waiting at most %.1fs more", ends_at - now)
                said_at = now
            await asyncio.sleep(min(QUIESCENCE_POLL_SECONDS, ends_at - now))

    async def _is_quiescent(self) -> bool:
        try:
            return await await_hook(self._engine.is_quiescent()) is True
        except Exception:
            logger.debug("is_quiescent() failed", exc_info=True)
            return False

    async def _clean_up_once(self) -> None:
        began = time.perf_counter()
        try:
            await await_hook(self._engine.cleanup())
            logger.info("Engine cleanup complete")
        except Exception:
            logger.error("engine cleanup failed", exc_info=True)
        except asyncio.CancelledError:
            logger.error("engine cleanup was cancelled before it had finished")
            raise
        finally:
            self._life.apply(WorkerEvent.CLEANED)
            if self.parts.metrics is not None:
                self.parts.metrics.cleanup_time_seconds.set(time.perf_counter() - began)
            if self.parts.publishing is not None:  # engines may publish until cleanup() returns
                await self.parts.publishing.close()

    async def _leave(self) -> None:
        """Take back what this worker put into a runtime that may outlive it."""
        for routed in (self.parts.admin, self.parts.drain):
            for name in () if routed is None else routed.routes():
                self._endpoint.runtime.status_server.unregister_route(name)
        if self.parts.served is not None:
            await self._run_despite_cancel(self.parts.served.close())
        if self.parts.chaos is not None:
            await self._run_despite_cancel(self.parts.chaos.close())
        if self.parts.model_published:
            await self._run_despite_cancel(self._withdraw_model())

    async def _withdraw_model(self) -> None:
        try:
            await unregister_model(self._endpoint)
        except Exception as error:
            logger.warning("leaving discovery failed, its records will expire: %s", error)


def shutdown_times(env: Mapping[str, str] | None = None) -> ShutdownTimes:
    """Read the times of this process's end from the environment."""
    return read_settings(ShutdownTimes, os.environ if env is None else env)
