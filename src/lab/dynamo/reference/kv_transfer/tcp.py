"""KV blocks over plain TCP: one connection per pull, one frame per block."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    InvalidArgument,
    StreamIncomplete,
)
from dynamo.reference.kv_transfer.base import BlockSource, Ended, Layout, PageSink, Ticket, TransferOptions
from dynamo.reference.kv_transfer.frames import (
    HEADER_BYTES,
    Header,
    Pull,
    TransferKind,
    check,
    decode_pull,
    frame,
    read_header,
)
from dynamo.reference.kv_transfer.offers import Offer, Offers
from dynamo.runtime.base.addresses import WILDCARDS, detect_host
from dynamo.runtime.base.listening import start_listening
from dynamo.runtime.base.timers import loop_timeout

logger = logging.getLogger(__name__)

ASK_SECONDS: Final = 5.0  # from the connection to the whole PULL frame: a peer that takes longer is no decode worker
CLOSE_SECONDS: Final = 2.0  # for pulls that have begun, when the sender closes
MAX_CONNECTIONS: Final = 1024  # a decode worker has one per prompt it is fetching


class TcpSender:
    """A prefill worker's listener; see `KvSender`."""

    transport = "tcp"

    def __init__(self, source: BlockSource, options: TransferOptions) -> None:
        self._source, self._options = source, options
        self._layout = source.layout
        self._offers = Offers(options.hold_seconds)
        self._server: asyncio.Server | None = None
        self._host, self._port = "", 0
        self._pulls: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        host = self._options.host or detect_host()
        try:
            self._server = await start_listening(
                asyncio.start_server(self._accept, host, self._options.port, start_serving=False)
            )
        except OSError as error:
            raise CannotConnect(
                f"cannot listen for KV transfers on {host}:{self._options.port} "
                f"(--kv-transfer-host, --kv-transfer-port): {error.strerror or error}"
            ) from error
        self._host = detect_host() if host in WILDCARDS else host
        self._port = self._server.sockets[0].getsockname()[1]
        logger.info("KV blocks are fetched from %s:%d (%s)", self._host, self._port, self.transport)

    def offer(self, blocks: Sequence[int], tokens: int, seed: int, ended: Ended) -> Ticket:
        if self._server is None:
            raise CannotConnect("the KV transfer is closed")
        offer = self._offers.add(blocks, ended)
        return Ticket(
            self.transport, self._host, self._port, offer.transfer_id, offer.secret, tokens, self._layout, seed
        )

    @property
    def offers(self) -> int:
        return len(self._offers)

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._offers.wait_unclaimed()
        except TimeoutError:
            logger.warning("KV transfers were still running and are cut; their decode workers start over")
        pulls = list(self._pulls)
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        self._offers.end_all()
        if server is not None:
            await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None or len(self._pulls) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._pulls.add(task)
        peer = Peer(reader, writer, self._layout.page_bytes)
        try:
            await self._serve(peer, task)
        except DynamoException as error:
            logger.info("a KV transfer failed: %s: %s", type(error).__name__, error)
            peer.refuse(str(error))
        except TimeoutError:
            logger.info("a KV transfer took more than %g s and was cut", self._options.pull_seconds)
        except OSError as error:
            logger.info("a KV transfer lost its peer: %s", error)
        except asyncio.CancelledError:
            writer.transport.abort()  # close(), or a later pull, has cancelled us: there is no caller to pass it on to
        finally:
            self._pulls.discard(task)
            await peer.close()

    async def _serve(self, peer: Peer, task: asyncio.Task[Any]) -> None:
        async with loop_timeout(ASK_SECONDS):
            pull = decode_pull(await peer.read(TransferKind.PULL))
        if pull.count and pull.layout != self._layout:
            raise InvalidArgument(f"the decode worker's KV blocks are {pull.layout}, these are {self._layout}")
        claim = self._offers.claim(pull.transfer_id, pull.secret, task.cancel)
        offer = claim.offer
        try:
            if pull.first + pull.count > len(offer.blocks):
                raise StreamIncomplete(
                    f"blocks {pull.first} to {pull.first + pull.count} were asked for, there are {len(offer.blocks)}"
                )
            async with asyncio.timeout(self._options.pull_seconds):
                await self._send(peer, pull, offer)
                await peer.read(TransferKind.DONE)
                self._offers.fetched(claim)
                await peer.write(frame(TransferKind.FREED))
        finally:
            self._offers.unclaim(claim)

    async def _send(self, peer: Peer, pull: Pull, offer: Offer) -> None:
        """Hand over the requested blocks."""
        for number in range(pull.first, pull.first + pull.count):
            await peer.write(frame(TransferKind.PAGE, self._source.page(offer.blocks[number]), number))


