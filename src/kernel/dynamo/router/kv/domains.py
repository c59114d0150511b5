"""One `KvPlacement` for each group of workers whose blocks have the same names, kept up to date by cards and KV events.

Workers of one namespace and role with one block size are a domain: a model and its adapters share their workers, and so
they share the index and the account of their load. A request names the workers that may serve it, so models do not mix.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from typing import Final, NamedTuple, cast
from weakref import WeakValueDictionary, finalize

from msgspec import structs

from dynamo.errors import InvalidArgument
from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.events import RouterEvent
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_state import KvPolicy
from dynamo.placement.policies.kv_policies import is_of_user, kv_policy, kv_policy_parameters
from dynamo.protocol.records import DEFAULT_BLOCK_SIZE, ModelCard
from dynamo.router.kv.decisions import DecisionHeader, DecisionLog
from dynamo.router.kv.domain import KvDomain, KvMember
from dynamo.router.kv.indexes import EventlessGuesses
from dynamo.router.kv.metrics import EventCounters, KvMetrics, SeriesGroups
from dynamo.router.kv.placement import KvPlacement
from dynamo.router.kv.pre_dispatch import PoolKind, PreDispatchGate, gate_for_pool
from dynamo.router.kv.queue_gate import GatedPool
from dynamo.router.kv.router import KvRouter, KvRouterOptions
from dynamo.router.kv.settings import KV_POLICIES, KvRouterSettings
from dynamo.router.kv_events.feed import MAX_RECOVERIES, KvEventFeed
from dynamo.router.kv_events.rank_events import CacheEvents
from dynamo.router.peers.load_reports import RouterLoadReports
from dynamo.router.peers.replica_sync import ReplicaSync, SessionSync
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.endpoint import Endpoint
from dynamo.runtime.observe.metrics import MetricsRegistry

OF_USERS: Final = "dynamo.policies.placement"
RETRY_SECONDS: Final = 1.0
AGGREGATED: Final = "aggregated"
_DECODE: Final = "decode"
_PREFILL: Final = "prefill"


class DomainKey(NamedTuple):
    """What the workers of a domain have in common."""

    namespace: str
    role: str
    block_size: int
    is_eagle: bool = False


def policy_of(settings: KvRouterSettings, role: str = AGGREGATED) -> tuple[KvPolicy, DecisionHeader]:
    """Return the policy that the settings name for workers of a role, and how it is written down.

    Raises InvalidArgument for a type, a parameter or a weight that cannot be used.
    """
    try:
        selector = settings.selector(role)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    if selector is not None and (selector.parameters or selector.type not in KV_POLICIES):
        given = cast("dict[str, float]", selector.parameters)  # the policy checks them
        return kv_policy(selector.type, given), DecisionHeader(selector.type, given)
    return _policy_named(settings, settings.policy if selector is None else selector.type)


def _policy_named(settings: KvRouterSettings, name: str) -> tuple[KvPolicy, DecisionHeader]:
    """Return a policy with the parameters that the settings give it, and how it is written down."""
    parameters = {each: getattr(settings, each) for each in kv_policy_parameters(name) if hasattr(settings, each)}
    return kv_policy(name, parameters), DecisionHeader(name, parameters)


def router_options(settings: KvRouterSettings, *, is_prefill: bool = False) -> KvRouterOptions:
    """Return what a router counts. `is_prefill`: its workers keep no blocks for longer than a prefill takes."""
    return KvRouterOptions(
        host_cache_hit_weight=settings.host_cache_hit_weight,
        disk_cache_hit_weight=settings.disk_cache_hit_weight,
        tracks_prefill_tokens=settings.router_track_prefill_tokens,
        tracks_active_blocks=settings.router_track_active_blocks and not is_prefill,
        tracks_output_blocks=settings.router_track_output_blocks,
        assumes_kv_reuse=settings.router_assume_kv_reuse,
        expiry_seconds=settings.active_request_expiry_seconds,
    )


def guesses_of(settings: KvRouterSettings) -> ApproximateIndex | EventlessGuesses | None:
    """Return what guesses the workers' caches by where prompts went; None where caches are ignored.

    Without events that is all there is to know. With them it is for what is on its way (`--router-predicted-ttl-secs`), or
    else for the workers that publish no events.
    """
    if settings.guesses:
        is_lru = settings.router_approximate_cache_policy == "lru"
        return ApproximateIndex(ttl_seconds=settings.router_ttl_secs, is_lru=is_lru)
    if not settings.reads_events:
        return None
    if settings.router_predicted_ttl_secs is not None:
        return ApproximateIndex(ttl_seconds=settings.router_predicted_ttl_secs)
    return EventlessGuesses(settings.router_ttl_secs)


class _CountingSink:
    """Passes the events of one endpoint's workers on to their domain, and counts what becomes of them."""

    __slots__ = ("_counters", "_domain", "forget", "refused")

    def __init__(self, domain: KvDomain, counters: EventCounters) -> None:
        self._domain, self._counters = domain, counters
        self.forget = domain.forget
        self.refused = counters.refused

    def apply(self, event: RouterEvent) -> None:
        """Apply one event. See `KvSink`."""
        self._counters.count(event, self._domain.apply(event))


