"""One of the processes of a group. Not for people: `python -m dynamo.frontend --workers N` starts it.

It takes connections that the parent accepted, answers for the whole group, and drains on request, or when the
parent is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from dynamo.errors import DynamoException
from dynamo.frontend.admission.process import Admission
from dynamo.frontend.app import Frontend
from dynamo.frontend.args import parse_args
from dynamo.frontend.base.offload import keep_large_blocks_apart
from dynamo.frontend.http.loops import event_loop_factory, spare_the_collector
from dynamo.frontend.http.server import Connect, HttpServer, serve_until
from dynamo.frontend.parts.group.messages import (
    Gather,
    Gathered,
    GroupAnswers,
    MemberAnswer,
    MemberQuestion,
    Message,
    Ready,
    Share,
    Shared,
    Snapshot,
    Standing,
    Take,
    read,
    write,
)
from dynamo.frontend.parts.group.places import Field, Places, SharedAdmission
from dynamo.frontend.parts.keys.limit_table import LimitTable
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.base.tasks import Background, first_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.observe.logging import configure_dynamo_logging
from dynamo.runtime.observe.metric_snapshots import snapshot
from dynamo.runtime.observe.metrics import MetricsRegistry

GATHER_SECONDS: Final = 3.0  # the parent itself waits for a member that does not answer for less

SETTLE_SECONDS: Final = 10.0
"""How long a new process may load the models that are registered already before it takes connections all the same: without
this a client would see a model vanish when a process is started again."""

TAKEN_AT_ONCE: Final = 64  # connections in one turn of the loop


class Deliveries:
    """Connections from the parent: each is one byte and one descriptor on a socket, and answered with one byte.

    The parent keeps its copy of a connection until then, so that none is lost with a process that could not take it any more.
    """

    def __init__(self, source: socket.socket, places: Places, row: int) -> None:
        self._source, self._places, self._row = source, places, row
        self._loop = asyncio.get_running_loop()
        self._connect: Connect | None = None
        self._work = Background()
        self._open = 0
        source.setblocking(False)

    def open(self, connect: Connect) -> None:
        """Await `connect` for every connection from now on."""
        self._connect = connect
        self._loop.add_reader(self._source, self._take)

    def changed(self, connections: int) -> None:
        """Record how many connections are open."""
        self._open = connections
        self._report()

    def _report(self) -> None:
        self._places.set(self._row, Field.OPEN, self._open + len(self._work))

    def close(self) -> None:
        """Take no more; idempotent."""
        if self._connect is not None:
            self._connect = None
            self._loop.remove_reader(self._source)
            self._source.close()

    def _take(self) -> None:
        for _ in range(TAKEN_AT_ONCE):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._source, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:  # the parent is gone; the control connection ends, too
                self.close()
                return
            for descriptor in descriptors:
                self._adopt(socket.socket(fileno=descriptor))
                with contextlib.suppress(OSError):  # the parent is gone: the next read shows it
                    self._source.send(data)

    def _adopt(self, connection: socket.socket) -> None:
        assert self._connect is not None
        connection.setblocking(False)
        # It ends by itself: in the next turn, or within the limit of a TLS handshake.
        task = self._work.start(self._connect(connection), "frontend: connection")
        task.add_done_callback(lambda _: self._report())
        self._report()  # before the parent learns that it was taken: it must see the connection somewhere


class _Parent:
    """The way to the parent: messages, and those that it answers by their numbers."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._number = 0

    def send(self, message: Message) -> None:
        write(self._writer, message)

    async def ask(self, make: Callable[[int], Message]) -> Message:
        """Send the message of a new number, and return its answer. Raises TimeoutError."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self.send(make(number))
            async with asyncio.timeout(GATHER_SECONDS):
                return await answer
        finally:
            del self._waiting[number]

    def answered(self, number: int, message: Message) -> None:
        """Take an answer. One that comes too late is dropped."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def close(self) -> None:
        self._writer.close()


