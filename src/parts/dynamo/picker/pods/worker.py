"""One pod of plain vLLM as a worker: what a worker publishes of itself is published here, in this process, in its name.

The pod gets a runtime of its own over the stores in memory, with a card, an instance, KV events and loads. So the models, the
index and the policies of the frontend follow it as they follow any worker. Its requests never come here: the gateway sends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from dynamo.contract.engine_config import EngineConfig
from dynamo.contract.kv_events import PushSource
from dynamo.errors import DynamoException, InvalidArgument, WorkerUnavailable, text_of
from dynamo.picker.pods.events import EngineMessages, EventAddress, PodEvents
from dynamo.picker.pods.listing import PodRecord
from dynamo.picker.pods.probes import PodClient, PodLoad, PodModel, PodRefused, read_load, read_models
from dynamo.picker.pods.settings import PodSettings
from dynamo.protocol.records import ModelCard, ModelRuntimeConfig, decode_card, slugify
from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.calls.request_plane.memory import shared_plane
from dynamo.runtime.discovery.memory import MemoryDiscovery, shared_hub
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.worker.kv_publishing.lifecycle import Publishing
from dynamo.worker.kv_publishing.load import WorkerMetricsPublisher
from dynamo.worker.kv_publishing.metrics import KvPublisherMetrics
from dynamo.worker.registration import build_card, plan_role, resolve_assets

if TYPE_CHECKING:
    from dynamo.worker.kv_publishing.publisher import KvEventPublisher

logger = logging.getLogger(__name__)

FAILURES: Final = 2  # in a row, and a pod is not ready
MAX_CARD_BYTES: Final = 4 * 1024 * 1024
SURFACES: Final = "chat,completions"


class PodTools:
    """What all pods share: settings, the HTTP client, the sockets' context."""

    def __init__(self, settings: PodSettings, namespace: str, metrics: KvPublisherMetrics) -> None:
        self.settings, self.namespace, self.metrics = settings, namespace, metrics
        self.client = PodClient(settings.timeout_seconds)
        self.sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets.set(zmq.MAX_SOCKETS, 16_384)

    async def card_for(self, record: PodRecord, model: PodModel, load: PodLoad) -> ModelCard:
        """Build the card of a pod. Raises InvalidArgument and CannotConnect."""
        settings, plan = self.settings, plan_role(record.mode, SURFACES)
        runtime = ModelRuntimeConfig(
            context_length=model.context_length, total_kv_blocks=load.total_blocks, enable_local_indexer=True
        )
        block_size = settings.block_size or load.block_size
        if block_size is None:
            raise InvalidArgument("its /metrics name no block size (vllm:cache_config_info): set --pod-block-size")
        if settings.card is not None:
            card = await asyncio.to_thread(_read_card, settings.card)
            card.display_name, card.slug, card.aliases = model.name, slugify(model.name), list(model.aliases)
            card.kv_cache_block_size = block_size
            card.worker_type, card.model_type = str(plan.worker_type), str(plan.model_type)
            card.needs = [[str(role) for role in alternative] for alternative in plan.needs]
            runtime.tool_call_parser = card.runtime_config.tool_call_parser
            runtime.reasoning_parser = card.runtime_config.reasoning_parser
            card.runtime_config = runtime
            return card
        source = settings.model_path or model.root
        assets = await resolve_assets(source)
        if assets is None:
            raise InvalidArgument(
                f"its model {source!r} is no directory here, so nothing says how prompts become tokens: set --pod-model-path"
            )
        return await asyncio.to_thread(
            build_card, model.name, source_path=source, assets=assets, model_type=plan.model_type,
            worker_type=plan.worker_type, needs=plan.needs, runtime_config=runtime, kv_cache_block_size=block_size,
            aliases=model.aliases,
        )  # fmt: skip

    async def aclose(self) -> None:
        """Close the connections, once no pod is followed any more."""
        await self.client.aclose()
        self.sockets.term()


def _read_card(path: Path) -> ModelCard:
    try:
        if path.stat().st_size > MAX_CARD_BYTES:
            raise InvalidArgument(f"--pod-card {path}: longer than {MAX_CARD_BYTES} bytes")
        return decode_card(msgspec.json.decode(path.read_bytes()))
    except (OSError, msgspec.MsgspecError, TypeError, ValueError) as error:
        raise InvalidArgument(f"--pod-card {path}: {error}") from error


