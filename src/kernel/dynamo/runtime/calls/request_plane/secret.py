"""The shared secret of `mux`: both sides prove that they know it, and it never travels.

Each side sends a nonce of its own in its HELLO. A proof is the HMAC-SHA256, under the secret, of the role of the prover and
both nonces; so it is good for this connection and this direction only. The worker proves first (in its HELLO), which keeps a
caller from handing its requests to a process that took a worker's address; then the caller does (AUTH).

The secret authenticates the peer. It neither hides nor protects what follows: where the network is not trusted, use TLS.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Final, Literal

from dynamo.errors import InvalidArgument
from dynamo.runtime.base.tls import TlsFile, Watched

SECRET_CAPABILITY: Final = "secret"
SECRET_SETTING: Final = "DYN_TCP_SECRET_PATH"

NONCE_BYTES: Final = 32
MIN_SECRET_BYTES: Final = 16  # a proof can be tried against guesses at leisure by any process that has seen one
MAX_SECRETS: Final = 8
MAX_FILE_BYTES: Final = 64 * 1024

Role = Literal["worker", "caller"]


class WrongSecret(Exception):
    """The peer does not know the secret, or did not prove it; the message names the setting."""


def new_nonce() -> str:
    """Never seen before: 32 random bytes, in hex."""
    return secrets.token_hex(NONCE_BYTES)


class SharedSecret:
    """The secrets of a file, one on each line: the first one is proven, all of them are accepted.

    So a secret is replaced without a pause: add the new one as the second line everywhere, then put it first, then take the
    old one out. The file is read again when it changes.
    """

    def __init__(self, path: str) -> None:
        """Raises InvalidArgument naming the setting when there is no usable secret in the file."""
        self._path = path
        self._lines = Watched([TlsFile(SECRET_SETTING, path)], self._load)

    def _load(self) -> tuple[bytes, ...]:
        try:
            with Path(self._path).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidArgument(f"{SECRET_SETTING}: cannot read {self._path}: {error.strerror}") from error
        lines = tuple(line.strip() for line in content.splitlines() if line.strip())
        if not lines or len(lines) > MAX_SECRETS or len(content) > MAX_FILE_BYTES:
            raise InvalidArgument(
                f"{SECRET_SETTING}: {self._path} holds {len(lines)} secrets; use 1 to {MAX_SECRETS} lines"
            )
        if min(map(len, lines)) < MIN_SECRET_BYTES:
            raise InvalidArgument(f"{SECRET_SETTING}: a secret of {self._path} has fewer than {MIN_SECRET_BYTES} bytes")
        return lines

    def prove(self, role: Role, caller_nonce: str, worker_nonce: str) -> str:
        """Return the proof of `role` for one connection, in hex."""
        return _proof(self._lines.current()[0], role, caller_nonce, worker_nonce)

    def check(self, proof: str, role: Role, caller_nonce: str, worker_nonce: str) -> None:
        """Raises WrongSecret unless `role` proved one of the secrets. Takes as long whatever is wrong."""
        given = proof.encode("ascii", "replace")
        found = [
            hmac.compare_digest(_proof(secret, role, caller_nonce, worker_nonce).encode(), given)
            for secret in self._lines.current()
        ]
        if not any(found):
            raise WrongSecret(f"the {role} does not know the shared secret ({SECRET_SETTING} differs)")


def _proof(secret: bytes, role: Role, caller_nonce: str, worker_nonce: str) -> str:
    said = f"dynamo mux 1 {role}\0{caller_nonce}\0{worker_nonce}".encode()
    return hmac.digest(secret, said, "sha256").hex()


def check_nonce(nonce: str) -> None:
    """Raises WrongSecret for what is no nonce: a short one might have been used before."""
    if len(nonce) != 2 * NONCE_BYTES:
        raise WrongSecret(f"a nonce of {len(nonce)} characters instead of {2 * NONCE_BYTES}")
