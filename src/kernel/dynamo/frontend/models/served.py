"""A model that can answer, and the models that are loaded."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from dynamo.frontend.admission.model import AdmissionPolicy, ModelAdmission
from dynamo.frontend.models.card_routing import CardRouting, GroupRouting
from dynamo.frontend.models.cards import Group, GroupKey
from dynamo.frontend.models.model_limits import LengthLimits
from dynamo.frontend.models.replacement import ReplacementWaits
from dynamo.kv.overlap import WorkerRank
from dynamo.placement import Policy
from dynamo.placement.prefill_bypass import BypassRules
from dynamo.protocol.model_types import ModelInput, ModelType
from dynamo.protocol.records import ModelCard
from dynamo.router.dispatch.failover import WorkerWait
from dynamo.router.dispatch.query_of_death import QueriesOfDeath
from dynamo.router.dispatch.stages import PrefillStage
from dynamo.router.dispatch.stream import Dispatcher
from dynamo.router.kv.domains import KvDomains
from dynamo.router.kv_events.rank_events import CacheEvents
from dynamo.router.workers.pool import ModelPool, WorkerClient
from dynamo.router.workers.worker_holds import WorkerHolds
from dynamo.text.model import TextModel

MAX_GONE: Final = 1024  # names; the one that has been gone longest is forgotten first
GONE_SECONDS: Final = 300.0  # a worker that is restarted has loaded its model again by then, in most cases


@dataclass(frozen=True, slots=True)
class ServingRules:
    """What holds for every model of a frontend."""

    new_policy: Callable[[], Policy]  # makes the policy of one group of workers, where `kv` does not
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)  # how many requests each model takes
    enforce_disagg: bool = False  # prompts of a disaggregated model are computed by prefill workers or not at all
    min_initial_workers: int = 0  # that a model must have had at once before it gets requests
    replacement_wait_seconds: float = 0.0
    """How long a model whose last worker was lost goes on taking requests, which wait for the next worker."""
    cold_start_wait_seconds: float = 0.0
    """Above 0: a model stays without any worker, and each of its requests waits so long for one."""
    starting_model: str | None = None  # that is expected until any worker has registered
    rng: random.Random | None = None
    kv: KvDomains | None = None  # in the kv mode: the placements, which are shared
    cards: CardRouting | None = None  # what cards declare of the policy; None: they do not count
    bypass: BypassRules | None = None  # which prompts of a disaggregated model decode workers compute; None: none

    holds: WorkerHolds = field(default_factory=WorkerHolds)  # drains and quarantines set by an operator
    queries_of_death: QueriesOfDeath = field(default_factory=QueriesOfDeath)

    @property
    def worker_wait(self) -> WorkerWait:
        """How requests wait while there is no worker."""
        if self.cold_start_wait_seconds > 0:
            return WorkerWait(self.cold_start_wait_seconds, is_from_arrival=True)
        return WorkerWait(self.replacement_wait_seconds)

    def policy(self, group: Group) -> Policy:
        """Return the policy by which the workers of a group are chosen."""
        routing = self.routing(group)
        if (kv := routing.kv) is None:
            return routing.new_policy()
        return kv.placement(kv.key(group.key.namespace, group.key.role, group.card))

    def equip(self, group: Group, pool: ModelPool) -> None:
        """Let requests wait for the workers of a group, and sessions stay with them, where the settings require that."""
        pool.holds = self.holds
        if (kv := self.routing(group).kv) is not None:
            key = kv.key(group.key.namespace, group.key.role, group.card)
            pool.pre_dispatch = kv.gate_for(key, group.key.model, pool)

    def routing(self, group: Group) -> GroupRouting:
        """Return how the workers of a group are chosen: as its card sets, or else by these rules."""
        return GroupRouting(self.new_policy, self.kv) if self.cards is None else self.cards.of(group)

    def cache_events(self) -> dict[WorkerRank, CacheEvents]:
        """Return what came of the KV events of each rank whose events are followed."""
        domains = [] if self.cards is None else self.cards.domains
        return {rank: counts for each in domains for rank, counts in each.cache_events().items()}

    def follow(self, key: GroupKey, group: Group | None) -> None:
        """Take over the workers of a group (None: it has none) before a request can be placed among them."""
        if self.cards is not None:
            self.cards.follow(key, group)

    def forget(self, key: GroupKey) -> None:
        """Forget what was chosen for a group that has gone, and so has what was served of it."""
        if self.cards is not None:
            self.cards.forget(key)


class ServedModel(ModelPool):
    """A model that can answer: its text side and its workers. One per (model, namespace, role)."""

    __slots__ = (
        "admission", "card", "created", "dispatcher", "length_limits", "mdc_sum", "namespace", "ranks",
        "surface_bits", "takes_text", "text",
    )  # fmt: skip

    def __init__(
        self,
        group: Group,
        text: TextModel,
        clients: Mapping[str, WorkerClient],
        rules: ServingRules,
    ) -> None:
        """`clients`: by endpoint; it may change any time."""
        super().__init__(group.key.model, clients, rules.policy(group))
        rules.equip(group, self)
        self.admission = ModelAdmission(group.key.model, rules.admission)
        self.namespace = group.key.namespace
        self.text = text
        self.created = int(time.time())
        self.dispatcher = Dispatcher(
            self,
            worker_wait=rules.worker_wait,
            queries_of_death=rules.queries_of_death,
        )
        self.update(group)

    def update(self, group: Group) -> None:
        """Take over new members; the model itself is the same."""
        card = group.card
        self.card: ModelCard = card
        self.runtime_config = card.runtime_config
        self.mdc_sum = group.fingerprint
        self.surface_bits: int = card.surfaces.value  # of what it can be called by, which every request needs
        self.takes_text = card.model_input == str(ModelInput.Text)  # it gets the client's own body, and yields text
        self.length_limits = LengthLimits.of(
            card, card.runtime_config.context_length or card.context_length or self.text.context_length or None
        )
        ranks = {entry.ranks for entry in group.accepted}
        self.ranks = tuple(sorted(ranks, key=lambda each: (each.start, each.stop)))
        self.set_members([(entry.endpoint, entry.instance_id) for entry in group.accepted])
        self.set_places({entry.instance_id: entry.taints for entry in group.accepted if entry.taints})
        self.admission.set_capacity(_capacity(group))

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; None when the worker did not report them."""
        return self.length_limits.context

    @property
    def surfaces(self) -> ModelType:
        """What it can be called by."""
        return self.card.surfaces

    @property
    def prefill_ranks(self) -> Sequence[range]:
        """The data-parallel ranks of the workers that compute its prompts; none where it does so itself."""
        stages = self.dispatcher.stages
        return [ranks for stage in stages if isinstance(stage, PrefillStage) for ranks in stage.router.ranks]

    @property
    def is_started_on_demand(self) -> bool:
        """Whether it may well have no worker: a request for it waits for one."""
        return self.dispatcher.worker_wait.is_from_arrival and self.emptied_at is not None

    @property
    def lora_name(self) -> str | None:
        """The adapter that it is; None for a base model."""
        return self.card.lora.name if self.card.lora else None

    @property
    def created_at_text(self) -> str:
        """When it was first served here, RFC 3339."""
        return datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ServedModels(Mapping[GroupKey, ServedModel]):
    """The loaded models, each for as long as it has a worker or requests may wait for the next one."""

    def __init__(self, waits: ReplacementWaits) -> None:
        self._waits = waits
        self._models: dict[GroupKey, ServedModel] = {}

    def __getitem__(self, key: GroupKey) -> ServedModel:
        return self._models[key]

    def __iter__(self) -> Iterator[GroupKey]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def add(self, key: GroupKey, model: ServedModel) -> None:
        self._models[key] = model

    def drop(self, key: GroupKey) -> None:
        """Forget a model, waiting requests or not."""
        del self._models[key]
        self._waits.forget(key)

    def drop_abandoned(self, is_registered: Callable[[GroupKey], bool]) -> list[GroupKey]:
        """Check every model again; forget those with no worker registered and no request that may wait for one.

        Return their keys. To be called after each change of members or instances.
        """
        self._waits.update(self._models)
        abandoned = [key for key in self._models if not is_registered(key) and key not in self._waits]
        for key in abandoned:
            self.drop(key)
        return abandoned

    def awaits_replacement(self, key: GroupKey) -> bool:
        """Return whether its last worker was lost moments ago, and requests may wait for the next one."""
        return key in self._waits

    def close(self) -> None:
        """Stop the waits. Idempotent."""
        self._waits.close()

    @property
    def longest_context(self) -> int | None:
        """The most tokens that any of them takes; None when one of them does not report it."""
        longest = 0
        for model in self._models.values():
            if not model.context_length:
                return None
            longest = max(longest, model.context_length)
        return longest or None


