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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, cast

from dynamo.contract.config import RESPONSE_PLANES, WorkerConfig
from dynamo.contract.engine import BaseEngine, LLMEngine, RawEngine
from dynamo.contract.engine_config import EngineConfig, read_engine_config
from dynamo.contract.health_check import resolve_health_check_payload
from dynamo.contract.metrics import EngineMetrics
from dynamo.contract.modes import (
    DisaggregationMode,
    NativeDisaggregationMode,
    coerce_disaggregation_mode,
    native_disaggregation_mode,
)
from dynamo.contract.parsers import check_parsers, warn_of_parsers_not_built
from dynamo.contract.telemetry import GenerateSpan
from dynamo.errors import CannotConnect, DynamoException, EngineShutdown, InvalidArgument, Unknown, text_of
from dynamo.protocol.model_types import ModelInput
from dynamo.protocol.records import ModelCard
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime, Endpoint, ServedEndpoint
from dynamo.runtime.endpoint import split_endpoint
from dynamo.runtime.logging import configure_dynamo_logging
from dynamo.runtime.request_plane.base import Handler
from dynamo.runtime.settings import env_bool, env_float, env_int, env_str
from dynamo.worker.controls import AdminRoutes, RlDirectory, checked_names, rl_endpoint_name
from dynamo.worker.hub import HUB_PREFIX
from dynamo.worker.kv_publishing.lifecycle import Publishing
from dynamo.worker.lifecycle import Event, Lifecycle, ShutdownTimes, State
from dynamo.worker.lifecycle_metrics import WorkerMetrics
from dynamo.worker.registration import (
    build_card,
    check_encoder_route,
    plan_role,
    publish_card,
    read_context_lengths,
    resolve_assets,
    runtime_config_of,
    unregister_model,
    update_model_taints,
)
from dynamo.worker.running_requests import RunningRequests
from dynamo.worker.serving import RawServing, TokenServing, wrap_error
from dynamo.worker.signals import Deadline, SignalGuard

if TYPE_CHECKING:
    from dynamo.runtime.chaos.plan import Fault
    from dynamo.runtime.chaos.worker import WorkerChaos

