"""The memory request plane with a wire in between: delays, lost connections, and frames that come twice, late or not at all.

Each pair of a caller and a worker shares one connection; both directions keep their order, as TCP does. What TCP cannot do
(a frame twice, missing or out of place) is done to single items all the same, because the offsets must catch it.

The two ends of a connection learn of its end each for itself, as sockets do (`tests/long/simulation/test_wire.py` holds the real
ones to it): a process that dies leaves behind what it had sent, and its goodbye after that; one that is frozen learns of
everything when it thaws; a connection that is reset, or silent for too long, loses what is on its way, and never an end
of a stream.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections import deque
from collections.abc import Callable, Iterator, MutableSet
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from dynamo.errors import CannotConnect, Disconnected, DynamoException, describe
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import END_INDEX, INITIAL_CREDITS, Instance, StreamItem
from dynamo.runtime.calls.request_plane.memory import MemoryClient, MemoryPlane, MemoryServer, MemorySink, MemoryStream

T = TypeVar("T")

PING_LIMIT_SECONDS: Final = 10.0  # a connection that is silent for so long is given up by both ends
CONNECT_SECONDS: Final = 5.0
LATENCY_SECONDS: Final = (0.0001, 0.003)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class ItemFault(enum.Enum):
    """What may happen to one item on its way to the caller."""

    DUPLICATE = "duplicate"
    CUT = "cut"
    REORDER = "reorder"


class OrderedSet(MutableSet[T], Generic[T]):
    """A set in order of arrival: a plain one is ordered by addresses, which no run repeats."""

    def __init__(self) -> None:
        self._items: dict[T, None] = {}

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, value: T) -> None:
        self._items[value] = None

    def discard(self, value: T) -> None:
        self._items.pop(value, None)


@dataclass
class NetworkHooks:
    """Called with the wire, and with the number of the item from 1."""

    on_open: Callable[[Wire], None] = lambda wire: None
    on_item: Callable[[Wire, StreamItem, int], ItemFault | None] = lambda wire, item, number: None
    on_breach: Callable[[str], None] = lambda text: None


class Network:
    """All connections of a cluster."""

    def __init__(self, rng: random.Random, *, server_settings: RequestPlaneSettings | None = None) -> None:
        self._rng = rng
        self._settings = server_settings or RequestPlaneSettings()
        self._servers: dict[str, MemoryServer] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._process_of: dict[int, str] = {}  # instance id -> worker
        self._gone: set[str] = set()
        self._frozen_until: dict[str, float] = {}  # by worker
        self.hooks = NetworkHooks()

    def plane(self, process: str) -> MemoryPlane:
        """Return the plane as one process sees it."""
        return _ProcessPlane(self, process)

    def announce(self, instance_id: int, process: str) -> None:
        """Record the process that has the instances of this id."""
        self._process_of[instance_id] = process

    def link(self, caller: str, worker: str) -> Link:
        found = self._links.get((caller, worker))
        if found is None:
            found = self._links[caller, worker] = Link(self._rng)
            if (left := self._frozen_until.get(worker, 0.0) - asyncio.get_running_loop().time()) > 0:
                found.hold(left, is_frozen=True)
        return found

    def links_from(self, caller: str) -> list[Link]:
        return [link for (end, _), link in self._links.items() if end == caller]

    def all_links(self) -> list[Link]:
        return list(self._links.values())

    def freeze(self, worker: str, seconds: float) -> None:
        """Freeze the worker process: it reads nothing and sends nothing, and its system keeps the data that arrives."""
        until = asyncio.get_running_loop().time() + seconds
        self._frozen_until[worker] = max(until, self._frozen_until.get(worker, 0.0))
        for (_, end), link in self._links.items():
            if end == worker:
                link.hold(seconds, is_frozen=True)

    def kill(self, process: str) -> None:
        """Kill the process; its system closes its connections, and nothing listens any more."""
        self._gone.add(process)
        self._frozen_until.pop(process, None)
        for path, server in list(self._servers.items()):
            if isinstance(server, _Server) and server.process == process:
                del self._servers[path]
        for (caller, worker), link in self._links.items():
            if process == caller:
                link.caller_died()
            elif process == worker:
                link.worker_died()


class _Hold:
    """Why nothing arrives for a while."""

    __slots__ = ("is_frozen", "pipes")

    def __init__(self, pipes: list[_Pipe], is_frozen: bool) -> None:
        self.pipes, self.is_frozen = pipes, is_frozen


class Link:
    """One connection, and the next one when it is lost: two pipes and the streams on it."""

    def __init__(self, rng: random.Random) -> None:
        self.up, self.down = _Pipe(rng), _Pipe(rng)
        self.wires: OrderedSet[Wire] = OrderedSet()  # of which one end at least is open
        self.is_severed = False  # given up, and there is no way to connect again yet
        self.is_connected = False  # as the caller sees it
        self._holds: list[_Hold] = []

    def hold(self, seconds: float, way: str = "both", *, is_frozen: bool = False) -> None:
        """Delay all data for a while ("up", "down" or "both"); afterwards all data arrives, unless an end gave up
        first.

        `is_frozen`: the delay comes from a frozen worker process. Then only the caller gives up, and may connect again.
        """
        pipes = [pipe for name, pipe in (("up", self.up), ("down", self.down)) if way in (name, "both")]
        for pipe in pipes:
            pipe.hold()
        hold = _Hold(pipes, is_frozen)
        self._holds.append(hold)
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._heal, hold)
        if seconds > PING_LIMIT_SECONDS:
            loop.call_later(PING_LIMIT_SECONDS, self._give_up)

    def connect(self) -> None:
        """Open a stream from the caller's end."""
        if not self.is_connected:
            self.is_connected = True
            if self._holds:  # the frozen worker's system accepts, and the worker stays silent
                asyncio.get_running_loop().call_later(PING_LIMIT_SECONDS, self._give_up)

    def lose(self, why: str) -> None:
        """Break the connection: data on its way is lost, and both ends learn of it; a frozen worker learns of it
        when it thaws.
        """
        self.down.clear()
        wires = self._caller_lost(why)
        if any(hold.is_frozen for hold in self._holds):
            self.up.send(lambda: _abandon_all(wires))  # its system has kept what came before
        else:
            self.up.clear()
            _abandon_all(wires)

    def caller_died(self) -> None:
        """Close the connection of a killed caller: the data that the caller had sent arrives first."""
        self.down.clear()
        wires = self._caller_lost("the caller was killed")
        self.up.send(lambda: _abandon_all(wires))

    def worker_died(self) -> None:
        """Close the connection of a killed worker: the data that the worker had sent arrives first."""
        self.up.clear()
        _abandon_all(list(self.wires))
        self.down.send(self._hear_of_death)
        for hold in [hold for hold in self._holds if hold.is_frozen]:
            self._heal(hold)

    def _hear_of_death(self) -> None:
        self._caller_lost("the worker was killed")

    def _caller_lost(self, why: str) -> list[Wire]:
        """Drop the caller's end of every stream; return all the streams."""
        self.is_connected = False
        wires = list(self.wires)
        for wire in wires:
            wire.caller_lost(why)
        return wires

    def _give_up(self) -> None:
        if self._holds:
            self.is_severed = not all(hold.is_frozen for hold in self._holds)
            self.lose("no answer to a ping")

    def _heal(self, hold: _Hold) -> None:
        if hold not in self._holds:
            return  # it was killed while it was frozen
        self._holds.remove(hold)
        if not self._holds:
            self.is_severed = False
        for pipe in hold.pipes:
            pipe.release()


