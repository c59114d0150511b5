"""Which models are ready, what is missing for the others, and what operators see of them as log lines and gauges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from dynamo.frontend.admission.model import AdmissionPolicy
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.models.cards import CardBook, Group, GroupKey
from dynamo.frontend.models.instances import InstanceBook
from dynamo.frontend.models.served import ServedModel, ServedModels, ServingRules
from dynamo.frontend.models.stage_pools import DECODE, ENCODE, PREFILL, StagePools
from dynamo.protocol.model_types import VECTORS, ModelInput, ModelType, WorkerType
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.workers.busy_workers import LoadReport
from dynamo.text.formats.reasoning import REASONING_FORMATS
from dynamo.text.formats.tools import TOOL_FORMATS
from dynamo.text.model import TextModel
from dynamo.text.prefix_cache import CachedTokenizer

logger = logging.getLogger(__name__)

SERVABLE: Final = (
    ModelType.Chat | ModelType.Completions | ModelType.Images | ModelType.Audios | ModelType.Videos | VECTORS
)
NOT_LIVE: Final = "no namespace has all required worker types live"


class Readiness:
    """Judges groups by the roles that their cards need and the workers that are there."""

    def __init__(
        self,
        cards: CardBook,
        instances: InstanceBook,
        served: ServedModels,
        stages: StagePools,
        *,
        load_error: Callable[[GroupKey], str | None],
        rules: ServingRules,
    ) -> None:
        """`load_error`: why a group could not be loaded so far. `rules.enforce_disagg`: a model is not ready while a role is
        missing, even if it was complete before. `rules.min_initial_workers`: nor before so many of its workers came."""
        self._cards, self._instances, self._served, self._stages = cards, instances, served, stages
        self._load_error, self._rules = load_error, rules
        self._complete: set[GroupKey] = set()  # groups that had all the roles they need, once

    def is_ready(self, key: GroupKey) -> bool:
        """Return whether a group's model may get requests."""
        served = self._served.get(key)
        return served is not None and served.is_reachable and self._had_all_roles(key)

    def forget(self, key: GroupKey) -> None:
        """Forget a group that has gone. An unknown key is fine."""
        self._complete.discard(key)

    def body(self, name: str) -> JsonObject | None:
        """Return the body of `/v1/models/{name}/ready`, or None for a name that no worker registered."""
        groups = self._cards.groups(name)
        if not groups and (owner := self._cards.owner_of(name)) is not None:
            groups = self._cards.groups(owner)
        if not groups:
            return None
        namespaces: dict[str, list[Group]] = {}
        for group in groups:
            namespaces.setdefault(group.key.namespace, []).append(group)
        bodies = {namespace: self._namespace_body(members) for namespace, members in namespaces.items()}
        is_ready = any(body["ready"] for body in bodies.values())
        why_not: JsonObject = {} if is_ready else {"reason": NOT_LIVE}
        return {"model": name, "ready": is_ready, **why_not, "namespaces": bodies}

    def _namespace_body(self, groups: Sequence[Group]) -> JsonObject:
        there = self._instances.has
        workers = {group.key.role: self._instances.count(group) for group in groups}
        present = sorted(role for role, count in workers.items() if count)
        missing = sorted({role for group in groups for role in _missing(group.card.needs, present)})
        body: JsonObject = {
            "ready": any(self.is_ready(group.key) for group in groups) and not (missing and self._rules.enforce_disagg),
            "worker_types": {
                group.key.role: {
                    "workers": workers[group.key.role],
                    "needs": group.card.needs,
                    # Ours as well: a replacement of workers one by one needs to know of each.
                    "instance_ids": sorted(entry.instance_id for entry in group.accepted if there(entry)),
                }
                for group in groups
            },
            "present": present,
            "missing_worker_types": missing,
        }
        gone = sorted({*missing, *(role for role, count in workers.items() if not count)})
        if gone and not body["ready"]:
            body["reason"] = f"missing worker types: {', '.join(gone)}"
        rejected = [entry for group in groups for entry in group.rejected]
        if rejected:  # ours: the native frontend leaves them out without a line
            body["rejected_workers"] = [
                {"endpoint": entry.endpoint, "instance_id": entry.instance_id, "reason": "model card differs"}
                for entry in rejected
            ]
        if errors := [error for group in groups if (error := self._load_error(group.key))]:
            body["error"] = errors[0]
        if all(unservable(group) for group in groups):
            body["error"] = unservable(groups[0])
        return body

    def _had_all_roles(self, key: GroupKey) -> bool:
        """Return whether a worker may get requests: not before its prefill and encode workers came, and as many like it as
        are requested, but still after they left.
        """
        served, least = self._served[key], self._rules.min_initial_workers
        own = served.card.needs
        if key in self._complete or not (own or key.role == DECODE or least):
            return True
        group = self._cards.group(key)
        if least and (group is None or self._instances.count(group) < least):
            return False
        beside = [group for group in self._cards.groups(key.model) if group.key.namespace == key.namespace]
        present = {group.key.role for group in beside if self._instances.count(group)}
        if not self._stages.prefill.is_reachable(key):
            present.discard(PREFILL)
        if not self._stages.encode.is_reachable(key):
            present.discard(ENCODE)
        # What its prefill workers need, it needs as well.
        needs = [own, *(group.card.needs for group in beside if group.key.role == PREFILL and key.role == DECODE)]
        if not any(_missing(each, present) for each in needs):
            self._complete.add(key)
            logger.info("model %s has all the roles it needs in namespace %s", key.model, key.namespace)
        return key in self._complete


