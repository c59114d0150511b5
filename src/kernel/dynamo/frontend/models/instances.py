"""The instance records in discovery: which workers stand behind the cards, and where."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence

import msgspec

from dynamo.frontend.models.cards import CardEntry, Group, Scope
from dynamo.frontend.models.file_policy import host_of_instance
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.protocol.records import UNREADABLE
from dynamo.runtime.discovery.base import INSTANCES, Change, Put

logger = logging.getLogger(__name__)


class InstanceBook:
    """Every readable instance record in scope, without I/O."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._records: dict[str, JsonObject] = {}  # by key, without "type"

    def apply(self, changes: Sequence[Change]) -> None:
        """Take over a batch."""
        for change in changes:
            key = change.key.removeprefix(f"{INSTANCES}/")
            if not isinstance(change, Put):
                self._records.pop(key, None)
                continue
            try:
                record = msgspec.json.decode(change.value, type=JsonObject)
            except UNREADABLE as error:
                logger.warning("instance record %s is not readable and ignored: %s", key, error)
                continue
            if self._scope.covers(str(record.get("namespace"))):
                record.pop("type", None)
                self._records[key] = record

    def has(self, entry: CardEntry) -> bool:
        """Return whether the worker of a card is there."""
        return entry.instance_key in self._records

    def has_any(self, instance_ids: Container[int]) -> bool:
        """Return whether one of these instances is there, at whatever endpoint."""
        return any(record.get("instance_id") in instance_ids for record in self._records.values())

    def count(self, group: Group) -> int:
        """Return how many of a group's workers are there."""
        return sum(map(self._records.__contains__, group.instance_keys))

    def hosts(self, entries: Iterable[CardEntry]) -> frozenset[str]:
        """Return the hosts that the cards' workers advertise, those that are there."""
        found = (host_of_instance(self._records[entry.instance_key]) for entry in entries if self.has(entry))
        return frozenset(host for host in found if host is not None)

    def records(self) -> list[JsonObject]:
        """Return every record, sorted by key, without its "type"."""
        return [record for _, record in sorted(self._records.items())]