def _abandon_all(wires: list[Wire]) -> None:
    """Report to the worker's end of these streams that the caller's end is gone."""
    for wire in wires:
        wire.worker_lost()


class _Pipe:
    """One direction: first in, first out, each after some latency."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._frames: deque[tuple[float, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._holds = 0
        self._last = 0.0

    def send(self, arrive: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._last = max(self._last, loop.time() + self._rng.uniform(*LATENCY_SECONDS))
        self._frames.append((self._last, arrive))
        self._arm(loop)

    def hold(self) -> None:
        self._holds += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def release(self) -> None:
        self._holds -= 1
        self._arm(asyncio.get_running_loop())

    def clear(self) -> None:
        self._frames.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._frames and self._timer is None and not self._holds:
            self._timer = loop.call_at(max(self._frames[0][0], loop.time()), self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time() + 1e-9
        while self._frames and self._frames[0][0] <= now and not self._holds:
            self._frames.popleft()[1]()
        self._arm(loop)


class Wire:
    """One request's stream while it is on a connection; stands between the two ends of the memory plane."""

    def __init__(
        self, network: Network, link: Link, caller: str, worker: str, body: Any, stream: MemoryStream, sink: MemorySink
    ) -> None:
        self._network, self.link = network, link
        self.caller, self.worker, self.body = caller, worker, body
        self._stream, self._sink = stream, sink
        self.context = _StopThere(self)
        self.items = 0  # sent by the worker
        self.arrived = 0  # at the caller
        self._caller_is_open = self._worker_is_open = True
        self._late: StreamItem | None = None
        stream.sink = cast(MemorySink, self)
        sink.stream = cast(MemoryStream, self)
        link.wires.add(self)

    def caller_lost(self, why: str) -> None:
        """Report to the caller that the connection is gone."""
        if self._caller_is_open:
            self._close_caller()
            self._stream.lost(Disconnected(f"Stream ended before generation completed ({why})"))

    def worker_lost(self) -> None:
        """Report to the worker that the caller's end is gone."""
        if self._worker_is_open:
            self._close_worker()
            self._sink.abandon()

    def _close_caller(self) -> None:
        self._caller_is_open = False
        self._settle()

    def _close_worker(self) -> None:
        self._worker_is_open = False
        self._settle()

    def _settle(self) -> None:
        if not (self._caller_is_open or self._worker_is_open):
            self.link.wires.discard(self)

    # -- what the worker's sink does to its stream -------------------------------------------------------------------

    def deliver(self, item: StreamItem) -> None:
        if not self._worker_is_open:
            return
        self.items += 1
        fault = self._network.hooks.on_item(self, item, self.items)
        if fault is ItemFault.REORDER and self._late is None:
            self._late = item
            return
        if fault is not ItemFault.CUT:
            self._send(item)
        if fault is ItemFault.DUPLICATE:
            self._send(item)
        if self._late is not None:
            late, self._late = self._late, None
            self._send(late)

    def _send(self, item: StreamItem) -> None:
        self.link.down.send(lambda: self._arrive(item))

    def _arrive(self, item: StreamItem) -> None:
        if self._caller_is_open:
            self.arrived += 1
            self._stream.deliver(item)

    def end_with(self, item: StreamItem) -> None:
        if not self._worker_is_open:
            return
        if self._late is not None:
            late, self._late = self._late, None
            self._send(late)
        self._close_worker()
        self.link.down.send(lambda: self._ended(item))

    def _ended(self, item: StreamItem) -> None:
        if self._caller_is_open:
            self._close_caller()
            self._stream.end_with(item)

    # -- what the caller's stream does to its sink -------------------------------------------------------------------

    def grant(self, credits: int) -> None:
        if self._caller_is_open:
            self.link.up.send(lambda: self._granted(credits))

    def _granted(self, credits: int) -> None:
        if not self._worker_is_open:
            return
        self._sink.grant(credits)
        if self._sink._credit > INITIAL_CREDITS:
            self._network.hooks.on_breach(
                f"a producer holds {self._sink._credit} credits, and {INITIAL_CREDITS} is all there are"
            )

    def abandon(self) -> None:
        if self._caller_is_open:
            self._close_caller()
            self.link.up.send(self.worker_lost)

    def stop(self) -> None:
        if self._caller_is_open:
            self.link.up.send(self._stopped)

    def _stopped(self) -> None:
        if self._worker_is_open:
            self._sink.context.stop_generating()


