"""Where workers bring their answers: one listener of the caller's process, one connection for each stream."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import struct
import uuid
from collections.abc import Callable, Sequence
from typing import Final, cast

from dynamo.errors import CannotConnect, Disconnected, InvalidArgument
from dynamo.runtime.base.addresses import WILDCARDS, detect_host
from dynamo.runtime.base.listening import start_listening
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.tls import ServerTls
from dynamo.runtime.base.tls_gate import TlsGate
from dynamo.runtime.calls.request_plane.native.frames import Codec, MalformedFrame, TwoPartDecoder, decode_handshake
from dynamo.runtime.calls.request_plane.native.stream import NativeStream

# Where a worker may bring the answer of a native request: to the caller's own machine, unless an operator allows more.
#
# The native wire names the address in the request. Without a check any process that reaches a worker could make it connect to any
# host and port that the worker reaches.

SETTING: Final = "DYN_TCP_CALL_HOME_NETWORKS"
ANYWHERE: Final = "any"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_own_address(host: str) -> bool:
    """Return whether an IP address is one of this machine: only such an address can be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return not ipaddress.ip_address(host).is_unspecified


class CallHomePolicy:
    """Decides by the address of the caller's request connection and the networks that were allowed."""

    def __init__(self, allowed: Sequence[str] = (), is_own: Callable[[str], bool] = is_own_address) -> None:
        """`allowed`: networks, addresses and host names; "any" ends the check. Raises InvalidArgument naming the setting."""
        self._is_own = is_own
        self._anywhere = ANYWHERE in allowed
        self._networks: list[Network] = []
        self._names: set[str] = set()
        self._permitted: tuple[str, str | None] | None = None  # the last pair: a caller sends many requests
        for entry in allowed:
            if entry == ANYWHERE:
                continue
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                if "/" in entry or not entry.isascii():
                    raise InvalidArgument(
                        f"{SETTING}: {entry!r} is neither a network (10.0.0.0/8) nor a host name nor {ANYWHERE!r}"
                    ) from None
                self._names.add(entry.lower())

    def permits(self, host: str, caller: str | None) -> bool:
        """Return whether an answer may be sent to `host`. `caller`: the peer of the request connection; None where
        requests come over NATS, which does not carry it: then everything is permitted unless networks were given.
        """
        if self._permitted == (host, caller):
            return True
        permitted = self._is_permitted(host, caller)
        if permitted:
            self._permitted = (host, caller)
        return permitted

    def _is_permitted(self, host: str, caller: str | None) -> bool:
        if self._anywhere or host.lower() in self._names:
            return True
        wanted = _address(host)
        if wanted is None:
            return caller is None and not self._networks and not self._names
        if any(wanted in network for network in self._networks):
            return True
        if caller is None:
            return not self._networks and not self._names
        peer = _address(caller)
        if peer is None or wanted == peer:
            return peer is not None
        # A caller on this machine: it may come from 127.0.0.1 and name the address that others know it by.
        return self._is_own(str(peer)) and self._is_own(str(wanted))


def _address(host: str) -> Address | None:
    """Parse an IP address, an IPv4 one also where it is wrapped into IPv6; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


logger = logging.getLogger(__name__)

SPARE_CONNECTIONS: Final = 256
"""Connections that have not yet named their stream, beyond the number of streams that are awaited: each awaited
stream opens one, and a burst of others must not keep those out."""

HANDSHAKE_BYTES: Final = 1024  # of a subject and a word
LINGER_ZERO: Final = struct.pack("ii", 1, 0)

KEEPALIVE: Final = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""The wire has no heartbeats: a worker whose machine or network is gone shows only in TCP's own probes, after 50 s."""


def keep_alive(sock: socket.socket | None) -> None:
    """Let the kernel notice a peer that has vanished without a word. A listener gives this to the connections it accepts."""
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
        self._server: asyncio.Server | TlsGate | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._awaited: dict[str, NativeStream] = {}
        self._open: set[NativeStream] = set()
        self._undecided: set[_Caller] = set()
        self.address = ""  # advertised "HOST:PORT", once started

    @property
    def _host(self) -> str:
        return self._settings.response_host or detect_host()

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
            for listening in self._server.sockets:  # and so all that it accepts: on each of these it took 15 us
                # The caller closes first, and thousands of sockets in TIME_WAIT would use up its ports.
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
                keep_alive(listening)
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
