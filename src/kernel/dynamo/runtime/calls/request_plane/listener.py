"""The one TCP listener of a worker process: `mux` and the native wire on the same port."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol, cast

from dynamo.errors import CannotConnect
from dynamo.runtime.base.addresses import WILDCARDS, detect_host
from dynamo.runtime.base.limits import PendingBytes, Refused, uncounted, within_descriptors
from dynamo.runtime.base.listening import start_listening
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.timers import LoopTimer
from dynamo.runtime.base.tls import ServerTls
from dynamo.runtime.base.tls_gate import TlsGate
from dynamo.runtime.calls.request_plane.base import Handler, TransportMembers
from dynamo.runtime.calls.request_plane.core import ServerCore
from dynamo.runtime.calls.request_plane.mux.frames import MAGIC, VERSION, Kind, frame, pack
from dynamo.runtime.calls.request_plane.mux.server import MuxHost, MuxServerProtocol
from dynamo.runtime.calls.request_plane.security import PlaneSecurity
from dynamo.runtime.observe.log_rate import LogRate
from dynamo.settings.foreign import VISIBLE_CUDA, VISIBLE_NVIDIA

logger = logging.getLogger(__name__)

LIMITS: Final = (
    "connections",
    "handshake_time",
    "malformed",
    "message_time",
    "body_size",
    "pending_bodies",
    "streams",
    "idle",
    "write_stall",
    "credit_stall",
    "backlog",
    "handshakes",
    "handshake",
    "secret",
    "unauthenticated",
    "decoded_size",
    "call_home",
)
"""The names under which refusals are counted."""

NATIVE_WIRE: Final = "dynamo.runtime.calls.request_plane.native.server"  # loaded by name
SPARE_CONNECTIONS: Final = (
    64  # beyond the limit, for as many callers at once to get the reason; the rest is just closed
)
SPARE_DESCRIPTORS: Final = 128  # for files, logs and the store
GOODBYE_SECONDS: Final = 1.0  # how long a rejected caller may take to show its wire, and to read
TLS_BEGINS: Final = b"\x16\x03"  # on the native wire: a path of 5,635 bytes
NO_CUDA: Final = frozenset({"", "-1", "none", "void"})
NO_NVIDIA: Final = frozenset({"none", "void"})


class OtherWire(Protocol):
    """The wire of callers that do not begin with `MAGIC`."""

    security: PlaneSecurity  # set when the listener starts

    @property
    def connections(self) -> int:
        """Open connections."""

    def adopt(self, transport: asyncio.Transport, data: bytes) -> None:
        """Take over a connection whose first bytes were read by the listener."""

    def refusal(self, text: str, *, is_overload: bool = False) -> bytes:
        """Return the rejection of a caller as bytes of this wire."""

    async def close(self) -> None:
        """Close every connection; what is queued still leaves, within a bound."""


def _native_wire(
    core: ServerCore, settings: RequestPlaneSettings, *, pending: PendingBytes, refused: Refused
) -> OtherWire:
    server: OtherWire = importlib.import_module(NATIVE_WIRE).NativeServer(
        core, settings, pending=pending, refused=refused
    )
    return server


class Listener:
    """Implements `RequestPlaneServer` over TCP. The code that makes a listener closes it."""

    def __init__(
        self,
        host: str | None = None,
        port: int = 0,
        *,
        settings: RequestPlaneSettings | None = None,
        core: ServerCore | None = None,
        refused: Refused = uncounted,
        security: PlaneSecurity | None = None,
    ) -> None:
        """`security`: None: from the settings, read in `start`. `refused` counts what the limits decline. `host` and
        `port` win over the settings; no host anywhere means the detected address of this machine.
        """
        self.settings = own = settings or RequestPlaneSettings.from_env()
        self._host = host or own.rpc_host or detect_host()
        self._port = port or own.rpc_port
        self.core = core or ServerCore(own)
        self.refused = refused
        pending = PendingBytes(own.pending_bytes, own.largest_connection_pending_bytes)
        self._native = _native_wire(self.core, own, pending=pending, refused=refused)
        # The other half is for the answers of the native wire, which are connections of their own.
        spare = SPARE_DESCRIPTORS + SPARE_CONNECTIONS
        self.max_connections = within_descriptors(own.max_connections, spare=spare, share=0.5)
        self._mux = MuxHost(self.core, own, pending, refused, log=LogRate(logger))  # `start` adds the secret
        self._sniffing: set[_Sniffer] = set()
        self._security = security
        self._server: asyncio.Server | TlsGate | None = None
        self._address: str | None = None

    @property
    def address(self) -> str:
        """The advertised "HOST:PORT". Raises RuntimeError before `start`."""
        if self._address is None:
            raise RuntimeError("the request plane listens nowhere yet; await start() first")
        return self._address

    @property
    def pending(self) -> PendingBytes:
        """What the bodies that are still arriving hold, over all connections."""
        return self._mux.pending

    @property
    def connections(self) -> int:
        """Open connections, of both wires and undecided ones."""
        return len(self._mux.connections) + self._native.connections + len(self._sniffing)

    async def start(self) -> None:
        """Begin to listen; idempotent.

        Raises `CannotConnect` naming the address when it cannot be bound, and `InvalidArgument` naming the variable when a
        file of TLS or of the secret cannot be used.
        """
        if self._server is not None:
            return
        if self._security is None:
            self._security = PlaneSecurity.of(self.settings)
        self._native.security = self._security
        self._mux = replace(self._mux, secret=self._security.secret)
        try:
            self._server = await self._listen(self._security.server)
        except OSError as error:
            raise CannotConnect(
                f"cannot listen on {self._host}:{self._port}: {error}; set DYN_TCP_RPC_HOST and DYN_TCP_RPC_PORT"
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        host = detect_host() if self._host in WILDCARDS else self._host
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _listen(self, tls: ServerTls | None) -> asyncio.Server | TlsGate:
        settings = self.settings
        if tls is None:
            loop, backlog = asyncio.get_running_loop(), settings.listen_backlog
            return await start_listening(
                loop.create_server(lambda: _Sniffer(self), self._host, self._port, backlog=backlog, start_serving=False)
            )
        gate = TlsGate(
            tls,
            lambda: _Sniffer(self),
            timeout_seconds=settings.tls_handshake_timeout_seconds,
            limit=settings.max_unauthenticated,
            refused=self.refused,
        )
        gate.bind(self._host, self._port, settings.listen_backlog)
        return gate

    @property
    def has_room_for_strangers(self) -> bool:
        """Whether one more caller that has proven nothing may stay; always, where no proof is required."""
        if self._security is None or self._security.secret is None:
            return True
        return len(self._sniffing) + len(self._mux.strangers) <= self.settings.max_unauthenticated

    def register(self, path: str, handler: Handler) -> None:
        """Serve `path`. Raises ValueError if it is taken."""
        self.core.register(path, handler)

    def unregister(self, path: str) -> None:
        """Decline new requests for `path`; streams in flight go on."""
        self.core.unregister(path)

    def transport(self, path: str) -> TransportMembers:
        """Return the members of an instance record for reaching `path`. Raises RuntimeError before `start`."""
        return {
            "transport": {"tcp": f"{self.address}/{path}"},
            "device_type": detect_device_type(),
            "request_plane_codec": "msgpack",
            "mux": VERSION,
        }

    async def close(self) -> None:
        """Stop listening, end what is open with `EngineShutdown`, and drop the connections; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for connection in list(self._mux.connections):
            connection.goaway("the worker is shutting down")
        await self.core.close()
        for sniffer in list(self._sniffing):
            sniffer.close()
        for connection in list(self._mux.connections):
            connection.close()
        await self._native.close()
        if server is not None:
            await server.wait_closed()

    # -- for the sniffers ----------------------------------------------------------------------------------------

    def undecided(self, sniffer: _Sniffer) -> None:
        self._sniffing.add(sniffer)

    def decided(self, sniffer: _Sniffer) -> None:
        self._sniffing.discard(sniffer)

    def too_many(self, first_bytes: bytes) -> bytes:
        """Build the rejection for a caller, on its own wire, when there are too many connections."""
        text = f"more than {self.max_connections} connections, the limit set by DYN_TCP_MAX_CONNECTIONS"
        if first_bytes.startswith(MAGIC):
            return frame(Kind.ERROR, pack({"message": text}))
        return self._native.refusal(text, is_overload=True)

    def adopt(self, transport: asyncio.Transport, first_bytes: bytes) -> None:
        """Give a connection to the wire it speaks."""
        if first_bytes.startswith(MAGIC):
            connection = MuxServerProtocol(self._mux)
            connection.adopt(transport, first_bytes)
        elif first_bytes.startswith(TLS_BEGINS):
            self.refused("handshake")
            text = "a caller began with TLS, and this worker has no certificate (DYN_TCP_TLS_CERT_PATH); closing its connection"
            self._mux.log.warn("a caller began with TLS", text)
            transport.close()
        elif self._security is not None and self._security.secret is not None and not self._security.knows_callers:
            self.refused("secret")
            text = (
                "this worker asks for the shared secret (DYN_TCP_SECRET_PATH), which the native wire has no place for"
            )
            transport.write(self._native.refusal(text))
            transport.close()
            asyncio.get_running_loop().call_later(GOODBYE_SECONDS, transport.abort)
        else:
            self._native.adopt(transport, first_bytes)


