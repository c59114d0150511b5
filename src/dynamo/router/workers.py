"""The workers that registered one model in one role: a choice among them, and a way to each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from dynamo.errors import Overloaded, WorkerUnavailable
from dynamo.runtime.context import Context
from dynamo.runtime.instances import Turn
from dynamo.runtime.request_plane.base import Instance, ResponseStream

__all__ = ["WorkerClient", "WorkerGroup"]


class WorkerClient(Protocol):
    """What is needed of `dynamo.runtime.Client`: the instances of one endpoint, and a way to each."""

    def instance_ids(self) -> list[int]: ...

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...

    def named(self, instance_id: int) -> Instance: ...

    def pick(
        self, context: Context, *, exclude: Collection[int] = (), only_well: bool = False, turn: Turn | None = None
    ) -> Instance: ...

    async def open(self, instance: Instance, body: Any, context: Context) -> ResponseStream: ...

    def inhibit(self, instance_id: int) -> None: ...

    async def close(self) -> None: ...


class WorkerGroup:
    """`pick`, `open` and `inhibit` of the endpoints' clients, restricted to the group's members.

    Workers of several models and roles may share an endpoint name; one model may stand on several endpoints.
    """

    __slots__ = ("_clients", "_endpoints", "_foreign", "_turn", "_turns", "_workers", "busy", "name")

    def __init__(self, name: str, clients: Mapping[str, WorkerClient]) -> None:
        """`name`: for error texts. `clients` by endpoint ("namespace.component.endpoint"); it may change any time."""
        self.name = name
        self._turn = 0  # among the endpoints
        self._turns: dict[str, Turn] = {}  # by endpoint: other models and roles there must not use up ours
        self._clients = clients
        self._foreign: dict[str, frozenset[int]] = {}  # by endpoint; absent: to be found out again
        self._workers: Mapping[str, frozenset[int]] = {}
        self._endpoints: list[str] = []
        self.busy: frozenset[int] = frozenset()  # members that take no more just now, as far as anybody knows

    def set_members(self, members: Iterable[tuple[str, int]]) -> None:
        """Take over who belongs to the group: (endpoint, instance id) pairs."""
        workers: dict[str, set[int]] = {}
        for endpoint, instance_id in members:
            workers.setdefault(endpoint, set()).add(instance_id)
        self._workers = {path: frozenset(ids) for path, ids in workers.items()}
        self._endpoints = list(self._workers)
        self._turns = {path: self._turns.get(path) or Turn() for path in self._endpoints}
        self._foreign.clear()

    def instances_changed(self, endpoint: str) -> None:
        """The instances of an endpoint are not what they were."""
        self._foreign.pop(endpoint, None)

    @property
    def workers(self) -> int:
        """How many members there are, reachable or not."""
        return sum(map(len, self._workers.values()))

    @property
    def endpoints(self) -> Collection[str]:
        """Where the members are: "namespace.component.endpoint"."""
        return self._workers.keys()

    @property
    def member_ids(self) -> frozenset[int]:
        """The instances of the members, reachable or not."""
        return frozenset().union(*self._workers.values())

    @property
    def is_reachable(self) -> bool:
        """Whether an instance stands behind one of the members: a card may come first, or stay a moment longer."""
        return any(
            endpoint in self._clients and not ids.isdisjoint(self._clients[endpoint].instance_ids())
            for endpoint, ids in self._workers.items()
        )

    def pick(self, context: Context, *, exclude: Collection[int] = (), only_well: bool = False) -> Instance:
        """The worker the router mode chooses; one in quarantine only where there is no other, and never with `only_well`.

        Raises `WorkerUnavailable` when none is left, `Overloaded` when all that are left are busy.
        """
        if self.busy:
            try:
                return self._pick(context, self.busy.union(exclude), only_well)
            except WorkerUnavailable:
                self._pick(context, exclude, only_well)
                raise Overloaded from None  # and not gone
        return self._pick(context, exclude, only_well)

    def _pick(self, context: Context, exclude: Collection[int], only_well: bool) -> Instance:
        endpoints = self._endpoints
        if len(endpoints) == 1:
            return self._pick_at(endpoints[0], context, exclude, only_well)
        # One model on several endpoints of a namespace: take turns, skip what has nobody; who is well goes first.
        self._turn += 1
        start = self._turn % (len(endpoints) or 1)
        for careful in (True,) if only_well else (True, False):
            for endpoint in endpoints[start:] + endpoints[:start]:
                with contextlib.suppress(WorkerUnavailable):
                    return self._pick_at(endpoint, context, exclude, careful)
        raise WorkerUnavailable(f"No workers available for model {self.name}")

    def _pick_at(self, endpoint: str, context: Context, exclude: Collection[int], only_well: bool) -> Instance:
        client = self._clients.get(endpoint)
        if client is None:
            raise WorkerUnavailable(f"No workers available for model {self.name}")
        foreign = self._foreign.get(endpoint)
        if foreign is None:
            foreign = self._foreign[endpoint] = frozenset(client.instance_ids()) - self._workers[endpoint]
        without = foreign.union(exclude) if foreign else exclude
        return client.pick(context, exclude=without, only_well=only_well, turn=self._turns[endpoint])

    async def open(self, instance: Instance, body: Any, context: Context) -> ResponseStream:
        """Send `body` to `instance` and return its stream."""
        return await self._client_of(instance).open(instance, body, context)

    def inhibit(self, instance: Instance) -> None:
        """Leave this worker alone for a while: it failed."""
        self._client_of(instance).inhibit(instance.instance_id)

    def instance(self, instance_id: int) -> Instance | None:
        """The member with this id, for requests that name their worker; None: no such member, or not reachable."""
        for endpoint, ids in self._workers.items():
            client = self._clients.get(endpoint)
            if instance_id in ids and client is not None:
                with contextlib.suppress(WorkerUnavailable):  # its card is there, its instance is not
                    return client.named(instance_id)
        return None

    def _client_of(self, instance: Instance) -> WorkerClient:
        endpoint = f"{instance.namespace}.{instance.component}.{instance.endpoint}"
        try:
            return self._clients[endpoint]
        except KeyError:
            raise WorkerUnavailable(f"{instance} does not serve {self.name} any more") from None
