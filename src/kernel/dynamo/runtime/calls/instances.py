"""The instances of one endpoint as discovery lists them, their health and their load. No I/O: time is an argument."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Final

import msgspec

from dynamo.errors import WorkerUnavailable
from dynamo.placement import Booking, Candidate, CandidateList, CircuitBreaker, LoadBook, RouterMode
from dynamo.runtime.calls.request_plane.base import Instance

__all__ = [
    "DEFAULT_INHIBIT_SECONDS",
    "InstanceChanges",
    "InstanceSet",
    "RouterMode",
    "decode_instance",
    "encode_instance",
]

logger = logging.getLogger(__name__)

DEFAULT_INHIBIT_SECONDS: Final = 5.0  # DYN_RUNTIME_INHIBITED_DURATION_SECS


MAX_KEPT: Final = 64
"""Groups of workers whose candidates are kept; a group is the members of one model in one role."""

_NONE: Final = frozenset[int]()


class _KeptCandidates:
    """The candidates of a group of workers, as the last choice was made from them."""

    __slots__ = ("busy", "changed", "found", "instances", "members", "opened")

    def __init__(
        self, members: Container[int] | None, busy: Collection[int], instances: Sequence[Instance], found: CandidateList
    ) -> None:
        self.members, self.busy, self.instances, self.found = members, busy, instances, found
        self.opened: frozenset[int] = _NONE  # ids with an open circuit
        self.changed: set[int] = set()  # ids whose open streams have changed since

    def note(self, busy: Collection[int], opened: frozenset[int]) -> None:
        """Mark the workers that are busy, and those with an open circuit, as changed where they were not before."""
        self.changed |= (frozenset(busy) ^ frozenset(self.busy)) | (opened ^ self.opened)
        self.busy, self.opened = busy, opened


class InstanceSet:
    """The instances of one endpoint, each with its circuit breaker and the streams that are open there.

    Several records may claim one instance id: a foreign or left-over record beside the worker's own. One of them is used:
    the record whose key is that of its id, else the first. When the instance cannot be reached there, the next record is
    used (`use_next_record`), so a collision ends at the record behind which a worker lives.
    """

    def __init__(self, endpoint: str, *, inhibit_seconds: float = DEFAULT_INHIBIT_SECONDS) -> None:
        """`endpoint` is "namespace.component.endpoint"; `inhibit_seconds` 0 switches the breaker off."""
        self._endpoint = endpoint
        self._by_id: dict[int, Instance] = {}  # the record in use
        self._records: dict[int, dict[str, Instance]] = {}  # every record that claims an id, by key
        self._ids: dict[str, int] = {}  # key -> the id it claims
        self._collisions: set[int] = set()  # ids whose collision was logged
        self._kept: dict[int, _KeptCandidates] = {}  # by the identity of the members
        self.breaker = CircuitBreaker(inhibit_seconds)
        self.loads = LoadBook()
        self._all = _KeptCandidates(None, _NONE, (), CandidateList(()))  # as they are apart from circuits
        self.loads.changed = [self._all.changed]

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def scope(self) -> str:
        """The group's name in error texts."""
        return f"endpoint {self._endpoint.replace('.', '/')}"

    @property
    def discovered(self) -> Sequence[Instance]:
        """Everything the store lists, by id."""
        return self._all.instances

    def put(self, key: str, instance: Instance) -> None:
        """Take over a record of the store that is new or has changed; its circuit is closed."""
        instance_id = instance.instance_id
        if self._ids.get(key, instance_id) != instance_id:
            self.remove(key)
        self._ids[key] = instance_id
        records = self._records.setdefault(instance_id, {})
        was = records.get(key)
        records[key] = instance
        in_use = self._by_id.get(instance_id)
        if in_use is None or in_use is was or _is_own_key(key, instance):
            self._use(instance)
        if len(records) > 1 and instance_id not in self._collisions:
            self._collisions.add(instance_id)
            logger.error(
                "%d records of %s claim instance id %x (%s); requests go to %s, and to the next record when no worker "
                "can be reached there. Remove the foreign record, or give each worker an id of its own",
                len(records),
                self._endpoint,
                instance_id,
                ", ".join(sorted(records)),
                self._by_id[instance_id].transport,
            )

    def remove(self, key: str) -> None:
        """Remove a record; an unknown key is fine. The instance's open streams stay booked until they are released."""
        instance_id = self._ids.pop(key, None)
        if instance_id is None:
            return
        records = self._records[instance_id]
        gone = records.pop(key)
        if self._by_id.get(instance_id) is not gone:
            return
        if records:
            self._use(next(iter(records.values())))
            return
        del self._records[instance_id]
        del self._by_id[instance_id]
        self._collisions.discard(instance_id)
        self.breaker.reset(instance_id)
        every = [*self._all.instances]
        del every[self._all.found.shape.find(instance_id)]
        self._all.instances, self._all.found = every, self._all.found.without((instance_id,))

    def use_next_record(self, instance: Instance) -> bool:
        """Use another record of this id, as no worker can be reached by `instance`; return whether there is another."""
        records = list(self._records.get(instance.instance_id, {}).values())
        if len(records) < 2:
            return False
        if self._by_id[instance.instance_id] is instance:
            position = next(number for number, record in enumerate(records) if record is instance)
            self._use(records[(position + 1) % len(records)])
        return True

    def named(self, instance_id: int) -> Instance:
        """Return one instance by id, whatever its circuit. Raises `WorkerUnavailable` naming the id."""
        instance = self._by_id.get(instance_id)
        if instance is None:
            raise WorkerUnavailable(f"instance_id={instance_id} not found for {self.scope}")
        return instance

    # -- health and load -----------------------------------------------------------------------------------------

    def inhibit(self, instance_id: int, now: float) -> bool:
        """Open the circuit of an instance that failed; return whether it was closed before."""
        return instance_id in self._by_id and self.breaker.record_failure(instance_id, now)

    def book(self, instance_id: int) -> Booking:
        """Count a stream to this instance. Book before awaiting, or two requests of one turn see the same load."""
        return self.loads.book(instance_id)

    def candidates(
        self, now: float, *, members: Container[int] | None = None, busy: Collection[int] = ()
    ) -> list[Candidate]:
        """Return the records that a choice is made from, by id. `members`: only these ids; None: all of them."""
        kept = self._kept.get(id(members))
        if kept is None or kept.instances is not self._all.instances:
            kept = self._keep(members)
        if kept.changed or busy is not kept.busy or kept.opened or self.breaker.open:
            return self._renewed(kept, busy, self.breaker.open_circuits(now) if self.breaker.open else _NONE)
        return kept.found

    def _renewed(self, kept: _KeptCandidates, busy: Collection[int], opened: frozenset[int]) -> CandidateList:
        """Return kept candidates with new records of those that have changed."""
        if busy is not kept.busy or opened is not kept.opened:
            kept.note(busy, opened)
        kept.found = CandidateList(kept.found, {
            at: self._candidate(self._by_id[known], busy, opened)
            for known in kept.changed if (at := kept.found.shape.find(known)) >= 0
        })  # fmt: skip
        kept.changed.clear()
        return kept.found

    def _candidate(self, instance: Instance, busy: Container[int] = (), opened: Container[int] = ()) -> Candidate:
        instance_id = instance.instance_id
        return Candidate(
            instance_id,
            self._endpoint,
            instance.device_type,
            self.loads.by_worker.get(instance_id, 0),
            instance_id in busy,
            instance_id in opened,
        )

    def _keep(self, members: Container[int] | None) -> _KeptCandidates:
        """Take the candidates of a group of workers from those of all, and keep them for the next choice."""
        every = self._all
        found = self._renewed(every, _NONE, _NONE)
        if members is not None:
            ids = found.shape.known
            others = ids - members if isinstance(members, frozenset) else [each for each in ids if each not in members]
            found = found.without(others)
        self._kept.pop(id(members), None)
        # Groups of before the last join or loss go, as every booking is noted for each group that is kept.
        self._kept = {key: each for key, each in self._kept.items() if each.instances is every.instances}
        if len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        kept = self._kept[id(members)] = _KeptCandidates(members, _NONE, every.instances, found)
        self.loads.changed = [every.changed, *(each.changed for each in self._kept.values())]
        return kept

    def _use(self, instance: Instance) -> None:
        instance_id, found = instance.instance_id, self._all.found
        self._by_id[instance_id] = instance
        self.breaker.reset(instance_id)
        every = [*self._all.instances]  # a new list: `discovered` may be iterated while the store changes
        at = found.shape.find(instance_id)
        if at >= 0:
            every[at] = instance
            self._all.changed.add(instance_id)
        else:
            self._all.found = found = found.joined_by(self._candidate(instance))
            every.insert(found.shape.find(instance_id), instance)
        self._all.instances = every


