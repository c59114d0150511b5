"""How a frontend reaches the workers of its runtime: their clients, the loads they report, the policy that chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from dynamo.frontend.admission.model import AdmissionPolicy
from dynamo.frontend.busy_threshold import LOAD_TOPIC
from dynamo.frontend.models.served import ServingRules
from dynamo.frontend.settings import FrontendSettings
from dynamo.placement import Policy, RouterMode, policy_for
from dynamo.router.kv.domains import KvDomains
from dynamo.router.pool import WorkerClient
from dynamo.runtime.event_plane.base import Event

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime

__all__ = ["ClusterAccess"]


class ClusterAccess:
    """Stays within one runtime, which it does not close."""

    def __init__(self, settings: FrontendSettings, runtime: DistributedRuntime) -> None:
        self._settings = settings
        self._runtime = runtime
        self.kv: KvDomains | None = None
        if settings.router_mode == RouterMode.KV:
            self.kv = KvDomains(
                settings.kv_router,
                runtime.endpoint,
                runtime.metrics,
                router_id=runtime.connection_id,
                rng=runtime.rng,
            )

    async def connect(self, endpoint: str) -> WorkerClient:
        """Return a client of an endpoint."""
        return await self._runtime.endpoint(endpoint).client()

    def loads(self, endpoint: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Subscribe to the loads that the workers of an endpoint report."""
        return self._runtime.events.subscribe(self._runtime.endpoint(endpoint).event_scope, LOAD_TOPIC)

    def rules(self) -> ServingRules:
        """Return how models are served."""
        settings = self._settings
        return ServingRules(
            self._placement_policy,
            AdmissionPolicy(settings.max_requests_per_model, settings.max_queue_age_seconds, settings.capacity_share),
            enforce_disagg=settings.enforce_disagg,
            replacement_wait_seconds=settings.replacement_wait_seconds,
            rng=self._runtime.rng,
            kv=self.kv,
            bypass=settings.bypass_rules(),
        )

    def _placement_policy(self) -> Policy:
        ratio = self._runtime.settings.cuda_to_cpu_ratio
        return policy_for(RouterMode.of(self._settings.router_mode), rng=self._runtime.rng, cuda_to_cpu_ratio=ratio)

    async def aclose(self) -> None:
        """Leave the KV routing."""
        if self.kv is not None:
            await self.kv.aclose()
