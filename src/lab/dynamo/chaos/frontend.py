"""A frontend that breaks as planned: it dies, stands still, or receives a SIGTERM when an item of an answer arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from dynamo.chaos.actions import crash, drain, freeze
from dynamo.chaos.fault_plan import FaultPlan, Visit
from dynamo.chaos.plan import ALL_KINDS, Fault, FaultKind
from dynamo.errors import DynamoException, InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, RequestPlaneClient, ResponseStream, StreamItem, TokenLane


class FrontendChaos:
    """The faults of one frontend process. A request is one that is sent to a worker: each choice, each try."""

    def __init__(self, faults: Iterable[Fault], *, name: str) -> None:
        self._faults = FaultPlan(faults, name=name)
        if any(fault.kind is FaultKind.LEASE for fault in self._faults.pending):
            raise InvalidArgument("chaos plan: lease: a frontend holds no records that it could lose; name a worker")

    def client(self, inner: RequestPlaneClient) -> RequestPlaneClient:
        """Return a stand-in for the caller's side of a request plane."""
        return _Client(inner, self)

    def begin(self, context: Context) -> Visit:
        visit = self._faults.begin(context)
        self._reach(visit)
        return visit

    def arrived(self, visit: Visit, count: int) -> None:
        """So many items more have come."""
        for _ in range(count):
            visit.items += 1
            self._reach(visit)

    def _reach(self, visit: Visit) -> None:
        for fault in self._faults.due(visit, visit.items, ALL_KINDS):
            # Not inside the reader's own call.
            asyncio.get_running_loop().call_soon(_inflict, fault)


def _inflict(fault: Fault) -> None:
    match fault.kind:
        case FaultKind.CRASH | FaultKind.FRONTEND_CRASH:
            crash()
        case FaultKind.DRAIN | FaultKind.FRONTEND_DRAIN:
            drain()
        case FaultKind.FREEZE:
            freeze(fault.seconds)
        case _:
            raise AssertionError(fault)


class _Client:
    def __init__(self, inner: RequestPlaneClient, chaos: FrontendChaos) -> None:
        self._inner, self._chaos = inner, chaos

    async def open(self, instance: Instance, body: Any, context: Context) -> ResponseStream:
        stream = await self._inner.open(instance, body, context)
        return _Stream(stream, self._chaos, self._chaos.begin(context))

    async def close(self) -> None:
        await self._inner.close()


class _Stream:
    """Counts what arrives."""

    def __init__(self, stream: ResponseStream, chaos: FrontendChaos, visit: Visit) -> None:
        self._stream, self._chaos, self._visit = stream, chaos, visit

    async def next_batch(self) -> list[StreamItem]:
        items = await self._stream.next_batch()
        self._chaos.arrived(self._visit, len(items))
        return items

    def take(self) -> list[StreamItem] | None:
        items = self._stream.take()
        self._chaos.arrived(self._visit, len(items or ()))
        return items

    def listen(self, arrived: Callable[[], None] | None) -> None:
        self._stream.listen(arrived)

    def open_lane(self, lane: TokenLane, closed: Callable[[BaseException | None], None]) -> bool:
        return False  # a fault comes after a number of items, and a lane passes on tokens of several at a time

    def book(
        self, *, first: Callable[[DynamoException | None], None] | None, released: Callable[[], None] | None
    ) -> None:
        self._stream.book(first=first, released=released)

    @property
    def tokens_taken(self) -> int:
        return self._stream.tokens_taken

    @property
    def failure(self) -> DynamoException | None:
        return self._stream.failure

    def stop(self) -> None:
        self._stream.stop()

    def kill(self) -> None:
        self._stream.kill()

    def finish(self) -> None:
        self._stream.finish()

    def close(self) -> None:
        self._stream.close()
