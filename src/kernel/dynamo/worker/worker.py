"""The worker: drives one engine from its construction to its clean-up, by the table in `lifecycle`.

The way up: connect, `start()`, metrics and publishers, register the model, serve. The way down: readiness off, take the
instance out of discovery, grace, wait for streams in flight, cut what is left, `drain()`, `cleanup()`, leave. Whatever
fails on the way up, an engine whose `start()` was entered is cleaned up exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import NoReturn

from dynamo.contract.config import RESPONSE_PLANES, WorkerConfig
from dynamo.contract.engine import BaseEngine, LLMEngine, RawEngine
from dynamo.contract.engine_config import EngineConfig, read_engine_config
from dynamo.contract.modes import (
    DisaggregationMode,
    NativeDisaggregationMode,
    coerce_disaggregation_mode,
    native_disaggregation_mode,
)
from dynamo.contract.parsers import check_parsers
from dynamo.errors import CannotConnect, DynamoException, EngineShutdown, InvalidArgument, Unknown, text_of
from dynamo.protocol.model_types import VECTORS, ModelInput, parse_endpoint_types
from dynamo.runtime.base.process_guard import guard_this_process
from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.base.tasks import first_of
from dynamo.runtime.calls.faults import injection
from dynamo.runtime.distributed import DistributedRuntime, Endpoint
from dynamo.runtime.endpoint import split_endpoint
from dynamo.runtime.observe.logging import configure_dynamo_logging
from dynamo.worker.embedding import offers_embeddings
from dynamo.worker.engine_failures import ErrorMapping
from dynamo.worker.hooks import await_hook
from dynamo.worker.hub import check_tokenizer_of
from dynamo.worker.lifecycle import Lifecycle, ShutdownTimes, State, WorkerEvent
from dynamo.worker.registration import check_encoder_route
from dynamo.worker.setup import Setup
from dynamo.worker.shutdown import Shutdown, StopRequest, shutdown_times
from dynamo.worker.signals import Deadline, SignalGuard

__all__ = ["EngineDied", "Worker", "WorkerConfig", "raise_when_dead", "shutdown_times"]

logger = logging.getLogger(__name__)

# An engine that reports its own end: the worker learns of it here, and its streams move to other workers.


class EngineDied(EngineShutdown):
    """The engine can never serve again, and the worker ends."""


async def raise_when_dead(engine: BaseEngine) -> NoReturn:
    """Wait until the engine reports its end (`wait_dead`); most engines never do.

    Raises:
        EngineDied: the engine is dead; the reason is in the text.
    """
    try:
        reason = await await_hook(engine.wait_dead())
    except Exception as error:
        raise EngineDied(f"the engine died: {type(error).__name__}: {error}") from error
    raise EngineDied(f"the engine died: {reason}")


class Worker:
    """Serves one engine. `await Worker(engine, config).run()` returns after a graceful shutdown, once per instance."""

    def __init__(
        self,
        engine: BaseEngine,
        config: WorkerConfig,
        *,
        runtime: DistributedRuntime | None = None,
        times: ShutdownTimes | None = None,
        force_exit: Callable[[int], object] = os._exit,
        embedded: bool = False,
    ) -> None:
        """`runtime`: one that the caller made and will shut down; None: the worker makes its own.

        `embedded`: the worker is part of a larger process, which owns signals and logging, calls `request_stop` itself
        and must not be ended by force: there is no deadline then.
        """
        self._engine = engine
        self._config = config
        self._shared_runtime = runtime
        self._force_exit = force_exit
        self._is_embedded = embedded
        self._life = Lifecycle()
        self._entered = False
        self._stop = StopRequest(times or shutdown_times())
        self._serving = asyncio.Event()

    @property
    def state(self) -> State:
        """Where this worker is in its life."""
        return self._life.state

    async def wait_serving(self) -> None:
        """Return when the instance is routable. Never returns for a worker that fails before: watch `run` as well."""
        await self._serving.wait()

    def request_stop(self) -> None:
        """Begin the graceful shutdown; on the loop only, idempotent. What a signal does."""
        if self._stop.is_set:
            return
        self._stop.request()
        if self._life.state is not State.CLOSED:
            self._life.apply(WorkerEvent.STOP)

    async def run(self) -> None:
        """Serve until a signal, `request_stop`, or the end of the endpoint.

        Raises RuntimeError when called twice, and the typed error of whatever failed; by then everything is cleaned up.
        """
        if self._entered:
            raise RuntimeError("Worker.run() can only be called once per Worker instance; create a new Worker")
        self._entered = True
        if not self._is_embedded:
            configure_dynamo_logging()
        _warn_deprecated(self._config)
        with SignalGuard(asyncio.get_running_loop()) as guard:
            _check_config(self._engine, self._config)
            if self._is_embedded:
                await self._run()
                return
            chaos = self._runtime_settings.chaos
            if chaos.plan is not None:  # a larger process is not to be killed for one of its workers
                injection().check(chaos)
            with Deadline(self._stop.times.deadline_seconds, force_exit=self._force_exit) as deadline:
                self._stop.deadline = deadline
                guard.listen(self._on_signal, at_once=deadline.arm)
                await self._run()

    def _on_signal(self, name: str) -> None:
        if self._stop.is_set:
            logger.debug("%s received again; the shutdown is under way", name)
            return
        logger.info("%s received", name)
        self.request_stop()

    @cached_property
    def _runtime_settings(self) -> RuntimeSettings:
        """The settings of the runtime: of the command line, or else of the environment of this moment."""
        if self._shared_runtime is not None:
            return self._shared_runtime.settings
        return self._config.runtime_settings or RuntimeSettings.from_env()

    # -- the whole life ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        async with self._connected() as runtime:
            if runtime is None or self._stop.is_set or not await self._start_guard():
                logger.info("Shutdown requested before the engine was started; leaving")
                return
            config = self._config
            endpoint = runtime.endpoint(_endpoint_path(config))
            release = runtime.hold()
            try:
                await self._live(endpoint)
            finally:
                release()

    async def _start_guard(self) -> bool:
        """Start the guard of the engine's processes, if it has any; False: a stop came first."""
        if not self._engine.has_child_processes:
            return True
        try:
            return await self._stop.unless_stopped(asyncio.to_thread(guard_this_process))
        except OSError as error:
            self._life.apply(WorkerEvent.FAILED)
            raise Unknown(f"the guard of the engine's processes cannot be started: {error}") from error

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[DistributedRuntime | None]:
        """Provide the connected runtime; None when a stop came first. Only a runtime of our own is closed on the way
        out.
        """
        runtime = self._shared_runtime
        try:
            try:
                runtime = runtime or self._make_runtime()
                connected = await self._stop.unless_stopped(runtime.start())
            except Exception as error:
                if not self._stop.is_set:
                    self._life.apply(WorkerEvent.FAILED)
                    raise _connection_failure(error) from error
                logger.warning("not connected, and no longer needed: %s", error)
                connected = False
            yield runtime if connected else None
        finally:
            if runtime is not None and runtime is not self._shared_runtime:
                await runtime.aclose()

    def _make_runtime(self) -> DistributedRuntime:
        config = self._config
        return DistributedRuntime(
            asyncio.get_running_loop(),
            config.discovery_backend,
            config.request_plane,
            event_plane=config.event_plane,
            response_plane=config.response_plane,
            settings=self._runtime_settings,
        )

    async def _live(self, endpoint: Endpoint) -> None:
        """Live from `start()` to `cleanup()`; raises what failed first, after the clean-up."""
        grace = self._stop.times.grace_seconds
        setup = Setup(self._engine, self._config, endpoint, self._life, lambda: self._stop.is_set, grace_seconds=grace)
        down = Shutdown(self._engine, self._config, endpoint, self._life, self._stop, setup.parts)
        failure = await self._start_up(setup)
        if self._life.state is State.SERVING:
            failure = await self._serve(setup, endpoint, down)
        down.skip_waiting = down.skip_waiting or isinstance(failure, asyncio.CancelledError)
        if self._life.state is State.DRAINING:
            await down.drain(owns_runtime=self._shared_runtime is None)
            self._life.apply(WorkerEvent.DRAINED)
        await down.finish()
        if failure is not None:
            raise failure
        if down.cancelled is not None:
            raise down.cancelled

    # -- up ----------------------------------------------------------------------------------------------------------

    async def _start_up(self, setup: Setup) -> BaseException | None:
        """Start the engine and set everything up; afterwards the worker is SERVING, DRAINING or CLEANING."""
        try:
            self._life.apply(WorkerEvent.START)
            engine_config, seconds = await self._start_engine(setup)
            if self._life.apply(WorkerEvent.STARTED) is State.PREPARING:
                await setup.prepare(engine_config, seconds)
                self._life.apply(WorkerEvent.PREPARED)
        except BaseException as error:  # also a cancellation: an engine that was started must be cleaned up
            self._life.apply(WorkerEvent.FAILED)
            failure = ErrorMapping(self._engine).typed(error) if isinstance(error, Exception) else error
            if self._stop.is_set:  # a stop is planned, and what it interrupts may raise anything
                logger.info("worker start-up ended by the request to stop: %s", text_of(failure))
                return failure
            # A mistake of the operator is one sentence, and `run` prints it.
            level = logging.DEBUG if isinstance(failure, InvalidArgument) else logging.ERROR
            cause = error if failure is not error else None
            logger.log(level, "worker start-up failed: %s", text_of(failure), exc_info=cause)
            return failure
        return None

    async def _start_engine(self, setup: Setup) -> tuple[EngineConfig, float]:
        began, stop = time.perf_counter(), self._stop
        try:
            async with asyncio.timeout(None) as stop.start_scope:  # a request to stop sets the time
                config = read_engine_config(await await_hook(self._engine.start(setup.worker_id)))
        except TimeoutError:
            scope = stop.start_scope
            if scope is None or not scope.expired():  # an error of the engine's own
                raise
            raise EngineShutdown(
                f"start() had not returned {stop.times.start_until_seconds:g}s after the request to stop, and was cancelled"
            ) from None
        finally:
            stop.start_scope = None
        return config, time.perf_counter() - began

    # -- serving -----------------------------------------------------------------------------------------------------

    async def _serve(self, setup: Setup, endpoint: Endpoint, down: Shutdown) -> BaseException | None:
        """Publish the instance and serve until the end; return what went wrong, if anything."""
        config, parts = self._config, setup.parts
        logger.info("Serving %s on %s.%s.%s", parts.served_name, config.namespace, config.component, config.endpoint)
        try:
            payload = await setup.canary_payload()
            if self._life.is_stopping:
                return None
            chaos = self._runtime_settings.chaos
            if chaos.plan is not None and not self._is_embedded:
                parts.chaos = injection().worker_faults(chaos, endpoint.runtime.discovery)
            parts.served = served = await endpoint.start_serving(
                setup.handler(parts.chaos),
                metrics_labels=config.metrics_labels,
                health_check_payload=payload,
                watch_progress=True,
            )
            if parts.publishing is not None:
                await parts.publishing.serve_recovery()
            setup.open_drain(served)
            await setup.serve_rl_directory()
            await setup.serve_adapters()
            if not await self._stop.unless_stopped(setup.load_adapters()):
                return None
            self._serving.set()
            ended = await self._stop.unless_stopped(first_of(served.wait_closed(), raise_when_dead(self._engine)))
            if ended and not self._stop.is_set:  # the runtime was shut down
                logger.info("The endpoint ended; shutting down")
                down.skip_waiting = True
                self.request_stop()
        except BaseException as error:
            if self._life.state is State.SERVING:  # else a stop came meanwhile and the way down is decided
                self._stop.begin()
                self._life.apply(WorkerEvent.FAILED)
            if isinstance(error, asyncio.CancelledError | InvalidArgument):
                return error
            if isinstance(error, EngineDied):
                logger.error("%s; leaving discovery, and the process ends", error)
                down.engine_died = error
                return error
            failure = Unknown(f"serve: {error}")
            failure.__cause__ = error
            logger.error("worker failed: %s", text_of(failure), exc_info=error)
            return failure
        return None


