"""The caller's side of `mux`: one connection per worker process, all streams of all requests on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final

import msgspec

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, split_tcp
from dynamo.runtime.calls.request_plane.dial import Dialler
from dynamo.runtime.calls.request_plane.mux.bodies import InSlices, encode_long, has_long_ids
from dynamo.runtime.calls.request_plane.mux.connection import MuxConnection
from dynamo.runtime.calls.request_plane.mux.frames import pack
from dynamo.runtime.calls.request_plane.mux.stream import MuxStream
from dynamo.runtime.calls.request_plane.security import PlaneSecurity

__all__ = ["MuxClient", "MuxConnection", "MuxStream"]

CONNECT_TIMEOUT_SECONDS: Final = 5.0  # DYN_TCP_CONNECT_TIMEOUT


class MuxClient:
    """Every `mux` connection of a process; implements `RequestPlaneClient`."""

    def __init__(
        self,
        *,
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
        waited: Callable[[float], object] | None = None,
        security: PlaneSecurity | None = None,
    ) -> None:
        """`waited` gets the seconds that each request waited for a connection; 0 where there was one."""
        security = security or PlaneSecurity()
        self._waited = waited
        self._connections: dict[tuple[str, int], MuxConnection] = {}
        self._dialler = Dialler(
            lambda address: MuxConnection(address, on_lost=self._lost, security=security),
            self._connections.__setitem__,
            timeout_seconds=connect_timeout,
            security=security,
            greeted=lambda connection: connection.greeting.proven,
        )

    async def open(self, instance: Instance, body: object, context: Context) -> MuxStream:
        if instance.mux is None or "tcp" not in instance.transport:
            raise CannotConnect(f"instance {instance} does not speak mux")
        try:
            host, port, path = split_tcp(instance.transport["tcp"])
        except ValueError as error:
            raise CannotConnect(f"instance {instance}: {error}") from error
        try:
            encoded = await _in_turns(encode_long(body)) if has_long_ids(body) else pack(body)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise InvalidArgument(f"the request cannot be encoded: {error}") from error
        connection = self._connections.get((host, port))
        waited = 0.0
        if connection is None or not connection.usable:
            began = perf_counter()
            connection = await self._dialler.connect(host, port)
            waited = perf_counter() - began
        if self._waited is not None:
            self._waited(waited)
        stream = connection.open(path, encoded, context)
        stream.follow(context)
        return stream

    def _lost(self, connection: MuxConnection) -> None:
        for where, known in list(self._connections.items()):
            if known is connection:
                del self._connections[where]

    async def close(self) -> None:
        self._dialler.close()
        for connection in list(self._connections.values()):
            connection.close()
        await asyncio.sleep(0)  # let the transports see their close


async def _in_turns(work: InSlices[bytes]) -> bytes:
    """Do a slice of the work in each turn of the loop."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            encoded: bytes = done.value
            return encoded
        await asyncio.sleep(0)