def unservable(group: Group) -> str | None:
    """Return why this version cannot serve a group, or None."""
    card = group.card
    if card.role is WorkerType.Prefill:
        return "prefill workers answer no request by themselves: a decode worker of the same model is missing"
    if card.role is WorkerType.Encode:
        return "encode workers answer no request by themselves: a worker of the same model that generates is missing"
    if card.model_input not in (str(ModelInput.Tokens), str(ModelInput.Text)):
        return f"model_input {card.model_input!r} is not in this version (use Tokens or Text)"
    if not card.surfaces & SERVABLE:
        return f"model_type {card.model_type!r} is not in this version (use one of {str(SERVABLE).replace(' |', ',')})"
    return None


def _missing(needs: Sequence[Sequence[str]], present: Collection[str]) -> list[str]:
    """Return the missing roles of the nearest alternative; [] when one alternative is complete or none is required."""
    gaps = [[role for role in alternative if role not in present] for alternative in needs]
    return min(gaps, key=len, default=[])


class ModelReports:
    """Keeps the gauges of models and workers, and logs what happens to models."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._rejected: dict[str, str] = {}  # card key -> fingerprint that was reported
        self._queued: frozenset[str] = frozenset()  # models whose gauge of waiting requests is above 0

    # -- events ------------------------------------------------------------------------------------------------------

    def served(self, model: ServedModel, admission: AdmissionPolicy) -> None:
        """Report a model that has just been loaded."""
        self.describe(model)
        if model.admission.ignores_factor:
            logger.warning(
                "model %s: its workers do not report how many requests they run at once (max_num_seqs), so "
                "DYN_HTTP_MAX_REQUESTS_PER_MODEL=%s does not hold for it; give a number",
                model.name,
                admission.limit,
            )
        _warn_of_missing_parsers(model.name, model.card.runtime_config)
        if model.surfaces & ModelType.Chat and not model.takes_text:
            _report_chat_template(model.name, model.text)
        logger.info(
            "model %s is served in namespace %s by %d worker(s) (%s)",
            model.name,
            model.namespace,
            model.workers,
            model.surfaces,
        )

    def unservable(self, key: GroupKey, reason: str) -> None:
        """Report a model that this version cannot serve."""
        logger.warning("model %s in namespace %s is not served: %s", key.model, key.namespace, reason)

    def gone(self, key: GroupKey, *, is_last: bool) -> None:
        """Report a model that is not served any more; `is_last`: in no namespace and no role."""
        logger.info("model %s is gone from namespace %s", key.model, key.namespace)
        if is_last:
            self._metrics.forget_model(key.model)

    def conflicts(self, group: Group) -> None:
        """Report every worker whose card differs from the one in service, once for each card."""
        for entry in group.rejected:
            if self._rejected.get(entry.key) == entry.fingerprint:
                continue
            self._rejected[entry.key] = entry.fingerprint
            self._metrics.models.card_conflicts.labels(group.key.model).inc()
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
        for entry in group.accepted if self._rejected else ():
            self._rejected.pop(entry.key, None)

    def forget_conflicts(self, cards: CardBook) -> None:
        """Forget the conflicts of cards that have gone."""
        if not self._rejected:
            return
        groups = [group for key in cards.keys if (group := cards.group(key)) is not None]
        rejected = {entry.key for group in groups for entry in group.rejected}
        self._rejected = {card: reported for card, reported in self._rejected.items() if card in rejected}

    # -- gauges ------------------------------------------------------------------------------------------------------

    def describe(self, model: ServedModel) -> None:
        """Show what a model's workers registered."""
        runtime = model.card.runtime_config
        self._metrics.models.describe(
            model.name,
            {
                "total_kv_blocks": runtime.total_kv_blocks,
                "max_num_seqs": runtime.max_num_seqs,
                "max_num_batched_tokens": runtime.max_num_batched_tokens,
                "context_length": model.context_length,
                "kv_cache_block_size": model.card.kv_cache_block_size,
                "migration_limit": model.card.migration_limit,
            },
        )

    def ready(self, states: Mapping[str, bool]) -> None:
        """Show the models that are ready."""
        for name, is_ready in states.items():
            self._metrics.models.describe(name, {"ready": float(is_ready)})

    def count_workers(self, cards: CardBook, instances: InstanceBook) -> None:
        """Show how many workers each model has, by role."""
        counts: dict[tuple[str, str], int] = {}
        roles: dict[int, str] = {}
        for key in cards.keys:
            group = cards.group(key)
            reachable = 0 if group is None else instances.count(group)
            counts[key.model, key.role] = counts.get((key.model, key.role), 0) + reachable
            roles |= {} if group is None else dict.fromkeys(group.instance_ids, key.role)
        self._metrics.models.count_workers(counts)
        self._metrics.workers.keep_only(roles)

    def load(self, load: LoadReport) -> None:
        """Show what a rank of a worker reported."""
        self._metrics.workers.loaded(
            load.worker_id, load.dp_rank, load.active_decode_blocks, load.active_prefill_tokens
        )

    def measure(self, models: Iterable[ServedModel], now: float) -> None:
        """Show how long requests have been waiting and what the tokenizers' caches did; once a second is often enough."""
        ages: dict[str, float] = {}
        for model in models:
            if (age := model.admission.queue_age_seconds(now)) > 0:
                ages[model.name] = max(ages.get(model.name, 0.0), age)
            tokenizer = model.text.tokenizer
            if isinstance(tokenizer, CachedTokenizer):
                self._metrics.models.tokenizer_cache.count(model.name, tokenizer.stats)
        for name in self._queued - ages.keys():
            self._metrics.requests.model(name).queue_age.set(0)
        for name, age in ages.items():
            self._metrics.requests.model(name).queue_age.set(age)
        self._queued = frozenset(ages)


def _warn_of_missing_parsers(model: str, config: ModelRuntimeConfig) -> None:
    """Log a warning when a card requests a parser that this version does not have."""
    for what, name, known in (
        ("tool-call parser", config.tool_call_parser, TOOL_FORMATS),
        ("reasoning parser", config.reasoning_parser, REASONING_FORMATS),
    ):
        if name is not None and name not in known:
            logger.warning(
                "model %s names the %s %r, which is not in this version: its output is shown as it comes",
                model,
                what,
                name,
            )


def _report_chat_template(model: str, text: TextModel) -> None:
    """Log what becomes of chat where the model brings no chat template."""
    if text.is_known_by_name_only and not text.has_chat_template:
        logger.info(
            "model %s brings no tokenizer: its tokens are bytes, and chat is plain lines of `role: text`", model
        )
    elif not text.can_chat:
        logger.warning(
            "model %s has no chat template: chat requests are refused with 400, completions are served; "
            "start its worker with --custom-jinja-template FILE",
            model,
        )