class _Follower:
    """The feed of one endpoint of a domain, for as long as workers are there."""

    __slots__ = ("feed", "tasks")

    def __init__(self) -> None:
        self.feed: KvEventFeed | None = None
        self.tasks: list[asyncio.Task[None]] = []


class _DomainMaker:
    """Makes the domains of one process: their policies, and the record of their decisions."""

    def __init__(
        self, settings: KvRouterSettings, series: SeriesGroups, router_id: Callable[[], int], rng: random.Random
    ) -> None:
        """Raises InvalidArgument for a policy that cannot be made, and OSError where decisions cannot be recorded."""
        self._settings, self._rng = settings, rng
        self.series, self.router_id = series, router_id
        made = {role: policy_of(settings, role) for role in (AGGREGATED, _PREFILL, _DECODE)}
        self._policies = {role: policy for role, (policy, _) in made.items()}
        self._shadow, header = None, made[AGGREGATED][1]
        if settings.shadow_policy is not None:
            self._shadow, named = _policy_named(settings, settings.shadow_policy)
            header = structs.replace(header, shadow=named.policy, shadow_parameters=named.parameters)
        self._decisions: DecisionLog | None = None
        if settings.decisions_path is not None:
            if any(other != made[AGGREGATED][1] for _, other in made.values()):
                raise InvalidArgument("DYN_ROUTER_DECISIONS needs one policy for all roles: its file names one")
            self._decisions = DecisionLog(settings.decisions_path, header, limit_bytes=settings.decisions_limit_bytes)

    def new(self, key: DomainKey) -> KvDomain:
        """Make a domain without workers."""
        settings = self._settings
        labels = {
            "dynamo_namespace": key.namespace,
            "dynamo_component": key.role,
            "router_id": f"{self.router_id():x}",
        }
        metrics = KvMetrics(self.series.registry, labels, role=key.role)
        index = PrefixIndex() if settings.reads_events else None
        guesses = guesses_of(settings)
        router = KvRouter(
            block_size=key.block_size,
            policy=self._policies.get(key.role, self._policies[AGGREGATED]),
            rng=self._rng,
            index=guesses if index is None else index,
            predicted=None if index is None else guesses,
            options=router_options(settings, is_prefill=key.role == _PREFILL),
        )
        if self._shadow is not None or self._decisions is not None:
            router.timed(())  # another policy may get the same state
        made: Callable[..., KvPlacement] = KvPlacement
        if self._shadow is not None or is_of_user(router.policy.name):
            made = partial(
                import_module(OF_USERS).ProgrammedPlacement, registry=self.series.registry, shadow=self._shadow
            )
        placement = made(
            router,
            rng=self._rng,
            is_eagle=key.is_eagle,
            tracks_output=settings.router_track_output_blocks,
            watcher=metrics,
            decisions=self._decisions,
        )
        domain = KvDomain(placement, index, metrics, guesses=guesses)
        finalize(domain, self.series.enter(labels)).atexit = False
        return domain

    def close(self) -> None:
        """Close the record of decisions. Idempotent."""
        if self._decisions is not None:
            self._decisions.close()


