"""Which worker serves which model: the bookkeeping over `v1/mdc`, without I/O.

Cards are grouped by (model name, namespace, role). The first card of a group defines the model; a worker whose card
has another fingerprint is left out, loudly, until the first card's last worker has gone. The native frontend has the same
rule but keeps silent about it.
"""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from msgspec import Struct

from dynamo.errors import InvalidArgument
from dynamo.placement.kv_transfer import topology_taints
from dynamo.protocol.model_types import ModelInput, WorkerType
from dynamo.protocol.records import ModelCard, ModelRecord, decode_model_record
from dynamo.runtime.discovery.base import MODEL_CARDS, Change, Put

logger = logging.getLogger(__name__)

MAX_CARDS: Final = 100_000  # a store gone wild must not take the frontend's memory
MAX_MODELS: Final = 2000  # by name, namespace and role; adapters count
MAX_CARD_BYTES: Final = 1024 * 1024  # of a record; the largest in use have 20 KB


class Scope(Struct, frozen=True):
    """Which namespaces a frontend serves; the prefix wins over the exact name, neither means all."""

    namespace: str | None = None
    prefix: str | None = None

    def covers(self, namespace: str) -> bool:
        if self.prefix is not None:
            return namespace.startswith(self.prefix)
        return self.namespace is None or namespace == self.namespace


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """Workers that must agree on what the model is."""

    model: str
    namespace: str
    role: str  # as the card spells it: "aggregated", "prefill", ...


class CardEntry(Struct, frozen=True):
    """One model at one instance."""

    key: str  # in the bucket, with the adapter's suffix if it has one
    endpoint: str  # "namespace.component.endpoint"
    instance_id: int
    card: ModelCard
    fingerprint: str
    instance_key: str  # of the record of its instance
    ranks: range  # data-parallel
    requests: int  # how many it runs at once, on all ranks; 0: it did not report that
    taints: frozenset[str]  # of where it is


@dataclass(frozen=True)
class Group:
    """The members of a group now; `accepted` is never empty. The same object until one of them has changed."""

    key: GroupKey
    accepted: tuple[CardEntry, ...]  # the first one's card counts
    rejected: tuple[CardEntry, ...]

    @property
    def card(self) -> ModelCard:
        return self.accepted[0].card

    @property
    def fingerprint(self) -> str:
        return self.accepted[0].fingerprint

    @cached_property
    def endpoints(self) -> frozenset[str]:
        """Where the accepted members are."""
        return frozenset([entry.endpoint for entry in self.accepted])

    @cached_property
    def instance_keys(self) -> frozenset[str]:
        """The keys of the accepted members' instance records."""
        return frozenset([entry.instance_key for entry in self.accepted])

    @cached_property
    def instance_ids(self) -> frozenset[int]:
        """The ids of the accepted members."""
        return frozenset([entry.instance_id for entry in self.accepted])


