"""The settings of the runtime: the tables of what every process reads once, at its edge, into frozen values.

One rule for variables without a flag: unset and blank mean the default. A value that cannot be read is a warning that names
the variable and what is used instead, never a crash at 3 a.m.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from dynamo.errors import InvalidArgument
from dynamo.runtime.base.addresses import LOOPBACK
from dynamo.runtime.base.http_limits import HttpLimits
from dynamo.settings.credentials import without_credentials
from dynamo.settings.readers import (
    SettingReader,
    folder,
    host_names,
    integer,
    kibibytes,
    mebibytes,
    number,
    one_of,
    port,
    seconds,
    switch,
    text,
    words,
)
from dynamo.settings.table import NO_FLAGS, Status, declared, read_settings, section, setting, setting_of

logger = logging.getLogger(__name__)

DISCOVERY_BACKENDS: Final = ("auto", "file", "mem", "etcd", "kubernetes")
RESPONSE_PLANES: Final = ("tcp", "quic")

_MIB: Final = 1024 * 1024
_PLANES: Final = "discovery and transport"
_TLS: Final = "transport security"
_CHAOS: Final = "fault injection"


class FromEnvironment:
    """A table that can be read from the variables of this process."""

    __slots__ = ()

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, given: Mapping[str, object] = NO_FLAGS) -> Self:
        """Read the settings of this process; `given`: parsed arguments, which win over the variables."""
        return read_settings(cls, os.environ if env is None else env, given)


def env_int(name: str, default: int, *, minimum: int | None = None, env: Mapping[str, str] | None = None) -> int:
    """Read an integer, at least `minimum`."""
    found: int = declared(name, integer(minimum), "", unset=default).value(os.environ if env is None else env)
    return found


def env_float(
    name: str, default: float, *, minimum: float | None = None, env: Mapping[str, str] | None = None
) -> float:
    """Read a finite number, at least `minimum`."""
    found: float = declared(name, number(minimum), "", unset=default).value(os.environ if env is None else env)
    return found


# -- requests between processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestPlaneSettings(FromEnvironment):
    """`DYN_TCP_*` and the request limits of the worker's side (spec names; sizes in bytes, times in seconds)."""

    # fmt: off
    rpc_host: str | None = setting(None, "DYN_TCP_RPC_HOST", text,
        "Where a worker listens, and what its record advertises. With `file` or `mem` discovery 127.0.0.1; `0.0.0.0` "
        "listens everywhere and advertises this machine's address", shown="127.0.0.1 or this machine's address")
    rpc_port: int = setting(0, "DYN_TCP_RPC_PORT", integer(0), "Its port; 0: any free port")
    listen_backlog: int = setting(1024, "DYN_TCP_LISTEN_BACKLOG", integer(1),
        "Connections that the system may hold until they are accepted")
    connect_timeout_seconds: float = setting(5.0, "DYN_TCP_CONNECT_TIMEOUT", seconds(0.1),
        "How long connecting to a worker may take")
    request_timeout_seconds: float = setting(5.0, "DYN_TCP_REQUEST_TIMEOUT", seconds(0.1),
        "Until a native worker must have acknowledged a request; then its connection is given up")
    response_host: str | None = setting(None, "DYN_TCP_RESPONSE_STREAM_HOST", text,
        "Where a caller listens for the answers of native workers, which connect back, and what it tells them",
        shown="as `DYN_TCP_RPC_HOST`")
    response_port: int = setting(0, "DYN_TCP_RESPONSE_STREAM_PORT", integer(0), "Its port; 0: any free port")
    pool_size: int = setting(100, "DYN_TCP_POOL_SIZE", integer(1),
        "Request connections of a caller to one native worker; one is enough until 16 requests on it wait for their "
        "acknowledgement")
    pipeline_limit: int = setting(1024, "DYN_TCP_CHANNEL_BUFFER", integer(1),
        "Requests without an acknowledgement on one of them; the next one is declined as overloaded")
    dial_limit: int = setting(64, "DYN_TCP_GLOBAL_CONNECT_LIMIT", integer(1),
        "Connections to native workers being opened at once")
    idle_host_seconds: float = setting(300.0, "DYN_TCP_HOST_IDLE_TTL_SECS", seconds(1),
        "Until a caller closes a connection to a native worker that has nothing to do")
    max_message_bytes: int = setting(32 * _MIB, "DYN_TCP_MAX_MESSAGE_SIZE", integer(1024, unit="bytes"),
        "Size of one request or one native message")
    # One per frontend for `mux`, up to 100 per frontend on the native wire.
    max_connections: int = setting(4096, "DYN_TCP_MAX_CONNECTIONS", integer(1),
        "Connections to a worker at once, fewer where the process may not open so many files")
    handshake_timeout_seconds: float = setting(10.0, "DYN_TCP_HANDSHAKE_TIMEOUT_SECS", seconds(0.1),
        "How long a connection may take to say which wire it speaks, and its HELLO; at a caller, which stream it "
        "brings")
    tls_handshake_timeout_seconds: float = setting(3.0, "DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS", seconds(0.1),
        "How long a TLS handshake may take, on either side")
    secret_path: str | None = setting(None, "DYN_TCP_SECRET_PATH", text,
        "File with the shared secret of `mux`: see [security](security.md)")
    max_unauthenticated: int = setting(256, "DYN_TCP_MAX_UNAUTHENTICATED", integer(1),
        "Connections that have not ended their TLS handshake; likewise, those that have not proven the secret")
    message_timeout_seconds: float = setting(30.0, "DYN_TCP_MESSAGE_TIMEOUT_SECS", seconds(0.1),
        "From the first byte of a request to its last")
    pending_bytes: int = setting(256 * _MIB, "DYN_TCP_PENDING_BODIES_LIMIT_MB", mebibytes,
        "Size of all requests that are still arriving. When it is used up, a connection that holds less than the "
        "average gets room from the one that holds most")
    connection_pending_bytes: int = setting(64 * _MIB, "DYN_TCP_CONNECTION_BODIES_LIMIT_MB", mebibytes,
        "Size of those on one connection; one request of `DYN_TCP_MAX_MESSAGE_SIZE` always fits")
    max_decoded_bytes: int = setting(256 * _MIB, "DYN_TCP_MAX_DECODED_MB", mebibytes,
        "Memory that one request may take once it is decoded, estimated before it is decoded")
    call_home_networks: tuple[str, ...] = setting((), "DYN_TCP_CALL_HOME_NETWORKS", words,
        "Where a worker may bring the answer of a native caller besides the caller's own address: networks, "
        "addresses, host names, with commas between them; `any`: everywhere")
    max_streams: int = setting(16_384, "DYN_TCP_MAX_STREAMS", integer(1), "Requests in flight on one `mux` connection")
    silence_seconds: float = setting(90.0, "DYN_TCP_SILENCE_SECS", seconds(1),
        "How long a `mux` caller, which pings every 20 s, may be silent")
    idle_seconds: float = setting(600.0, "DYN_TCP_IDLE_CONNECTION_SECS", seconds(1),
        "How long a native connection without a request is kept; native callers close theirs after 300 s")
    write_stall_seconds: float = setting(60.0, "DYN_TCP_WRITE_STALL_SECS", seconds(0.1),
        "How long a caller may leave what was sent to it unread; then it is cut, and its requests are killed")
    credit_stall_seconds: float = setting(300.0, "DYN_TCP_CREDIT_STALL_SECS", seconds(0.1),
        "The same for one stream of a `mux` connection; keep it above `DYN_HTTP_WRITE_STALL_SECS`")
    worker_pool_size: int = setting(10_000, "DYN_TCP_WORKER_POOL_SIZE", integer(1),
        "Requests a worker runs at once, unless `DYN_ENGINE_REQUEST_LIMIT` is set")
    work_queue_size: int = setting(40_000, "DYN_TCP_WORK_QUEUE_SIZE", integer(0),
        "Requests that wait, likewise; the next one is declined")
    engine_request_limit: int | None = setting(None, "DYN_ENGINE_REQUEST_LIMIT", integer(1),
        "Requests a worker runs at once; a few more wait, the rest are declined",
        flag="--engine-request-limit", group="operation")
    engine_queue_limit: int = setting(16, "DYN_DYNAMO_REQUEST_QUEUE_LIMIT", integer(0),
        "Requests that wait when `DYN_ENGINE_REQUEST_LIMIT` is set")
    nats_timeout_seconds: float = setting(10.0, "DYN_NATS_REQUEST_TIMEOUT_SECS", seconds(0.1),
        "Until a worker must have taken a request over NATS, and how long one waits for a lost server to come back")
    tls_cert_path: str | None = setting(None, "DYN_TCP_TLS_CERT_PATH", text,
        "Certificate of the listener: of a worker, which takes TLS only then; of a frontend, for the answers that "
        "native workers bring over connections of their own. See [security](security.md) for this and the next seven",
        flag="--tcp-tls-cert-path", group=_TLS)
    tls_key_path: str | None = setting(None, "DYN_TCP_TLS_KEY_PATH", text,
        "Its key", flag="--tcp-tls-key-path", group=_TLS)
    tls_ca_cert_path: str | None = setting(None, "DYN_TCP_TLS_CA_CERT_PATH", text,
        "Call others with TLS: a frontend its workers; this authority signs their certificates",
        flag="--tcp-tls-ca-cert-path", group=_TLS)
    tls_insecure: bool = setting(False, "DYN_TCP_TLS_INSECURE", switch,
        "Call others with TLS and accept any certificate", flag="--tcp-tls-insecure", group=_TLS)
    tls_server_name: str | None = setting(None, "DYN_TCP_TLS_SERVER_NAME", text,
        "The name in the others' certificates, where it is not the address they are reached at",
        flag="--tcp-tls-server-name", group=_TLS)
    tls_client_cert_path: str | None = setting(None, "DYN_TCP_TLS_CLIENT_CERT_PATH", text,
        "Certificate shown to others (mutual TLS)", flag="--tcp-tls-client-cert-path", group=_TLS)
    tls_client_key_path: str | None = setting(None, "DYN_TCP_TLS_CLIENT_KEY_PATH", text,
        "Its key", flag="--tcp-tls-client-key-path", group=_TLS)
    tls_client_ca_cert_path: str | None = setting(None, "DYN_TCP_TLS_CLIENT_CA_CERT_PATH", text,
        "Who calls, or at a frontend brings answers as a native worker, must show a certificate of this authority",
        flag="--tcp-tls-client-ca-cert-path", group=_TLS)
    # fmt: on

    @property
    def largest_connection_pending_bytes(self) -> int:
        """What the requests that arrive on one connection may hold: at least one message always fits."""
        return max(self.connection_pending_bytes, self.max_message_bytes)


