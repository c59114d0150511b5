"""Checks of what is reached over the network: the frontend, its ports, discovery, NATS."""

from __future__ import annotations

import secrets
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from dynamo.cli.api_client import ServerError
from dynamo.cli.doctor.diagnosis import Diagnosis, Examined
from dynamo.cli.inspect.client import ViewQuery
from dynamo.cli.status import VIEWS, troubles_of
from dynamo.errors import InvalidArgument
from dynamo.runtime.base.settings import discovery_store
from dynamo.runtime.discovery.etcd.client import parse_endpoints, tls_context

# Checks of the certificates that the settings name: key, dates, names, chain.

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


def _decoded(path: str) -> dict[str, object]:
    """Return the first certificate of a file; the standard library decodes one outside a connection here only."""
    found: dict[str, object] = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]
    return found


TIMEOUT_SECONDS: Final = 3.0
SLOW_SECONDS: Final = 0.25  # a fortieth of the shortest usual lease


def frontend(examined: Examined) -> Iterator[Diagnosis]:
    """Get the frontend's own list of what is wrong."""
    try:
        picture = examined.client.picture(ViewQuery(VIEWS))
    except ServerError as error:
        if error.status is not None:
            yield Diagnosis.warn(
                f"{examined.client.url} does not say how it is: {error}", "give a key that may use the inspector: --key"
            )
        elif examined.names_frontend:
            yield Diagnosis.bad(str(error), "start it, or name another address with --url")
        else:
            yield Diagnosis.ok(f"no frontend runs at {examined.client.url}")
        return
    troubles = list(troubles_of(picture))
    if not troubles:
        yield Diagnosis.ok(f"{examined.client.url} is ready")
    for trouble in troubles:
        yield Diagnosis.warn(f"{trouble.subject}: {trouble.text}", "dynamo status and dynamo top show more")


def ports(examined: Examined) -> Iterator[Diagnosis]:
    """Try the ports that the settings name."""
    settings = examined.settings
    asked = {"DYN_HTTP_PORT": (settings.http_host, examined.port)}
    if settings.runtime.requests.rpc_port:
        asked["DYN_TCP_RPC_PORT"] = (
            settings.runtime.requests.rpc_host or "127.0.0.1",
            settings.runtime.requests.rpc_port,
        )
    for name, (host, port) in asked.items():
        yield port_use(name, host, port, is_ours=name == "DYN_HTTP_PORT" and _answers(examined))


def _answers(examined: Examined) -> bool:
    try:
        with examined.client.answered("/live"):
            return True
    except ServerError as error:
        return error.status is not None


def port_use(name: str, host: str, port: int, *, is_ours: bool) -> Diagnosis:
    """Judge whether a process could listen at a port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
    except OSError as error:
        if is_ours:
            return Diagnosis.ok(f"{name} {port}: a frontend listens there")
        return Diagnosis.bad(
            f"{name}: {host}:{port} is not to be had: {error.strerror or error}",
            "stop what listens there, or choose another port",
        )
    return Diagnosis.ok(f"{name} {port} is free")


# -- discovery ---------------------------------------------------------------------------------------------------------


def discovery(examined: Examined) -> Iterator[Diagnosis]:
    """Reach the store of discovery, and measure how long it takes."""
    runtime = examined.settings.runtime
    store = discovery_store(runtime.discovery_backend, runtime.etcd.endpoints)
    if store == "file":
        if runtime.discovery_backend == "etcd":
            yield Diagnosis.warn(
                "discovery asks for etcd without ETCD_ENDPOINTS: it is the file store", "set ETCD_ENDPOINTS"
            )
        yield file_store(runtime.file_root)
    elif store == "etcd":
        try:
            endpoints = parse_endpoints(runtime.etcd)
            tls = tls_context(runtime.etcd) if endpoints[0].startswith("https:") else None
        except InvalidArgument as error:
            yield Diagnosis.bad(str(error), "mend it: no process with it starts")
            return
        for endpoint in endpoints:
            yield etcd_answer(endpoint, tls)
    elif store == "kubernetes":
        if "KUBERNETES_SERVICE_HOST" in examined.env or "KUBECONFIG" in examined.env:
            yield Diagnosis.ok("discovery is Kubernetes, whose API this process can find")
        else:
            yield Diagnosis.bad("discovery is Kubernetes, and there is none here", "run in a pod, or set KUBECONFIG")
    else:
        yield Diagnosis.ok(f"discovery is {store}")


def file_store(root: Path) -> Diagnosis:
    """Write, read and remove a file where the file store is, or would be."""
    folder = next((one for one in (root, *root.absolute().parents) if one.is_dir()), Path("/"))
    path = folder / f".doctor-{secrets.token_hex(8)}"
    began = time.monotonic()
    try:
        try:
            path.write_bytes(b"here")
            path.read_bytes()
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return Diagnosis.bad(
            f"the file store {root} cannot be written: {error.strerror or error}",
            "set DYN_FILE_KV to a directory of your own",
        )
    return round_trip(f"the file store {root}", time.monotonic() - began)


def etcd_answer(endpoint: str, tls: ssl.SSLContext | None = None) -> Diagnosis:
    """Get the health of one etcd, a URL."""
    began = time.monotonic()
    try:
        with _direct(tls).open(f"{endpoint}/health", timeout=TIMEOUT_SECONDS) as answer:
            healthy = b'"true"' in answer.read(1000).replace(b": ", b":")
    except urllib.error.HTTPError as error:
        return Diagnosis.bad(f"etcd at {endpoint} answers {error.code}", "look at its log")
    except (OSError, ValueError) as error:
        return Diagnosis.bad(
            f"etcd at {endpoint} cannot be reached: {getattr(error, 'reason', error)}",
            "start it, or mend ETCD_ENDPOINTS",
        )
    if not healthy:
        return Diagnosis.bad(f"etcd at {endpoint} is not healthy", "look at its log: it may have lost its quorum")
    return round_trip(f"etcd at {endpoint}", time.monotonic() - began)


def _direct(tls: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """Return an opener without the proxy that the environment may name: no process of ours reaches its store through one."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))


def round_trip(what: str, seconds: float) -> Diagnosis:
    """Judge how long a store took to answer."""
    text = f"{what} answers in {seconds * 1000:.1f} ms"
    if seconds <= SLOW_SECONDS:
        return Diagnosis.ok(text)
    return Diagnosis.warn(text, "leases are kept alive through it: find out why it is slow")


# -- NATS --------------------------------------------------------------------------------------------------------------


def nats(examined: Examined) -> Iterator[Diagnosis]:
    """Reach NATS, where a plane uses it."""
    runtime = examined.settings.runtime
    if "nats" not in (runtime.request_plane, runtime.event_plane) and not examined.env.get("NATS_SERVER"):
        return
    for server in runtime.nats.servers:
        yield nats_greeting(server)


def nats_greeting(server: str) -> Diagnosis:
    """Connect to one server and read its greeting."""
    parts = urlsplit(server if "://" in server else f"nats://{server}")
    began = time.monotonic()
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 4222), TIMEOUT_SECONDS) as one:
            greeting = one.recv(64)
    except (OSError, ValueError) as error:
        return Diagnosis.bad(
            f"NATS at {parts.hostname}:{parts.port or 4222} cannot be reached: {error}", "start it, or mend NATS_SERVER"
        )
    if not greeting.startswith(b"INFO"):
        return Diagnosis.bad(f"what listens at {parts.hostname}:{parts.port or 4222} is not NATS", "mend NATS_SERVER")
    return round_trip(f"NATS at {parts.hostname}:{parts.port or 4222}", time.monotonic() - began)
