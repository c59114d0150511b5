"""What can be done to a `mux` connection from the worker's side: lose it, hold it, and move its items about."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

from dynamo.runtime.calls.request_plane.mux.server import MuxServerProtocol


def lose(connection: MuxServerProtocol) -> None:
    """Reset the connection: what was on its way is lost, and both ends know."""

    def abort(transport: asyncio.Transport) -> asyncio.Transport:
        transport.abort()
        return transport

    connection.through(abort)


def hold(connection: MuxServerProtocol, seconds: float, way: str = "both") -> None:
    """Delay all data for a while ("up": to this end, "down": to the caller); then all data arrives, unless an end
    gave up.
    """
    loop = asyncio.get_running_loop()

    def stand_in(transport: asyncio.Transport) -> asyncio.Transport:
        if way in ("up", "both") and not transport.is_closing():
            transport.pause_reading()
            loop.call_later(seconds, _read_again, transport)
        if way == "up":
            return transport
        held = _Held(transport)
        loop.call_later(seconds, held.release)
        return cast(asyncio.Transport, held)

    connection.through(stand_in)


def _read_again(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


class _Held:
    """A transport that keeps what is written to it until it is released. The credits of the streams bound that."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._kept: list[bytes] | None = []
        self._closes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.writelines([data])

    def writelines(self, parts: Iterable[bytes]) -> None:
        if self._kept is None:
            self._transport.writelines(parts)
        else:
            self._kept += parts

    def close(self) -> None:
        """Close after the held data was sent, as on a slow line."""
        if self._kept is None:
            self._transport.close()
        self._closes = True

    def is_closing(self) -> bool:
        return self._closes or self._transport.is_closing()

    def release(self) -> None:
        kept, self._kept = self._kept, None
        if kept and not self._transport.is_closing():
            self._transport.writelines(kept)
        if self._closes:
            self._transport.close()