class _StopThere:
    """Stands where the caller's stream expects the worker's context."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def stop_generating(self) -> None:
        self._wire.stop()


class _ProcessPlane(MemoryPlane):
    def __init__(self, network: Network, process: str) -> None:
        super().__init__()
        self._network, self._process = network, process
        self._servers = network._servers

    def server(self, settings: RequestPlaneSettings | None = None) -> MemoryServer:
        return _Server(self, self._network._settings, self._process)

    def client(self) -> MemoryClient:
        return _Client(self, self._network, self._process)


class _Server(MemoryServer):
    def __init__(self, plane: MemoryPlane, settings: RequestPlaneSettings, process: str) -> None:
        super().__init__(plane, settings)
        self.process = process


class _Client(MemoryClient):
    """A caller's side whose requests and answers take a connection."""

    def __init__(self, plane: MemoryPlane, network: Network, process: str) -> None:
        super().__init__(plane)
        self._network, self._process = network, process
        self._streams = cast("set[MemoryStream]", OrderedSet[MemoryStream]())

    async def open(self, instance: Instance, body: Any, context: Context) -> MemoryStream:
        network = self._network
        worker = network._process_of.get(instance.instance_id, "")
        if self._closed or self._process in network._gone:
            raise CannotConnect("the runtime is closed")
        link = network.link(self._process, worker)
        if link.is_severed:
            await asyncio.sleep(CONNECT_SECONDS)
            if link.is_severed:
                raise CannotConnect(f"{worker} did not answer within {CONNECT_SECONDS:g} s")
        path = instance.transport["mem"]
        if path not in self._plane._servers and not (link.is_connected and worker in network._gone):
            raise CannotConnect(f"{worker} refused the connection")
        loop = asyncio.get_running_loop()
        encoded = _encode(body)
        remote = Context(
            context.id(), context.metadata.copy() if context.has_metadata else None, deadline=context.deadline
        )
        remote.prompt_tokens = context.prompt_tokens
        sink = MemorySink(loop, remote, len(encoded))
        stream = sink.stream
        assert stream is not None
        link.connect()
        wire = Wire(network, link, self._process, worker, body, stream, sink)
        link.up.send(lambda: self._dispatch(path, encoded, remote, sink, wire))
        stream.live_in((self._streams,))
        stream.follow(context)
        network.hooks.on_open(wire)
        return stream

    def _dispatch(self, path: str, encoded: bytes, remote: Context, sink: MemorySink, wire: Wire) -> None:
        server = self._plane._servers.get(path)
        if server is None:
            wire.worker_lost()
            wire.caller_lost("nobody listens any more")
            return
        try:
            server.core.dispatch(path, _decode(encoded), remote, sink)
        except DynamoException as error:
            wire.end_with(StreamItem(0, END_INDEX, 0, [], None, describe(error)))