async def _elsewhere(_body: object, _context: Context, _sink: ResponseSink) -> None:
    raise WorkerUnavailable("a pod of plain vLLM gets its requests from the gateway")


class PodWorker:
    """Follows one pod: a worker while it is well, and none while it is not."""

    def __init__(self, record: PodRecord, tools: PodTools, changed: Callable[[], None]) -> None:
        """`changed` is called when the pod becomes full, and when it no longer is."""
        self.record, self._tools, self._changed = record, tools, changed
        self.load: PodLoad | None = None
        """Its last figures; None: it is not ready."""
        self.is_full = False
        """Whether it gets no further request."""
        self._failures = 0
        self._said: str | None = None  # why it is not ready, as the log has it
        self._stack: AsyncExitStack | None = None  # of what it publishes
        self._reports: WorkerMetricsPublisher | None = None

    async def run(self) -> None:
        """Follow the pod until this is cancelled."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(self._tools.settings.poll_seconds)
        finally:
            await self._leave()

    async def _look(self) -> None:
        address, client = self.record.address, self._tools.client
        try:
            await client.get(address, "/health")
            load = read_load(await client.get(address, "/metrics"))
            if self.load is not None and self.load.started_at != load.started_at:
                logger.info("pod %s has begun again", address)
                await self._leave()
            if self._stack is None:
                await self._join(read_models(await client.get(address, "/v1/models")), load)
        except DynamoException as error:
            self._failures += 1
            if isinstance(error, PodRefused) or self._failures >= FAILURES or self.load is None:
                await self._leave()
                self._say(text_of(error))
            return
        self._failures = 0
        self._take_load(load)
        if self._reports is not None and load.total_blocks:
            self._reports.update(0, kv_used_blocks=round(load.cache_usage * load.total_blocks))

    def _take_load(self, load: PodLoad | None) -> None:
        self.load, limit, was_full = load, self._tools.settings.waiting_limit, self.is_full
        self.is_full = limit is not None and load is not None and load.waiting > limit
        if self.is_full != was_full:
            self._changed()

    def _say(self, why: str) -> None:
        if why != self._said:
            self._said = why
            logger.warning("pod %s is not ready: %s", self.record.address, why)

    async def _join(self, model: PodModel, load: PodLoad) -> None:
        """Publish the pod as a worker."""
        record, tools, loop = self.record, self._tools, asyncio.get_running_loop()
        card = await tools.card_for(record, model, load)
        async with AsyncExitStack() as stack:
            runtime = DistributedRuntime(
                loop, None, "mem", settings=RuntimeSettings(), memory_plane=shared_plane(loop),
                discovery=MemoryDiscovery(shared_hub(loop), lease_id=record.instance_id),
            )  # fmt: skip
            stack.push_async_callback(runtime.aclose)
            await runtime.start()
            endpoint = runtime.endpoint(f"{tools.namespace}.{record.mode.discovery_component}.generate")
            await endpoint.start_serving(_elsewhere)
            config = EngineConfig(model.name, kv_cache_block_size=card.kv_cache_block_size)
            publishing = Publishing(endpoint, config, enable_local_indexer=True)
            stack.push_async_callback(publishing.close)
            reports = WorkerMetricsPublisher()
            await reports.create_endpoint(endpoint)
            stack.callback(reports.close)
            await endpoint.publish_model(card.to_json())
            if (events := record.event_address(tools.settings.defaults)) is not None:
                where = EventAddress(events, tools.settings.event_topic, record.replay_address(tools.settings.defaults))

                def subscribe(publisher: KvEventPublisher) -> None:
                    messages = EngineMessages(events, publisher.take_engine_events, tools.metrics)
                    stack.callback(PodEvents(tools.sockets, where, messages).close)

                publishing.connect_kv_events([PushSource(subscribe)])
                await publishing.serve_recovery()
            self._reports, self._stack = reports, stack.pop_all()
        self._said = None
        logger.info(
            "pod %s is ready: model %s, blocks of %d tokens", record.address, model.name, config.kv_cache_block_size
        )

    async def _leave(self) -> None:
        """Publish it no more. Idempotent."""
        stack, self._stack = self._stack, None
        self._reports = None
        self._take_load(None)
        if stack is not None:
            await stack.aclose()
