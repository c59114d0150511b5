"""The models this frontend serves right now: cards and instances watched, files fetched, names looked up.

`lookup` is the only thing on a request's way; everything else happens when workers come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.shares import SharedBound
from dynamo.frontend.models.cards import MAX_MODELS, CardBook, CardEntry, Group, GroupKey, Scope
from dynamo.frontend.models.changes import Changes
from dynamo.frontend.models.endpoint_clients import Connect, EndpointClients
from dynamo.frontend.models.instances import InstanceBook
from dynamo.frontend.models.loader import CONCURRENT_LOADS, ClusterView, Load, ModelLoader
from dynamo.frontend.models.replacement import ReplacementWaits
from dynamo.frontend.models.reports import ModelReports, Readiness, unservable
from dynamo.frontend.models.served import NameIndex, ServedModel, ServedModels, ServingRules
from dynamo.frontend.models.stage_pools import ENCODE, PREFILL, StagePools
from dynamo.kv.overlap import WorkerRank
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.router.kv_events.rank_events import CacheEvents
from dynamo.router.workers.busy_workers import LoadReport
from dynamo.router.workers.pool import ModelPool
from dynamo.router.workers.worker_holds import WorkerHolds
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS, Change, Discovery
from dynamo.runtime.discovery.follow import follow
from dynamo.text.model import TextModel

WATCH_RETRY_SECONDS: Final = 1.0
SLICE: Final = 16  # records that are taken over in one go; each costs up to a tenth of a millisecond
CARDS_AT_ONCE: Final = 4096  # the same for their cards
INDEXED_AT_ONCE: Final = 64  # groups; examining more of them takes milliseconds, and is done in a moment


class ModelDirectory:
    """Watches the store and keeps `ServedModel`s. Open it with `start`, leave it with `aclose`."""

    def __init__(
        self,
        discovery: Discovery,
        connect: Connect,
        load: Load,
        rules: ServingRules,
        *,
        scope: Scope,
        metrics: FrontendMetrics,
        max_models: int = MAX_MODELS,
        concurrent_loads: int = CONCURRENT_LOADS,
    ) -> None:
        self._rules = rules
        self._background = Background()
        cards = CardBook(scope, max_groups=max_models, refused=metrics.refused)
        changes = Changes(self._update, lambda: len(cards) > INDEXED_AT_ONCE or cards.size > CARDS_AT_ONCE)
        clients = EndpointClients(connect, self._changed, self._background)
        self._cluster = ClusterView(discovery, cards, InstanceBook(scope), clients, changes)
        is_endless = rules.cold_start_wait_seconds > 0
        self._served = ServedModels(
            ReplacementWaits(rules.replacement_wait_seconds, self._changed, is_endless=is_endless)
        )
        self._stages = StagePools(cards, clients.by_endpoint, rules, self._background, metrics.models.encoder_outcome)
        self._loader = ModelLoader(
            load,
            self._cluster,
            self._loaded,
            metrics=metrics,
            background=self._background,
            concurrent_loads=concurrent_loads,
        )
        self._readiness = Readiness(
            cards,
            self._cluster.instances,
            self._served,
            self._stages,
            load_error=self._loader.last_error,
            rules=rules,
        )
        self.names = NameIndex(starting=rules.starting_model)
        self._reports = ModelReports(metrics)

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Watch; returns when both snapshots are in, without waiting for any file."""
        first_cards, first_instances = asyncio.Event(), asyncio.Event()
        cards = partial(self._follow, MODEL_CARDS, self._take_cards, first_cards, set[str]())
        instances = partial(self._follow, INSTANCES, self._take_instances, first_instances, set[str]())
        self._background.keep(cards, "frontend: model cards", WATCH_RETRY_SECONDS)
        self._background.keep(instances, "frontend: instances", WATCH_RETRY_SECONDS)
        await first_cards.wait()
        await first_instances.wait()

    async def aclose(self) -> None:
        """Stop watching; idempotent. Models served so far stay known; the clients are the runtime's to close."""
        self._cluster.changes.close()
        self._loader.forget_all()
        await self._background.close()
        self._served.close()
        await self._stages.aclose()

    async def _follow(
        self, bucket: str, take: Callable[[Sequence[Change]], None], first: asyncio.Event, known: set[str]
    ) -> None:
        """Take what changes until the store is closed. `known`: the keys that an attempt that failed may have taken."""
        async with aclosing(follow(self._cluster.store, bucket, known)) as changes:
            async for batch in changes:
                for start in range(0, len(batch), SLICE):
                    await asyncio.sleep(0)  # streams go on while hundreds of records come in
                    take(batch[start : start + SLICE])
                touched = self._cluster.touched  # each group once, however many of its cards were in the batch
                while touched and bucket == MODEL_CARDS:
                    if len(batch) > SLICE or self._cluster.cards.size > CARDS_AT_ONCE:
                        await asyncio.sleep(0)
                    self._reconcile(key := next(iter(touched)))
                    del touched[key]
                self._changed()
                first.set()
        first.set()  # also where the store was closed before it answered

    # -- requests ----------------------------------------------------------------------------------------------------

    def lookup(self, name: str) -> ServedModel | None:
        """Choose the model for one request; where several namespaces serve the name, each gets its share by workers."""
        return self.names.lookup(name)

    def is_registered(self, name: str) -> bool:
        """Return whether a worker registered the name, ready or not."""
        return self.names.is_registered(name)

    @property
    def longest_context(self) -> int | None:
        """The most tokens that any model served here takes; None when one of the models does not report it."""
        return self._served.longest_context

    async def change(self) -> None:
        """Return after the next change."""
        await self._cluster.changes.next()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; `condition` is checked after every change."""
        await self._cluster.changes.wait_for(condition)

    # -- what operators see ------------------------------------------------------------------------------------------

    def models(self) -> list[ServedModel]:
        """Return one entry per name, sorted."""
        return self.names.models()

    def serving(self, name: str) -> Sequence[ServedModel]:
        """Return the models that serve a name, one for each namespace."""
        return self.names.serving(name)

    def served(self) -> list[ServedModel]:
        """Return every loaded model, once for each namespace and role."""
        return list(self._served.values())

    def places(self) -> list[tuple[str, SharedBound]]:
        """Return what each owner has of the places of each model that has a limit."""
        limited = [each for each in self._served.values() if each.admission.limit is not None]
        return [(f"requests in flight of {each.name}", each.admission.owners) for each in limited]

    def pools(self) -> list[ModelPool]:
        """Return the workers of every loaded model, and the prefill workers beside them, each with the name of its model."""
        return [*self._served.values(), *self._stages.prefill.pools]

    def groups(self) -> list[Group]:
        """Return the workers that registered each model, by namespace and role; those that are left out, too."""
        cards = self._cluster.cards
        return [group for key in sorted(cards.keys) if (group := cards.group(key)) is not None]

    @property
    def holds(self) -> WorkerHolds:
        """The drains and quarantines of the workers of all models."""
        return self._rules.holds

    def cache_events(self) -> dict[WorkerRank, CacheEvents]:
        """Return what came of the KV events of each rank whose events are followed."""
        return self._rules.cache_events()

    def pool_of(self, key: GroupKey) -> ModelPool | None:
        """Return the pool of a group; None: the group is not loaded, or is not used."""
        return self._stages.pool(key) if key.role in (PREFILL, ENCODE) else self._served.get(key)

    def roles(self) -> dict[GroupKey, ModelPool]:
        """Return the workers of every loaded model, and the prefill workers beside them, by role."""
        return {**self._served, **self._stages.prefill.by_role()}

    @property
    def is_loading(self) -> bool:
        """Whether a registered model is not served yet because its files are still being fetched or read."""
        return self._loader.is_busy

    @property
    def store_trouble(self) -> str | None:
        """Why the view of the cluster may be out of date; None while the discovery store answers."""
        return self._cluster.store.trouble()

    def instances(self) -> list[JsonObject]:
        """Return every instance record, sorted by key, without its "type"."""
        return self._cluster.instances.records()

    def workers_of(self, name: str) -> list[CardEntry]:
        """Return the workers that are there with a card of this name, whatever their role."""
        groups = self._cluster.cards.groups(name)
        return [entry for group in groups for entry in group.accepted if self.is_there(entry)]

    def is_there(self, entry: CardEntry) -> bool:
        """Return whether the worker of a card is there."""
        return self._cluster.instances.has(entry)

    def base_names(self) -> dict[int, str]:
        """Return, by instance, the model that it serves beside its adapters."""
        return self._cluster.cards.base_names()

    @property
    def has_managed_adapters(self) -> bool:
        """Whether a card is of an adapter that a frontend manages."""
        return self._cluster.cards.has_managed

    def adapters(self) -> list[CardEntry]:
        """Return the cards of adapters whose workers are there."""
        return [
            entry for name in sorted(self._cluster.cards.names) for entry in self.workers_of(name) if entry.card.lora
        ]

    def readiness(self, name: str) -> JsonObject | None:
        """Return the body of `/v1/models/{name}/ready`, or None for a name that no worker registered."""
        return self._readiness.body(name)

    def note_load(self, load: LoadReport) -> None:
        """Show what a rank of a worker reported."""
        self._reports.load(load)

    def measure(self, now: float) -> None:
        """Set the gauges of queues and tokenizers; once a second is often enough."""
        self._reports.measure(self._served.values(), now)

    # -- changes -----------------------------------------------------------------------------------------------------

    def _take_instances(self, batch: Sequence[Change]) -> None:
        self._cluster.instances.apply(batch)

    def _take_cards(self, batch: Sequence[Change]) -> None:
        self._cluster.touched.update(dict.fromkeys(self._cluster.cards.apply(batch)))

    def _reconcile(self, key: GroupKey) -> None:
        """Make what is served and loaded agree with the cards for one group."""
        group = self._cluster.cards.group(key)
        self._rules.follow(key, group)
        self._loader.give_up_outdated(key, group)
        if group is None:
            self._on_group_gone(key)
            return
        self._reports.conflicts(group)
        if key.role in (PREFILL, ENCODE):  # kept beside the models that need them
            self._stages.update(group)
            self._reach(group)
            return
        served = self._served.get(key)
        if served is not None and served.mdc_sum == group.fingerprint:
            served.update(group)
            self._reports.describe(served)
            self._reach(group)
            return
        if served is not None:  # the first card's workers have left; the others take over with another model
            self._served.drop(key)
        if (reason := unservable(group)) is not None:
            self._reports.unservable(key, reason)
        else:
            self._loader.start(group)

    def _on_group_gone(self, key: GroupKey) -> None:
        if key.role in (PREFILL, ENCODE):
            self._stages.group_gone(key)
        elif (served := self._served.get(key)) is None:
            self._readiness.forget(key)
            self._rules.forget(key)
        elif served.lora_name is not None and self._cluster.instances.has_any(served.member_ids):
            self._served.drop(key)  # it was unloaded: its workers are there, and none of them will bring it back
            self.names.unload(key.model)
        else:
            served.set_members(())  # it is forgotten once no request may wait for a worker of it
        self._reports.forget_conflicts(self._cluster.cards)
        self._stages.leave_all_but(self._cluster.cards.keys)
        self._cluster.clients.leave_all_but(self._cluster.cards.endpoints)

    def _loaded(self, group: Group, text: TextModel) -> None:
        clients, key = self._cluster.clients, group.key
        served = ServedModel(group, text, clients.by_endpoint, self._rules)
        self._served.add(key, served)
        self._reports.served(served, self._rules.admission)
        self._changed()
        self._reach(group)

    def _reach(self, group: Group) -> None:
        """Connect to endpoints that joined a served model; until then requests go to the others."""
        cards, key = self._cluster.cards, group.key
        self._cluster.clients.reach(key.model, lambda: () if (now := cards.group(key)) is None else now.endpoints)

    def _changed(self) -> None:
        """Record the models that have a worker, and update the models that may get requests: at once, or in a moment."""
        cards = self._cluster.cards
        for key in self._served.drop_abandoned(cards.__contains__):
            self._readiness.forget(key)
            self._rules.forget(key)
            self._reports.gone(key, is_last=not cards.groups(key.model))
        self._stages.prefill.instances_changed()
        self._cluster.changes.note()

    def _update(self) -> None:
        """List what is loaded and has an instance. The rest of the cards is registered, not ready."""
        cards = self._cluster.cards
        names: dict[str, list[ServedModel]] = {}
        ready = {key.model: False for key in cards.keys}  # a model's own name is never another model's alias
        for key in sorted(self._served):
            served = self._served[key]
            served.dispatcher.stages = self._stages.before(key, served)
            is_ready = self._readiness.is_ready(key)
            if not is_ready and not self._served.awaits_replacement(key):
                continue
            if is_ready and key.model in ready:
                ready[key.model] = True
            for name in dict.fromkeys((served.name, *served.card.aliases)):
                if name == served.name or name not in ready:
                    names.setdefault(name, []).append(served)
        self._reports.ready(ready)
        self._reports.count_workers(cards, self._cluster.instances)
        self.names.set(names, cards.names)
