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
from typing import Final
from urllib.parse import urlsplit

from dynamo.cli.api_client import ServerError
from dynamo.cli.doctor.diagnosis import Diagnosis, Examined
from dynamo.cli.inspect.client import ViewQuery
from dynamo.cli.status import VIEWS, troubles_of
from dynamo.errors import InvalidArgument
from dynamo.runtime.base.settings import discovery_store
from dynamo.runtime.discovery.etcd.client import parse_endpoints, tls_context

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