def _capacity(group: Group) -> int | None:
    """Return how many requests the group's workers run at once; None when at least one worker did not report its
    capacity.
    """
    requests = [entry.requests for entry in group.accepted]
    return sum(requests) if all(requests) else None


class NameIndex:
    """Names and aliases of the models that may get requests, and the names that are or were only registered."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, starting: str | None = None) -> None:
        """`starting`: a name that is expected until any other is registered, as its first worker still loads."""
        self._now = now
        self._starting = starting
        self._gone: dict[str, float] = {}  # when the last worker of a name left, oldest first
        self._unloaded: set[str] = set()  # since the last `set`
        self._by_name: dict[str, tuple[ServedModel, ...]] = {}
        self._pending: frozenset[str] = frozenset()  # registered, cannot answer yet
        self._turn = 0
        self.on_demand: Collection[str] = ()
        """Names whose models are loaded when a request comes, and the presets of them."""

    def set(self, by_name: Mapping[str, Sequence[ServedModel]], registered: Iterable[str]) -> None:
        """Take over the models by name; `registered`: every name that a worker registered."""
        before = self._pending.union(self._by_name)
        self._by_name = {name: tuple(models) for name, models in by_name.items()}
        registered = frozenset(registered)
        if registered:
            self._starting = None
        self._pending = registered - self._by_name.keys()
        for name in before:
            if not self.is_registered(name):
                self._gone.pop(name, None)
                if name not in self._unloaded:
                    self._gone[name] = self._now()
        self._unloaded.clear()
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def unload(self, name: str) -> None:
        """Remember a name that was taken away on purpose: where the next `set` has it no more, nothing brings it back."""
        self._unloaded.add(name)

    def lookup(self, name: str) -> ServedModel | None:
        """Choose the model for one request; where several namespaces serve the name, each gets its share by workers."""
        found = self._by_name.get(name)
        if found is None:
            return None
        if len(found) == 1:
            return found[0]
        self._turn += 1
        turn = self._turn % (sum(model.workers for model in found) or 1)
        for model in found:
            turn -= model.workers
            if turn < 0:
                return model
        return found[0]

    def serving(self, name: str) -> Sequence[ServedModel]:
        """Return the models that serve a name, one for each namespace."""
        return self._by_name.get(name, ())

    def is_registered(self, name: str) -> bool:
        """Return whether a worker registered the name, ready or not."""
        return name in self._by_name or name in self._pending

    def is_expected(self, name: str) -> bool:
        """Return whether a worker registered the name, is starting with it, or had it a moment ago and may be restarting."""
        if self.is_registered(name) or name == self._starting or name in self.on_demand:
            return True
        left_at = self._gone.get(name)
        return left_at is not None and self._now() - left_at < GONE_SECONDS

    def unloaded(self) -> list[str]:
        """Return the names that are served on demand and have no entry in `models`, sorted."""
        return sorted(set(self.on_demand).difference(model.name for model in self.models())) if self.on_demand else []

    def models(self) -> list[ServedModel]:
        """Return one entry per name, sorted."""
        return [
            found[0]
            for name, found in sorted(self._by_name.items())
            if found[0].name == name and any(each.is_reachable or each.is_started_on_demand for each in found)
        ]
