"""The workers that registered one model in one role: the members, the choice among them, and the connection to each.

Every choice of a worker goes through `ModelPool.choose`: the members' candidate records, the policy's choice, the instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Awaitable, Callable, Collection, Container, Coroutine, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from dynamo.errors import DynamoException, InvalidArgument, Overloaded, WorkerUnavailable
from dynamo.placement import Candidate, Placement, PlacementRequest, Policy, WorkerKey, eligible, place
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.kv.placement import KvPlaced, KvPlacement
from dynamo.router.kv.pre_dispatch import PreDispatchGate
from dynamo.router.kv.queue_gate import QueueGate
from dynamo.router.kv.sessions import PoolSessions, SessionHold, session_id_of
from dynamo.router.workers.worker_holds import HeldWorkers
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.runtime.calls.request_plane.base import Instance, ResponseStream


class WorkerClient(Protocol):
    """What is needed of `dynamo.runtime.Client`: the instances of one endpoint, and a way to each."""

    def instance_ids(self) -> list[int]: ...

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...

    def candidates(self, *, members: Container[int] | None = None, busy: Collection[int] = ()) -> list[Candidate]: ...

    def named(self, instance_id: int) -> Instance: ...

    def circuits(self) -> dict[int, float]: ...

    async def open(self, instance: Instance, body: object, context: Context) -> ResponseStream: ...

    def record_failure(self, instance: Instance, error: DynamoException) -> bool: ...

    async def close(self) -> None: ...


class ChosenWorker(Struct, frozen=True):
    """A worker that was chosen for one attempt of a request."""

    placement: Placement
    instance: Instance
    client: WorkerClient
    kv: KvPlacement | None = None  # books what is opened there; None: nothing does

    @property
    def key(self) -> WorkerKey:
        candidate = self.placement.candidate
        return candidate.endpoint, candidate.instance_id

    def open(self, body: WorkerRequest, context: Context) -> Awaitable[ResponseStream]:
        """Send `body` there and return its stream. Errors are those of the request plane."""
        if self.kv is not None:
            return self.kv.open(self, body, context)
        return self.client.open(self.instance, body, context)

    def record_failure(self, error: DynamoException) -> bool:
        """Leave the worker out for a while if `error` is about the connection to it.

        Return True when another discovery record of the same id took its place instead: then the id may be tried again.
        """
        return self.client.record_failure(self.instance, error)


class PoolMembers(HeldWorkers):
    """Which workers belong to a pool, where they are, and which of them discovery lists."""

    __slots__ = ("_clients", "_members", "_places")

    def __init__(self, clients: Mapping[str, WorkerClient]) -> None:
        """`clients` by endpoint ("namespace.component.endpoint"); it may change any time."""
        super().__init__()
        self._clients = clients
        self._members: Mapping[str, frozenset[int]] = {}  # instance ids by endpoint
        self._places: Mapping[int, frozenset[str]] = {}  # topology taints, of the members that have any

    def set_members(self, members: Iterable[WorkerKey]) -> None:
        """Take over the members: (endpoint, instance id) pairs."""
        found: dict[str, set[int]] = {}
        for endpoint, instance_id in members:
            found.setdefault(endpoint, set()).add(instance_id)
        self._members = {endpoint: frozenset(ids) for endpoint, ids in found.items()}

    def set_places(self, taints: Mapping[int, frozenset[str]]) -> None:
        """Take over where the members are: the topology taints of those that have any."""
        self._places = taints

    @property
    def workers(self) -> int:
        """How many members there are, reachable or not."""
        return sum(map(len, self._members.values()))

    @property
    def endpoints(self) -> Collection[str]:
        """Where the members are: "namespace.component.endpoint"."""
        return self._members.keys()

    @property
    def member_ids(self) -> frozenset[int]:
        """The instance ids of the members, reachable or not."""
        if len(self._members) == 1:
            return next(iter(self._members.values()))  # as nearly always, and not a copy
        return frozenset().union(*self._members.values())

    @property
    def listed_ids(self) -> frozenset[int]:
        """The ids of the members that discovery lists."""
        found: frozenset[int] = frozenset()
        for endpoint, ids in self._members.items():
            if (client := self._clients.get(endpoint)) is not None:
                found |= ids.intersection(client.instance_ids())
        return found

    @property
    def is_reachable(self) -> bool:
        """Whether an instance stands behind one of the members: a card may come first, or stay a moment longer."""
        return any(
            endpoint in self._clients and not ids.isdisjoint(self._clients[endpoint].instance_ids())
            for endpoint, ids in self._members.items()
        )

    def circuits(self) -> dict[int, float]:
        """Return when each worker of its endpoints that failed, and has not answered since, is tried again: loop times."""
        found: dict[int, float] = {}
        for endpoint in self._members:
            if (client := self._clients.get(endpoint)) is not None:
                found |= client.circuits()
        return found

    def instance(self, instance_id: int) -> Instance | None:
        """Return the member with this id; None when there is no such member or discovery does not list it."""
        for endpoint, ids in self._members.items():
            client = self._clients.get(endpoint)
            if instance_id in ids and client is not None:
                with contextlib.suppress(WorkerUnavailable):  # its card is there, its instance is not
                    return client.named(instance_id)
        return None


class ModelPool(PoolMembers):
    """The members of one model and role, restricted to what their endpoints' clients have discovered.

    Workers of several models and roles may share an endpoint name; one model may stand on several endpoints.
    """

    __slots__ = (
        "__weakref__", "_busy", "_policy", "_waiters", "emptied_at", "kv",
        "name", "pre_dispatch", "runtime_config",
    )  # fmt: skip

    def __init__(self, name: str, clients: Mapping[str, WorkerClient], policy: Policy) -> None:
        """`name`: for error texts. `clients`: see `PoolMembers`.
        `policy`: of this pool alone, as it keeps the pool's turn; only a `KvPlacement` may be shared."""
        self.name = name
        super().__init__(clients)
        self.pre_dispatch: PreDispatchGate | None = None  # what requests pass before they go to a worker
        self.use(policy)
        # Requests that wait for a worker, in order of arrival; bounded by those in flight.
        self._waiters: dict[asyncio.Future[None], None] = {}
        self.emptied_at: float | None = None  # when the last reachable member was lost; None: it was not
        self.runtime_config = ModelRuntimeConfig()  # what the engine registered about itself
        self._busy: frozenset[int] = frozenset()

    def use(self, policy: Policy) -> None:
        """Choose by another policy from now on."""
        self._policy = policy
        self.kv = policy if isinstance(policy, KvPlacement) else None

    @property
    def gate(self) -> QueueGate | None:
        """Where requests wait for a worker; None: they do not."""
        return None if self.pre_dispatch is None else self.pre_dispatch.gate

    @property
    def sessions(self) -> PoolSessions | None:
        """The sessions that stay with their worker; None: none does."""
        return None if self.pre_dispatch is None else self.pre_dispatch.sessions

    async def hold_session(
        self, body: WorkerRequest, context: Context, *, worker_id: int | None, dp_rank: int | None
    ) -> SessionHold | None:
        """Return a request's hold on its session; None: it has none. `worker_id`, `dp_rank`: what the request names itself.

        Raises what `PoolSessions.hold` raises.
        """
        sessions, session_id = self.sessions, session_id_of(body)
        if sessions is None or session_id is None:
            return None
        return await sessions.hold(session_id, context, pinned_worker_id=worker_id, pinned_dp_rank=dp_rank)

    @property
    def busy(self) -> frozenset[int]:
        """The members whose reported load exceeds a threshold."""
        return self._busy

    @busy.setter
    def busy(self, busy: frozenset[int]) -> None:
        self._busy = busy
        if self.gate is not None:
            self.gate.changed()

    def members_changed(self, was_reachable: bool) -> None:
        """Wake the requests that wait for a worker, and note when the last member was lost.

        To be called after `set_members` and whenever a client's instances have changed. `was_reachable`: before that.
        """
        if self.is_reachable:
            self.emptied_at = None
        elif was_reachable:
            self.emptied_at = asyncio.get_running_loop().time()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self.gate is not None:
            self.gate.changed()

    async def wait_for_change(self, context: Context, until: float) -> None:
        """Return when the members have changed, at the time `until`, or when `context` is stopped."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_killed: bool = False) -> None:
            if not waiter.done():
                waiter.set_result(None)

        self._waiters[waiter] = None
        timer = loop.call_at(until, wake)
        forget = context.on_cancel(on_loop(loop, wake))
        try:
            await waiter
        finally:
            forget()
            timer.cancel()
            self._waiters.pop(waiter, None)

    def choose(self, request: PlacementRequest) -> ChosenWorker:
        """Choose the worker of one attempt. Open it in the same turn of the loop: that is where its load is booked.

        Raises:
            InvalidArgument: the request names a worker that is not a member or that its KV blocks cannot be sent to, or the
                policy cannot place the request.
            WorkerUnavailable: no member is left.
            Overloaded: every member that is left is busy, or, in the kv mode, the one that the request names.
        """
        is_open = request.transfer is None and not self.holds.by_worker  # as nearly always
        now, candidates = asyncio.get_running_loop().time(), self.listed() if is_open else self._in_reach(request)
        placement = place(self._policy, request, candidates, now, scope=f"model {self.name}")
        if self.kv is not None:
            placement = self.kv.settle(placement, request, now)
        if self.holds.on_choice is not None:
            self.holds.on_choice(self.name, candidates, placement)
        client = self._clients[placement.candidate.endpoint]
        return ChosenWorker(placement, client.named(placement.candidate.instance_id), client, self.kv)

    def wait_for_turn(self, worker: ChosenWorker, context: Context) -> Coroutine[None, None, bool] | None:
        """Return the wait of a request that is about to go to `worker`; None: it may go at once.

        Await it: True: choose again, and open in the same turn of the loop; False: the request was cancelled meanwhile.
        It raises RouterQueueLimitExceeded where too many wait already.
        """
        gate, placement = self.gate, worker.placement
        if not isinstance(placement, KvPlaced):
            return None
        if placement.query.defer_seconds:
            return self._deferred(placement, context)
        if gate is None:
            return None
        policy = gate.parks(placement.selection, placement.query, context)
        return None if policy is None else gate.wait(policy, placement.selection, placement.query, context)

    async def _deferred(self, placement: KvPlaced, context: Context) -> bool:
        """Hold a request back for as long as its policy requires, and then in the queue; False: it was cancelled meanwhile."""
        query, loop = placement.query, asyncio.get_running_loop()
        until, query.defer_seconds = loop.time() + query.defer_seconds, 0.0
        while loop.time() < until and not context.is_stopped():
            await self.wait_for_change(context, until)
        gate = self.gate
        policy = None if gate is None else gate.parks(placement.selection, query, context)
        if gate is not None and policy is not None and not context.is_stopped():
            return await gate.wait(policy, placement.selection, query, context)
        return not context.is_stopped()

    def check_room(self, request: PlacementRequest) -> None:
        """Raise Overloaded where `choose` would, because of busy workers; nothing is chosen, so no turn is used up."""
        pinned = request.pinned_instance_id
        if pinned is not None:
            if self.kv is not None and pinned in self._busy:
                raise Overloaded
        elif self._busy:
            with contextlib.suppress(
                InvalidArgument, WorkerUnavailable
            ):  # `choose` raises those, when the time has come
                eligible(request, self._in_reach(request), scope=f"model {self.name}")

    def has_worker(self, request: PlacementRequest) -> bool:
        """Return whether `choose` would find a worker that is not busy; nothing is chosen, so no turn is used up."""
        try:
            return bool(eligible(request, self._in_reach(request), scope=self.name))
        except DynamoException:
            return False

    def _in_reach(self, request: PlacementRequest) -> list[Candidate]:
        """Return the members that the KV blocks of a request can be sent to; all of them where that does not matter.

        Where a place is only preferred, the kv mode has a weight for it. In the other modes workers of that place go
        before the others, for as long as one of them is healthy, free and untried.
        """
        candidates, rule = self.candidates(), request.transfer
        if rule is None:
            return candidates
        near = [each for each in candidates if rule.taint in self._places.get(each.instance_id, ())]
        if not rule.is_required:
            can_serve = any(not (each.is_circuit_open or each.is_busy or each.key in request.excluded) for each in near)
            return near if can_serve and self.kv is None and request.pinned_instance_id is None else candidates
        pinned = request.pinned_instance_id
        if pinned in {each.instance_id for each in candidates} - {each.instance_id for each in near}:
            raise InvalidArgument(f"worker {pinned} is not in reach of the prefill worker: it has no {rule.taint}")
        return near

    def preview(self, request: PlacementRequest) -> tuple[Sequence[Candidate], Placement]:
        """Return what `choose` would choose from now, and what; nothing is booked, and no turn is used up.

        Raises what `choose` raises.
        """
        now, candidates = asyncio.get_running_loop().time(), self._in_reach(request)
        policy = copy.deepcopy(self._policy) if self.kv is None else self.kv.previewing()
        return candidates, place(policy, request, candidates, now, scope=f"model {self.name}")

    def candidates(self) -> list[Candidate]:
        """Return the members that discovery lists, as a policy sees them; without those that an operator drains."""
        found = self.listed()
        return self.holds.apply(found, asyncio.get_running_loop().time()) if self.holds.by_worker else found

    def listed(self) -> list[Candidate]:
        """Return the members that discovery lists, held by an operator or not."""
        if len(self._members) == 1:
            ((endpoint, ids),) = self._members.items()
            client = self._clients.get(endpoint)
            return [] if client is None else client.candidates(members=ids, busy=self._busy)
        found: list[Candidate] = []
        for endpoint, ids in self._members.items():
            if (client := self._clients.get(endpoint)) is not None:
                found += client.candidates(members=ids, busy=self._busy)
        return found
