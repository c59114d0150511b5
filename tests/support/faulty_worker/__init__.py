"""A worker with one named fault, on both wires: written from the pages, so that the judge is tried on what is not ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from support.faulty_worker.base import PATH, FaultyWorker
from support.faulty_worker.mux import MuxSide
from support.faulty_worker.native import NativeSide

__all__ = ["PATH", "FaultyWorker", "faulty_worker"]


@asynccontextmanager
async def faulty_worker(fault: str = "", secret: bytes = b"", wires: str = "mux,native") -> AsyncIterator[FaultyWorker]:
    """Serve with a fault, "" for none, until the context is left."""
    worker = FaultyWorker(fault, secret)

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            first = await reader.readexactly(1)
            side = MuxSide if first == b"\xff" else NativeSide
            if ("mux" if side is MuxSide else "native") in wires:
                await side(worker, reader, writer, first).run()
        worker.lost(writer)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker.start(_closing(taken(reader, writer), writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    worker.server = server
    worker.port = server.sockets[0].getsockname()[1]
    try:
        yield worker
    finally:
        server.close()
        await worker.close()


async def _closing(work: Coroutine[Any, Any, None], writer: asyncio.StreamWriter) -> None:
    try:
        await work
    finally:
        if not writer.transport.is_closing():
            writer.close()
