"""Socket writes that are made together, after everything that is to be written has been made.

A frame of a worker with continuous batching has a token for every stream. A write per stream in between would send the
processor through the kernel and back for each of them: every time it finds its instruction cache full of the other's code, and
the client, which has read the last event by then, has to be woken again. Made together, the writes cost a third less.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)


class WriteBatch:
    """The writes of one event loop that wait for the end of a frame.

    The code that hands a frame out sets `is_open` before, and calls `flush` after it in the same turn of the loop, on every path.
    Meanwhile others may append to `pending`, and no other code writes to those transports: only callbacks run that were called
    by the code that hands it out.
    """

    __slots__ = ("is_open", "pending")

    def __init__(self) -> None:
        self.is_open = False
        self.pending: list[tuple[asyncio.Transport, bytes]] = []  # bounded by what one frame becomes

    @staticmethod
    def of_this_loop() -> WriteBatch:
        """Return the batch of the running loop."""
        loop = asyncio.get_running_loop()
        batch = _batches.get(loop)
        if batch is None:
            batch = _batches[loop] = WriteBatch()
        return batch

    def flush(self) -> None:
        """Make the writes, in their order. One that fails costs its own connection and no other."""
        self.is_open = False
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        for transport, data in pending:
            try:
                transport.write(data)
            except Exception:
                logger.exception("could not write to a connection; it is closed")
                transport.abort()


_batches: WeakKeyDictionary[asyncio.AbstractEventLoop, WriteBatch] = WeakKeyDictionary()