# -- the status server ------------------------------------------------------------------------------------------------


def _read_port_or_none(given: str) -> int:
    return -1 if given == "-1" else port.parse(given)


def _read_admin_port(given: str) -> int | None:
    return None if given == "-1" else port.parse(given)


def _read_starting_ready(given: str) -> bool:
    return one_of("ready", "notready").parse(given) == "ready"


_route: Final = SettingReader(lambda given: given if given.startswith("/") else f"/{given}")
_REQUEST_SECONDS: Final = (
    10.0,
    "DYN_SYSTEM_REQUEST_TIMEOUT_SECS",
    seconds(0.1),
    "From the first byte of a request to its last",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusLimits(HttpLimits, FromEnvironment):
    """What the clients of a status server may cost."""

    # fmt: off
    max_connections: int = setting(256, "DYN_SYSTEM_MAX_CONNECTIONS", integer(1), "Connections at once")
    header_limit_bytes: int = setting(16 * 1024, "DYN_SYSTEM_HEADER_LIMIT_KB", kibibytes(1),  # probes send below 4 KiB
        "Size of the request line and headers")
    header_count_limit: int = setting(64, "DYN_SYSTEM_HEADER_COUNT_LIMIT", integer(1), "Number of headers")
    # Admin bodies are small; a list of LoRA adapters is the largest.
    body_limit_bytes: int = setting(8 * _MIB, "DYN_SYSTEM_BODY_LIMIT_MB", mebibytes,
        "Size of a request body")
    header_timeout_seconds: float = setting(*_REQUEST_SECONDS)
    body_timeout_seconds: float = setting(*_REQUEST_SECONDS)
    # Above the 60 s for which proxies commonly keep a connection.
    idle_seconds: float = setting(75.0, "DYN_SYSTEM_IDLE_CONNECTION_SECS", seconds(0.1),
        "How long a connection without a request is kept")
    pipeline_limit: int = setting(8, "DYN_SYSTEM_PIPELINE_LIMIT", integer(1),
        "Requests of one connection that wait behind the one being answered")
    write_stall_seconds: float = setting(30.0, "DYN_SYSTEM_WRITE_STALL_SECS", seconds(0.1),
        "How long a client may leave its answer unread")
    json_depth_limit: int = setting(128, "DYN_SYSTEM_JSON_DEPTH_LIMIT", integer(4, 512),
        "Arrays and objects inside each other, at most 512")
    # fmt: on


@dataclass(frozen=True, slots=True)
class SystemSettings(FromEnvironment):
    """`DYN_SYSTEM_*`: the status server of a worker."""

    # fmt: off
    port: int = setting(-1, "DYN_SYSTEM_PORT", SettingReader(_read_port_or_none),
        "Port of `/health`, `/live` and `/metrics`, and of `/engine/...` while it is bound to loopback; -1: none, 0: "
        "any free port, which the log names. A frontend ignores it")
    host: str | None = setting(None, "DYN_SYSTEM_HOST", text,
        "Address to listen on. With `file` or `mem` discovery 127.0.0.1, else every address",
        shown="127.0.0.1 or 0.0.0.0")
    admin_port: int | None = setting(None, "DYN_ADMIN_PORT", SettingReader(_read_admin_port),
        "Port that serves `/engine/...` and `/v1/loras`, and then nothing else does; 0: any free port, which the log "
        "names. Unset: they are on `DYN_SYSTEM_PORT` while that is bound to loopback, else nowhere. Needs "
        "`DYN_SYSTEM_PORT`. See [admin routes](security.md#admin-routes)")
    admin_host: str = setting(LOOPBACK, "DYN_ADMIN_HOST", text, "Address of that port; no key protects it")
    allowed_hosts: tuple[str, ...] = setting((), "DYN_ALLOWED_HOSTS", host_names,
        "A name by which this process is reached over HTTP beside addresses and `localhost` (repeatable, in the variable "
        "separated by commas; `*`: any); see [web pages](security.md#web-pages)",
        flag="--allowed-host", group="http", repeats=True, shown="none on loopback, else `*`")
    health_path: str = setting("/health", "DYN_SYSTEM_HEALTH_PATH", _route, "Where the health of this process is read")
    live_path: str = setting("/live", "DYN_SYSTEM_LIVE_PATH", _route, "Where whether it is alive is read")
    starting_ready: bool | None = setting(None, "DYN_SYSTEM_STARTING_HEALTH_STATUS", SettingReader(_read_starting_ready),
        "`ready` or `notready`; unset: ready as soon as all endpoints serve")
    lora_enabled: bool = setting(False, "DYN_LORA_ENABLED", switch, "Serve `/v1/loras`")
    # fmt: on
    limits: StatusLimits = section(StatusLimits)

    @property
    def enabled(self) -> bool:
        return self.port >= 0

    def settle(self, env: Mapping[str, str]) -> Self:
        """Log a warning for each variable that means nothing any more."""
        for ignored in IGNORED:
            if ignored.variable and env.get(ignored.variable, "").strip():
                logger.warning(
                    "%s is deprecated and ignored; DYN_SYSTEM_PORT >= 0 starts the status server", ignored.variable
                )
        return self


IGNORED: Final = tuple(
    declared(name, text, "Deprecated and ignored, with a warning", status=Status.IGNORED)
    for name in ("DYN_SYSTEM_ENABLED", "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS")
)


@dataclass(frozen=True, slots=True)
class CanarySettings(FromEnvironment):
    """`DYN_HEALTH_CHECK_*`: the probe of idle endpoints."""

    # fmt: off
    enabled: bool = setting(False, "DYN_HEALTH_CHECK_ENABLED", switch, "Probe idle endpoints with the canary's request")
    wait_seconds: float = setting(10.0, "DYN_CANARY_WAIT_TIME", seconds(0.01), "Idle time before a probe")
    timeout_seconds: float = setting(3.0, "DYN_HEALTH_CHECK_REQUEST_TIMEOUT", seconds(0.01),
        "Time for the probe's first item, and for each one after it")
    # fmt: on


@dataclass(frozen=True, slots=True)
class ProgressSettings(FromEnvironment):
    """When an engine whose requests stand still is reported."""

    # fmt: off
    limit_seconds: float = setting(300.0, "DYN_HEALTH_PROGRESS_TIMEOUT_SECS", seconds(),
        "An engine with requests of which none has had a token for so long is not ready, and `/health` says why; 0: "
        "never. Longer than the longest prefill, or an engine that is well is restarted")
    # fmt: on


@dataclass(frozen=True, slots=True)
class WatchdogSettings(FromEnvironment):
    """When a callback that blocks the event loop is reported."""

    # fmt: off
    # A stream that pauses for a second is seen by its reader.
    threshold_seconds: float = setting(1.0, "DYN_LOOP_BLOCK_THRESHOLD_SECS", seconds(),
        "A callback that keeps the event loop for longer is reported in the log with its file and line, and counted; "
        "until it returns `/health` is 503 and says so, and afterwards names the last block; 0: not watched")
    # fmt: on


# -- discovery --------------------------------------------------------------------------------------------------------


def _read_ttl(given: str) -> float:
    value = integer().parse(given)
    if value <= 0:  # not the nearest that is allowed: a lease of 1 s is hardly what was meant
        raise ValueError(f"{value} is not a valid TTL")
    return value


def _read_duration(given: str) -> float | None:
    value = number().parse(given)
    if value < 0:
        raise ValueError(f"{given} is not a valid duration")
    return value or None


_ttl: Final = SettingReader(_read_ttl, show=lambda value: f"{value:g}", unit="s")
_duration: Final = SettingReader(_read_duration, unit="s")


@dataclass(frozen=True, slots=True)
class EtcdSettings(FromEnvironment):
    """`ETCD_*`: where etcd is and how it is talked to (times in seconds; None: see the property of that name)."""

    # fmt: off
    endpoints: str | None = setting(None, "ETCD_ENDPOINTS", text,
        "Where etcd is: `http://HOST:PORT`, `https://HOST:PORT` or `HOST:PORT`, with commas between several. Not "
        "set, `etcd` means `file`, with a warning. See [discovery](discovery.md#etcd)")
    lease_ttl_seconds: float = setting(10.0, "ETCD_LEASE_TTL", _ttl,
        "Whole seconds until a dead process is forgotten; etcd raises what is too short for it (below 2 as it comes)")
    username: str | None = setting(None, "ETCD_AUTH_USERNAME", text, "Needs `ETCD_AUTH_PASSWORD`")
    password: str | None = setting(None, "ETCD_AUTH_PASSWORD", text, "Needs `ETCD_AUTH_USERNAME`", secret=True)
    ca: str | None = setting(None, "ETCD_AUTH_CA", text,
        "Certificates that vouch for the server: a path, or PEM text", shown="the system's")
    client_cert: str | None = setting(None, "ETCD_AUTH_CLIENT_CERT", text,
        "A path, or PEM text. Needs `ETCD_AUTH_CLIENT_KEY`")
    client_key: str | None = setting(None, "ETCD_AUTH_CLIENT_KEY", text,
        "A path, or PEM text. Needs `ETCD_AUTH_CLIENT_CERT`", secret=True)
    startup_timeout_seconds: float = setting(5.0, "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", seconds(0.1),
        "How long a process that starts waits for etcd; raise it where they start together")
    # A third, because one renewal may get lost.
    keepalive_interval_seconds: float | None = setting(None, "ETCD_KEEPALIVE_INTERVAL_SECONDS", _duration,
        "Between renewals of the lease; more than that third counts as that third", shown="a third of the TTL")
    # A sixth, so that two other endpoints can still be tried in time.
    keepalive_timeout_seconds: float | None = setting(None, "ETCD_KEEPALIVE_TIMEOUT_SECONDS", _duration,
        "How long one endpoint may take to answer", shown="a sixth of the TTL")
    # fmt: on

    @property
    def address(self) -> str:
        """The endpoints, for people; without the passwords that they may hold."""
        return without_credentials(self.endpoints or "")


@dataclass(frozen=True, slots=True)
class KubernetesSettings(FromEnvironment):
    """The identity of this process in its cluster: the downward API's files, or variables of the same meaning."""

    # fmt: off
    pod_name: str | None = setting(None, "POD_NAME", text,
        "Name of this pod, where the downward API has not written the file of that name to `/etc/podinfo`")
    pod_namespace: str | None = setting(None, "POD_NAMESPACE", text, "Its namespace, likewise")
    pod_uid: str | None = setting(None, "POD_UID", text, "Its uid, likewise")
    container_name: str | None = setting(None, "CONTAINER_NAME", text, "Which container this is, for the mode `container`")
    mode: str = setting("pod", "DYN_KUBE_DISCOVERY_MODE", one_of("pod", "container"),
        "`pod`, or `container`: several workers in one pod, each ready by itself; see "
        "[discovery](discovery.md#kubernetes)")
    # fmt: on

    @property
    def resource_name(self) -> str:
        """The name of this process's resource; "" while the pod's is not known."""
        if self.mode == "pod" or self.pod_name is None or self.container_name in (None, "main"):
            return self.pod_name or ""
        return f"{self.pod_name}-{self.container_name}"

    def settle(self, env: Mapping[str, str], podinfo: Path = Path("/etc/podinfo")) -> Self:
        """Name the pod of this process."""

        def identity(field: str) -> str | None:
            file = podinfo / field
            try:
                found = file.read_text().strip()
            except FileNotFoundError:
                found = ""
            except OSError as error:
                variable = setting_of(KubernetesSettings, field).variable
                logger.warning("%s cannot be read (%s); using the variable %s", file, error.strerror, variable)
                found = ""
            return found or getattr(self, field)

        return replace(
            self,
            pod_name=identity("pod_name"),
            pod_namespace=identity("pod_namespace"),
            pod_uid=identity("pod_uid"),
        )


def discovery_store(backend: str, etcd_endpoints: str | None) -> str:
    """Return the store of a discovery backend's name: "auto" and "etcd" are files until an etcd is named.

    The guide's own engine selects "etcd" unless an operator chooses. Where no etcd is named, the file store lets its
    commands run as printed on one machine; a deployment that has an etcd sets ETCD_ENDPOINTS.
    """
    name = backend.lower()
    return ("etcd" if etcd_endpoints else "file") if name in ("auto", "etcd") else name


# -- events -----------------------------------------------------------------------------------------------------------

_TCP: Final = re.compile(r"tcp://[^/\s]+:\d{1,5}")


@dataclass(frozen=True, slots=True)
class ZmqBroker:
    """Where a ZMQ broker takes events (`xsub`) and gives them (`xpub`); several of each are equals."""

    xsub: tuple[str, ...]
    xpub: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ZmqBroker:
        """Read `xsub=tcp://a:1;tcp://b:1 , xpub=tcp://a:2;tcp://b:2`. Raises InvalidArgument naming the variable."""
        sides: dict[str, tuple[str, ...]] = {}
        for side in text.split(","):
            name, _, endpoints = side.partition("=")
            sides[name.strip()] = tuple(each.strip() for each in endpoints.split(";") if each.strip())
        broker = cls(sides.pop("xsub", ()), sides.pop("xpub", ()))
        named = (*broker.xsub, *broker.xpub)
        if sides or not broker.xsub or not broker.xpub or not all(_TCP.fullmatch(each) for each in named):
            raise InvalidArgument(
                f"DYN_ZMQ_BROKER_URL={text!r} is not understood; write xsub=tcp://HOST:PORT,xpub=tcp://HOST:PORT, several "
                "endpoints of a side divided by ;"
            )
        return broker


@dataclass(frozen=True, slots=True)
class EventPlaneSettings(FromEnvironment):
    """How events travel over ZMQ. Reading raises InvalidArgument for a broker that cannot be read."""

    # fmt: off
    host: str | None = setting(None, "DYN_EVENT_PLANE_HOST", text,
        "Where `zmq` publishers say they are. A loopback address is also all they bind; `dynamo serve` sets 127.0.0.1",
        shown="this machine's address")
    io_threads: int = setting(1, "DYN_ZMQ_IO_THREADS", integer(1),
        "Threads of ZMQ in a process that publishes or subscribes")
    subscriber_capacity: int = setting(100_000, "DYN_ZMQ_EVENT_SUBSCRIBER_CHANNEL_CAPACITY", integer(1),
        "Events of one subscriber that nobody has read; further ones are dropped and counted. For `nats` too")
    broker: ZmqBroker | None = setting(None, "DYN_ZMQ_BROKER_URL", SettingReader(ZmqBroker.parse),
        "`xsub=tcp://HOST:PORT,xpub=tcp://HOST:PORT`: `zmq` through a broker; several endpoints of a side are "
        "divided by `;`")
    broker_enabled: bool = setting(False, "DYN_ZMQ_BROKER_ENABLED", switch,
        "`zmq` through the broker that has announced itself in discovery")
    # fmt: on

    def settle(self, env: Mapping[str, str]) -> Self:
        """Enable the broker that is named."""
        return self if self.broker is None else replace(self, broker_enabled=True)


def _read_servers(given: str) -> tuple[str, ...]:
    return tuple(each if "://" in each else f"nats://{each}" for each in words.parse(given))


@dataclass(frozen=True, slots=True)
class NatsSettings(FromEnvironment):
    """Where NATS is and how to get in. Of several ways to authenticate the first one set counts, in this order."""

    # fmt: off
    servers: tuple[str, ...] = setting(("nats://localhost:4222",), "NATS_SERVER", SettingReader(_read_servers, show=",".join),
        "Servers of NATS, with commas between them")
    username: str | None = setting(None, "NATS_AUTH_USERNAME", text,
        "The first way to authenticate, where the password is set too")
    password: str | None = setting(None, "NATS_AUTH_PASSWORD", text, "Of this user", secret=True)
    token: str | None = setting(None, "NATS_AUTH_TOKEN", text, "The second way", secret=True)
    nkey: str | None = setting(None, "NATS_AUTH_NKEY", text, "The third: an nkey's seed", secret=True)
    credentials_file: str | None = setting(None, "NATS_AUTH_CREDENTIALS_FILE", text,
        "The fourth: a file with credentials")
    tls_ca_path: str | None = setting(None, "NATS_TLS_CA_CERT_PATH", text,
        "Authority of the NATS server; it or the next ones turn TLS on", flag="--nats-tls-ca-cert-path", group=_TLS)
    tls_insecure: bool = setting(False, "NATS_TLS_INSECURE", switch,
        "Do not verify the NATS server", flag="--nats-tls-insecure", group=_TLS)
    tls_client_cert_path: str | None = setting(None, "NATS_TLS_CLIENT_CERT_PATH", text,
        "Certificate shown to the NATS server", flag="--nats-tls-client-cert-path", group=_TLS)
    tls_client_key_path: str | None = setting(None, "NATS_TLS_CLIENT_KEY_PATH", text,
        "Its key", flag="--nats-tls-client-key-path", group=_TLS)
    connect_timeout_seconds: float = setting(4.0, "NATS_STARTUP_CONNECT_TIMEOUT_SECONDS", seconds(0.1),
        "How long a start waits for NATS. A connection that was there is sought for ever")
    # fmt: on

    def settle(self, env: Mapping[str, str]) -> Self:
        """Drop half of a user: it would be refused, where the next way might do."""
        is_whole = self.username is not None and self.password is not None
        return self if is_whole else replace(self, username=None, password=None)

    @property
    def address(self) -> str:
        """The servers, for people; without what a URL may hold of passwords."""
        return ", ".join(map(without_credentials, self.servers))

    @property
    def wants_tls(self) -> bool:
        own = (self.tls_ca_path, self.tls_client_cert_path)
        return any(own) or self.tls_insecure or any(server.startswith("tls://") for server in self.servers)


# -- fault injection --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChaosSettings(FromEnvironment):
    """Faults that this process injects into itself, and the permission to do so."""

    # fmt: off
    plan: str | None = setting(None, "DYN_CHAOS", text,
        "Break as this plan (TOML) says: [chaos plans](chaos.md). Refused without the next one",
        flag="--chaos", group=_CHAOS)
    is_allowed: bool = setting(False, "DYN_ALLOW_CHAOS", switch,
        "Permit fault injection in this process", flag="--allow-chaos", group=_CHAOS)
    name: str | None = setting(None, "DYN_CHAOS_NAME", text,
        "What this process is called in the plan", flag="--chaos-name", group=_CHAOS, shown="`worker` or `frontend`")
    # fmt: on


# -- all of it --------------------------------------------------------------------------------------------------------

_FILE_ROOT: Final = Path("/tmp/dynamo_store_kv")


TEMPORARY: Final = declared("TMPDIR", text, "Only for the default of `DYN_FILE_KV`", unset="/tmp")


@dataclass(frozen=True, slots=True)
class RuntimeSettings(FromEnvironment):
    """All settings of one runtime: its planes, and how its parts behave (times in seconds)."""

    # fmt: off
    discovery_backend: str = setting("auto", "DYN_DISCOVERY_BACKEND", one_of(*DISCOVERY_BACKENDS),
        "Where workers and frontends find each other: `file` (one machine), `mem` (one process), `etcd`, "
        "`kubernetes`. `auto` is `etcd` when `ETCD_ENDPOINTS` is set, else `file`. See [Discovery](#discovery)",
        flag="--discovery-backend", group=_PLANES)
    request_plane: str = setting("tcp", "DYN_REQUEST_PLANE", one_of("tcp", "nats", "mem"),
        "How requests come in: `tcp`; `nats`: reach NATS at start. Each worker is called on the plane its record "
        "names, whatever this says. Answers always leave over TCP", flag="--request-plane", group=_PLANES)
    response_plane: str | None = setting(None, "DYN_RESPONSE_PLANE", one_of(*RESPONSE_PLANES),
        "How answers travel on the native wire; `quic` is refused",
        flag="--response-plane", group=_PLANES, shown="`tcp`")
    event_plane: str | None = setting(None, "DYN_EVENT_PLANE", one_of("zmq", "nats", "mem"),
        "How KV events and load reports travel: `zmq` or `nats`, which is reached at start; see [events](events.md)",
        flag="--event-plane", group=_PLANES, shown="`zmq`")
    file_root: Path = setting(_FILE_ROOT, "DYN_FILE_KV", folder,
        "Directory of the file store, which another user may not own; `dynamo_store_kv-UID` where another user has the default",
        shown="$TMPDIR/dynamo_store_kv")
    inhibit_seconds: float = setting(5.0, "DYN_RUNTIME_INHIBITED_DURATION_SECS", seconds(),
        "How long an instance that failed is left out the first time ([quarantine](migration.md#quarantine)); 0: not "
        "at all")
    cuda_to_cpu_ratio: float = setting(8.0, "DYN_ENCODER_CUDA_TO_CPU_RATIO", number(0.001),
        "How many requests a `cuda` instance gets for one of a `cpu` instance, in the mode `device-aware-weighted`")
    cancel_grace_seconds: float = setting(1.0, "DYN_HANDLER_CANCEL_GRACE_SECS", seconds(),
        "How long a handler of the lower-level path, whose caller has gone, may look at its context and clean up "
        "before it is cancelled")
    shutdown_seconds: float = setting(900.0, "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", seconds(),
        "For streams in flight when `DistributedRuntime.shutdown()` was called")
    # fmt: on
    etcd: EtcdSettings = section(EtcdSettings)
    kubernetes: KubernetesSettings = section(KubernetesSettings)
    requests: RequestPlaneSettings = section(RequestPlaneSettings)
    events: EventPlaneSettings = section(EventPlaneSettings)
    nats: NatsSettings = section(NatsSettings)
    system: SystemSettings = section(SystemSettings)
    canary: CanarySettings = section(CanarySettings)
    progress: ProgressSettings = section(ProgressSettings)
    watchdog: WatchdogSettings = section(WatchdogSettings)
    chaos: ChaosSettings = section(ChaosSettings)

    def settle(self, env: Mapping[str, str]) -> Self:
        """Put the file store below TMPDIR where nothing else is set."""
        if self.file_root != _FILE_ROOT:
            return self
        shared = Path(TEMPORARY.value(env)) / _FILE_ROOT.name  # that of native processes, too
        is_taken = sys.platform != "win32" and os.path.lexists(shared) and shared.lstat().st_uid != os.geteuid()
        return replace(self, file_root=shared.with_name(f"{shared.name}-{os.geteuid()}") if is_taken else shared)
