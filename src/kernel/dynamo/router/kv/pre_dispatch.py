"""What a request passes before it is sent, where the settings have it: a queue, and sessions that stay with their worker."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.queueing import PolicyProfile
from dynamo.router.kv.queue_gate import GatedPool, PoolRanks, QueuedRanks, QueueGate, RouterRanks
from dynamo.router.kv.queue_metrics import QueueMetrics
from dynamo.router.kv.router import KvRouter
from dynamo.router.kv.sessions import PoolSessions, SessionRelay
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.peers.replica_sync import SessionSync
from dynamo.runtime.endpoint import Endpoint
from dynamo.runtime.observe.metrics import MetricsRegistry

if TYPE_CHECKING:
    from dynamo.router.kv.placement import KvPlacement


class PreDispatchGate(NamedTuple):
    """A queue and sessions; None: there are none."""

    gate: QueueGate | None = None
    sessions: PoolSessions | None = None


class PoolKind(NamedTuple):
    """What a pool of workers is called in metrics."""

    model: str
    worker_type: str  # "decode" or "prefill"; workers that do both count as "decode"


def gate_for_pool(
    settings: KvRouterSettings,
    registry: MetricsRegistry,
    kind: PoolKind,
    pool: GatedPool,
    placement: KvPlacement,
    *,
    relay: SessionRelay,
    ranks: Callable[[], Collection[WorkerRank]],
    writer_id: int,
) -> PreDispatchGate | None:
    """Return what requests pass before the workers of a pool; None: nothing. `ranks`: those that the workers' cards name."""
    gate = _gate(registry, kind, settings.profile(kind.model), placement.router, PoolRanks(pool, placement))
    reached = weakref.ref(pool)

    def is_known(rank: WorkerRank) -> bool:
        found = reached()
        return found is not None and rank in ranks() and found.instance(rank.worker_id) is not None

    sessions = _sessions(settings, writer_id, is_known, relay, kind.model)
    may_wait = gate is not None or sessions is not None or placement.may_defer
    return PreDispatchGate(gate, sessions) if may_wait else None


@asynccontextmanager
async def gate_for_endpoint(
    settings: KvRouterSettings, router: KvRouter, endpoint: Endpoint
) -> AsyncIterator[PreDispatchGate]:
    """Give what requests pass before the workers of an endpoint. Bindings of sessions are shared with other routers."""
    path = endpoint.path
    profile = settings.profile("")  # that of no model in particular: an endpoint may serve several
    gate = _gate(endpoint.runtime.metrics, PoolKind(path, "decode"), profile, router, RouterRanks(router))
    relay = SessionRelay(lambda _: path)
    sessions = _sessions(settings, endpoint.connection_id(), lambda rank: rank in router.ranks, relay, path)
    if sessions is None:
        yield PreDispatchGate(gate)
        return
    async with SessionSync(endpoint, relay) as sync:
        relay.syncs[path] = sync
        yield PreDispatchGate(gate, sessions)


def _gate(
    registry: MetricsRegistry,
    kind: PoolKind,
    profile: PolicyProfile,
    router: KvRouter,
    ranks: QueuedRanks,
) -> QueueGate | None:
    if not profile.parks:
        return None
    metrics = QueueMetrics(registry, model=kind.model, worker_type=kind.worker_type, classes=profile.classes)
    return QueueGate(router, profile, ranks, metrics)


def _sessions(
    settings: KvRouterSettings,
    writer_id: int,
    is_known: Callable[[WorkerRank], bool],
    relay: SessionRelay,
    name: str,
) -> PoolSessions | None:
    ttl = settings.router_session_affinity_ttl_secs
    if ttl is None:
        return None
    mode = settings.router_session_affinity_mode
    made = relay.pools[name] = PoolSessions(ttl, mode, writer_id=writer_id, is_known=is_known, report=relay.report)
    return made