class CardBook:
    """Every readable card in scope, in order of arrival."""

    def __init__(
        self, scope: Scope, *, max_groups: int = MAX_MODELS, refused: Callable[[str], None] = lambda limit: None
    ) -> None:
        """`refused` counts a card that is ignored, under the limit's name."""
        self._scope, self._max_groups, self._refused = scope, max_groups, refused
        self._is_full = False  # a card was ignored for lack of room, and that was logged
        self._where: dict[str, GroupKey] = {}  # card key -> group
        self._groups: dict[GroupKey, dict[str, CardEntry]] = {}  # insertion order is arrival order
        self._made: dict[GroupKey, Group] = {}  # as they were returned last
        self._tallies = Tally[str](), Tally[str](), Tally[str]()  # names with aliases, endpoints, sources of adapters

    def __contains__(self, key: object) -> bool:
        return key in self._groups

    def __len__(self) -> int:
        """Return how many groups there are."""
        return len(self._groups)

    @property
    def has_managed(self) -> bool:
        """Whether a card is of an adapter that a frontend manages."""
        return bool(self._tallies[2])

    @property
    def size(self) -> int:
        """How many cards there are."""
        return len(self._where)

    def apply(self, changes: Iterable[Change]) -> list[GroupKey]:
        """Take over a batch; the groups that may be different now, each once, in order."""
        touched: dict[GroupKey, None] = {}
        for change in changes:
            key = change.key.removeprefix(f"{MODEL_CARDS}/")
            found = self._put(key, change.value) if isinstance(change, Put) else self._delete(key)
            if found is not None:
                touched[found] = None
        return list(touched)

    def group(self, key: GroupKey) -> Group | None:
        """Return the current group, or None when its last member has gone."""
        if (made := self._made.get(key)) is not None:
            return made
        entries = self._groups.get(key)
        if not entries:
            return None
        fingerprint = next(iter(entries.values())).fingerprint
        accepted = tuple([entry for entry in entries.values() if entry.fingerprint == fingerprint])
        rejected = tuple([entry for entry in entries.values() if entry.fingerprint != fingerprint])
        made = self._made[key] = Group(key, accepted, rejected)
        return made

    def groups(self, model: str) -> list[Group]:
        """Return all groups of a model (by its own name), sorted by namespace and role."""
        keys = sorted(key for key in self._groups if key.model == model)
        return [group for key in keys if (group := self.group(key)) is not None]

    @property
    def keys(self) -> Sequence[GroupKey]:
        return list(self._groups)

    @property
    def names(self) -> frozenset[str]:
        """Every registered name, aliases included."""
        return frozenset(self._tallies[0])

    def owner_of(self, alias: str) -> str | None:
        """Return the model that has this alias, or None."""
        return next(
            (
                key.model
                for key, group in self._groups.items()
                for entry in group.values()
                if alias in entry.card.aliases
            ),
            None,
        )

    def base_names(self) -> dict[int, str]:
        """Return the model of each instance that is not an adapter."""
        found: dict[int, str] = {}
        for key in self._groups:
            if (group := self.group(key)) is not None:
                found |= {} if group.card.lora else dict.fromkeys(group.instance_ids, key.model)
                found |= {entry.instance_id: key.model for entry in group.rejected if entry.card.lora is None}
        return found

    @property
    def endpoints(self) -> frozenset[str]:
        """Every endpoint with a card."""
        return frozenset(self._tallies[1])

    def _put(self, key: str, value: bytes) -> GroupKey | None:
        if len(value) > MAX_CARD_BYTES:
            self._refused("card_size")
            logger.error("model card %s has %d bytes, more than %d; it is ignored", key, len(value), MAX_CARD_BYTES)
            return None
        try:
            entry, group_key = _read(key, value)
        except InvalidArgument as error:
            # What was readable stays in force: a bad rewrite is no reason to stop serving.
            logger.warning("model card %s is not readable and ignored: %s", key, error)
            return None
        if not self._scope.covers(group_key.namespace):
            return None
        known = self._where.get(key)
        if known is not None:
            held = self._groups[known].get(key)
            if held is not None and (held.fingerprint != entry.fingerprint or known != group_key):
                logger.error(
                    "model card %s was rewritten with another fingerprint; only taints may change while a worker serves. "
                    "The first card stays in force: restart the worker to change its model",
                    key,
                )
                return None
            if held is not None:
                self._count(held, -1)
            self._count(entry, 1)
            self._groups[known][key] = entry
            self._made.pop(known, None)
            return known
        if len(self._where) >= MAX_CARDS:
            logger.error("more than %d model cards; %s is ignored", MAX_CARDS, key)
            return None
        if group_key not in self._groups and len(self._groups) >= self._max_groups:
            self._refused("models")
            if not self._is_full:
                self._is_full = True
                logger.error(
                    "more than %d models (DYN_MAX_MODELS); %s and further new ones are ignored until others leave",
                    self._max_groups,
                    key,
                )
            return None
        self._where[key] = group_key
        self._count(entry, 1)
        self._groups.setdefault(group_key, {})[key] = entry
        self._made.pop(group_key, None)
        return group_key

    def _delete(self, key: str) -> GroupKey | None:
        group_key = self._where.pop(key, None)
        if group_key is None:
            return None
        entries = self._groups[group_key]
        if (gone := entries.pop(key, None)) is not None:
            self._count(gone, -1)
        if not entries:
            del self._groups[group_key]
            self._is_full = False
        self._made.pop(group_key, None)
        return group_key

    def _count(self, entry: CardEntry, count: int) -> None:
        """Count the names, the endpoint and the source of a card that has come, or has gone (-1)."""
        card, source = entry.card, None if entry.card.lora is None else entry.card.lora.source
        found = (card.display_name, *card.aliases), (entry.endpoint,), () if source is None else (source,)
        for tally, names in zip(self._tallies, found, strict=True):
            for name in names:
                tally[name] += count
                if not tally[name]:
                    del tally[name]


def _read(key: str, value: bytes) -> tuple[CardEntry, GroupKey]:
    record: ModelRecord = decode_model_record(value)
    card = record.card
    if card.model_input not in ModelInput.__members__:
        raise InvalidArgument(f"model_input {card.model_input!r} is unknown to this version")
    role: WorkerType = card.role
    entry = CardEntry(
        key=key,
        endpoint=f"{record.namespace}.{record.component}.{record.endpoint}",
        instance_id=record.instance_id,
        card=card,
        fingerprint=card.checksum(),
        instance_key="/".join(key.split("/", 4)[:4]),  # without the adapter's suffix
        ranks=card.runtime_config.ranks,
        requests=(card.runtime_config.max_num_seqs or 0) * max(1, card.runtime_config.data_parallel_size),
        taints=topology_taints(card.runtime_config),
    )
    return entry, GroupKey(card.display_name, record.namespace, str(role))