class TcpReceiver:
    """A decode worker's side; see `KvReceiver`."""

    def __init__(self, layout: Layout, options: TransferOptions) -> None:
        self._layout, self._options = layout, options

    async def pull(self, ticket: Ticket, first: int, count: int, sink: PageSink) -> None:
        if count and ticket.layout != self._layout:
            raise InvalidArgument(f"the prefill worker's KV blocks are {ticket.layout}, these are {self._layout}")
        try:
            async with asyncio.timeout(self._options.pull_seconds), self._connected(ticket) as peer:
                await self._fetch(peer, ticket, first, count, sink)
                await peer.write(frame(TransferKind.DONE))
                await peer.read(TransferKind.FREED)
        except TimeoutError as error:
            raise ConnectionTimeout(f"{ticket!r} was not fetched within {self._options.pull_seconds:g} s") from error
        except OSError as error:
            raise Disconnected(f"{ticket!r}: the connection was lost: {error}") from error

    async def close(self) -> None:
        return None

    async def _fetch(self, peer: Peer, ticket: Ticket, first: int, count: int, sink: PageSink) -> None:
        await self._ask(peer, ticket, first, count)
        for number in range(first, first + count):
            sink(number, memoryview(await peer.read(TransferKind.PAGE, number)))

    async def _ask(self, peer: Peer, ticket: Ticket, first: int, count: int, *, direct: bool = False) -> None:
        pull = Pull(ticket.transfer_id, ticket.secret, first, count, self._layout, direct)
        await peer.write(frame(TransferKind.PULL, msgspec.msgpack.encode(pull)))

    @asynccontextmanager
    async def _connected(self, ticket: Ticket) -> AsyncIterator[Peer]:
        try:
            reader, writer = await asyncio.open_connection(ticket.host, ticket.port)
        except (OSError, UnicodeError) as error:  # a name may be too odd to be looked up
            raise CannotConnect(f"{ticket!r}: nobody answers there: {error}") from error
        peer = Peer(reader, writer, self._layout.page_bytes)
        try:
            yield peer
        finally:
            await peer.close()


class Peer:
    """One connection, as frames. Errors of the socket are OSError, those of the other side `DynamoException`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, page_bytes: int) -> None:
        self._reader, self._writer, self._page_bytes = reader, writer, page_bytes
        connection = writer.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def has_left(self) -> bool:
        """Whether the other side has closed the connection, and everything it sent was read."""
        return self._reader.at_eof()

    async def read(self, kind: TransferKind, number: int = 0) -> bytes:
        """Return the payload of the next frame, of the expected kind. Raises StreamIncomplete or Disconnected."""
        try:
            header = read_header(await self._reader.readexactly(HEADER_BYTES), page_bytes=self._page_bytes)
            payload = await self._reader.readexactly(header.length)
        except asyncio.IncompleteReadError as error:
            raise Disconnected(f"the peer left before its {kind.name} frame") from error
        check(header, payload)
        self._expect(header, payload, kind, number)
        return payload

    def _expect(self, header: Header, payload: bytes, kind: TransferKind, number: int) -> None:
        if header.kind is TransferKind.REFUSED:
            raise StreamIncomplete(f"the peer refused: {payload.decode(errors='replace')}")
        if header.kind is not kind or header.number != number:
            raise StreamIncomplete(
                f"a {header.kind.name} frame {header.number} came where {kind.name} {number} belongs"
            )

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def refuse(self, text: str) -> None:
        """Send the reason, as far as the peer still reads."""
        if not self._writer.is_closing():
            self._writer.write(frame(TransferKind.REFUSED, text.encode()[:1024]))

    async def close(self) -> None:
        """Never raises: whatever is wrong with a connection that is given up is no news."""
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()
