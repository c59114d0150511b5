"""KV blocks over NIXL: the decode worker reads the prefill worker's memory. Needs the `nixl` extra.

The conversation is that of `tcp`; only the pages do not travel on its connection. The prefill worker answers with where
its cache lies; the decode worker reads the pieces of each block into a buffer of its own, and believes them only after
the FREED frame: a peer that had let the blocks go meanwhile does not send it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import uuid
from collections import OrderedDict
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np

from dynamo.errors import Disconnected, DynamoException, InvalidArgument, StreamIncomplete
from dynamo.reference.kv_transfer.base import (
    FLOAT32_BYTES,
    NIXL_PACKAGES,
    BlockSource,
    Layout,
    PageSink,
    Ticket,
    TransferOptions,
    nixl_missing,
)
from dynamo.reference.kv_transfer.frames import Pull, TransferKind, frame
from dynamo.reference.kv_transfer.offers import Offer
from dynamo.reference.kv_transfer.tcp import Peer, TcpReceiver, TcpSender

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.0005  # NIXL has no event to wait for; a transfer between two processes takes about as long
MAX_PEERS: Final = 64  # agents kept connected; the least recently used one is let go


class Placed(msgspec.Struct, frozen=True):
    """Where the offered blocks lie."""

    agent: bytes  # NIXL's own description of the sender
    keys: int  # addresses
    values: int
    slots: int  # tokens the cache holds, which is the stride of a head
    blocks: list[int]


_PLACED: Final = msgspec.msgpack.Decoder(Placed)


class NixlSender(TcpSender):
    """A prefill worker whose cache is registered once, and read from outside."""

    transport = "nixl"

    def __init__(self, source: BlockSource, options: TransferOptions) -> None:
        super().__init__(source, options)
        self._agent = make_agent()
        self._arrays = source.arrays()  # kept: the memory must outlive its registration
        regions = [(array.ctypes.data, array.nbytes, 0, "") for array in self._arrays.values()]
        self._registered: Any = self._agent.register_memory(regions, "DRAM")
        self._description: bytes = self._agent.get_agent_metadata()

    async def close(self) -> None:
        await super().close()
        registered, self._registered = self._registered, None
        if registered is not None:
            self._agent.deregister_memory(registered)

    async def _send(self, peer: Peer, pull: Pull, offer: Offer) -> None:
        if not pull.direct:
            await super()._send(peer, pull, offer)
            return
        keys, values = self._arrays["keys"], self._arrays["values"]
        blocks = list(offer.blocks[pull.first : pull.first + pull.count])
        placed = Placed(self._description, keys.ctypes.data, values.ctypes.data, keys.shape[2], blocks)
        await peer.write(frame(TransferKind.DIRECT, msgspec.msgpack.encode(placed)))


class NixlReceiver(TcpReceiver):
    """A decode worker that reads; from a sender without NIXL it takes frames."""

    def __init__(self, layout: Layout, options: TransferOptions) -> None:
        super().__init__(layout, options)
        self._agent = make_agent()
        self._peers: OrderedDict[bytes, Any] = OrderedDict()  # description -> name
        self._abandoned: list[Any] = []  # buffers that NIXL may still write to; each is an error in the log

    async def close(self) -> None:
        while self._peers:
            self._forget(self._peers.popitem()[1])

    async def _fetch(self, peer: Peer, ticket: Ticket, first: int, count: int, sink: PageSink) -> None:
        if ticket.transport != "nixl" or count == 0:
            await super()._fetch(peer, ticket, first, count, sink)
            return
        await self._ask(peer, ticket, first, count, direct=True)
        try:
            placed = _PLACED.decode(await peer.read(TransferKind.DIRECT))
        except msgspec.MsgspecError as error:
            raise StreamIncomplete(
                f"{ticket!r}: what the peer says about its memory is not readable: {error}"
            ) from error
        if len(placed.blocks) != count:
            raise StreamIncomplete(f"{ticket!r}: {len(placed.blocks)} blocks came where {count} were asked for")
        pages = np.empty(count * self._layout.page_bytes, np.uint8)
        await self._read(placed, pages, peer)
        for number, page in enumerate(pages.reshape(count, -1), first):
            sink(number, page.data)

    async def _read(self, placed: Placed, pages: Any, peer: Peer) -> None:
        """Read every piece. Ends the transfer before it returns, however it returns: the buffer may go then."""
        agent = self._agent
        registered = handle = None
        try:
            name = self._name(placed.agent)
            registered = agent.register_memory([(pages.ctypes.data, pages.nbytes, 0, "")], "DRAM")
            theirs = agent.get_xfer_descs(pieces(placed, self._layout), "DRAM")
            ours = agent.get_xfer_descs(packed(pages.ctypes.data, len(placed.blocks), self._layout), "DRAM")
            handle = agent.initialize_xfer("READ", ours, theirs, name)
            state = agent.transfer(handle)
            while state == "PROC":
                await asyncio.sleep(POLL_SECONDS)
                if peer.has_left:  # NIXL may take minutes to find out
                    raise Disconnected("the peer left while its memory was read")
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise Disconnected(f"NIXL could not read the peer's memory ({state})")
        except DynamoException:
            raise
        except Exception as error:  # the bindings' errors have nothing else in common
            self._peers.pop(placed.agent, None)
            raise Disconnected(f"NIXL could not read the peer's memory: {error}") from error
        finally:
            if (handle is None or self._is_released(handle, pages)) and registered is not None:
                agent.deregister_memory(registered)

    def _is_released(self, handle: Any, pages: Any) -> bool:
        try:
            handle.release()
        except Exception as error:
            # NIXL may still write there and cannot be stopped: rather lose this buffer than the memory of another owner.
            logger.error("a NIXL transfer cannot be ended, its buffer of %d bytes stays: %s", pages.nbytes, error)
            self._abandoned.append(pages)
            return False
        return True

    def _name(self, description: bytes) -> Any:
        if description not in self._peers:
            while len(self._peers) >= MAX_PEERS:
                self._forget(self._peers.popitem(last=False)[1])
            self._peers[description] = self._agent.add_remote_agent(description)
        self._peers.move_to_end(description)
        return self._peers[description]

    def _forget(self, name: Any) -> None:
        with suppress(Exception):  # it was lost before
            self._agent.remove_remote_agent(name)


def pieces(placed: Placed, layout: Layout) -> Any:
    """Return (address, bytes, device) of every piece of the blocks, in the order of their pages."""
    head = placed.slots * layout.head_dim * FLOAT32_BYTES
    size = layout.block_size * layout.head_dim * FLOAT32_BYTES
    bases = np.array([placed.keys, placed.values], np.uint64)
    heads = np.arange(layout.layers * layout.kv_heads, dtype=np.uint64) * np.uint64(head)
    blocks = np.array(placed.blocks, np.uint64) * np.uint64(size)
    addresses = blocks[:, None, None] + bases[None, :, None] + heads[None, None, :]
    return _descriptors(addresses.reshape(-1), size)


def packed(address: int, blocks: int, layout: Layout) -> Any:
    """Return the same pieces laid out one after the other from `address` on."""
    size = layout.block_size * layout.head_dim * FLOAT32_BYTES
    count = blocks * 2 * layout.layers * layout.kv_heads
    return _descriptors(np.arange(count, dtype=np.uint64) * np.uint64(size) + np.uint64(address), size)


def _descriptors(addresses: Any, size: int) -> Any:
    found = np.zeros((len(addresses), 3), np.uint64)
    found[:, 0], found[:, 1] = addresses, size
    return found


def make_agent() -> Any:
    """Make a NIXL agent for this process. Raises InvalidArgument where NIXL is not installed, or has no transport."""
    for package in NIXL_PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError:
            continue
        try:
            return api.nixl_agent(f"dynamo-{uuid.uuid4().hex}", api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:
            raise InvalidArgument(f"--kv-transfer nixl: NIXL cannot start on this machine: {error}") from error
    raise InvalidArgument(nixl_missing())
