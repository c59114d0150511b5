"""How a caller of `mux` greets a worker, and learns whether the worker is the one it should be."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from dynamo.errors import CannotConnect
from dynamo.runtime.calls.request_plane.base import INITIAL_CREDITS
from dynamo.runtime.calls.request_plane.mux.frames import (
    MAGIC,
    STEP_CAPABILITY,
    VERSION,
    Hello,
    Kind,
    ProtocolError,
    frame,
    pack,
)
from dynamo.runtime.calls.request_plane.secret import (
    SECRET_CAPABILITY,
    SECRET_SETTING,
    WrongSecret,
    check_nonce,
    new_nonce,
)
from dynamo.runtime.calls.request_plane.security import PlaneSecurity

__all__ = ["Greeting"]

WITHOUT_TLS: Final = "if it has a certificate, calls to it need DYN_TCP_TLS_CA_CERT_PATH"
WITH_TLS: Final = "if it asks for a certificate, it must accept that of DYN_TCP_TLS_CLIENT_CERT_PATH"


class Greeting:
    """The caller's HELLO, and the proof of the shared secret."""

    __slots__ = ("_nonce", "_secret", "hint", "is_over", "proven")

    def __init__(self, security: PlaneSecurity | None) -> None:
        """With a `security` that requires a proof, `proven` is done when the worker has proven its identity."""
        self._secret = None if security is None else security.secret
        self._nonce = "" if self._secret is None else new_nonce()
        self.is_over = False
        self.hint = WITHOUT_TLS if security is None or security.client is None else WITH_TLS
        is_guarded = security is not None and (security.client is not None or security.secret is not None)
        self.proven: asyncio.Future[None] | None = asyncio.get_running_loop().create_future() if is_guarded else None

    def first_bytes(self) -> bytes:
        """Return the first bytes of a connection."""
        hello = Hello(
            version=VERSION,
            capabilities=[STEP_CAPABILITY],
            credits=INITIAL_CREDITS,
            agent=f"dynamo-unified pid {os.getpid()}",
        )
        if self._secret is not None:
            hello.capabilities.append(SECRET_CAPABILITY)
            hello.auth = self._nonce
        return MAGIC + frame(Kind.HELLO, pack(hello))

    def answered(self, hello: Hello) -> bytes | None:
        """Check the worker's HELLO; the frame to send next, if any. Raises ProtocolError."""
        if not 1 <= hello.version <= VERSION:
            raise ProtocolError(f"it answered with mux version {hello.version}, which we did not offer")
        reply: bytes | None = None
        if self._secret is not None:
            nonce, _, proof = (hello.auth or "").partition(":")
            try:
                check_nonce(nonce)
                self._secret.check(proof, "worker", self._nonce, nonce)
            except WrongSecret as error:
                text = f"the worker has none ({SECRET_SETTING})" if hello.auth is None else str(error)
                raise ProtocolError(f"the shared secret is asked for: {text}") from None
            reply = frame(Kind.AUTH, self._secret.prove("caller", self._nonce, nonce).encode())
        self.is_over = True
        if self.proven is not None and not self.proven.done():
            self.proven.set_result(None)
        return reply

    def failed(self, address: str, reason: str) -> None:
        """Fail the greeting: the connection is lost."""
        if self.proven is not None and not self.proven.done():
            self.proven.set_exception(CannotConnect(f"{address} is not who it should be: {reason}"))
