"""TLS of listeners and callers: from files to contexts, and to new contexts when the files change.

Files are checked again when a connection begins, at most once a second, so a certificate that is replaced serves the next
connection; no signal is needed. A replacement that cannot be read leaves the old one in service and is an error in the log.
Connections that are open keep what they began with.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from msgspec import Struct

from dynamo.errors import InvalidArgument

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0  # three `stat` calls cost 5 us, but a storm of connections must not pay them each


class TlsFile(Struct, frozen=True):
    """A file and the setting that names it, for errors."""

    setting: str
    path: str


T = TypeVar("T")


class Watched(Generic[T]):
    """What `load` makes of some files; made again when one of them is another one than before."""

    def __init__(
        self, files: Sequence[TlsFile], load: Callable[[], T], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises what `load` raises: InvalidArgument naming the setting."""
        self._files, self._load, self._clock = tuple(files), load, clock
        self._seen = self._look()
        self._value = load()
        self._looked_at = clock()

    def current(self) -> T:
        """Return the newest version that could be loaded."""
        now = self._clock()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            seen = self._look()
            if seen != self._seen:
                self._seen = seen
                self._reload()
        return self._value

    def _reload(self) -> None:
        what = ", ".join(file.setting for file in self._files)
        try:
            self._value = self._load()
        except InvalidArgument as error:
            logger.error(
                "the files of %s have changed and cannot be used; the old ones stay in service: %s", what, error
            )
        else:
            logger.info("the files of %s have changed; new connections use them", what)

    def _look(self) -> tuple[object, ...]:
        """Return what distinguishes one version of the files from another; links are followed, as Kubernetes swaps
        links.
        """
        return tuple(_identity(file.path) for file in self._files)


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_dev, found.st_mtime_ns, found.st_size


class ServerTls:
    """A listener's certificate, and the authority that its callers' certificates must come from."""

    def __init__(self, certificate: TlsFile, key: TlsFile, client_authority: TlsFile | None = None) -> None:
        """Raises InvalidArgument naming the setting of a file that cannot be used."""
        self.certificate, self.key, self.client_authority = certificate, key, client_authority
        files = [certificate, key, *([client_authority] if client_authority else [])]
        self._context = Watched(files, self._load)

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        return self._context.current()

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_pair(context, self.certificate, self.key)
        if self.client_authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            _load_authority(context, self.client_authority)
        return context


class ClientTls:
    """How a caller checks its peers, and what it shows them."""

    def __init__(
        self,
        authority: TlsFile | None = None,
        *,
        certificate: TlsFile | None = None,
        key: TlsFile | None = None,
        server_name: str | None = None,
        is_insecure: bool = False,
    ) -> None:
        """`server_name`: the name a peer's certificate must have, instead of the peer's address.

        Raises InvalidArgument naming the setting of a file that cannot be used.
        """
        self.authority, self.certificate, self.key = authority, certificate, key
        self.server_name, self.is_insecure = server_name, is_insecure
        files = [file for file in (authority, certificate, key) if file is not None]
        self._context = Watched(files, self._load)

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        return self._context.current()

    def name_for(self, host: str) -> str:
        """Return the name that the certificate of a peer at `host` must have."""
        return self.server_name or host

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.is_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif self.authority is not None:
            _load_authority(context, self.authority)
        else:
            context.load_default_certs()
        if self.certificate is not None and self.key is not None:
            _load_pair(context, self.certificate, self.key)
        return context


def _load_pair(context: ssl.SSLContext, certificate: TlsFile, key: TlsFile) -> None:
    for file in (certificate, key):
        _check_readable(file)
    try:
        # OpenSSL would prompt for a password on the terminal.
        context.load_cert_chain(certificate.path, key.path, password="")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{certificate.setting}, {key.setting}: {certificate.path} and {key.path} are no certificate and its key: {error}"
        ) from error


def _load_authority(context: ssl.SSLContext, file: TlsFile) -> None:
    _check_readable(file)
    try:
        context.load_verify_locations(file.path)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file.setting}: {file.path} holds no certificate: {error}") from error


def _check_readable(file: TlsFile) -> None:
    try:
        with Path(file.path).open("rb"):
            pass
    except OSError as error:
        raise InvalidArgument(f"{file.setting}: cannot read {file.path}: {error.strerror}") from error


_NO_CERTIFICATE: Final = frozenset({"PEER_DID_NOT_RETURN_A_CERTIFICATE", "TLSV13_ALERT_CERTIFICATE_REQUIRED"})
_NOT_TLS: Final = frozenset({"HTTP_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"})


def handshake_text(error: BaseException) -> str:
    """Explain why a handshake failed; the caller adds which setting to check."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if reason in _NO_CERTIFICATE:
            return "a certificate is asked for, and none was shown"
        if reason in _NOT_TLS:
            return "the peer does not speak TLS"
        if "ALERT" in reason:
            return f"the peer declined it ({reason.replace('_', ' ').lower()})"
        return str(error)
    if isinstance(error, TimeoutError | ConnectionAbortedError):
        return "it did not end in time, or the peer left"
    return str(error) or type(error).__name__
