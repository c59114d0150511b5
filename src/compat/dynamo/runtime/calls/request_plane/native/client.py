"""The caller's side of the native wire: requests over a pool of connections, answers over connections of their own."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, cast

import msgspec

from dynamo.errors import CannotConnect, ConnectionTimeout, Disconnected, InvalidArgument, Overloaded, ResponseTimeout
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.timers import due_of
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, split_tcp
from dynamo.runtime.calls.request_plane.dial import Dialled, Dialler
from dynamo.runtime.calls.request_plane.native.call_home import CallHomeListener, keep_alive
from dynamo.runtime.calls.request_plane.native.frames import (
    MAX_CONTROL_BYTES,
    PROMPT_TOKENS_HEADER,
    AckDecoder,
    Codec,
    ControlMessage,
    MalformedFrame,
    declined,
    encode_body,
    encode_call,
    encode_request,
    response_at,
)
from dynamo.runtime.calls.request_plane.native.stream import NativeStream
from dynamo.runtime.calls.request_plane.security import PlaneSecurity

logger = logging.getLogger(__name__)

BUSY_REQUESTS: Final = (
    16  # without an ACK on every connection: then another one is opened, as long as the pool has room
)
MAX_QUEUED_BYTES: Final = 256 * 1024 * 1024  # requests waiting for a full socket, per connection

Waited = Callable[[float], object]
"""Called with how many seconds a request waited for a connection; 0 where there was one."""


class PreparedCall:
    """One request, ready to leave on whatever carries requests of this wire, and the stream that awaits its answer."""

    __slots__ = ("headers", "payload", "stream")

    def __init__(self, headers: dict[str, str], payload: bytes, stream: NativeStream) -> None:
        self.headers, self.payload, self.stream = headers, payload, stream


def prepare(instance: Instance, path: str, body: Any, context: Context, home: CallHomeListener) -> PreparedCall:
    """Encode a request and await its answer at `home`. `path` is written to the headers only.

    Raises `InvalidArgument` for what the wire cannot carry, `ResponseTimeout` when the deadline has passed, and
    `CannotConnect` for an instance with an unknown codec.
    """
    codec = codec_of(instance)
    if context.deadline is not None and context.deadline <= asyncio.get_running_loop().time():
        raise ResponseTimeout("the request's deadline passed before it was sent")
    try:
        encoded = encode_body(body, codec)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidArgument(f"the request cannot be encoded: {error}") from error
    headers = {**(context.trace_headers() or {}), "request-id": context.id(), "x-endpoint-path": path}
    if context.prompt_tokens is not None:
        headers[PROMPT_TOKENS_HEADER] = str(context.prompt_tokens)
    stream = home.expect(codec)
    control = ControlMessage(
        id=context.id(),
        request_type="single_in",
        response_type="many_out",
        connection_info=response_at(home.address, stream.subject, context.id()),
        payload_codec=codec,
        metadata=context.metadata.copy() if context.has_metadata else None,
    )
    payload = encode_call(control, encoded)
    if len(payload) - len(encoded) > MAX_CONTROL_BYTES:
        stream.kill()
        raise InvalidArgument(f"the request's metadata does not fit in the {MAX_CONTROL_BYTES} bytes there are for it")
    return PreparedCall(headers, payload, stream)


def codec_of(instance: Instance) -> Codec:
    """Return the codec of an instance; JSON where its record names none. Raises `CannotConnect` for an unknown
    codec.
    """
    match instance.request_plane_codec:
        case None | "json":
            return "json"
        case "msgpack":
            return "msgpack"
        case other:
            raise CannotConnect(f"instance {instance} speaks {other!r}, this version json and msgpack")


class NativeClient:
    """Every native connection of a process; implements `RequestPlaneClient` over TCP."""

    def __init__(
        self,
        settings: RequestPlaneSettings,
        home: CallHomeListener,
        *,
        waited: Waited | None = None,
        security: PlaneSecurity | None = None,
    ) -> None:
        """`home` may be shared with other planes; the code that made `home` closes it."""
        self._security = security or PlaneSecurity()
        self._settings = settings
        self._home = home
        self._waited = waited
        self._pools: dict[tuple[str, int], list[RequestSender]] = {}
        self._dialler = Dialler(
            lambda address: RequestSender(address, settings, self._lost),
            self._connected,
            timeout_seconds=settings.connect_timeout_seconds,
            security=self._security,
            limit=settings.dial_limit,
        )

    async def open(self, instance: Instance, body: Any, context: Context) -> NativeStream:
        try:
            host, port, path = split_tcp(instance.transport.get("tcp", ""))
        except ValueError as error:
            raise CannotConnect(f"instance {instance}: {error}") from error
        if self._security.secret is not None and self._security.client is None:
            raise CannotConnect(
                f"instance {instance} speaks the native wire, which has no place for the shared secret that is asked for here "
                "(DYN_TCP_SECRET_PATH); use TLS for it (DYN_TCP_TLS_CA_CERT_PATH)"
            )
        if self._security.client is not None and self._security.server is None:
            raise CannotConnect(
                f"instance {instance} speaks the native wire, whose answers would come without TLS: set DYN_TCP_TLS_CERT_PATH "
                "and DYN_TCP_TLS_KEY_PATH here, too"
            )
        if not self._home.address:
            await self._home.start()
        sender = self._free_sender(host, port)
        waited = 0.0
        if sender is None:
            began = perf_counter()
            sender = await self._dialler.connect(host, port)
            waited = perf_counter() - began
        if self._waited is not None:
            self._waited(waited)
        call = prepare(instance, path, body, context, self._home)
        stream = call.stream
        try:
            frame = encode_request(path, call.headers, call.payload)
            if len(frame) > self._settings.max_message_bytes:
                raise InvalidArgument(
                    f"the request is {len(frame)} bytes long; the wire carries {self._settings.max_message_bytes} "
                    "(DYN_TCP_MAX_MESSAGE_SIZE)"
                )
            sender.send(frame, stream)
        except ValueError as error:
            stream.kill()
            raise InvalidArgument(f"the request cannot be framed: {error}") from error
        except BaseException:
            stream.kill()
            raise
        stream.follow(context)
        return stream

    async def close(self) -> None:
        self._dialler.close()
        await self._home.close()
        for pool in list(self._pools.values()):
            for sender in list(pool):
                sender.close()
        await asyncio.sleep(0)  # let the transports see their close

    # -- the pool ------------------------------------------------------------------------------------------------

    def _free_sender(self, host: str, port: int) -> RequestSender | None:
        """Return the least busy connection; None when another one should be opened."""
        pool = self._pools.get((host, port))
        if not pool:
            return None
        sender = pool[0] if len(pool) == 1 else min(pool, key=_busyness)
        if _busyness(sender) >= BUSY_REQUESTS and len(pool) < self._settings.pool_size:
            return None
        return sender

    def _connected(self, where: tuple[str, int], sender: RequestSender) -> None:
        self._pools.setdefault(where, []).append(sender)

    def _lost(self, sender: RequestSender) -> None:
        for where, pool in list(self._pools.items()):
            if sender in pool:
                pool.remove(sender)
                if not pool:
                    del self._pools[where]


def _busyness(sender: RequestSender) -> int:
    return sender.unacknowledged


class RequestSender(Dialled):
    """One pooled connection to a worker: request frames out, one ACK for each back, in the same order."""

    def __init__(self, address: str, settings: RequestPlaneSettings, on_lost: Callable[[RequestSender], None]) -> None:
        self._address = address
        self._settings = settings
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._acks = AckDecoder()
        self._sent: deque[tuple[float, NativeStream]] = deque()  # without an ACK: when each was sent, and what for
        self._not_home: set[NativeStream] = set()  # sent, and the worker has not called home yet
        self._idle_since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._failure: str | None = None
        self._transport: asyncio.Transport | None = None
        self.usable = True

    @property
    def unacknowledged(self) -> int:
        """Requests without an ACK."""
        return len(self._sent)

    def send(self, frame: bytes, stream: NativeStream) -> None:
        """Write one request. Raises `CannotConnect` when it can leave no more, `Overloaded` when too many wait already."""
        transport = self._transport
        if not self.usable or transport is None:
            raise CannotConnect(f"{self._address} closed the connection at once: {self._failure or 'no reason given'}")
        if len(self._sent) >= self._settings.pipeline_limit:
            raise Overloaded(
                f"{self._address} has not acknowledged {len(self._sent)} requests of one connection, the limit set by "
                "DYN_TCP_CHANNEL_BUFFER"
            )
        if transport.get_write_buffer_size() + len(frame) > MAX_QUEUED_BYTES:
            raise CannotConnect(f"{self._address} does not read: its send queue is full")
        self._sent.append((self._loop.time(), stream))
        self._not_home.add(stream)
        stream.await_home(self._not_home.discard)
        transport.write(frame)
        if self._timer is None or due_of(self._timer) > self._due():
            self._arm()

    def close(self) -> None:
        """Leave; streams that the worker has not called home for are lost."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport.get_extra_info("socket"))
        self._arm()

    def data_received(self, data: bytes) -> None:
        self._acks.feed(data)
        try:
            while (text := self._acks.next_ack()) is not None:
                self._acknowledged(text)
        except MalformedFrame as error:
            self._fail(f"{self._address} broke the wire: {error}")
        if not self._sent:
            self._idle_since = self._loop.time()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        reason = self._failure or (str(exc) if exc else "the connection was closed")
        self._sent.clear()
        waiting, self._not_home = self._not_home, set()
        for stream in waiting:
            stream.await_home(None)
            stream.lost(Disconnected(f"Stream ended before generation completed ({self._address}: {reason})"))
        self._on_lost(self)

    # -- inside --------------------------------------------------------------------------------------------------

    def _acknowledged(self, text: str) -> None:
        if not self._sent:
            raise MalformedFrame(f"an ACK for nothing: {text[:100]!r}")
        _, stream = self._sent.popleft()
        refusal = declined(text)
        if refusal is not None:
            stream.lost(refusal)

    def _due(self) -> float:
        if self._sent:
            return self._sent[0][0] + self._settings.request_timeout_seconds
        return self._idle_since + self._settings.idle_host_seconds

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due(), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due() > self._loop.time():
            self._arm()
        elif self._sent:
            limit = self._settings.request_timeout_seconds
            self._failure = f"no ACK within {limit:g} s (DYN_TCP_REQUEST_TIMEOUT)"
            for _, stream in self._sent:
                if stream in self._not_home:  # a worker that has called home has plainly accepted
                    stream.lost(ConnectionTimeout(f"{self._address}: {self._failure}"))
            self.close()  # the ACKs that are to come could no longer be distinguished
        elif self._not_home:
            self._idle_since = self._loop.time()  # requests that wait for their turn at the worker
            self._arm()
        else:
            self.close()

    def _fail(self, message: str) -> None:
        logger.warning("%s", message)
        self._failure = message
        self.close()
