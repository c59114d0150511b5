"""Everything between an engine's `start()` and its first request: observers, the card, controls, the handler."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

from dynamo.contract.config import HEALTH_CHECK_PAYLOAD, WorkerConfig
from dynamo.contract.engine import BaseEngine, LLMEngine, RawEngine
from dynamo.contract.engine_config import EngineConfig
from dynamo.contract.health_check import resolve_health_check_payload
from dynamo.contract.metrics import EngineMetrics
from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.telemetry import GenerateSpan
from dynamo.errors import InvalidArgument, Unknown
from dynamo.protocol.records import ADAPTERS_ENDPOINT, ModelCard
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Handler, ResponseSink
from dynamo.runtime.distributed import DistributedRuntime, Endpoint, ServedEndpoint
from dynamo.runtime.observe.logging import has_span_events, span_events
from dynamo.worker.adapters import AdapterRequests, adapter_uri
from dynamo.worker.controls import AdminRoutes, RlDirectory, checked_names, rl_endpoint_name
from dynamo.worker.drain import WorkerDrain
from dynamo.worker.embedding import EmbedServing, offers_embeddings
from dynamo.worker.engine_failures import ErrorMapping
from dynamo.worker.hooks import await_hook
from dynamo.worker.hub import HUB_PREFIX
from dynamo.worker.kv_publishing.lifecycle import Publishing
from dynamo.worker.lifecycle import Lifecycle
from dynamo.worker.lifecycle_metrics import WorkerMetrics
from dynamo.worker.registration import (
    build_card,
    plan_role,
    publish_card,
    read_context_lengths,
    resolve_assets,
    runtime_config_of,
    update_model_taints,
)
from dynamo.worker.running_requests import RunningRequests
from dynamo.worker.serving import RawServing, TokenServing
from dynamo.worker.settings import ALLOW_DOWNLOAD, MAP_BUILTIN_ERRORS, VALIDATE, describe_place

if TYPE_CHECKING:
    from dynamo.runtime.calls.faults import WorkerFaults

logger = logging.getLogger(__name__)


class MetricLabels(TypedDict):
    """What the worker's metrics are labelled with."""

    namespace: str
    component: str
    endpoint: str
    worker_id: str  # lower-case hex
    model: str
    model_name: str


@dataclass(slots=True)
class Parts:
    """What the set-up of one engine made, and its shutdown takes down. None: not made yet."""

    served_name: str = ""
    model: str = ""
    metrics: WorkerMetrics | None = None
    publishing: Publishing | None = None
    running: RunningRequests | None = None
    drain: WorkerDrain | None = None
    admin: AdminRoutes | None = None
    chaos: WorkerFaults | None = None
    served: ServedEndpoint | None = None
    rl: ServedEndpoint | None = None
    adapters: ServedEndpoint | None = None
    model_published: bool = False


