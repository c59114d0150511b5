"""The gate of a TLS listener: it accepts connections itself, and knows those whose handshake has not ended.

A server that asyncio starts with `ssl=` does not report these, so they could be neither counted nor limited.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final, NamedTuple

from dynamo.runtime.base.limits import Refused, uncounted
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.base.tls import ServerTls, handshake_text

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE: Final = 64
PAUSE_SECONDS: Final = 0.1  # when no descriptor is left
COMPLAINT_SECONDS: Final = 1.0  # between two lines about failed handshakes: a port scanner must not fill the log

Make = Callable[[], asyncio.Protocol]


class HandshakeLimits(NamedTuple):
    """What handshakes may take."""

    timeout_seconds: float  # each
    at_once: int


class TlsGate:
    """All handshakes of one listener. The code that makes a gate closes it."""

    def __init__(
        self,
        tls: ServerTls,
        make: Make,
        *,
        timeout_seconds: float,
        limit: int,
        refused: Refused = uncounted,
    ) -> None:
        """`make` makes a protocol when a handshake is over. At most `limit` handshakes at once, each of at most
        `timeout_seconds`; `refused` counts under "handshakes" (too many), "handshake_time" and "handshake" (failed)."""
        self._tls, self._make = tls, make
        self._limits, self._refused = HandshakeLimits(timeout_seconds, limit), refused
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._shakes = Background()
        self._complained_at = float("-inf")

    def bind(self, host: str, port: int, backlog: int) -> None:
        """Listen there. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listen(socket.create_server((host, port), family=family, backlog=backlog), backlog)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """As `asyncio.Server` has them."""
        return () if self._listener is None else (self._listener,)

    async def wait_closed(self) -> None:
        """Return when the handshakes that `close` cut have ended."""
        await self._shakes.wait()

    def listen(self, listener: socket.socket, backlog: int) -> None:
        """Accept the connections of a bound socket, which belongs to the gate from now on."""
        listener.listen(backlog)
        listener.setblocking(False)
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    async def admit(self, connection: socket.socket) -> None:
        """Run the handshake of a connection that another part accepted; returns when it is over, successful or not."""
        task = self._begin(connection)
        if task is not None:
            await asyncio.wait({task})

    def _begin(self, connection: socket.socket) -> asyncio.Task[None] | None:
        if self._shakes.is_closed:
            connection.close()
            return None
        if len(self._shakes) >= self._limits.at_once:
            self._refused("handshakes")
            connection.close()
            return None
        connection.setblocking(False)
        return self._shakes.start(self._shake(connection), "TLS handshake")  # ends within the time limit

    def close(self) -> None:
        """Accept no more, and drop every connection whose handshake has not ended; idempotent."""
        if self._listener is not None:
            if self._pause is not None:
                self._pause.cancel()
            else:
                self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        self._shakes.cancel()

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it left while it waited
                continue
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
            self._begin(connection)

    def _resume(self) -> None:
        self._pause = None
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    async def _shake(self, connection: socket.socket) -> None:
        began = self._loop.time()
        try:
            # Both asyncio and uvloop set TCP_NODELAY.
            await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._tls.context(), ssl_handshake_timeout=self._limits.timeout_seconds
            )
        except (OSError, TimeoutError) as error:  # SSLError is an OSError
            is_late = (
                not isinstance(error, ssl.SSLError) and self._loop.time() - began >= self._limits.timeout_seconds * 0.9
            )
            if isinstance(error, ssl.SSLError) or is_late:
                self._refused("handshake_time" if is_late else "handshake")
                self._complain(error)
            else:  # a probe that only connects, or a client that does not accept our certificate: asyncio's report no more
                setting = self._tls.certificate.setting
                text = "a client left during its TLS handshake; it may not accept the certificate of %s"
                self._say(logging.INFO, text, setting)

    def _complain(self, error: BaseException) -> None:
        authority = self._tls.client_authority
        asked = f"; callers are asked for a certificate of {authority.setting}" if authority is not None else ""
        self._say(
            logging.WARNING,
            "a TLS handshake failed: %s (this listener has the certificate of %s%s)",
            handshake_text(error),
            self._tls.certificate.setting,
            asked,
        )

    def _say(self, level: int, text: str, *values: object) -> None:
        now = self._loop.time()
        if now - self._complained_at >= COMPLAINT_SECONDS:
            self._complained_at = now
            logger.log(level, text, *values)