class _Sniffer(asyncio.Protocol):
    """An accepted connection until its first bytes identify the wire.

    `MAGIC` begins with 0xFF: on the native wire that would be a path of more than 65,000 bytes.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._first_bytes = b""
        self._transport: asyncio.Transport | None = None
        self._timer: LoopTimer | None = None
        self._is_over = False  # the limit of connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        transport = self._transport = cast(asyncio.Transport, transport)
        listener = self._listener
        listener.undecided(self)
        if not listener.has_room_for_strangers:
            listener.refused("unauthenticated")
            transport.abort()
            return
        over = listener.connections - listener.max_connections
        if over > 0:
            listener.refused("connections")
            self._is_over = True
        if over > SPARE_CONNECTIONS:
            transport.abort()
            return
        patience = GOODBYE_SECONDS if self._is_over else listener.settings.handshake_timeout_seconds
        self._timer = LoopTimer(patience, self._expire)

    def data_received(self, data: bytes) -> None:
        self._first_bytes += data
        undecided = len(self._first_bytes) < len(MAGIC) and MAGIC.startswith(self._first_bytes)
        if undecided or self._transport is None:
            return
        if self._is_over:
            if not self._transport.is_closing():
                self._transport.write(self._listener.too_many(self._first_bytes))
                self._transport.close()  # the timer ends it if it does not read
            return
        transport, self._transport = self._transport, None
        self._leave()
        self._listener.adopt(transport, self._first_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _expire(self) -> None:
        if not self._is_over:
            self._listener.refused("handshake_time")
        self.close()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._listener.decided(self)


def detect_device_type(env: Mapping[str, str] | None = None) -> str:
    """Detect the device type of this worker's instance record: "cuda" unless the environment hides every GPU."""
    env = os.environ if env is None else env
    cuda, nvidia = (env.get(str(made.variable)) for made in (VISIBLE_CUDA, VISIBLE_NVIDIA))  # empty is a value here
    if cuda is not None and cuda.strip().lower() in NO_CUDA:
        return "cpu"
    if nvidia is not None and nvidia.strip().lower() in NO_NVIDIA:
        return "cpu"
    return "cuda"
