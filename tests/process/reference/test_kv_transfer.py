"""What every transport of KV blocks promises, and what the TCP one bears from strangers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    InvalidArgument,
    Overloaded,
    StreamIncomplete,
)
from dynamo.reference.kv_transfer import (
    KvReceiver,
    KvSender,
    Layout,
    Ticket,
    TransferOptions,
    check_installed,
    make_receiver,
    make_sender,
    offers,
    tcp,
)
from dynamo.reference.kv_transfer.frames import HEADER_BYTES, LIMITS, Pull, TransferKind, check, frame, read_header

LAYOUT = Layout(layers=2, kv_heads=3, block_size=4, head_dim=5)
BLOCKS = 6

try:
    check_installed(TransferOptions("nixl"))
    NO_NIXL = None
except InvalidArgument as error:
    NO_NIXL = str(error)
TRANSPORTS = ["tcp", pytest.param("nixl", marks=pytest.mark.skipif(NO_NIXL is not None, reason=str(NO_NIXL)))]


class Cache:
    """A block source of random numbers."""

    layout = LAYOUT

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        shape = (LAYOUT.layers, LAYOUT.kv_heads, BLOCKS * LAYOUT.block_size, LAYOUT.head_dim)
        self.keys, self.values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))

    def page(self, block: int) -> bytes:
        at = slice(block * LAYOUT.block_size, (block + 1) * LAYOUT.block_size)
        return self.keys[:, :, at].tobytes() + self.values[:, :, at].tobytes()

    def arrays(self) -> dict[str, Any]:
        return {"keys": self.keys, "values": self.values}


class Got:
    """A sink that keeps pages, and an `ended` that keeps reasons."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}
        self.reasons: list[str] = []

    def page(self, number: int, page: memoryview) -> None:
        self.pages[number] = bytes(page)


@asynccontextmanager
async def linked(
    kind: str = "tcp", **options: Any
) -> AsyncIterator[tuple[KvSender, KvReceiver, Callable[..., Ticket], Got, Cache]]:
    cache, got = Cache(), Got()
    chosen = TransferOptions(kind, "127.0.0.1", **options)
    sender, receiver = make_sender(cache, chosen), make_receiver(LAYOUT, chosen)
    await sender.start()

    def offer(*blocks: int) -> Ticket:
        return sender.offer(blocks or (4, 1, 3), 11, 77, got.reasons.append)

    try:
        yield sender, receiver, offer, got, cache
    finally:
        await receiver.close()
        await sender.close()
        assert sender.offers == 0


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_transport_keeps_its_promises(kind: str) -> None:
    """One test for all, because a NIXL agent takes a second to make."""
    async with linked(kind) as (sender, receiver, offer, got, cache):
        await receiver.pull(offer(4, 1, 3), 0, 3, got.page)
        assert got.pages == {0: cache.page(4), 1: cache.page(1), 2: cache.page(3)}
        assert (got.reasons, sender.offers) == (["fetched"], 0)

        got.pages.clear()
        await receiver.pull(offer(5, 0, 2), 1, 1, got.page)  # the others are cached at the receiver
        assert got.pages == {1: cache.page(0)}
        await receiver.pull(offer(), 0, 0, got.page)  # not wanted any more
        assert (len(got.pages), got.reasons, sender.offers) == (1, ["fetched"] * 3, 0)

        ticket = offer()
        await receiver.pull(ticket, 0, 3, got.page)
        with pytest.raises(StreamIncomplete, match="there is no such transfer"):
            await receiver.pull(ticket, 0, 3, got.page)
        for wrong in (
            msgspec.structs.replace(offer(), secret="0" * 32),
            msgspec.structs.replace(ticket, transfer_id="nobody's"),
        ):
            with pytest.raises(StreamIncomplete, match="there is no such transfer"):
                await receiver.pull(wrong, 0, 3, got.page)
        with pytest.raises(StreamIncomplete, match="blocks 0 to 9 were asked for, there are 3"):
            await receiver.pull(offer(), 0, 9, got.page)
        other = msgspec.structs.replace(offer(), layout=msgspec.structs.replace(LAYOUT, block_size=8))
        with pytest.raises(InvalidArgument, match="block_size=8"):
            await receiver.pull(other, 0, 3, got.page)
        assert sender.offers == 3  # whose pulls failed; somebody else may still come
        await sender.close()
        assert got.reasons == ["fetched"] * 4 + ["closed"] * 3
        with pytest.raises(CannotConnect):
            await receiver.pull(ticket, 0, 3, got.page)
        with pytest.raises(CannotConnect, match="closed"):
            offer()


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_pages_of_an_offer_that_ended_meanwhile_are_not_believed(kind: str) -> None:
    async with linked(kind) as (sender, receiver, offer, got, _):
        ticket = offer()
        serve = sender._send  # type: ignore[attr-defined]

        async def give_up(peer: Any, pull: Any, held: Any) -> None:
            await serve(peer, pull, held)
            sender._offers.end(held, "expired")  # type: ignore[attr-defined]

        sender._send = give_up  # type: ignore[attr-defined]
        with pytest.raises(StreamIncomplete, match="ended while it was fetched"):
            await receiver.pull(ticket, 0, 3, got.page)
        assert got.reasons == ["expired"]