__all__ = ["Worker", "WorkerConfig", "shutdown_times"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

QUIESCENCE_POLL_SECONDS: Final = 0.5
CUT_SECONDS: Final = 2.0  # for streams that were cut to let go of the engine; the rest of the reserve is cleanup()'s
HEARTBEAT_SECONDS: Final = 5.0  # how often a long wait says that it still waits


class Worker:
    """Serves one engine. `await Worker(engine, config).run()` returns after a graceful shutdown, once per instance."""

    def __init__(
        self,
        engine: BaseEngine,
        config: WorkerConfig,
        *,
        runtime: DistributedRuntime | None = None,
        times: ShutdownTimes | None = None,
        force_exit: Callable[[int], Any] = os._exit,
        embedded: bool = False,
    ) -> None:
        """`runtime`: one that somebody else made and will shut down; None: the worker makes its own.

        `embedded`: the worker is part of a larger process, which owns signals and logging, calls `request_stop` itself
        and must not be ended by force: there is no deadline then.
        """
        self._engine = engine
        self._config = config
        self._shared_runtime = runtime
        self._times = times or shutdown_times()
        self._force_exit = force_exit
        self._is_embedded = embedded
        self._life = Lifecycle()
        self._entered = False
        self._stop = asyncio.Event()
        self._serving = asyncio.Event()
        self._deadline: Deadline | None = None
        self._stopped_at = 0.0  # loop time of the request to stop
        self._start_scope: asyncio.Timeout | None = None  # while start() runs
        self._faults: tuple[Fault, ...] | None = None  # of a chaos plan

    @property
    def state(self) -> State:
        """Where this worker is in its life."""
        return self._life.state

    async def wait_serving(self) -> None:
        """Return when the instance is routable. Never returns for a worker that fails before: watch `run` as well."""
        await self._serving.wait()

    def request_stop(self) -> None:
        """Begin the graceful shutdown; on the loop only, idempotent. What a signal does."""
        if self._stop.is_set():
            return
        self._stopped_at = asyncio.get_running_loop().time()
        self._stop.set()
        if self._deadline is not None:
            self._deadline.arm()
        if self._start_scope is not None:
            self._start_scope.reschedule(self._stopped_at + self._times.start_until_seconds)
        if self._life.state is not State.CLOSED:
            self._life.apply(Event.STOP)

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
            if env_str("DYN_CHAOS") is not None:  # a larger process is not to be killed for one of its workers
                from dynamo.runtime.chaos.admission import plan_from_env

                self._faults = plan_from_env()
            with Deadline(self._times.deadline_seconds, force_exit=self._force_exit) as self._deadline:
                guard.listen(self._on_signal, at_once=self._deadline.arm)
                await self._run()

    def _on_signal(self, name: str) -> None:
        if self._stop.is_set():
            logger.debug("%s received again; the shutdown is under way", name)
            return
        logger.info("%s received", name)
        self.request_stop()

    def _chaos_on(self, runtime: DistributedRuntime) -> WorkerChaos | None:
        """What breaks this worker on purpose; None where no plan asks for it."""
        if self._faults is None:
            return None
        from dynamo.runtime.chaos.admission import Role, faults_of, process_name
        from dynamo.runtime.chaos.worker import WorkerChaos

        name = process_name(Role.WORKER)
        return WorkerChaos(faults_of(Role.WORKER, name, self._faults), name=name, discovery=runtime.discovery)

    # -- the whole life ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        async with self._connected() as runtime:
            if runtime is None or self._stop.is_set():
                logger.info("Shutdown requested before the engine was started; leaving")
                return
            config = self._config
            endpoint = runtime.endpoint(_endpoint_path(config))
            await _EngineLife(self, self._engine, config, runtime, endpoint).run()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[DistributedRuntime | None]:
        """The runtime, connected; None when a stop came first. Only one of our own is closed on the way out."""
        runtime = self._shared_runtime
        try:
            try:
                runtime = runtime or self._make_runtime()
                connected = await self._unless_stopped(runtime.start())
            except Exception as error:
                if not self._stop.is_set():
                    self._life.apply(Event.FAILED)
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
        )

    async def _unless_stopped(self, work: Awaitable[object]) -> bool:
        """Await `work` unless a stop comes first (then it is cancelled); whether it was finished."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            await task
            return True
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.wait({task, stop})


class _Names(TypedDict):
    """What the worker's metrics are labelled with."""

    namespace: str
    component: str
    endpoint: str
    worker_id: str  # lower-case hex
    model: str
    model_name: str


