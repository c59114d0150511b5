"""Begins to accept connections so that a cancelled start leaves no socket behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def start_listening(made: Awaitable[asyncio.Server]) -> asyncio.Server:
    """Return a server that accepts connections. `made`: it, with `start_serving=False`.

    `create_server` by itself waits once after it has begun to listen, and forgets the server where it is cancelled there: its
    socket goes on listening, and no code can close it.
    """
    server = await made
    try:
        await server.start_serving()
    except BaseException:
        server.close()
        raise
    return server