async def test_an_offer_that_nobody_fetches_ends_once() -> None:
    async with linked(hold_seconds=0.02) as (sender, _, offer, got, _cache):
        offer()
        while sender.offers:
            await asyncio.sleep(0.005)
        assert got.reasons == ["expired"]


async def test_an_offer_does_not_expire_while_it_is_fetched_but_right_after() -> None:
    async with linked() as (sender, _, offer, got, _cache):
        ticket = offer()
        table = sender._offers  # type: ignore[attr-defined]
        claim = table.claim(ticket.transfer_id, ticket.secret, lambda: None)
        table._expire(claim.offer)
        assert got.reasons == []
        claim.offer.expires_at = 0.0
        table.unclaim(claim)
        table.unclaim(claim)
        assert (got.reasons, table.end(claim.offer, "again")) == (["expired"], False)


async def test_whoever_comes_later_with_the_same_ticket_takes_over() -> None:
    """A decode worker that hangs must not keep the blocks from the one that replaces it."""
    async with linked() as (sender, receiver, offer, got, _):
        serve, begun = sender._send, asyncio.Event()  # type: ignore[attr-defined]

        async def stuck(peer: Any, pull: Any, held: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        sender._send = stuck  # type: ignore[attr-defined]
        ticket = offer()
        first = asyncio.create_task(receiver.pull(ticket, 0, 3, Got().page))
        await begun.wait()
        sender._send = serve  # type: ignore[attr-defined]
        await receiver.pull(ticket, 0, 3, got.page)
        with pytest.raises(Disconnected):
            await first
        assert (len(got.pages), got.reasons) == (3, ["fetched"])


async def test_offers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "MAX_OFFERS", 2)
    async with linked() as (_, _receiver, offer, _got, _cache):
        offer(), offer()
        with pytest.raises(Overloaded):
            offer()


async def test_a_peer_that_goes_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(pull_seconds=0.05) as (sender, receiver, offer, got, _):

        async def silent(peer: Any, pull: Any, held: Any) -> None:
            await asyncio.Event().wait()

        sender._send = silent  # type: ignore[attr-defined]
        with pytest.raises((ConnectionTimeout, Disconnected)):
            await receiver.pull(offer(), 0, 3, got.page)
        while sender._pulls:  # type: ignore[attr-defined]
            await asyncio.sleep(0.005)
        assert (sender.offers, got.reasons) == (1, [])  # not fetched; it may still be, by another one


async def test_closing_waits_for_a_transfer_that_has_begun() -> None:
    async with linked() as (sender, receiver, offer, got, _):
        serve, goes_on = sender._send, asyncio.Event()  # type: ignore[attr-defined]

        async def slow(peer: Any, pull: Any, held: Any) -> None:
            goes_on.set()
            await asyncio.sleep(0.02)
            await serve(peer, pull, held)

        sender._send = slow  # type: ignore[attr-defined]
        pull = asyncio.create_task(receiver.pull(offer(), 0, 3, got.page))
        await goes_on.wait()
        await sender.close()
        await pull
        assert (len(got.pages), got.reasons) == (3, ["fetched"])


