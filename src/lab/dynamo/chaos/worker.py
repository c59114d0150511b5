"""A worker that breaks as planned: its engine stalls or raises, its answers and connections suffer, it dies or stands still.

It stands around the engine and around the handler, and only where there is a plan: without one nothing of this is loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final, cast

from dynamo.chaos.actions import LosesLease, crash, drain, freeze
from dynamo.chaos.fault_plan import FaultPlan, Visit
from dynamo.chaos.plan import ALL_KINDS, Fault, FaultKind
from dynamo.errors import InvalidArgument
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Handler, ResponseSink
from dynamo.runtime.calls.request_plane.mux.server import MuxServerProtocol
from dynamo.runtime.calls.request_plane.mux.sink import MuxSink

logger = logging.getLogger(__name__)

# What can be done to a `mux` connection from the worker's side: lose it, hold it, and move its items about.


def lose(connection: MuxServerProtocol) -> None:
    """Reset the connection: what was on its way is lost, and both ends know."""

    def abort(transport: asyncio.Transport) -> asyncio.Transport:
        transport.abort()
        return transport

    connection.through(abort)


def hold(connection: MuxServerProtocol, seconds: float, way: str = "both") -> None:
    """Delay all data for a while ("up": to this end, "down": to the caller); then all data arrives, unless an end
    gave up.
    """
    loop = asyncio.get_running_loop()

    def stand_in(transport: asyncio.Transport) -> asyncio.Transport:
        if way in ("up", "both") and not transport.is_closing():
            transport.pause_reading()
            loop.call_later(seconds, _read_again, transport)
        if way == "up":
            return transport
        held = _Held(transport)
        loop.call_later(seconds, held.release)
        return cast(asyncio.Transport, held)

    connection.through(stand_in)


def _read_again(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


class _Held:
    """A transport that keeps what is written to it until it is released. The credits of the streams bound that."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._kept: list[bytes] | None = []
        self._closes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.writelines([data])

    def writelines(self, parts: Iterable[bytes]) -> None:
        if self._kept is None:
            self._transport.writelines(parts)
        else:
            self._kept += parts

    def close(self) -> None:
        """Close after the held data was sent, as on a slow line."""
        if self._kept is None:
            self._transport.close()
        self._closes = True

    def is_closing(self) -> bool:
        return self._closes or self._transport.is_closing()

    def release(self) -> None:
        kept, self._kept = self._kept, None
        if kept and not self._transport.is_closing():
            self._transport.writelines(kept)
        if self._closes:
            self._transport.close()


_ENGINE_KINDS: Final = frozenset({FaultKind.STALL, FaultKind.ENGINE_ERROR})
_ITEM_KINDS: Final = frozenset({FaultKind.CUT, FaultKind.DUPLICATE, FaultKind.REORDER})
_OTHER_KINDS: Final = ALL_KINDS - _ENGINE_KINDS - _ITEM_KINDS
_PROBE_ID: Final = "health-check-"  # requests of the canary are not counted


class InjectedFailure(RuntimeError):
    """The failure of an engine that a plan injects."""


