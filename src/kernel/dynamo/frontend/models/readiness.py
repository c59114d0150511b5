"""Which models are ready for requests, and what is missing for the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from dynamo.frontend.models.cards import CardBook, Group, GroupKey
from dynamo.frontend.models.instances import InstanceBook
from dynamo.frontend.models.served import ServedModels, ServingRules
from dynamo.frontend.models.stage_pools import DECODE, ENCODE, PREFILL, StagePools
from dynamo.protocol.model_types import VECTORS, ModelInput, ModelType, WorkerType
from dynamo.protocol.openai.shapes import JsonObject

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
