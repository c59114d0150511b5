"""Checks of the certificates that the settings name: key, dates, names, chain."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from dynamo.cli.doctor.diagnosis import Diagnosis, Examined

SOON_DAYS: Final = 14
_DAY: Final = 86_400


def certificates(examined: Examined) -> Iterator[Diagnosis]:
    """Check every pair of certificate and key, and at what signs them."""
    own, wire = examined.settings, examined.settings.runtime.requests
    pairs = (
        ("DYN_TLS_CERT_PATH", own.tls_cert_path, "DYN_TLS_KEY_PATH", own.tls_key_path),
        ("DYN_TCP_TLS_CERT_PATH", wire.tls_cert_path, "DYN_TCP_TLS_KEY_PATH", wire.tls_key_path),
        (
            "DYN_TCP_TLS_CLIENT_CERT_PATH",
            wire.tls_client_cert_path,
            "DYN_TCP_TLS_CLIENT_KEY_PATH",
            wire.tls_client_key_path,
        ),
    )
    for name, certificate, key_name, key in pairs:
        if certificate is not None and key is not None:
            yield from pair(name, certificate, key)
        elif certificate is not None or key is not None:
            given, missing = (name, key_name) if key is None else (key_name, name)
            yield Diagnosis.bad(f"{given} is set, and {missing} is not", f"set {missing}")
    if wire.tls_ca_cert_path and wire.tls_cert_path and wire.tls_key_path:
        yield chain(wire.tls_cert_path, wire.tls_key_path, wire.tls_ca_cert_path, wire.tls_server_name)


def pair(name: str, certificate: str, key: str) -> Iterator[Diagnosis]:
    """Judge a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
        found = _decoded(certificate)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        wrong = next((path for path in (certificate, key) if not Path(path).is_file()), None)
        if wrong is not None:
            yield Diagnosis.bad(f"{name}: there is no file {wrong}", "mend the path")
        elif isinstance(error, ssl.SSLError) and "KEY_VALUES_MISMATCH" in str(error):
            yield Diagnosis.bad(f"{name}: {key} is not the key of {certificate}", "name the pair that belongs together")
        else:
            yield Diagnosis.bad(
                f"{name}: {certificate} and {key} cannot be used: {error}",
                "both must be PEM, the key without a password",
            )
        return
    yield validity(name, found, time.time())


def validity(name: str, certificate: dict[str, Any], now: float) -> Diagnosis:
    """Judge the dates of a certificate, and report for which names it is."""
    names = ", ".join(str(value) for _, value in certificate.get("subjectAltName", ())) or "no name"
    begins = ssl.cert_time_to_seconds(certificate["notBefore"])
    ends = ssl.cert_time_to_seconds(certificate["notAfter"])
    if now < begins:
        return Diagnosis.bad(
            f"{name}: the certificate is valid from {certificate['notBefore']} only", "look at the clock, or wait"
        )
    if now > ends:
        return Diagnosis.bad(
            f"{name}: the certificate ended {certificate['notAfter']}", "replace it; no restart is needed"
        )
    text = f"{name}: valid for {int((ends - now) / _DAY)} more days, for {names}"
    if ends - now < SOON_DAYS * _DAY:
        return Diagnosis.warn(text, "replace it in time; no restart is needed")
    if names == "no name":
        return Diagnosis.bad(
            f"{name}: the certificate names no host (subjectAltName)", "clients refuse it: issue one with names"
        )
    return Diagnosis.ok(text)


def chain(certificate: str, key: str, authority: str, server_name: str | None) -> Diagnosis:
    """Make a handshake in memory, as a caller with this authority would."""
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate, key, password=lambda: "")
        client = ssl.create_default_context(cafile=authority)
        client.check_hostname = server_name is not None
        _shake_hands(server, client, server_name)
    except (OSError, ValueError) as error:
        why = getattr(error, "verify_message", "") or str(error)
        return Diagnosis.bad(
            f"DYN_TCP_TLS_CA_CERT_PATH: callers refuse {certificate}: {why}",
            "name the authority that signed it, and the name in it (DYN_TCP_TLS_SERVER_NAME)",
        )
    return Diagnosis.ok(f"callers trust {certificate}" + (f" as {server_name}" if server_name else ""))


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> None:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(down, up, server_hostname=name)
    listener = server.wrap_bio(up, down, server_side=True)
    waiting = [caller, listener]
    for _ in range(20):  # a handshake has a handful of turns
        for end in list(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
        if not waiting:
            return
    raise ValueError("the handshake does not end")


def _decoded(path: str) -> dict[str, Any]:
    """Return the first certificate of a file; the standard library decodes one outside a connection here only."""
    found: dict[str, Any] = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]
    return found