class Setup:
    """Sets one engine up on one connected runtime."""

    def __init__(
        self,
        engine: BaseEngine,
        config: WorkerConfig,
        endpoint: Endpoint,
        life: Lifecycle,
        is_stop_requested: Callable[[], bool] = lambda: False,
        *,
        grace_seconds: float = 0.0,
    ) -> None:
        """`grace_seconds`: how long a worker that left discovery still serves what comes."""
        self._engine, self._grace_seconds = engine, grace_seconds
        self._is_stop_requested = is_stop_requested
        self._config = config
        self._runtime: DistributedRuntime = endpoint.runtime
        self._endpoint = endpoint
        self._life = life
        self.parts = Parts()

    @property
    def worker_id(self) -> int:
        """The id of the instance, which `start()` gets."""
        return self._runtime.connection_id()

    async def prepare(self, engine_config: EngineConfig, load_seconds: float) -> None:
        """Do all between `start()` and the first request; a stop ends the preparation after the step in flight."""
        self.parts.served_name = engine_config.resolve_served_name(self._config.served_model_name).removeprefix(
            HUB_PREFIX
        )
        self.parts.model = engine_config.model
        names = MetricLabels(
            namespace=self._config.namespace,
            component=self._config.component,
            endpoint=self._config.endpoint,
            worker_id=f"{self._runtime.connection_id():x}",
            model=self.parts.model,
            model_name=self.parts.served_name,
        )
        await self._attach_observers(engine_config, load_seconds, names)
        if not self._life.is_stopping:
            await self._register(engine_config)
        if not self._life.is_stopping:
            self._prepare_admin()

    async def _attach_observers(self, engine_config: EngineConfig, load_seconds: float, names: MetricLabels) -> None:
        engine, config = self._engine, self._config
        registry = self._runtime.metrics
        # Twice, because the times of the lifecycle are there even if the engine's own set-up fails.
        self.parts.metrics = WorkerMetrics(registry, **names)
        self.parts.metrics.model_load_time_seconds.set(load_seconds)
        await await_hook(engine.register_prometheus(EngineMetrics(registry, **names)))
        ranks = _checked_ranks(engine.component_metrics_dp_ranks())
        self.parts.metrics = WorkerMetrics(registry, dp_ranks=ranks, **names)
        if not config.enable_kv_routing:
            return
        self.parts.publishing = Publishing(
            self._endpoint, engine_config, enable_local_indexer=config.local_indexer_enabled
        )
        if isinstance(engine, LLMEngine):
            self.parts.publishing.connect_kv_events(await await_hook(engine.kv_event_sources()))
            self.parts.running = await self.parts.publishing.running_requests(config.disaggregation_mode)
        if ranks:
            engine.attach_snapshot_publisher(await self.parts.publishing.snapshot_publisher(self.parts.metrics))

    async def _register(self, engine_config: EngineConfig) -> None:
        config = self._config
        plan = plan_role(config.disaggregation_mode, config.endpoint_types, route_to_encoder=config.route_to_encoder)
        is_raw = isinstance(self._engine, RawEngine)
        if is_raw:
            assets = await asyncio.to_thread(read_context_lengths, config.model_name or engine_config.model)
        else:
            allowed = config.allow_download or ALLOW_DOWNLOAD.value(os.environ)
            assets = await resolve_assets(config.model_name, allow_download=allowed)
        card = await asyncio.to_thread(
            build_card,
            self.parts.served_name,
            source_path=(config.model_name or engine_config.model).removeprefix(HUB_PREFIX),
            assets=assets,
            model_input=config.model_input,
            model_type=plan.model_type,
            worker_type=plan.worker_type,
            needs=plan.needs,
            runtime_config=runtime_config_of(config, engine_config),
            kv_cache_block_size=engine_config.kv_cache_block_size,
            custom_template_path=config.custom_jinja_template,
            aliases=engine_config.model_aliases if config.model_aliases is None else config.model_aliases,
            media_decoder=config.media_decoder,
            media_fetcher=config.media_fetcher,
        )
        await describe_place(card.runtime_config, os.environ)
        await await_hook(self._engine.on_endpoint_ready(self._endpoint))
        await self._publish(card)

    async def _publish(self, card: ModelCard) -> None:
        self.parts.model_published = True  # before the attempt: what was half done is withdrawn as well
        try:
            await publish_card(self._endpoint, card)
        except Exception as error:
            raise Unknown(f"model attach: {error}") from error

    def _prepare_admin(self) -> None:
        engine = self._engine
        drain = self.parts.drain = WorkerDrain(
            engine,
            lambda: self._life.gate,
            is_prefill=self._config.disaggregation_mode is DisaggregationMode.PREFILL,
            grace_seconds=self._grace_seconds,
        )
        controls = checked_names("control", engine.supported_controls())
        updates = checked_names("update", engine.supported_updates())
        logger.info("registered engine management controls control_count=%d", len(controls))
        logger.info("registered engine management updates update_count=%d", len(updates))
        if not isinstance(engine, LLMEngine) and not controls and not updates:
            return  # a raw engine has no taints to update either
        admin = AdminRoutes(
            engine,
            controls=controls,
            updates=updates,
            record=drain.record,
            set_taints=lambda taints: update_model_taints(self._endpoint, taints),
        )
        for name, route in admin.routes().items():
            self._runtime.register_engine_route(name, route)
        self.parts.admin = admin

    def open_drain(self, served: ServedEndpoint) -> None:
        """Let operators drain the worker, and controls pause it."""
        drain, server = self.parts.drain, self._runtime.status_server
        assert drain is not None  # it was prepared before anything is served
        drain.attach(served)
        for name, (method, route) in drain.routes().items():
            server.register_reserved_route(name, method, route)
        logger.info("registered worker Admin API routes under /engine")

    def handler(self, chaos: WorkerFaults | None) -> Handler:
        engine = self._engine
        if chaos is not None:
            return chaos.handler(self._framed(self._plain_handler(chaos.engine(engine))))
        return self._framed(self._plain_handler(engine))

    def _framed(self, handler: Handler) -> Handler:
        """Return the handler with records of the beginning and end of `engine.generate`, where spans are records."""
        if not has_span_events():
            return handler
        is_raw, model, role = (
            isinstance(self._engine, RawEngine),
            self.parts.model,
            str(self._config.disaggregation_mode),
        )

        async def framed(body: object, context: Context, sink: ResponseSink) -> None:
            fields: dict[str, object] = {"request_id": context.id()}
            if not is_raw and isinstance(body, dict):
                tokens = body.get("token_ids")
                count = len(tokens) if isinstance(tokens, list | bytes) else None
                fields |= {"model": model, "disagg_role": role, "input_tokens": count}
            with span_events("engine.generate", **fields):
                await handler(body, context, sink)

        return framed

    def _plain_handler(self, engine: BaseEngine) -> Handler:
        config = self._config
        errors = ErrorMapping(
            engine,
            map_builtin_errors=bool(MAP_BUILTIN_ERRORS.value(os.environ)),
            is_stopping=self._is_stop_requested,
        )
        if isinstance(self._engine, RawEngine):
            return RawServing(cast(RawEngine, engine), errors=errors).handle
        assert isinstance(self._engine, LLMEngine)  # _check_config lets no other kind pass
        loop, model, role = asyncio.get_running_loop(), self.parts.model, str(config.disaggregation_mode)

        def start_span(context: Context, request: Mapping[str, Any]) -> GenerateSpan | None:
            return GenerateSpan.begin(
                context,
                now=loop.time(),
                model=model,
                input_tokens=len(request["token_ids"]),
                role=role,
                migration_link=request.get("migration_link"),
            )

        generate = TokenServing(
            cast(LLMEngine, engine),
            mode=config.disaggregation_mode,
            validate=bool(VALIDATE.value(os.environ)),
            errors=errors,
            start_span=start_span,
            running=self.parts.running,
        ).handle
        if not offers_embeddings(self._engine):
            return generate
        return EmbedServing(self._engine, generate, served_name=self.parts.served_name, errors=errors).handle

    async def canary_payload(self) -> dict[str, object] | None:
        own: Any = None
        if self._config.health_check_payload is None and HEALTH_CHECK_PAYLOAD.value(os.environ) is None:
            try:
                own = await await_hook(self._engine.health_check_payload())
            except Exception:  # the canary is a convenience; a worker without one serves as well
                logger.warning("health_check_payload() failed; serving without a canary", exc_info=True)
        return resolve_health_check_payload(self._config.health_check_payload, own)

    async def serve_rl_directory(self) -> None:
        if not self._config.enable_rl or self.parts.admin is None:
            return
        name = rl_endpoint_name(self._config.endpoint)
        url = self._runtime.status_server.admin_url
        if self._runtime.system_status_server_url() is None:
            raise InvalidArgument("--enable-rl needs the status server: set DYN_SYSTEM_PORT (0 for any free port)")
        if url is None:
            raise InvalidArgument(
                "--enable-rl needs the engine routes, which are not served on a status server that is open to a network: set "
                "DYN_ADMIN_PORT (0 for any free port)"
            )
        endpoint = self._runtime.endpoint(f"{self._config.namespace}.{self._config.component}.{name}")
        status = self._runtime.status_server
        directory = RlDirectory(url, self.parts.admin.routes(), lambda: status.route_names)
        self.parts.rl = await endpoint.start_serving(directory.handle)

    async def serve_adapters(self) -> None:
        """Let frontends load and unload adapters, where that is switched on and the engine can."""
        if not self._runtime.settings.system.lora_enabled or self.parts.admin is None:
            return
        routes = self.parts.admin.routes()
        if "update/load_lora" in routes:
            endpoint = self._runtime.endpoint(f"{self._config.namespace}.{self._config.component}.{ADAPTERS_ENDPOINT}")
            self.parts.adapters = await endpoint.start_serving(AdapterRequests(routes).handle)

    async def load_adapters(self) -> None:
        """Load what the configuration names. Raises InvalidArgument for an engine that cannot, or what it does not load."""
        if not self._config.loras:
            return
        load = None if self.parts.admin is None else self.parts.admin.routes().get("update/load_lora")
        if load is None:
            raise InvalidArgument("--lora: this engine loads no adapters")
        for name, uri in map(adapter_uri, self._config.loras):
            answer = await load({"lora_name": name, "source": {"uri": uri}})
            if str(answer.get("status")).lower() == "error":
                raise InvalidArgument(f"--lora {name}: {answer.get('message') or answer}")
            logger.info("The adapter %s is loaded", name)


def _checked_ranks(ranks: object) -> list[int]:
    if not isinstance(ranks, list) or not all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in ranks):
        raise InvalidArgument(f"component_metrics_dp_ranks() must return a list of ranks (int), got {ranks!r}")
    return ranks