class WorkerChaos:
    """The faults of one worker process. All on its event loop."""

    def __init__(self, faults: Iterable[Fault], *, name: str, discovery: object) -> None:
        """Raises InvalidArgument for a fault that this worker's store cannot have."""
        self._faults = FaultPlan(faults, name=name)
        self._discovery = discovery
        self._visits: dict[Context, Visit] = {}
        self._work = Background()
        if not isinstance(discovery, LosesLease) and any(f.kind is FaultKind.LEASE for f in self._faults.pending):
            raise InvalidArgument("chaos plan: lease: this discovery store has no lease to lose; use file or etcd")

    async def close(self) -> None:
        """End the faults under way. Idempotent."""
        await self._work.close()

    # -- around the engine -------------------------------------------------------------------------------------------

    def engine(self, engine: Any) -> Any:
        """Return a stand-in for the engine where requests are served: it has `generate` and `abort`."""
        return _Engine(engine, self)

    async def before_chunk(self, visit: Visit) -> None:
        """Apply the faults due before a chunk; may take time, or raise."""
        for fault in self._faults.due(visit, visit.chunks, _ENGINE_KINDS):
            if fault.kind is FaultKind.ENGINE_ERROR:
                raise InjectedFailure("the engine failed, as the chaos plan says")
            try:
                async with asyncio.timeout(fault.seconds or None):
                    if fault.is_patient:
                        await visit.context.async_killed_or_stopped()
                    else:
                        await asyncio.Event().wait()
            except TimeoutError:
                logger.warning("CHAOS: the stall of request %d is over", visit.number)

    # -- around the handler ------------------------------------------------------------------------------------------

    def handler(self, inner: Handler) -> Handler:
        """Serve with `inner`, under the plan."""

        async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
            if context.id().startswith(_PROBE_ID):
                await inner(body, context, sink)
                return
            visit = self._visits[context] = self._faults.begin(context)
            try:
                for fault in self._faults.due(visit, 0, _OTHER_KINDS):
                    self._inflict(fault, sink)
                await inner(body, context, cast(ResponseSink, _Sink(sink, self, visit)))
            finally:
                del self._visits[context]

        return handle

    def item_faults(self, visit: Visit, sink: ResponseSink) -> list[FaultKind]:
        """Return what happens to the item just sent; start the other faults that are due."""
        visit.items += 1
        loop = asyncio.get_running_loop()
        for fault in self._faults.due(visit, visit.items, _OTHER_KINDS):
            # Two turns later: the item is flushed in the next one, and written to its socket at the end of that.
            loop.call_soon(loop.call_soon, self._inflict, fault, sink)
        return [fault.kind for fault in self._faults.due(visit, visit.items, _ITEM_KINDS)]

    def visit(self, context: Context) -> Visit | None:
        """Return the visit of this context; None for a request that is not counted."""
        return self._visits.get(context)

    def _inflict(self, fault: Fault, sink: ResponseSink) -> None:
        match fault.kind:
            case FaultKind.CRASH:
                crash()
            case FaultKind.FREEZE:
                freeze(fault.seconds)
            case FaultKind.DRAIN:
                drain()
            case FaultKind.LEASE:
                if not self._work.is_closed:
                    self._work.start(self._lose_lease(), "chaos: lease")
            case _ if not isinstance(sink, MuxSink):
                _cannot(fault.kind)
            case FaultKind.DROP:
                lose(sink.connection)
            case FaultKind.DELAY:
                hold(sink.connection, fault.seconds)
            case FaultKind.PARTITION:
                hold(sink.connection, fault.seconds, fault.way)
            case _:
                raise AssertionError(fault)

    async def _lose_lease(self) -> None:
        assert isinstance(self._discovery, LosesLease)
        try:
            await self._discovery.lose_lease()
        except Exception:  # the store may be away: then the fault is not to be had, and the worker goes on
            logger.exception("CHAOS: the lease could not be lost")


def _cannot(kind: FaultKind) -> None:
    logger.error("CHAOS: %s cannot be done to this request: it did not come over mux", kind)


class _Engine:
    """Stands for an engine."""

    def __init__(self, engine: Any, chaos: WorkerChaos) -> None:
        self._engine, self._chaos = engine, chaos

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        visit = self._chaos.visit(context)
        stream = self._engine.generate(request, context=context)
        try:
            if visit is not None:
                await self._chaos.before_chunk(visit)
            async for chunk in stream:
                yield chunk
                if visit is not None:
                    visit.chunks += 1
                    await self._chaos.before_chunk(visit)
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    async def abort(self, context: Context) -> None:
        await self._engine.abort(context)

    def map_error(self, error: Exception) -> Exception | None:
        mapped: Exception | None = self._engine.map_error(error)
        return mapped


class _Sink:
    """Stands for a sink, and lets items get lost, doubled or late on a `mux` connection."""

    def __init__(self, sink: ResponseSink, chaos: WorkerChaos, visit: Visit) -> None:
        self._sink, self._chaos, self._visit = sink, chaos, visit
        self._outbox = sink.outbox if isinstance(sink, MuxSink) else None
        self._late: Any = None  # an item that waits for its successor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def send_tokens(
        self, token_ids: list[int], index: int = 0, finish_reason: Any = None, extra: dict[str, Any] | None = None
    ) -> None:
        before = self._length
        self._sink.send_tokens(token_ids, index, finish_reason, extra)
        self._sent(before)

    def send_token(self, token_id: int) -> bool:
        self.send_tokens([token_id])
        return not self._sink.ended and self._sink.has_credit()

    def send_object(self, envelope: dict[str, Any]) -> None:
        before = self._length
        self._sink.send_object(envelope)
        self._sent(before)

    def end(self, error: BaseException | None = None) -> None:
        self._sink.end(error)
        self._let_go()

    @property
    def _length(self) -> int:
        return 0 if self._outbox is None else len(self._outbox.items)

    def _sent(self, before: int) -> None:
        if self._sink.ended:
            return  # nothing was sent: the caller has left
        kinds = self._chaos.item_faults(self._visit, self._sink)
        if self._outbox is None or len(self._outbox.items) == before:
            for kind in kinds:
                _cannot(kind)
            return
        held = None
        for kind in kinds:
            match kind:
                case FaultKind.CUT:
                    self._outbox.items.pop()
                case FaultKind.DUPLICATE:
                    self._outbox.items.append(self._outbox.items[-1])
                case FaultKind.REORDER:
                    held = self._outbox.items.pop()
            break  # one thing at a time can happen to an item
        self._let_go()
        self._late = held

    def _let_go(self) -> None:
        late, self._late = self._late, None
        if late is not None and self._outbox is not None:
            self._outbox.items.append(late)