class GroupPeers:
    """The rest of the group as this process sees it: its parent, and through it the others."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        places: Places,
        row: int,
        metrics: MetricsRegistry,
    ) -> None:
        self._reader, self._parent = reader, _Parent(writer)
        self._places, self._row = places, row
        self._metrics = metrics
        self._answer: Callable[[bytes], bytes] | None = None  # to requests of other members
        self._takers: list[Callable[[str, bytes], None]] = []
        self.standing = Standing(0, places.rows)
        self.is_orphaned = asyncio.Event()

    def admission(self, limit: int) -> Admission:
        """Make the admission whose slots all processes share."""
        return SharedAdmission(limit, self._places, self._row)

    def limits(self) -> LimitTable | None:
        """Return the table of the keys' limits that all processes share; None where no route needs a key."""
        return self._places.limits

    async def gather(self) -> list[bytes]:
        """Gather the metrics of the whole group, this process's own first. Raises TimeoutError."""
        own = snapshot(self._metrics)
        gathered = await self._parent.ask(lambda number: Gather(number, own))
        assert isinstance(gathered, Gathered)
        return [own, *gathered.snapshots]

    async def ask(self, question: bytes) -> tuple[list[bytes], list[str]]:
        """Return the answers of the others, and the names of those that gave none. Raises TimeoutError."""
        found = await self._parent.ask(lambda number: MemberQuestion(number, question))
        assert isinstance(found, GroupAnswers)
        return found.answers, found.silent

    def on_asked(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer the questions of the others with what `answer` returns."""
        self._answer = answer

    async def share(self, key: str, value: bytes) -> None:
        """Report to the others, and to those that start later. Raises TimeoutError."""
        await self._parent.ask(lambda number: Share(number, key, value))

    def on_shared(self, take: Callable[[str, bytes], None]) -> None:
        """Call `take(key, value)` for what others share."""
        self._takers.append(take)

    def describe(self) -> dict[str, int]:
        """Describe the group for `/health`."""
        return {"serving": self.standing.serving, "configured": self.standing.configured}

    def ready(self) -> None:
        """Report to the parent that connections are welcome."""
        self._parent.send(Ready())

    async def run(self) -> None:
        """Listen to the parent; ends when it is gone."""
        try:
            while (message := await read(self._reader)) is not None:
                match message:
                    case Take(number):
                        self._parent.send(Snapshot(number, snapshot(self._metrics)))
                    case Gathered(number) | GroupAnswers(number) | Shared(number):
                        self._parent.answered(number, message)
                    case MemberQuestion(number, question):
                        if self._answer is not None:
                            self._parent.send(MemberAnswer(number, self._answer(question)))
                    case Share(_, key, value):
                        for take in self._takers:
                            take(key, value)
                    case Standing():
                        self.standing = message
                    case _:
                        raise RuntimeError(f"a parent does not say {message!r}")
        finally:
            self.is_orphaned.set()
            self._parent.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """What the parent has handed over."""

    control: socket.socket
    deliveries: socket.socket
    places: Places
    row: int
    admin: socket.socket | None


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM, or until the parent is gone; the exit status."""
    parser = argparse.ArgumentParser("dynamo.frontend.parts.group.member")
    for name in ("control", "deliveries", "places", "row", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--limits", type=int, help="the shared table of the keys' limits")
    parser.add_argument("--admin", type=int, help="a bound socket for the admin routes")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    configure_dynamo_logging()
    _number_records(given.row + 1)
    settings = parse_args(given.rest[1:], dump=False)  # the first one is "--"
    place = _Place(
        socket.socket(fileno=given.control),
        socket.socket(fileno=given.deliveries),
        Places(given.places, given.rows),
        given.row,
        None if given.admin is None else socket.socket(fileno=given.admin),
    )
    if given.limits is not None:
        place.places.limits = LimitTable(given.rows, member=given.row, fd=given.limits)
    try:
        spare_the_collector()
        keep_large_blocks_apart()
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(_serve(_share_of(settings, given.rows), place))
    except DynamoException as error:
        print(f"Failed to start the frontend: {error}", file=sys.stderr)  # noqa: T201 - the command line's own voice
        return 1
    return 0


def _number_records(number: int) -> None:
    """Name this process in all its log records: those of a group go to one place."""
    make = logging.getLogRecordFactory()

    def numbered(*args: Any, **named: Any) -> logging.LogRecord:
        record = make(*args, **named)
        record.frontend_process = number
        return record

    logging.setLogRecordFactory(numbered)


def _share_of(settings: FrontendSettings, processes: int) -> FrontendSettings:
    """Divide the limits that each process counts for itself: connections are dealt out evenly.

    What one process books, the others count, unless that is switched off: else each would send its requests to the workers
    that the others have just filled.
    """
    kv_router = settings.kv_router
    if kv_router.router_replica_sync is None:
        kv_router = dataclasses.replace(kv_router, router_replica_sync=True)
    return dataclasses.replace(
        settings,
        kv_router=kv_router,
        limits=dataclasses.replace(settings.limits, max_connections=-(-settings.limits.max_connections // processes)),
        pending_bodies_limit_bytes=-(-settings.pending_bodies_limit_bytes // processes),
        capacity_share=settings.capacity_share / processes,
    )


async def _serve(settings: FrontendSettings, place: _Place) -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, None, None, settings=settings.runtime)
    reader, writer = await asyncio.open_unix_connection(sock=place.control)
    peers = GroupPeers(reader, writer, places=place.places, row=place.row, metrics=runtime.metrics)
    asked = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    try:
        async with Background() as beside:
            parent = beside.start(peers.run(), "frontend: parent", is_awaited=True)
            parent.add_done_callback(lambda _: asked.set())
            async with Frontend(settings, runtime, peers=peers) as frontend:
                deliveries = Deliveries(place.deliveries, place.places, place.row)
                server = HttpServer(frontend, admin=place.admin, deliveries=deliveries)

                async def serving() -> None:
                    await _settled(frontend, asked)
                    peers.ready()

                await serve_until(server, asked, serving)
        if not parent.cancelled():
            parent.result()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        await runtime.aclose()


async def _settled(frontend: Frontend, asked: asyncio.Event) -> None:
    """Return when every registered model is loaded, when that takes too long, or when the end was requested."""
    models = frontend.models
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_SECONDS):
            await first_of(models.wait_for(lambda: not models.is_loading), asked.wait())


if __name__ == "__main__":
    sys.exit(main())