class KvDomains:
    """The domains of one process. `update` them as workers come and go, and leave them with `aclose`."""

    def __init__(
        self,
        settings: KvRouterSettings,
        endpoint: Callable[[str], Endpoint],
        registry: MetricsRegistry,
        *,
        router_id: Callable[[], int],
        rng: random.Random,
    ) -> None:
        """`endpoint`: from "namespace.component.endpoint" to the endpoint. `router_id`: read once there are workers.

        Raises InvalidArgument for a policy that cannot be made, and OSError where decisions cannot be recorded.
        """
        self._settings, self._endpoint = settings, endpoint
        self._maker = _DomainMaker(settings, SeriesGroups(registry), router_id, rng)
        # A domain lives while it has workers, or a pool holds its placement: the next worker finds the pool where it was.
        self._domains: WeakValueDictionary[DomainKey, KvDomain] = WeakValueDictionary()
        self._owners: dict[Hashable, tuple[DomainKey, KvDomain]] = {}  # where each owner's workers are
        self._followers: dict[tuple[DomainKey, str], _Follower] = {}
        self._slots = asyncio.Semaphore(MAX_RECOVERIES)
        self._background = Background()

    def key(self, namespace: str, role: str, card: ModelCard) -> DomainKey:
        """Return the domain of workers with this card."""
        size = self._settings.kv_cache_block_size or card.kv_cache_block_size or DEFAULT_BLOCK_SIZE
        return DomainKey(namespace, role, size, card.runtime_config.enable_eagle)

    def placement(self, key: DomainKey) -> KvPlacement:
        """Return the placement of a domain, which need not have workers yet."""
        return self._domain(key).placement

    def gate_for(self, key: DomainKey, model: str, pool: GatedPool) -> PreDispatchGate | None:
        """Return what requests pass before the workers of a pool; None: nothing. A domain may have several pools: each model has
        the policy classes of its name, and sessions of its own.
        """
        domain = self._domain(key)
        kind = PoolKind(model, _PREFILL if key.role == _PREFILL else _DECODE)
        if self._settings.profile(model).parks:
            finalize(pool, self._maker.series.enter(kind._asdict())).atexit = False
        return gate_for_pool(
            self._settings,
            self._maker.series.registry,
            kind,
            pool,
            domain.placement,
            relay=domain.relay.sessions,
            ranks=lambda: domain.ranks,
            writer_id=self._maker.router_id(),
        )

    def update(self, owner: Hashable, key: DomainKey, members: Iterable[KvMember]) -> None:
        """Take over the workers of one owner, such as a model: all of them are in the domain `key`."""
        former = self._owners.get(owner)
        if former is not None and former[0] != key:
            self.remove(owner)
        self._owners[owner] = key, self._domain(key)
        self._update(key, owner, members)

    def remove(self, owner: Hashable) -> None:
        """Take the loss of an owner's last worker; an unknown owner is fine."""
        former = self._owners.pop(owner, None)
        if former is not None:
            self._update(former[0], owner, ())

    def cache_events(self) -> dict[WorkerRank, CacheEvents]:
        """Return what came of the KV events of each rank that is followed."""
        feeds = [each.feed for each in self._followers.values() if each.feed is not None]
        return {rank: counts for feed in feeds for rank, counts in feed.counts()}

    @asynccontextmanager
    async def load_reports(self, endpoint: str) -> AsyncIterator[None]:
        """Report the accounts of an endpoint's workers as load, for the busy thresholds of all frontends, for as long as the
        block runs."""
        async with AsyncExitStack() as stack:
            for domain in list(self._domains.values()):
                if endpoint in domain.endpoints:
                    load = domain.placement.router.load
                    await stack.enter_async_context(RouterLoadReports(self._endpoint(endpoint), load))
            yield

    async def aclose(self) -> None:
        """Stop following events, and close the record of decisions. Idempotent."""
        self._followers.clear()
        await self._background.close()
        self._maker.close()

    # -- domains -----------------------------------------------------------------------------------------------------

    def _domain(self, key: DomainKey) -> KvDomain:
        domain = self._domains.get(key)
        if domain is None:
            domain = self._domains[key] = self._maker.new(key)
        return domain

    def _update(self, key: DomainKey, owner: Hashable, members: Iterable[KvMember]) -> None:
        domain = self._domain(key)
        changed = domain.update(owner, members)
        if changed is None:
            return
        endpoints = domain.endpoints
        for (of, endpoint), follower in list(self._followers.items()):
            if of != key:
                continue
            if endpoint not in endpoints:
                self._leave(key, endpoint)
            elif follower.feed is not None:
                follower.feed.ranks_changed(changed)
        if not endpoints:
            return
        settings = self._settings
        has_sessions = settings.router_session_affinity_ttl_secs is not None
        if domain.index is not None or settings.router_replica_sync or has_sessions:
            for endpoint in endpoints:
                if (key, endpoint) not in self._followers and not self._background.is_closed:
                    self._follow(key, domain, endpoint)

    # -- events ------------------------------------------------------------------------------------------------------

    def _follow(self, key: DomainKey, domain: KvDomain, endpoint: str) -> None:
        follower = self._followers[key, endpoint] = _Follower()
        if domain.index is not None:
            namespace, component, _ = endpoint.split(".", 2)
            labels = {"dynamo_namespace": namespace, "dynamo_component": component}
            left = self._maker.series.enter(labels)
            counters = _CountingSink(domain, EventCounters(self._maker.series.registry, labels))
            work = partial(self._follow_events, follower, domain, endpoint, counters)
            follower.tasks.append(task := self._background.keep(work, f"kv events {endpoint}", RETRY_SECONDS))
            task.add_done_callback(lambda _: left())
        if self._settings.router_replica_sync:
            domain.placement.router.observer = domain.relay
            syncing = partial(self._sync, domain, endpoint)
            follower.tasks.append(self._background.keep(syncing, f"replica sync {endpoint}", RETRY_SECONDS))
        if self._settings.router_session_affinity_ttl_secs is not None:
            sharing = partial(self._share_sessions, domain, endpoint)
            follower.tasks.append(self._background.keep(sharing, f"sessions {endpoint}", RETRY_SECONDS))

    def _leave(self, key: DomainKey, endpoint: str) -> None:
        follower = self._followers.pop((key, endpoint))
        for task in follower.tasks:
            task.cancel()

    async def _share_sessions(self, domain: KvDomain, endpoint: str) -> None:
        """Share where sessions are bound with other routers until this is cancelled, or fails."""
        async with SessionSync(self._endpoint(endpoint), domain.relay.sessions) as sync:
            domain.relay.sessions.syncs[endpoint] = sync
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                domain.relay.sessions.syncs.pop(endpoint, None)

    async def _sync(self, domain: KvDomain, endpoint: str) -> None:
        """Share the bookings of an endpoint's workers with other routers until this is cancelled, or fails."""
        router = domain.placement.router
        async with ReplicaSync(
            self._endpoint(endpoint),
            router.load,
            router_id=self._maker.router_id(),
            block_size=router.block_size,
            is_live=domain.is_live,
        ) as sync:
            domain.relay.syncs[endpoint] = sync
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                domain.relay.syncs.pop(endpoint, None)

    async def _follow_events(self, follower: _Follower, domain: KvDomain, endpoint: str, sink: _CountingSink) -> None:
        """Follow the events of an endpoint until this is cancelled, or fails."""
        feed = KvEventFeed(
            self._endpoint(endpoint),
            sink,
            on_trust=domain.set_trust,
            slots=self._slots,
            is_live=domain.is_live,
            on_refused=sink.refused,
        )
        try:
            async with feed:
                follower.feed = feed
                await asyncio.get_running_loop().create_future()
        finally:
            follower.feed = None
            feed.forget_all()