async def test_closing_cuts_a_transfer_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CLOSE_SECONDS", 0.02)
    async with linked() as (sender, receiver, offer, got, _):
        begun = asyncio.Event()

        async def stuck(peer: Any, pull: Any, held: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        sender._send = stuck  # type: ignore[attr-defined]
        pull = asyncio.create_task(receiver.pull(offer(), 0, 3, got.page))
        await begun.wait()
        await sender.close()
        with pytest.raises(Disconnected):
            await pull
        assert got.reasons == ["closed"]


async def test_an_address_that_is_taken_is_named() -> None:
    async with linked() as (_, _receiver, offer, _got, cache):
        second = make_sender(cache, TransferOptions(host="127.0.0.1", port=offer().port))
        with pytest.raises(CannotConnect, match="--kv-transfer-port"):
            await second.start()
        await second.close()


# -- strangers -----------------------------------------------------------------------------------------------------------


def asked(ticket: Ticket, **more: Any) -> bytes:
    pull = {"first": 0, "count": 3, "layout": LAYOUT, **more}
    return frame(TransferKind.PULL, msgspec.msgpack.encode(Pull(ticket.transfer_id, ticket.secret, **pull)))


async def said(port: int, data: bytes, *, eof: bool = True) -> bytes:
    """All that the sender answers to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if eof:
        writer.write_eof()
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_every_truncation_of_a_request_leaves_the_offer_as_it_was() -> None:
    async with linked() as (sender, receiver, offer, got, _):
        ticket = offer()
        whole = asked(ticket)
        for cut in range(len(whole)):
            answer = await said(ticket.port, whole[:cut])
            assert answer == b"" or TransferKind(answer[5]) is TransferKind.REFUSED
        assert (sender.offers, got.reasons) == (1, [])
        await receiver.pull(ticket, 0, 3, got.page)
        assert len(got.pages) == 3


async def test_every_flipped_bit_of_a_request_is_refused() -> None:
    async with linked() as (sender, _, offer, got, _cache):
        ticket = offer()
        whole = asked(ticket)
        for bit in range(0, len(whole) * 8, 5):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            answer = await said(ticket.port, bytes(damaged))
            assert answer == b"" or TransferKind(answer[5]) is TransferKind.REFUSED, bit
        assert (sender.offers, got.reasons) == (1, [])


async def test_a_stranger_who_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "ASK_SECONDS", 0.02)
    async with linked() as (_, _receiver, offer, _got, _cache):
        assert await said(offer().port, b"DK", eof=False) == b""


async def test_more_connections_than_there_are_places_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_CONNECTIONS", 0)
    async with linked() as (_, receiver, offer, got, _cache):
        with pytest.raises(Disconnected):
            await receiver.pull(offer(), 0, 3, got.page)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"", Disconnected, "left before its PAGE"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", StreamIncomplete, "does not speak"),
        (frame(TransferKind.PAGE, b"short"), StreamIncomplete, "a page of 5 bytes came where 960 belong"),
        (frame(TransferKind.PAGE, bytes(LAYOUT.page_bytes), 1), StreamIncomplete, "PAGE frame 1 came where PAGE 0"),
        (frame(TransferKind.FREED), StreamIncomplete, "FREED frame 0 came"),
        (frame(TransferKind.REFUSED, b"no"), StreamIncomplete, "the peer refused: no"),
        (frame(TransferKind.PAGE, bytes(960))[:-1] + b"\1", StreamIncomplete, "damaged"),
        (frame(TransferKind.PAGE, bytes(960)) + frame(TransferKind.PAGE, bytes(960), 1)[:99], Disconnected, "left"),
    ],
)
async def test_a_peer_that_breaks_the_conversation_is_a_typed_error(
    answer: bytes, error: type[DynamoException], text: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER_BYTES)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    receiver = make_receiver(LAYOUT, TransferOptions())
    with pytest.raises(error, match=text):
        await receiver.pull(Ticket("tcp", "127.0.0.1", port, "t", "s" * 16, 11, LAYOUT, 1), 0, 3, Got().page)
    server.close()
    await server.wait_closed()


# -- values --------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(TransferKind), st.binary(max_size=64), st.integers(0, 2**32 - 1))
def test_a_frame_is_what_was_framed(kind: TransferKind, payload: bytes, number: int) -> None:
    data = frame(kind, payload, number)
    if kind is TransferKind.PAGE or len(payload) <= LIMITS[kind]:
        header = read_header(data[:HEADER_BYTES], page_bytes=len(payload))
        check(header, data[HEADER_BYTES:])
        assert (header.kind, header.number, header.length) == (kind, number, len(payload))
        with pytest.raises(StreamIncomplete):
            check(header, data[HEADER_BYTES:] + b"x")
    else:
        with pytest.raises(StreamIncomplete, match="at most"):
            read_header(data[:HEADER_BYTES], page_bytes=0)


TICKET = Ticket("tcp", "h", 1, "t", "s" * 16, 1, LAYOUT, 1)


@pytest.mark.parametrize(
    ("change", "member"),
    [
        ({"port": 0}, "port"),
        ({"port": "80"}, "port"),
        ({"host": ""}, "host"),
        ({"secret": "short"}, "secret"),
        ({"tokens": 0}, "tokens"),
        ({"layout": {"layers": 1}}, "layout"),
        ({"seed": None}, "seed"),
    ],
)
def test_a_ticket_that_is_none_is_refused_by_member(change: dict[str, Any], member: str) -> None:
    assert Ticket.from_params(TICKET.to_params()) == TICKET
    with pytest.raises(InvalidArgument, match=member):
        Ticket.from_params({**TICKET.to_params(), **change})


@pytest.mark.parametrize("params", [None, [], "x", {}])
def test_params_of_another_engine_are_refused(params: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"prefill_result\.disaggregated_params"):
        Ticket.from_params(params)


def test_a_ticket_in_a_log_keeps_its_secret() -> None:
    assert TICKET.secret not in f"{TICKET} {TICKET!r}"


def test_nixl_that_is_not_installed_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.reference.kv_transfer.find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match="pip install 'nixl-cu12'"):
        check_installed(TransferOptions("nixl"))
