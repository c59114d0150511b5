"""The models this frontend serves right now: cards and instances watched, files fetched, names looked up.

`lookup` is the only thing on a request's way; everything else happens when workers come and go.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from dynamo.errors import DynamoException
from dynamo.frontend.admission.model import AdmissionPolicy, ModelAdmission
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.models.cards import MAX_MODELS, CardBook, CardEntry, Group, GroupKey, Scope
from dynamo.frontend.models.file_policy import host_of_instance
from dynamo.frontend.models.replacement import ReplacementWaits
from dynamo.frontend.pipeline.parsing import report_chat_template, warn_of_missing_parsers
from dynamo.placement import Policy
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType
from dynamo.protocol.records import UNREADABLE, ModelCard
from dynamo.router.busy_workers import LoadReport
from dynamo.router.dispatch import Dispatcher
from dynamo.router.pool import ModelPool, WorkerClient
from dynamo.router.prefill import PrefillRouter
from dynamo.router.query_of_death import QueriesOfDeath
from dynamo.router.stages import PrefillStage
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS, Change, Discovery, Put
from dynamo.runtime.discovery.follow import follow
from dynamo.runtime.tasks import Background
from dynamo.text.model import TextModel
from dynamo.text.prefix_cache import CachedTokenizer

__all__ = ["ModelDirectory", "ServedModel", "WorkerClient"]

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = (1, 2, 4, 8, 16, 30)  # then 30 again and again: the files may be on their way
WATCH_RETRY_SECONDS: Final = 1.0
SLICE: Final = 16  # records that are taken over in one go; each costs up to a tenth of a millisecond
INDEXED_AT_ONCE: Final = 64  # groups; looking through more of them takes milliseconds, and is done
INDEX_SECONDS: Final = 0.1  # this long after the first change, for all changes since

_PREFILL, _DECODE = str(WorkerType.Prefill), str(WorkerType.Decode)

_Place = tuple[str, str]  # model, namespace

CONCURRENT_LOADS: Final = 2  # models whose files are read at once
SERVABLE: Final = ModelType.Chat | ModelType.Completions


Connect = Callable[[str], Awaitable[WorkerClient]]
"""From "namespace.component.endpoint" to the client of that endpoint."""

Load = Callable[[ModelCard, frozenset[str]], Awaitable[TextModel]]
"""From a card, and the hosts that its workers advertise, to its tokenizer and template. Raises `DynamoException`; it is
called again after a while."""


class ServedModel(ModelPool):
    """A model that can answer: its text side and its workers. One per (model, namespace, role)."""

    __slots__ = (
        "admission",
        "card",
        "context_length",
        "created",
        "dispatcher",
        "lora_name",
        "mdc_sum",
        "namespace",
        "ranks",
        "surfaces",
        "takes_text",
        "text",
    )

    def __init__(
        self,
        group: Group,
        text: TextModel,
        clients: Mapping[str, WorkerClient],
        *,
        placement: Policy,
        admission: AdmissionPolicy,
        replacement_wait_seconds: float = 0.0,
        queries_of_death: QueriesOfDeath | None = None,
    ) -> None:
        super().__init__(group.key.model, clients, placement)
        self.admission = ModelAdmission(group.key.model, admission)
        self.namespace = group.key.namespace
        self.text = text
        self.created = int(time.time())
        self.dispatcher = Dispatcher(
            self, replacement_wait_seconds=replacement_wait_seconds, queries_of_death=queries_of_death
        )
        self.update(group)

    def update(self, group: Group) -> None:
        """Take over new members; the model itself is the same."""
        card = group.card
        self.card = card
        self.runtime_config = card.runtime_config
        self.mdc_sum = group.fingerprint
        self.lora_name = card.lora.name if card.lora else None
        self.surfaces = card.surfaces
        self.takes_text = card.model_input == str(ModelInput.Text)  # it gets the client's own body, and says text
        # Tokens of prompt and answer together; None when the worker did not say.
        self.context_length = (
            card.runtime_config.context_length or card.context_length or self.text.context_length or None
        )
        self.ranks = _ranks(group)
        self.set_members((entry.endpoint, entry.instance_id) for entry in group.accepted)
        self.admission.set_capacity(_capacity(group))

    @property
    def created_at_text(self) -> str:
        """When it was first served here, RFC 3339."""
        return datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class _Loading:
    """A group whose files are being fetched."""

    fingerprint: str
    task: asyncio.Task[None]
    last_error: str | None = None


class ModelDirectory:
    """Watches the store and keeps `ServedModel`s. Open it with `start`, leave it with `aclose`."""

    def __init__(
        self,
        discovery: Discovery,
        connect: Connect,
        load: Load,
        *,
        scope: Scope,
        metrics: FrontendMetrics,
        placement: Callable[[], Policy],
        enforce_disagg: bool = False,
        replacement_wait_seconds: float = 0.0,
        policy: AdmissionPolicy | None = None,
        rng: random.Random | None = None,
        max_models: int = MAX_MODELS,
        concurrent_loads: int = CONCURRENT_LOADS,
    ) -> None:
        """`placement` makes the policy of one group of workers. `enforce_disagg`: prompts of a disaggregated model are computed by prefill workers or not at all.
        `replacement_wait_seconds`: how long a model whose last worker was lost goes on taking requests, which wait for the
        next worker. `policy`: how many requests each model takes."""
        self._discovery, self._connect, self._load, self._metrics = discovery, connect, load, metrics
        self._scope = scope
        self._placement = placement
        self._waits = ReplacementWaits(replacement_wait_seconds, self._index)
        self._queries_of_death = QueriesOfDeath()
        self._enforce_disagg, self._rng = enforce_disagg, rng
        self._policy = policy or AdmissionPolicy()
        self._book = CardBook(scope, max_groups=max_models, refused=metrics.refused)
        self._prefill: dict[_Place, PrefillRouter] = {}  # of every model that has, or had, prefill workers
        self._complete: set[GroupKey] = set()  # groups that had all the roles they need, once
        self._served: dict[GroupKey, ServedModel] = {}
        self._loading: dict[GroupKey, _Loading] = {}
        self._by_name: dict[str, tuple[ServedModel, ...]] = {}  # also by alias
        self._pending_names: frozenset[str] = frozenset()  # registered, cannot answer yet
        self._clients: dict[str, WorkerClient] = {}
        self._instances: dict[str, dict[str, Any]] = {}  # by key, without "type"
        self._rejected: dict[str, str] = {}  # card key -> fingerprint that was complained about
        self._queued: frozenset[str] = frozenset()  # models whose gauge of waiting requests is above 0
        self._turn = 0
        self._background = Background()
        self._changed = asyncio.Event()
        self._indexing: asyncio.TimerHandle | None = None
        self._loads = asyncio.Semaphore(concurrent_loads)

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Watch; returns when both snapshots are in, without waiting for any file."""
        first_cards, first_instances = asyncio.Event(), asyncio.Event()
        start = self._background.start
        start(self._follow(MODEL_CARDS, self._take_cards, first_cards), "frontend: model cards")
        start(self._follow(INSTANCES, self._take_instances, first_instances), "frontend: instances")
        await first_cards.wait()
        await first_instances.wait()

    async def aclose(self) -> None:
        """Stop watching; idempotent. Models served so far stay known; the clients are the runtime's to close."""
        if self._indexing is not None:
            self._indexing.cancel()
            self._indexing = None
        self._loading.clear()
        await self._background.close()
        self._waits.close()
        for router in self._prefill.values():
            await router.aclose()

    async def _follow(self, bucket: str, take: Callable[[Sequence[Change]], None], first: asyncio.Event) -> None:
        known: set[str] = set()

        async def pass_on(changes: Sequence[Change]) -> None:
            for start in range(0, len(changes), SLICE):
                if start:  # so that streams go on while hundreds of records come in
                    await asyncio.sleep(0)
                take(changes[start : start + SLICE])

        while True:
            try:
                async with aclosing(follow(self._discovery, bucket, known)) as changes:
                    async for batch in changes:
                        await pass_on(batch)
                        first.set()
                first.set()  # also where the store was closed before it answered
                return
            except Exception:  # the boundary: one fault of ours must not leave the frontend blind for ever
                logger.exception("following %s failed; reading it again in %g s", bucket, WATCH_RETRY_SECONDS)
            await asyncio.sleep(WATCH_RETRY_SECONDS)

    # -- requests ----------------------------------------------------------------------------------------------------

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

    def is_registered(self, name: str) -> bool:
        """Return whether a worker registered the name, ready or not."""
        return name in self._by_name or name in self._pending_names

    def models(self) -> list[ServedModel]:
        """Return one entry per name, sorted."""
        return [
            found[0]
            for name, found in sorted(self._by_name.items())
            if found[0].name == name and any(each.is_reachable for each in found)
        ]

    @property
    def longest_context(self) -> int | None:
        """The most tokens that any model served here takes; None when one of the models does not report it."""
        longest = 0
        for model in self._served.values():
            if not model.context_length:
                return None
            longest = max(longest, model.context_length)
        return longest or None

    @property
    def is_loading(self) -> bool:
        """Whether a registered model is not served yet because its files are still being fetched or read."""
        return bool(self._loading)

    def served(self) -> list[ServedModel]:
        """Return every loaded model, once for each namespace and role."""
        return list(self._served.values())

    def measure_queues(self, now: float) -> None:
        """Set the gauges of how long requests have been waiting; once a second is often enough."""
        ages: dict[str, float] = {}
        for model in self._served.values():
            if (age := model.admission.queue_age_seconds(now)) > 0:
                ages[model.name] = max(ages.get(model.name, 0.0), age)
        for name in self._queued - ages.keys():
            self._metrics.model(name).queue_age.set(0)
        for name, age in ages.items():
            self._metrics.model(name).queue_age.set(age)
        self._queued = frozenset(ages)

    async def change(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; `condition` is checked after every change."""
        while not condition():
            changed = self._changed
            await changed.wait()

    # -- what operators see ------------------------------------------------------------------------------------------

    @property
    def store_trouble(self) -> str | None:
        """Why the view of the cluster may be out of date; None while the discovery store answers."""
        return self._discovery.trouble()

    def instances(self) -> list[dict[str, Any]]:
        """Return every instance record, sorted by key, without its "type"."""
        return [record for _, record in sorted(self._instances.items())]

    def readiness(self, name: str) -> dict[str, Any] | None:
        """Return the body of `/v1/models/{name}/ready`, or None for a name that no worker registered."""
        groups = self._book.groups(name)
        if not groups and (owner := self._book.owner_of(name)) is not None:
            groups = self._book.groups(owner)
        if not groups:
            return None
        namespaces: dict[str, list[Group]] = {}
        for group in groups:
            namespaces.setdefault(group.key.namespace, []).append(group)
        bodies = {namespace: self._namespace_readiness(members) for namespace, members in namespaces.items()}
        return {"model": name, "ready": any(body["ready"] for body in bodies.values()), "namespaces": bodies}

    def _namespace_readiness(self, groups: Sequence[Group]) -> dict[str, Any]:
        workers = {group.key.role: sum(map(self._has_instance, group.accepted)) for group in groups}
        present = sorted(role for role, count in workers.items() if count)
        missing = sorted({role for group in groups for role in _missing(group.card.needs, present)})
        body: dict[str, Any] = {
            "ready": any(self._is_ready(group.key) for group in groups) and not (missing and self._enforce_disagg),
            "worker_types": {
                group.key.role: {
                    "workers": workers[group.key.role],
                    "needs": group.card.needs,
                    # Ours as well: who replaces workers one by one wants to know of each.
                    "instance_ids": sorted(entry.instance_id for entry in group.accepted if self._has_instance(entry)),
                }
                for group in groups
            },
            "present": present,
            "missing_worker_types": missing,
        }
        rejected = [entry for group in groups for entry in group.rejected]
        if rejected:  # ours: the native frontend leaves them out without telling anybody
            body["rejected_workers"] = [
                {"endpoint": entry.endpoint, "instance_id": entry.instance_id, "reason": "model card differs"}
                for entry in rejected
            ]
        errors = [loading.last_error for group in groups if (loading := self._loading.get(group.key))]
        if any(errors):
            body["error"] = next(error for error in errors if error)
        if all(_unservable(group) for group in groups):
            body["error"] = _unservable(groups[0])
        return body

    def _is_ready(self, key: GroupKey) -> bool:
        served = self._served.get(key)
        return served is not None and served.is_reachable and self._had_all_roles(key)

    def _had_all_roles(self, key: GroupKey) -> bool:
        """Return whether a decode worker may get requests: not before its prefill workers came, but still after they
        left.
        """
        if key.role != _DECODE or key in self._complete:
            return True
        served = self._served[key]
        present = {group.key.role for group in self._groups_beside(key) if any(map(self._has_instance, group.accepted))}
        if not _is_reachable(self._prefill.get(_place(key))):
            present.discard(_PREFILL)
        if not _missing(served.card.needs, present):
            self._complete.add(key)
            logger.info("model %s has all the roles it needs in namespace %s", key.model, key.namespace)
        return key in self._complete

    def _groups_beside(self, key: GroupKey) -> list[Group]:
        return [group for group in self._book.groups(key.model) if group.key.namespace == key.namespace]

    def _has_instance(self, entry: CardEntry) -> bool:
        return _instance_key(entry) in self._instances

    # -- changes -----------------------------------------------------------------------------------------------------

    def _take_instances(self, batch: Sequence[Change]) -> None:
        for change in batch:
            key = change.key.removeprefix(f"{INSTANCES}/")
            if not isinstance(change, Put):
                self._instances.pop(key, None)
                continue
            try:
                record = msgspec.json.decode(change.value, type=dict[str, Any])
            except UNREADABLE as error:
                logger.warning("instance record %s is not readable and ignored: %s", key, error)
                continue
            if self._scope.covers(str(record.get("namespace"))):
                record.pop("type", None)
                self._instances[key] = record
        self._index()  # a role may be complete now

    def _take_cards(self, batch: Sequence[Change]) -> None:
        for key in self._book.apply(batch):
            self._reconcile(key)
        self._index()

    def _reconcile(self, key: GroupKey) -> None:
        """Make what is served and loaded agree with the book for one group."""
        group = self._book.group(key)
        loading = self._loading.get(key)
        if loading is not None and (group is None or group.fingerprint != loading.fingerprint):
            loading.task.cancel()
            del self._loading[key]
            loading = None
        served = self._served.get(key)
        if key.role == _PREFILL:
            self._reconcile_prefill(key, group)
            return
        if group is None:
            if served is None:
                self._complete.discard(key)
            else:
                served.set_members(())  # `_index` forgets it once no request may wait for a worker of it
            self._clear_up()
            return
        self._complain(group)
        if served is not None and served.mdc_sum == group.fingerprint:
            served.update(group)
            self._gauges(served)
            self._reach(group)
            return
        if served is not None:  # the first card's workers have left; the others take over with another model
            del self._served[key]
            self._waits.forget(key)
        reason = _unservable(group)
        if reason is not None:
            logger.warning("model %s in namespace %s is not served: %s", key.model, key.namespace, reason)
            return
        if loading is None:
            task = self._background.start(self._bring_up(key), f"frontend: load {key.model}")
            self._loading[key] = _Loading(group.fingerprint, task)

    def _reconcile_prefill(self, key: GroupKey, group: Group | None) -> None:
        """Prefill workers serve no client by themselves: they are kept beside the models that need them."""
        place = _place(key)
        router = self._prefill.get(place)
        if group is None:
            if router is not None:
                router.set_members({})
                logger.warning(
                    "model %s has no prefill workers any more in namespace %s: %s",
                    key.model,
                    key.namespace,
                    "its requests fail" if self._enforce_disagg else "decode workers compute the prompts themselves",
                )
            self._clear_up()
            return
        self._complain(group)
        if router is None:
            workers = ModelPool(key.model, self._clients, self._placement())
            router = self._prefill[place] = PrefillRouter(workers, enforced=self._enforce_disagg, rng=self._rng)
        router.set_members({(entry.endpoint, entry.instance_id): entry.card.runtime_config for entry in group.accepted})
        self._reach(group)

    def _clear_up(self) -> None:
        """Clear up after a group that has gone."""
        self._rejected = {card: said for card, said in self._rejected.items() if self._is_rejected(card)}
        for place in self._prefill.keys() - {_place(key) for key in self._book.keys}:
            self._spawn(self._prefill.pop(place).aclose(), f"frontend: leave the prefill workers of {place[0]}")
        self._part_from_idle()

    def _is_rejected(self, card_key: str) -> bool:
        return any(
            entry.key == card_key
            for key in self._book.keys
            if (group := self._book.group(key)) is not None
            for entry in group.rejected
        )

    def _complain(self, group: Group) -> None:
        for entry in group.rejected:
            if self._rejected.get(entry.key) == entry.fingerprint:
                continue
            self._rejected[entry.key] = entry.fingerprint
            self._metrics.card_conflicts.labels(group.key.model).inc()
            logger.error(
                "worker %s/%x registered model %s with a card that differs from the one in service (%s instead of %s: "
                "tokenizer, template, generation config, block size, role or needs) and gets no requests. Give it the "
                "same model files, another model name or another namespace",
                entry.endpoint,
                entry.instance_id,
                group.key.model,
                entry.fingerprint[:12],
                group.fingerprint[:12],
            )
        for entry in group.accepted:
            self._rejected.pop(entry.key, None)

    async def _bring_up(self, key: GroupKey) -> None:
        """Load a group's files, again and again until it works, then serve it."""
        attempt = 0
        while True:
            group = self._book.group(key)
            if group is None:
                return
            try:
                hosts = await self._hosts_of(key)
                async with self._loads:
                    text = await self._load(group.card, hosts)
                    await self._connect_all(group.accepted)
                break
            except Exception as error:  # the boundary: a stranger's files may do anything to a parser
                delay = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                attempt += 1
                self._metrics.materialise_failures.labels(key.model).inc()
                loading = self._loading.get(key)
                if loading is not None:
                    loading.last_error = str(error) or type(error).__name__
                expected = isinstance(error, DynamoException | OSError | ValueError)
                logger.error(
                    "model %s cannot be loaded, next attempt in %g s: %s",
                    key.model,
                    delay,
                    error,
                    exc_info=None if expected else error,
                )
                await asyncio.sleep(delay)
        group = self._book.group(key)  # it may have grown meanwhile; a new fingerprint would have cancelled this task
        self._loading.pop(key, None)
        if group is None:
            return
        served = self._served[key] = ServedModel(
            group,
            text,
            self._clients,
            placement=self._placement(),
            admission=self._policy,
            replacement_wait_seconds=self._waits.seconds,
            queries_of_death=self._queries_of_death,
        )
        self._gauges(served)
        if served.admission.ignores_factor:
            logger.warning(
                "model %s: its workers do not say how many requests they run at once (max_num_seqs), so "
                "--max-requests-per-model %s does not hold for it; give a number",
                key.model,
                self._policy.limit,
            )
        warn_of_missing_parsers(key.model, served.card.runtime_config)
        if served.surfaces & ModelType.Chat and not served.takes_text:
            report_chat_template(key.model, text)
        logger.info(
            "model %s is served in namespace %s by %d worker(s) (%s)",
            key.model,
            key.namespace,
            served.workers,
            served.surfaces,
        )
        self._index()
        self._reach(group)

    async def _hosts_of(self, key: GroupKey) -> frozenset[str]:
        """Return the hosts that a group's workers advertise; wait for the first record where files must be fetched."""
        while (group := self._book.group(key)) is not None:
            entries = [entry for entry in group.accepted if self._has_instance(entry)]
            if entries or not any("://" in ref.path for _, ref in group.card.files()):
                hosts = (host_of_instance(self._instances[_instance_key(entry)]) for entry in entries)
                return frozenset(host for host in hosts if host is not None)
            if (loading := self._loading.get(key)) is not None:
                loading.last_error = "its files lie at a worker that is not in the store yet"
            await self.change()
        return frozenset()

    def _reach(self, group: Group) -> None:
        """Connect to endpoints that joined a served model; until then requests go to the others."""
        if any(entry.endpoint not in self._clients for entry in group.accepted):
            self._spawn(self._reach_all(group.key), f"frontend: reach {group.key.model}")

    async def _reach_all(self, key: GroupKey) -> None:
        while (group := self._book.group(key)) is not None:
            try:
                await self._connect_all(group.accepted)
                return
            except (DynamoException, OSError) as error:
                logger.error(
                    "model %s: an endpoint cannot be reached, next attempt in %g s: %s",
                    key.model,
                    WATCH_RETRY_SECONDS,
                    error,
                )
            await asyncio.sleep(WATCH_RETRY_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._background.is_closed:
            work.close()  # the directory has been left, and nothing needs it any more
        else:
            self._background.start(work, name)

    async def _connect_all(self, entries: Sequence[CardEntry]) -> None:
        for endpoint in {entry.endpoint for entry in entries}:
            if endpoint not in self._clients:
                client = await self._connect(endpoint)
                if self._clients.setdefault(endpoint, client) is not client:  # another group was faster
                    await client.close()
                    continue
                client.on_change(self._index)
                self._index()

    def _part_from_idle(self) -> None:
        """Close the clients of endpoints that serve nothing any more; streams in flight go on."""
        for endpoint in self._clients.keys() - self._book.endpoints:
            self._spawn(self._clients.pop(endpoint).close(), f"frontend: leave {endpoint}")

    def _gauges(self, served: ServedModel) -> None:
        runtime = served.card.runtime_config
        self._metrics.describe_model(
            served.name,
            {
                "total_kv_blocks": runtime.total_kv_blocks,
                "max_num_seqs": runtime.max_num_seqs,
                "max_num_batched_tokens": runtime.max_num_batched_tokens,
                "context_length": served.context_length,
                "kv_cache_block_size": served.card.kv_cache_block_size,
                "migration_limit": served.card.migration_limit,
            },
        )

    def _index(self) -> None:
        """Update the models that may get requests: at once, or in a moment where the update takes long."""
        self._note_presence()
        if len(self._book) <= INDEXED_AT_ONCE:
            self._index_now()
        elif self._indexing is None:
            self._indexing = asyncio.get_running_loop().call_later(INDEX_SECONDS, self._index_now)

    def _index_now(self) -> None:
        """List what is loaded and has an instance. The rest of the book is registered, not ready."""
        if self._indexing is not None:
            self._indexing.cancel()
            self._indexing = None
        names: dict[str, list[ServedModel]] = {}
        ready: set[str] = set()
        own = {key.model for key in self._book.keys}  # a model's own name is never another model's alias
        for key in sorted(self._served):
            served = self._served[key]
            if key.role == _DECODE:
                router = self._prefill.get(_place(key))
                used = router is not None and (self._enforce_disagg or _is_reachable(router))
                served.dispatcher.stages = (PrefillStage(router, served),) if router is not None and used else ()
            is_ready = self._is_ready(key)
            if not is_ready and key not in self._waits:
                continue
            if is_ready:
                ready.add(key.model)
            for name in dict.fromkeys((served.name, *served.card.aliases)):
                if name == served.name or name not in own:
                    names.setdefault(name, []).append(served)
        for name in own:
            self._metrics.describe_model(name, {"ready": float(name in ready)})
        self._count_workers()
        self._by_name = {name: tuple(models) for name, models in names.items()}
        self._pending_names = self._book.names - frozenset(self._by_name)
        self._announce()

    def note_load(self, load: LoadReport) -> None:
        """Show what a rank of a worker reported."""
        self._metrics.workers.loaded(
            load.worker_id, load.dp_rank, load.active_decode_blocks, load.active_prefill_tokens
        )

    def measure_tokenizers(self) -> None:
        """Count what the caches of the tokenizers did since the last call; once a second is often enough."""
        for model in self._served.values():
            tokenizer = model.text.tokenizer
            if isinstance(tokenizer, CachedTokenizer):
                self._metrics.tokenizer_cache.count(model.name, tokenizer.stats)

    def _count_workers(self) -> None:
        counts: dict[tuple[str, str], int] = {}
        roles: dict[int, str] = {}
        for key in self._book.keys:
            group = self._book.group(key)
            reachable = 0 if group is None else sum(map(self._has_instance, group.accepted))
            counts[key.model, key.role] = counts.get((key.model, key.role), 0) + reachable
            roles |= {} if group is None else {entry.instance_id: key.role for entry in group.accepted}
        self._metrics.count_workers(counts)
        self._metrics.workers.keep_only(roles)

    def _note_presence(self) -> None:
        """Record the models that have a worker, and forget the models with no worker and no waiting request."""
        self._waits.update(self._served)
        for key in [key for key in self._served if self._book.group(key) is None and key not in self._waits]:
            del self._served[key]
            self._waits.forget(key)
            self._complete.discard(key)
            logger.info("model %s is gone from namespace %s", key.model, key.namespace)
            if not self._book.groups(key.model):
                self._metrics.forget_model(key.model)

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _instance_key(entry: CardEntry) -> str:
    return "/".join(entry.key.split("/", 4)[:4])  # without the adapter's suffix


def _missing(needs: Sequence[Sequence[str]], present: Collection[str]) -> list[str]:
    """Return the missing roles of the nearest alternative; [] when one alternative is complete or none is required."""
    gaps = [[role for role in alternative if role not in present] for alternative in needs]
    return min(gaps, key=len, default=[])


def _unservable(group: Group) -> str | None:
    """Return why this version cannot serve a group, or None."""
    card = group.card
    if card.role is WorkerType.Prefill:
        return "prefill workers answer no request by themselves: a decode worker of the same model is missing"
    if card.role is WorkerType.Encode:
        return "encode workers are not in this version"
    if card.model_input not in (str(ModelInput.Tokens), str(ModelInput.Text)):
        return f"model_input {card.model_input!r} is not in this version (use Tokens or Text)"
    if not card.surfaces & SERVABLE:
        return f"model_type {card.model_type!r} is not in this version (use Chat or Completions)"
    return None


def _ranks(group: Group) -> tuple[range, ...]:
    """Return the data-parallel ranks of the members, each range once."""
    configs = [entry.card.runtime_config for entry in group.accepted]
    starts = {(config.data_parallel_start_rank, max(1, config.data_parallel_size)) for config in configs}
    return tuple(range(start, start + size) for start, size in sorted(starts))


def _capacity(group: Group) -> int | None:
    """Return how many requests the group's workers run at once; None when at least one worker did not report its
    capacity.
    """
    total = 0
    for entry in group.accepted:
        runtime = entry.card.runtime_config
        if not runtime.max_num_seqs:
            return None
        total += runtime.max_num_seqs * max(1, runtime.data_parallel_size)  # each rank has a scheduler of its own
    return total


def _place(key: GroupKey) -> _Place:
    return key.model, key.namespace


def _is_reachable(router: PrefillRouter | None) -> bool:
    return router is not None and router.workers.is_reachable
