"""One place of the group as the parent sees it: the process that runs there, and the lines to it."""

from __future__ import annotations

import asyncio
import socket
from collections import deque

from dynamo.frontend.parts.group.messages import Message, write
from dynamo.supervise.backoff import RestartPolicy


class MemberProcess:
    """One place of the group, over the incarnations of its process."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.name = f"frontend process {row + 1}"
        self.policy = RestartPolicy()
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.deliveries: socket.socket | None = None
        self.on_their_way: deque[socket.socket] = deque()  # connections dealt and not yet taken; bounded by the socket
        self.ready_since: float | None = None
        self.last_snapshot = b""  # of the running incarnation

    @property
    def takes(self) -> bool:
        return self.ready_since is not None and self.deliveries is not None

    def send(self, message: Message) -> None:
        """Send a message to the process, if one runs."""
        if self.writer is not None:
            write(self.writer, message)
