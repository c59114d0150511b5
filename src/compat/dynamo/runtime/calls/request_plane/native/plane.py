"""The parts of `dynamo.runtime.planes` that speak the native wire, over TCP and over NATS."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import perf_counter
from typing import Any, Final, cast

from dynamo.errors import CannotConnect, ConnectionTimeout, Disconnected, InvalidArgument
from dynamo.runtime.base.addresses import bind_host
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.nats_connection import NatsConnection
from dynamo.runtime.calls.request_plane.base import Instance, RequestPlaneClient
from dynamo.runtime.calls.request_plane.metrics import REFUSALS, RefusalMetrics
from dynamo.runtime.calls.request_plane.native.call_home import CallHomeListener
from dynamo.runtime.calls.request_plane.native.client import Waited, prepare
from dynamo.runtime.calls.request_plane.native.frames import declined
from dynamo.runtime.calls.request_plane.native.nats_server import TRANSPORT
from dynamo.runtime.calls.request_plane.native.stream import NativeStream
from dynamo.runtime.planes import NATS_REQUESTS, NATS_WORKERS, CoreServer, PlaneParts

__all__ = ["call_home", "native_client", "nats_client", "nats_server"]


# The native wire over NATS, caller's side: a request is a message with an empty reply, the answer comes over TCP.

HOME_SECONDS: Final = 60.0
"""How long a worker that has taken a request may take to call home. Over TCP its lost connection shows that it died in
between; here nothing does."""

HEADER_BYTES: Final = 64  # what NATS adds to each header: a name, a separator, an end of line; generous


class NatsClient:
    """Implements `RequestPlaneClient` over one NATS connection, which may be shared: the code that made the connection
    closes it.
    """

    def __init__(
        self,
        connection: NatsConnection,
        home: CallHomeListener,
        *,
        request_timeout_seconds: float,
        waited: Waited | None = None,
    ) -> None:
        """`request_timeout_seconds`: until the reply that a worker has taken the request."""
        self._connection = connection
        self._home = home
        self._timeout = request_timeout_seconds
        self._waited = waited
        self._not_home: dict[NativeStream, asyncio.TimerHandle] = {}

    async def open(self, instance: Instance, body: Any, context: Context) -> NativeStream:
        subject = instance.transport.get(TRANSPORT)
        if not subject:
            raise CannotConnect(f"instance {instance} has no NATS subject")
        began = perf_counter()
        if not self._home.address:
            await self._home.start()
        await self._reach()
        if self._waited is not None:
            self._waited(perf_counter() - began)
        call = prepare(instance, subject, body, context, self._home)
        stream = call.stream
        try:
            client = self._connection.client
            size = len(call.payload) + sum(len(k) + len(v) + HEADER_BYTES for k, v in call.headers.items())
            if size > client.max_payload:
                raise InvalidArgument(
                    f"the request is {len(call.payload)} bytes long; this NATS server carries {client.max_payload} (max_payload)"
                )
            stream.follow(context)
            await self._send(subject, call.payload, call.headers, stream)
        except BaseException:
            stream.close()
            raise
        self._await_home(stream)
        return stream

    async def _reach(self) -> None:
        """Connect, or wait for a lost server to come back, no longer than a reply is waited for."""
        connection = self._connection
        if connection.is_connected:
            return
        await connection.start()
        try:
            async with asyncio.timeout(self._timeout):
                await connection.wait_connected()
        except TimeoutError as error:
            raise CannotConnect(
                f"NATS has been away for {self._timeout:g} s (DYN_NATS_REQUEST_TIMEOUT_SECS)"
            ) from error

    async def _send(self, subject: str, payload: bytes, headers: dict[str, str], stream: NativeStream) -> None:
        # Imported here, as the connection imports its client: the library is an extra.
        from nats import errors

        try:
            reply = await self._connection.client.request(subject, payload, timeout=self._timeout, headers=headers)
        except errors.NoRespondersError as error:
            raise CannotConnect(f"nobody serves {subject}: the worker is gone") from error
        except errors.TimeoutError as error:
            raise ConnectionTimeout(
                f"no worker took the request for {subject} within {self._timeout:g} s (DYN_NATS_REQUEST_TIMEOUT_SECS)"
            ) from error
        except errors.MaxPayloadError as error:
            raise InvalidArgument("the request is longer than this NATS server carries (max_payload)") from error
        except errors.Error as error:
            raise CannotConnect(f"NATS did not take the request for {subject}: {error}") from error
        refusal = declined(reply.data.decode(errors="replace"))
        if refusal is not None:
            stream.lost(refusal)

    def _await_home(self, stream: NativeStream) -> None:
        self._not_home[stream] = asyncio.get_running_loop().call_later(HOME_SECONDS, self._not_come, stream)
        stream.await_home(self._came)

    def _came(self, stream: NativeStream) -> None:
        timer = self._not_home.pop(stream, None)
        if timer is not None:
            timer.cancel()

    def _not_come(self, stream: NativeStream) -> None:
        self._not_home.pop(stream, None)
        text = f"the worker took the request and did not call home within {HOME_SECONDS:g} s"
        stream.lost(Disconnected(f"Stream ended before generation completed ({text})"))

    async def close(self) -> None:
        await self._home.close()
        for timer in self._not_home.values():
            timer.cancel()
        self._not_home.clear()


def call_home(parts: PlaneParts) -> CallHomeListener:
    """Return where workers that answer by calling home reach this process."""
    host = bind_host(parts.names.store, parts.requests.response_host, "") or None
    return CallHomeListener(replace(parts.requests, response_host=host), parts.security.server)


def nats_server(parts: PlaneParts) -> CoreServer:
    """Return the worker's side of the native wire over NATS."""
    from dynamo.runtime.calls.request_plane.listener import LIMITS
    from dynamo.runtime.calls.request_plane.native.nats_server import NatsServer

    refusals = RefusalMetrics(parts.metrics, REFUSALS["tcp"], LIMITS)
    server = NatsServer(parts.nats(NATS_REQUESTS), parts.requests, refused=refusals.count, security=parts.security)
    return server, server.core


def native_client(parts: PlaneParts) -> RequestPlaneClient:
    """Return the caller's side of the native wire over TCP."""
    from dynamo.runtime.calls.request_plane.native.client import NativeClient

    home, waited = cast(CallHomeListener, parts.call_home), parts.caller_metrics.queue_seconds.observe
    return NativeClient(parts.requests, home, waited=waited, security=parts.security)


def nats_client(parts: PlaneParts) -> RequestPlaneClient:
    """Return the caller's side of the native wire over NATS."""
    from dynamo.runtime.calls.request_plane.native.plane import NatsClient

    return NatsClient(
        parts.nats(NATS_WORKERS),
        cast(CallHomeListener, parts.call_home),
        request_timeout_seconds=parts.requests.nats_timeout_seconds,
        waited=parts.caller_metrics.queue_seconds.observe,
    )
