"""Where workers bring their answers: one listener of the caller's process, one connection for each stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import uuid
from typing import Final, cast

from dynamo.errors import CannotConnect, Disconnected
from dynamo.runtime.base.addresses import WILDCARDS, detect_host
from dynamo.runtime.base.listening import start_listening
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.tls import ServerTls
from dynamo.runtime.base.tls_gate import TlsGate
from dynamo.runtime.calls.request_plane.native.frames import Codec, MalformedFrame, TwoPartDecoder, decode_handshake
from dynamo.runtime.calls.request_plane.native.stream import NativeStream

logger = logging.getLogger(__name__)

SPARE_CONNECTIONS: Final = 256
"""Connections that have not yet named their stream, beyond the number of streams that are awaited: each awaited
stream opens one, and a burst of others must not keep those out."""

HANDSHAKE_BYTES: Final = 1024  # of a subject and a word
LINGER_ZERO: Final = struct.pack("ii", 1, 0)

KEEPALIVE: Final = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""The wire has no heartbeats: a worker whose machine or network is gone shows only in TCP's own probes, after 50 s."""


def keep_alive(transport: asyncio.Transport) -> None:
    """Let the kernel notice a peer that has vanished without a word."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None:
        return
    with contextlib.suppress(OSError):  # it was lost meanwhile
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


class CallHomeListener:
    """The awaited streams, by their subject. The code that makes a `CallHome` closes it."""

    def __init__(self, settings: RequestPlaneSettings, tls: ServerTls | None = None) -> None:
        """`tls`: the certificate to listen with, if any."""
        self._settings = settings
        self._tls = tls
        self._host = settings.response_host or detect_host()
        self._server: asyncio.Server | TlsGate | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._awaited: dict[str, NativeStream] = {}
        self._open: set[NativeStream] = set()
        self._undecided: set[_Caller] = set()
        self.address = ""  # advertised "HOST:PORT", once started

    @property
    def streams(self) -> int:
        """Streams whose answer is awaited or arriving."""
        return len(self._open)

    async def start(self) -> None:
        """Begin to listen; idempotent. Raises `CannotConnect` naming the address when it cannot be bound."""
        async with self._starting:
            if self._closed:
                raise CannotConnect("the runtime is closed")
            if self._server is not None:
                return
            port = self._settings.response_port
            try:
                self._server = await self._listen(port)
            except OSError as error:
                raise CannotConnect(
                    f"cannot listen for answers on {self._host}:{port}: {error}; set DYN_TCP_RESPONSE_STREAM_HOST and "
                    "DYN_TCP_RESPONSE_STREAM_PORT"
                ) from error
            port = self._server.sockets[0].getsockname()[1]
            host = detect_host() if self._host in WILDCARDS else self._host
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _listen(self, port: int) -> asyncio.Server | TlsGate:
        settings = self._settings
        if self._tls is None:
            loop, backlog = asyncio.get_running_loop(), settings.listen_backlog
            return await start_listening(
                loop.create_server(lambda: _Caller(self), self._host, port, backlog=backlog, start_serving=False)
            )
        timeout, limit = settings.tls_handshake_timeout_seconds, settings.max_unauthenticated
        gate = TlsGate(self._tls, lambda: _Caller(self), timeout_seconds=timeout, limit=limit)
        gate.bind(self._host, port, settings.listen_backlog)
        return gate

    def expect(self, codec: Codec) -> NativeStream:
        """Make a stream for which a worker will call home. Its subject is a secret of 122 random bits: only a
        process that received the request knows the subject. Raises `CannotConnect` once this is closed.
        """
        if self._closed:
            raise CannotConnect("the runtime is closed")
        stream = NativeStream(str(uuid.uuid4()), codec, self._forget)
        self._awaited[stream.subject] = stream
        self._open.add(stream)
        return stream

    def _forget(self, stream: NativeStream) -> None:
        self._awaited.pop(stream.subject, None)
        self._open.discard(stream)

    async def close(self) -> None:
        """Stop listening; streams that have not ended are lost. Idempotent."""
        self._closed = True
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for caller in list(self._undecided):
            caller.abort()
        for stream in list(self._open):
            stream.lost(Disconnected("Stream ended before generation completed (the caller's runtime is closed)"))
        await asyncio.sleep(0)  # an aborted transport reports its loss on the next turn
        if server is not None:
            await server.wait_closed()

    # -- for the connections -------------------------------------------------------------------------------------

    @property
    def handshake_seconds(self) -> float:
        return self._settings.handshake_timeout_seconds

    def joined(self, caller: _Caller) -> bool:
        """Add a connection not yet identified; return whether there is room for it."""
        self._undecided.add(caller)
        return len(self._undecided) <= len(self._awaited) + SPARE_CONNECTIONS

    def left(self, caller: _Caller) -> None:
        self._undecided.discard(caller)

    def awaited(self, subject: str) -> NativeStream | None:
        """Return the stream of this name, which is then no longer awaited: a subject is good for one connection."""
        return self._awaited.pop(subject, None)


class _Caller(asyncio.Protocol):
    """An accepted connection until it has named its stream."""

    def __init__(self, listener: CallHomeListener) -> None:
        self._listener = listener
        self._decoder = TwoPartDecoder(max_data_bytes=0, max_header_bytes=HANDSHAKE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        transport = self._transport = cast(asyncio.Transport, transport)
        if not self._listener.joined(self):
            logger.warning("a call-home connection was refused: too many have not said which stream they carry")
            transport.abort()
            return
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            # The caller closes first, and thousands of sockets in TIME_WAIT would use up its ports.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
        keep_alive(transport)
        self._timer = asyncio.get_running_loop().call_later(self._listener.handshake_seconds, self.abort)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._decoder.feed(data)
        try:
            frame = self._decoder.next_frame()
            if frame is None:
                return
            handshake = decode_handshake(frame)
        except MalformedFrame as error:
            logger.warning("a call-home connection was refused: %s", error)
            transport.abort()
            return
        # The request may have been given up meanwhile; the worker takes the closed connection for a kill.
        stream = self._listener.awaited(handshake.subject) if handshake.stream_type == "response" else None
        if stream is None:
            transport.abort()
            return
        self._leave()
        self._transport = None
        stream.adopt(transport, self._decoder.rest())

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def abort(self) -> None:
        """Drop the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        self._listener.left(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
