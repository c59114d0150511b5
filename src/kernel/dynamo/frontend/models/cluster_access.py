"""How a frontend reaches the workers of its runtime: their clients, the loads they report, the policy that chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo.errors import Unknown
from dynamo.frontend.admission.model import AdmissionPolicy
from dynamo.frontend.models.busy_threshold import LOAD_TOPIC
from dynamo.frontend.models.card_routing import CardRouting, GroupRouting
from dynamo.frontend.models.cards import CardEntry
from dynamo.frontend.models.served import ServingRules
from dynamo.frontend.models.settings import ModelSettings
from dynamo.placement import Policy, RouterMode, policy_for
from dynamo.protocol.records import ADAPTERS_ENDPOINT
from dynamo.router.kv.domains import KvDomains
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.workers.pool import WorkerClient
from dynamo.runtime.calls.event_plane.base import Event

if TYPE_CHECKING:
    from dynamo.runtime.client import Client
    from dynamo.runtime.distributed import DistributedRuntime


class ClusterAccess:
    """Stays within one runtime, which it does not close."""

    def __init__(self, settings: ModelSettings, runtime: DistributedRuntime) -> None:
        self._settings = settings
        self._runtime = runtime
        mode = RouterMode.of(settings.router_mode)
        own = self._routing(mode, settings.kv_router)
        self.cards = CardRouting(own, mode, settings.kv_router, self._routing)
        self.kv = own.kv
        self._adapters: dict[str, Client] = {}  # of the components whose adapters were requested

    async def connect(self, endpoint: str) -> WorkerClient:
        """Return a client of an endpoint."""
        return await self._runtime.endpoint(endpoint).client()

    async def ask_adapters(self, entry: CardEntry, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request for adapters to the worker of a card. Raises `DynamoException`."""
        namespace, component, _ = entry.endpoint.split(".")
        path = f"{namespace}.{component}.{ADAPTERS_ENDPOINT}"
        client = self._adapters.get(path)
        if client is None:
            client = self._adapters[path] = await self._runtime.endpoint(path).client()
        stream = await client.direct(dict(body), entry.instance_id, annotated=False)
        try:
            async for answer in stream:
                if isinstance(answer, dict):
                    return answer
        except ValueError as error:  # what a caller of `direct` sees of an error
            raise Unknown(str(error)) from error
        finally:
            await stream.aclose()
        raise Unknown("the worker ended without an answer")

    def loads(self, endpoint: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Subscribe to the loads that the workers of an endpoint report."""
        return self._runtime.events.subscribe(self._runtime.endpoint(endpoint).event_scope, LOAD_TOPIC)

    def rules(self) -> ServingRules:
        """Return how models are served."""
        settings = self._settings
        return ServingRules(
            partial(self._policy, RouterMode.of(settings.router_mode)),
            AdmissionPolicy(settings.max_requests_per_model, settings.max_queue_age_seconds, settings.capacity_share),
            enforce_disagg=settings.enforce_disagg,
            min_initial_workers=settings.router_min_initial_workers,
            replacement_wait_seconds=settings.replacement_wait_seconds,
            cold_start_wait_seconds=settings.cold_start_wait_seconds,
            rng=self._runtime.rng,
            kv=self.kv,
            cards=self.cards,
            bypass=settings.bypass_rules(),
        )

    @asynccontextmanager
    async def report_own(self, endpoint: str) -> AsyncIterator[None]:
        """Report what this process has booked at an endpoint as load, for as long as the block runs."""
        async with AsyncExitStack() as stack:
            for each in self.cards.domains:
                await stack.enter_async_context(each.load_reports(endpoint))
            yield

    def _routing(self, mode: RouterMode, settings: KvRouterSettings) -> GroupRouting:
        """Return how workers are chosen by a mode. Raises InvalidArgument for a policy that cannot be made."""
        runtime, kv = self._runtime, None
        if mode is RouterMode.KV:
            kv = KvDomains(
                settings, runtime.endpoint, runtime.metrics, router_id=runtime.connection_id, rng=runtime.rng
            )
        return GroupRouting(partial(self._policy, mode), kv)

    def _policy(self, mode: RouterMode) -> Policy:
        ratio = self._runtime.settings.cuda_to_cpu_ratio
        return policy_for(mode, rng=self._runtime.rng, cuda_to_cpu_ratio=ratio)

    async def aclose(self) -> None:
        """Leave the KV routing, and the endpoints of adapters."""
        for client in self._adapters.values():
            await client.close()
        self._adapters.clear()
        for each in self.cards.domains:
            await each.aclose()