class _EngineLife:
    """From `start()` to `cleanup()`: one engine on one connected runtime."""

    def __init__(
        self,
        worker: Worker,
        engine: BaseEngine,
        config: WorkerConfig,
        runtime: DistributedRuntime,
        endpoint: Endpoint,
    ) -> None:
        self._worker = worker
        self._life = worker._life
        self._times = worker._times
        self._engine = engine
        self._config = config
        self._runtime = runtime
        self._endpoint = endpoint
        self._metrics: WorkerMetrics | None = None
        self._publishing: Publishing | None = None
        self._running: RunningRequests | None = None
        self._admin: AdminRoutes | None = None
        self._served: ServedEndpoint | None = None
        self._rl: ServedEndpoint | None = None
        self._model_published = False
        self._in_haste = False  # nobody waits for streams any more
        self._cancelled: asyncio.CancelledError | None = None  # somebody cancelled `run` on its way down

    async def run(self) -> None:
        """Live the whole life; raises what failed first, after the clean-up."""
        release = self._runtime.hold()
        try:
            await self._live()
        finally:
            release()

    async def _live(self) -> None:
        failure = await self._come_up()
        if self._life.state is State.SERVING:
            failure = await self._serve()
        self._in_haste = self._in_haste or isinstance(failure, asyncio.CancelledError)
        if self._life.state is State.DRAINING:
            await self._go_down()
            self._life.apply(Event.DRAINED)
        await self._bear(self._cleanup_once())
        await self._leave()
        if failure is not None:
            raise failure
        if self._cancelled is not None:
            raise self._cancelled

    async def _bear(self, step: Awaitable[None]) -> None:
        """Await a step of the end. A cancellation ends the step, not the way down: an engine is owed its clean-up."""
        try:
            await step
        except asyncio.CancelledError as error:
            self._cancelled = error
            self._in_haste = True

    # -- up ----------------------------------------------------------------------------------------------------------

    async def _come_up(self) -> BaseException | None:
        """Start the engine and set everything up; afterwards the worker is SERVING, DRAINING or CLEANING."""
        try:
            self._life.apply(Event.START)
            engine_config, seconds = await self._start_engine()
            if self._life.apply(Event.STARTED) is State.PREPARING:
                await self._prepare(engine_config, seconds)
                self._life.apply(Event.PREPARED)
        except BaseException as error:  # also a cancellation: an engine that was started must be cleaned up
            self._life.apply(Event.FAILED)
            failure = _typed(error)
            # A mistake of the operator is one sentence, and `run` prints it.
            level = logging.DEBUG if isinstance(failure, InvalidArgument) else logging.ERROR
            cause = error if failure is not error else None
            logger.log(level, "worker start-up failed: %s", text_of(failure), exc_info=cause)
            return failure
        return None

    async def _start_engine(self) -> tuple[EngineConfig, float]:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(None) as self._worker._start_scope:  # `request_stop` sets the time
                config = read_engine_config(await _hook(self._engine.start(self._runtime.connection_id())))
        except TimeoutError:
            scope = self._worker._start_scope
            if scope is None or not scope.expired():  # an error of the engine's own
                raise
            raise EngineShutdown(
                f"start() had not returned {self._times.start_until_seconds:g}s after the request to stop, and was cancelled"
            ) from None
        finally:
            self._worker._start_scope = None
        return config, time.perf_counter() - began

    async def _prepare(self, engine_config: EngineConfig, load_seconds: float) -> None:
        """Everything between `start()` and the first request; a stop ends it after the step in flight."""
        self._served_name = engine_config.resolve_served_name(self._config.served_model_name).removeprefix(HUB_PREFIX)
        self._model = engine_config.model
        self._names = _Names(
            namespace=self._config.namespace,
            component=self._config.component,
            endpoint=self._config.endpoint,
            worker_id=f"{self._runtime.connection_id():x}",
            model=self._model,
            model_name=self._served_name,
        )
        await self._attach_observers(engine_config, load_seconds)
        if not self._life.is_stopping:
            await self._register(engine_config)
        if not self._life.is_stopping:
            self._prepare_admin()

    async def _attach_observers(self, engine_config: EngineConfig, load_seconds: float) -> None:
        engine, config = self._engine, self._config
        registry, names = self._runtime.metrics, self._names
        # Twice, because the times of the lifecycle are there even if the engine's own set-up fails.
        self._metrics = WorkerMetrics(registry, **names)
        self._metrics.model_load_time_seconds.set(load_seconds)
        await _hook(engine.register_prometheus(EngineMetrics(registry, **names)))
        ranks = _checked_ranks(engine.component_metrics_dp_ranks())
        self._metrics = WorkerMetrics(registry, dp_ranks=ranks, **names)
        if not config.enable_kv_routing:
            return
        self._publishing = Publishing(self._endpoint, engine_config, enable_local_indexer=config.local_indexer_enabled)
        if isinstance(engine, LLMEngine):
            self._publishing.connect_kv_events(await _hook(engine.kv_event_sources()))
            self._running = await self._publishing.running_requests(config.disaggregation_mode)
        if ranks:
            engine.attach_snapshot_publisher(await self._publishing.snapshot_publisher(self._metrics))

    async def _register(self, engine_config: EngineConfig) -> None:
        config = self._config
        plan = plan_role(config.disaggregation_mode, config.endpoint_types, route_to_encoder=config.route_to_encoder)
        is_raw = isinstance(self._engine, RawEngine)
        if is_raw:
            assets = await asyncio.to_thread(read_context_lengths, config.model_name or engine_config.model)
        else:
            allowed = config.allow_download or env_bool("DYN_ALLOW_DOWNLOAD")
            assets = await resolve_assets(config.model_name, allow_download=allowed)
        card = await asyncio.to_thread(
            build_card,
            self._served_name,
            source_path=(config.model_name or engine_config.model).removeprefix(HUB_PREFIX),
            assets=assets,
            model_input=config.model_input,
            model_type=plan.model_type,
            worker_type=plan.worker_type,
            needs=plan.needs,
            runtime_config=runtime_config_of(config, engine_config),
            kv_cache_block_size=engine_config.kv_cache_block_size,
            custom_template_path=config.custom_jinja_template,
            aliases=engine_config.model_aliases,
            media_decoder=config.media_decoder,
            media_fetcher=config.media_fetcher,
        )
        await _hook(self._engine.on_endpoint_ready(self._endpoint))
        await self._publish(card)

    async def _publish(self, card: ModelCard) -> None:
        self._model_published = True  # before the attempt: what was half done is withdrawn as well
        try:
            await publish_card(self._endpoint, card)
        except Exception as error:
            raise Unknown(f"model attach: {error}") from error

    def _prepare_admin(self) -> None:
        engine = self._engine
        controls = checked_names("control", engine.supported_controls())
        updates = checked_names("update", engine.supported_updates())
        if not isinstance(engine, LLMEngine) and not controls and not updates:
            return  # a raw engine has no taints to update either
        admin = AdminRoutes(
            engine,
            controls=controls,
            updates=updates,
            gate=lambda: self._life.gate,
            set_taints=lambda taints: update_model_taints(self._endpoint, taints),
        )
        for name, route in admin.routes().items():
            self._runtime.register_engine_route(name, route)
        self._admin = admin

    # -- serving -----------------------------------------------------------------------------------------------------

    async def _serve(self) -> BaseException | None:
        """Publish the instance and serve until the end; what went wrong, if anything."""
        config, worker = self._config, self._worker
        logger.info("Serving %s on %s.%s.%s", self._served_name, config.namespace, config.component, config.endpoint)
        try:
            payload = await self._canary_payload()
            if self._life.is_stopping:
                return None
            self._served = served = await self._endpoint.start_serving(
                self._handler(),
                metrics_labels=config.metrics_labels,
                health_check_payload=payload,
                watch_progress=True,
            )
            if self._publishing is not None:
                await self._publishing.serve_recovery()
            if self._admin is not None:
                self._admin.attach(served)
            await self._serve_rl_directory()
            worker._serving.set()
            await self._until_the_end(served)
        except BaseException as error:
            if self._life.state is State.SERVING:  # else a stop came meanwhile and the way down is decided
                worker._stopped_at = asyncio.get_running_loop().time()
                self._life.apply(Event.FAILED)
            if isinstance(error, asyncio.CancelledError | InvalidArgument):
                return error
            failure = Unknown(f"serve: {error}")
            failure.__cause__ = error
            logger.error("worker failed: %s", text_of(failure), exc_info=error)
            return failure
        return None

    async def _until_the_end(self, served: ServedEndpoint) -> None:
        """Return when a stop was asked for, or when the endpoint ended: somebody shut the runtime down."""
        stop = asyncio.ensure_future(self._worker._stop.wait())
        ended = asyncio.ensure_future(served.wait_closed())
        try:
            await asyncio.wait({stop, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (stop, ended):
                each.cancel()
            await asyncio.wait({stop, ended})
        if not self._worker._stop.is_set():
            logger.info("The endpoint ended; shutting down")
            self._in_haste = True
            self._worker.request_stop()

    def _handler(self) -> Handler:
        engine = self._engine
        map_errors = env_bool("DYN_BACKEND_MAP_BUILTIN_ERRORS")
        chaos = self._worker._chaos_on(self._runtime)
        if chaos is not None:
            return chaos.handler(self._plain_handler(chaos.engine(engine), map_errors))
        return self._plain_handler(engine, map_errors)

    def _plain_handler(self, engine: BaseEngine, map_errors: bool) -> Handler:
        config = self._config
        if isinstance(self._engine, RawEngine):
            return RawServing(cast(RawEngine, engine), map_builtin_errors=map_errors).handle
        assert isinstance(self._engine, LLMEngine)  # _check_config lets no other kind pass
        loop, model, role = asyncio.get_running_loop(), self._model, str(config.disaggregation_mode)

        def start_span(context: Context, request: Mapping[str, Any]) -> GenerateSpan | None:
            return GenerateSpan.begin(
                context,
                now=loop.time(),
                model=model,
                input_tokens=len(request["token_ids"]),
                role=role,
                migration_link=request.get("migration_link"),
            )

        return TokenServing(
            cast(LLMEngine, engine),
            mode=config.disaggregation_mode,
            validate=env_bool("DYN_BACKEND_VALIDATE"),
            map_builtin_errors=map_errors,
            start_span=start_span,
            running=self._running,
        ).handle

    async def _canary_payload(self) -> dict[str, Any] | None:
        own: Any = None
        if self._config.health_check_payload is None and env_str("DYN_HEALTH_CHECK_PAYLOAD") is None:
            try:
                own = await _hook(self._engine.health_check_payload())
            except Exception:  # the canary is a convenience; a worker without one serves as well
                logger.warning("health_check_payload() failed; serving without a canary", exc_info=True)
        return resolve_health_check_payload(self._config.health_check_payload, own)

    async def _serve_rl_directory(self) -> None:
        if not self._config.enable_rl or self._admin is None:
            return
        name = rl_endpoint_name(self._config.endpoint)
        url = self._runtime.system_status_server_url()
        if url is None:
            raise InvalidArgument("--enable-rl needs the status server: set DYN_SYSTEM_PORT (0 for any free port)")
        endpoint = self._runtime.endpoint(f"{self._config.namespace}.{self._config.component}.{name}")
        self._rl = await endpoint.start_serving(RlDirectory(url, self._admin.routes()).handle)

    # -- down --------------------------------------------------------------------------------------------------------

    async def _go_down(self) -> None:
        """Leave discovery, let the streams end, drain. Nothing here may fail: every step goes on after an error."""
        if self._worker._shared_runtime is None:
            self._runtime.health.begin_shutdown()
        await self._bear(self._unregister())
        if not self._in_haste and self._times.grace_seconds > 0:
            logger.info("Grace period %.2fs before drain", self._times.grace_seconds)
            await self._bear(asyncio.sleep(self._times.grace_seconds))
        began = time.perf_counter()
        await self._bear(self._await_streams())
        await self._bear(self._cut_streams())
        await self._bear(self._drain())
        await self._bear(self._await_quiescence())
        if self._metrics is not None:
            self._metrics.drain_time_seconds.set(time.perf_counter() - began)

    async def _unregister(self) -> None:
        try:
            if self._admin is not None:
                await self._admin.close()
            if self._rl is not None:
                await self._rl.close()
            if self._served is not None:
                await self._served.withdraw()
        except Exception as error:
            logger.warning("discovery unregister failed: %s", error)
            return
        logger.info("Endpoint unregistered from discovery")

    async def _await_streams(self) -> None:
        """Wait for streams in flight until the deadline less a reserve."""
        served = self._served
        if served is None or self._in_haste:
            return
        until = self._worker._stopped_at + self._times.streams_until_seconds
        loop = asyncio.get_running_loop()
        while served.inflight and loop.time() < until:
            logger.info("Waiting for %d streams in flight, at most %.1fs more", served.inflight, until - loop.time())
            if await served.wait_idle(min(HEARTBEAT_SECONDS, until - loop.time())):
                return

    async def _cut_streams(self) -> None:
        """Decline new requests and end the streams that are left: a frontend migrates them."""
        served = self._served
        if served is None:
            return
        served.stop_accepting()
        cut = served.cut(EngineShutdown("the worker is shutting down"))
        if cut:
            logger.warning("%d streams were still running and were cut; frontends may migrate them", cut)
            # Their aborts and the `finally` of their generators need a living engine: neither may run after cleanup().
            if not await served.wait_idle(CUT_SECONDS):
                logger.warning("%d of them ignored it and are left to the clean-up", served.inflight)

    async def _drain(self) -> None:
        try:
            await _hook(self._engine.drain())
        except Exception:
            logger.warning("engine drain failed", exc_info=True)

    async def _await_quiescence(self) -> None:
        """Prefill only, and only for an engine that overrides `is_quiescent`: peers may still pull from its memory."""
        if type(self._engine).is_quiescent is BaseEngine.is_quiescent:
            return
        if self._config.disaggregation_mode is not DisaggregationMode.PREFILL:
            return
        loop = asyncio.get_running_loop()
        budget = self._times.quiescence_seconds(self._config.disaggregation_mode)
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
            return await _hook(self._engine.is_quiescent()) is True
        except Exception:
            logger.debug("is_quiescent() failed", exc_info=True)
            return False

    async def _cleanup_once(self) -> None:
        began = time.perf_counter()
        try:
            await _hook(self._engine.cleanup())
            logger.info("Engine cleanup complete")
        except Exception:
            logger.error("engine cleanup failed", exc_info=True)
        except asyncio.CancelledError:
            logger.error("engine cleanup was cancelled before it had finished")
            raise
        finally:
            self._life.apply(Event.CLEANED)
            if self._metrics is not None:
                self._metrics.cleanup_time_seconds.set(time.perf_counter() - began)
            if self._publishing is not None:  # engines may publish until cleanup() returns
                await self._publishing.close()

    async def _leave(self) -> None:
        """Take back what this worker put into a runtime that may outlive it."""
        if self._admin is not None:
            for name in self._admin.routes():
                self._runtime.status_server.unregister_route(name)
        if self._served is not None:
            await self._bear(self._served.close())
        if self._model_published:
            await self._bear(self._withdraw_model())

    async def _withdraw_model(self) -> None:
        try:
            await unregister_model(self._endpoint)
        except Exception as error:
            logger.warning("leaving discovery failed, its records will expire: %s", error)


# -- decisions --------------------------------------------------------------------------------------------------------


def shutdown_times(env: Mapping[str, str] | None = None) -> ShutdownTimes:
    """The times of this process's end, from the environment."""
    default = ShutdownTimes()
    return ShutdownTimes(
        grace_seconds=env_float("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", default.grace_seconds, minimum=0.0, env=env),
        timeout_seconds=env_int("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", default.timeout_seconds, minimum=0, env=env),
        prefill_drain_seconds=env_float(
            "DYN_PREFILL_DRAIN_TIMEOUT_S", default.prefill_drain_seconds, minimum=0.0, env=env
        ),
    )


async def _hook(call: Awaitable[T]) -> T:
    """Await a hook of the engine. Only a cancellation of this very task comes out as one: an engine that awaits a task
    which it has cancelled raises CancelledError as well, and that is a failure like any other."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await call
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling() > before:
            raise
        raise Unknown("CancelledError: the engine awaited a task that was cancelled") from error


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
    else:
        raise InvalidArgument(f"{type(engine).__name__} is neither an LLMEngine nor a RawEngine; subclass one of them")
    check_encoder_route(config.disaggregation_mode, config.route_to_encoder)
    check_parsers(config.tool_call_parser, config.reasoning_parser)
    warn_of_parsers_not_built(config.tool_call_parser, config.reasoning_parser)
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


def _checked_ranks(ranks: object) -> list[int]:
    if not isinstance(ranks, list) or not all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in ranks):
        raise InvalidArgument(f"component_metrics_dp_ranks() must return a list of ranks (int), got {ranks!r}")
    return ranks


def _connection_failure(error: Exception) -> DynamoException:
    """What a failed connection is reported as: bad names are the operator's, everything else the store's."""
    if isinstance(error, CannotConnect | InvalidArgument):
        return error
    if isinstance(error, ValueError):
        return InvalidArgument(str(error))
    return CannotConnect(f"{type(error).__name__}: {error}")


def _typed(error: BaseException) -> BaseException:
    """Engine failures as typed errors; what is no failure (a cancellation, an exit) stays itself."""
    return wrap_error(error) if isinstance(error, Exception) else error


# Names that tests written for the native system import from here.
_coerce_disagg_mode = coerce_disaggregation_mode


def _to_rust_disaggregation_mode(mode: DisaggregationMode) -> NativeDisaggregationMode:
    return native_disaggregation_mode(mode)
