"""Answers probes from a thread while the event loop is blocked, so that a probe gets a reason and not a timeout."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

READ_SECONDS: Final = 0.25  # for a request to arrive: the thread has to notice the end of the block as well
REQUEST_LIMIT_BYTES: Final = 8 * 1024


class BlockedProbes:
    """Shares the listening sockets of a server; connections that the server accepted before stay with the server."""

    def __init__(
        self, listeners: list[socket.socket], paths: tuple[str, ...], body: Callable[[], Mapping[str, object]]
    ) -> None:
        """`listeners`: duplicates, closed by `close`. `paths` are answered with the JSON of `body()`, others with a sentence."""
        self._listeners = listeners
        self._paths = paths
        self._body = body

    def close(self) -> None:
        """Give the duplicates up, or the address would stay taken. Idempotent."""
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def answer(self, is_blocked: Callable[[], bool], seconds: float) -> None:
        """Answer new connections while `is_blocked()`, for about `seconds`; blocking, for a thread."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and is_blocked():
            try:
                readable = select.select(self._listeners, (), (), left)[0]
            except (OSError, ValueError):  # closed meanwhile
                time.sleep(left)
                return
            for listener in readable:
                if is_blocked():  # else the connection is the server's
                    with suppress(OSError):  # the caller left, or the server was faster
                        connection, _ = listener.accept()
                        with connection:
                            self._answer_one(connection)

    def _answer_one(self, connection: socket.socket) -> None:
        until, head = time.monotonic() + READ_SECONDS, b""
        while b"\r\n\r\n" not in head and len(head) < REQUEST_LIMIT_BYTES:
            connection.settimeout(max(0.001, until - time.monotonic()))
            part = connection.recv(REQUEST_LIMIT_BYTES)
            if not part:
                return
            head += part
        words = head.split(b"\r\n", 1)[0].split(b" ")
        path = words[1].split(b"?", 1)[0].decode("latin-1") if len(words) == 3 else ""
        if path in self._paths:
            body = self._body()
            text, is_ready = json.dumps(body), body["status"] == "ready"
        else:
            text, is_ready = "The event loop of this process is blocked", False
        connection.settimeout(READ_SECONDS)
        connection.sendall(
            (b"HTTP/1.1 200 OK\r\n" if is_ready else b"HTTP/1.1 503 Service Unavailable\r\n")
            + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            + f"content-length: {len(text.encode())}\r\n\r\n".encode()
            + (b"" if words[0] == b"HEAD" else text.encode())
        )
