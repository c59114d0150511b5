"""Authentication of the request plane: TLS, mutual TLS and the shared secret, from settings to what the wires use."""

from __future__ import annotations

import ssl
from typing import Any, Self

from msgspec import Struct

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.tls import ClientTls, ServerTls, TlsFile, handshake_text
from dynamo.runtime.calls.request_plane.secret import SharedSecret

CERT, KEY = "DYN_TCP_TLS_CERT_PATH", "DYN_TCP_TLS_KEY_PATH"
CA, CLIENT_CA = "DYN_TCP_TLS_CA_CERT_PATH", "DYN_TCP_TLS_CLIENT_CA_CERT_PATH"
CLIENT_CERT, CLIENT_KEY = "DYN_TCP_TLS_CLIENT_CERT_PATH", "DYN_TCP_TLS_CLIENT_KEY_PATH"


class PlaneSecurity(Struct, frozen=True):
    """None means off."""

    server: ServerTls | None = None
    client: ClientTls | None = None
    secret: SharedSecret | None = None
    handshake_timeout_seconds: float = 3.0

    @classmethod
    def of(cls, settings: RequestPlaneSettings) -> Self:
        """Read the files. Raises InvalidArgument naming the variable of what cannot be used."""
        certificate = _pair(settings.tls_cert_path, settings.tls_key_path, CERT, KEY)
        shown = _pair(settings.tls_client_cert_path, settings.tls_client_key_path, CLIENT_CERT, CLIENT_KEY)
        client_authority = _file(CLIENT_CA, settings.tls_client_ca_cert_path)
        if client_authority is not None and certificate is None:
            raise InvalidArgument(f"{CLIENT_CA} asks callers for certificates, which needs {CERT} and {KEY}")
        authority = _file(CA, settings.tls_ca_cert_path)
        calls_with_tls = authority or shown or settings.tls_insecure or settings.tls_server_name
        return cls(
            server=None if certificate is None else ServerTls(*certificate, client_authority),
            client=ClientTls(
                authority,
                certificate=shown[0] if shown else None,
                key=shown[1] if shown else None,
                server_name=settings.tls_server_name,
                is_insecure=settings.tls_insecure,
            )
            if calls_with_tls
            else None,
            secret=None if settings.secret_path is None else SharedSecret(settings.secret_path),
            handshake_timeout_seconds=settings.tls_handshake_timeout_seconds,
        )

    def connect_options(self, host: str) -> dict[str, Any]:
        """Return the options of `create_connection` to `host`: empty where calls go without TLS."""
        if self.client is None:
            return {}
        return {
            "ssl": self.client.context(),
            "server_hostname": self.client.name_for(host),
            "ssl_handshake_timeout": self.handshake_timeout_seconds,
        }

    @property
    def knows_callers(self) -> bool:
        """Whether the TLS of a listener already identifies the caller."""
        return self.server is not None and self.server.client_authority is not None

    def not_connected(self, address: str, error: Exception) -> CannotConnect:
        """Explain why a dial failed, with the setting to check."""
        if self.client is None:
            return CannotConnect(f"{address} cannot be reached: {error}")
        if isinstance(error, ssl.SSLCertVerificationError):
            hint = f"{CA} is what it is checked against; DYN_TCP_TLS_SERVER_NAME, the name it must have"
        elif isinstance(error, ssl.SSLError):
            hint = (
                f"{CA} is set, so it must have {CERT}; where it asks callers for a certificate, {CLIENT_CERT} is shown"
            )
        elif isinstance(error, ConnectionAbortedError | ConnectionResetError):
            hint = f"{CA} is set here, so it must have {CERT}"
        else:
            return CannotConnect(f"{address} cannot be reached: {error}")
        return CannotConnect(f"TLS with {address} failed: {handshake_text(error)} ({hint})")


def _file(setting: str, path: str | None) -> TlsFile | None:
    return None if path is None else TlsFile(setting, path)


def _pair(
    certificate: str | None, key: str | None, cert_setting: str, key_setting: str
) -> tuple[TlsFile, TlsFile] | None:
    if (certificate is None) != (key is None):
        raise InvalidArgument(f"{cert_setting} and {key_setting} need each other")
    if certificate is None or key is None:
        return None
    return TlsFile(cert_setting, certificate), TlsFile(key_setting, key)