def _is_own_key(key: str, instance: Instance) -> bool:
    return key.endswith("/" + instance.key)


# -- the record -----------------------------------------------------------------------------------------------------------

_decoder = msgspec.json.Decoder(Instance)


def encode_instance(
    namespace: str, component: str, endpoint: str, instance_id: int, transport: Mapping[str, object]
) -> bytes:
    """Encode the record of `v1/instances`, with its members in the native order; `transport` is the request plane's
    part.
    """
    record = {
        "type": "Endpoint",
        "component": component,
        "endpoint": endpoint,
        "namespace": namespace,
        "instance_id": instance_id,
        **transport,
    }
    return msgspec.json.encode(record)


def decode_instance(value: bytes) -> Instance:
    """Decode the record of a key. Raises `msgspec.MsgspecError` for anything else; unknown members are ignored."""
    return _decoder.decode(value)


class InstanceChanges:
    """The callers that are notified of changes of the instances, and those that wait for the next one."""

    def __init__(self) -> None:
        self._listeners: dict[object, Callable[[], None]] = {}
        self._changed = asyncio.Event()

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back at every change; returns a function that takes it back."""
        token = object()
        self._listeners[token] = callback
        return lambda: self._forget(token)

    def _forget(self, token: object) -> None:
        self._listeners.pop(token, None)

    def notify(self) -> None:
        """Report a change."""
        self._changed.set()
        for callback in list(self._listeners.values()):
            callback()

    def wake(self) -> None:
        """Wake what waits, without a change."""
        self._changed.set()

    async def next(self) -> None:
        """Wait for the next change."""
        self._changed.clear()
        await self._changed.wait()