# -- decisions --------------------------------------------------------------------------------------------------------


def _endpoint_path(config: WorkerConfig) -> str:
    return f"{config.namespace}.{config.component}.{config.endpoint}"


def _check_config(engine: BaseEngine, config: WorkerConfig) -> None:
    """Raises InvalidArgument for a configuration that cannot serve this engine; before anything was touched."""
    if isinstance(engine, RawEngine):
        if config.model_input not in (ModelInput.Text, ModelInput.Tensor):
            raise InvalidArgument(
                f"model_input must be Text or Tensor for a RawEngine ({type(engine).__name__}), got {config.model_input}"
            )
    elif isinstance(engine, LLMEngine):
        if config.model_input is not ModelInput.Tokens:
            raise InvalidArgument(
                f"model_input must be Tokens for an LLMEngine ({type(engine).__name__}), got {config.model_input}"
            )
        if parse_endpoint_types(config.endpoint_types) & VECTORS and not offers_embeddings(engine):
            raise InvalidArgument(
                f"endpoint types {config.endpoint_types!r} need vectors, and {type(engine).__name__} does not override embed()"
            )
        check_tokenizer_of(config.model_name)
    else:
        raise InvalidArgument(f"{type(engine).__name__} is neither an LLMEngine nor a RawEngine; subclass one of them")
    check_encoder_route(config.disaggregation_mode, config.route_to_encoder)
    check_parsers(config.tool_call_parser, config.reasoning_parser)
    try:
        split_endpoint(_endpoint_path(config))
    except ValueError as error:
        raise InvalidArgument(f"namespace, component and endpoint: {error}") from error
    if config.response_plane not in RESPONSE_PLANES:
        raise ValueError(f"response_plane must be one of {', '.join(RESPONSE_PLANES)}, got {config.response_plane!r}")


def _warn_deprecated(config: WorkerConfig) -> None:
    if config.use_kv_events:
        warnings.warn(
            "WorkerConfig.use_kv_events is ignored; override kv_event_sources() instead",
            DeprecationWarning,
            stacklevel=3,
        )


def _connection_failure(error: Exception) -> DynamoException:
    """Map a failed connection to the error to report: bad names are the operator's fault, everything else the
    store's.
    """
    if isinstance(error, CannotConnect | InvalidArgument):
        return error
    if isinstance(error, ValueError):
        return InvalidArgument(str(error))
    return CannotConnect(f"{type(error).__name__}: {error}")


# Names that tests written for the native system import from here.
_coerce_disagg_mode = coerce_disaggregation_mode


def _to_rust_disaggregation_mode(mode: DisaggregationMode) -> NativeDisaggregationMode:
    return native_disaggregation_mode(mode)
