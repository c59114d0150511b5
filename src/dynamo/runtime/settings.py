"""Environment variables, read once at the edge into plain values.

The helpers follow one rule: unset and empty mean the default; a value that cannot be read is a warning naming the
variable and the default, never a crash at 3 a.m.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.runtime.addresses import LOOPBACK

logger = logging.getLogger(__name__)

TRUTHY: Final = frozenset({"1", "true", "on", "yes"})
FALSY: Final = frozenset({"", "0", "false", "off", "no"})


def env_str(name: str, default: str | None = None, *, env: Mapping[str, str] | None = None) -> str | None:
    """Read the variable's text, or `default` when it is unset or blank."""
    value = (os.environ if env is None else env).get(name, "").strip()
    return value or default


def env_bool(name: str, default: bool = False, *, env: Mapping[str, str] | None = None) -> bool:
    """Read a boolean: 1/true/on/yes or 0/false/off/no, any case."""
    value = env_str(name, env=env)
    if value is None:
        return default
    if value.lower() in TRUTHY:
        return True
    if value.lower() not in FALSY:
        logger.warning("%s=%r is neither true nor false; using %s", name, value, default)
        return default
    return False


def env_int(name: str, default: int, *, minimum: int | None = None, env: Mapping[str, str] | None = None) -> int:
    """Read an integer, at least `minimum`."""
    value = env_str(name, env=env)
    if value is None:
        return default
    try:
        number = int(value)
    except ValueError:
        logger.warning("%s=%r is not an integer; using %s", name, value, default)
        return default
    if minimum is not None and number < minimum:
        logger.warning("%s=%r is below %s; using %s", name, value, minimum, minimum)
        return minimum
    return number


def env_float(
    name: str, default: float, *, minimum: float | None = None, env: Mapping[str, str] | None = None
) -> float:
    """Read a finite number, at least `minimum`."""
    value = env_str(name, env=env)
    if value is None:
        return default
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        logger.warning("%s=%r is not a finite number; using %s", name, value, default)
        return default
    if minimum is not None and number < minimum:
        logger.warning("%s=%r is below %s; using %s", name, value, minimum, minimum)
        return minimum
    return number


@dataclass(frozen=True, slots=True)
class RequestPlaneSettings:
    """`DYN_TCP_*` and the request limits of the worker's side (spec names; sizes in bytes, times in seconds)."""

    rpc_host: str | None = None  # None: loopback where discovery is of one machine, else the detected address
    rpc_port: int = 0  # 0: the system chooses
    max_message_bytes: int = 32 * 1024 * 1024
    worker_pool_size: int = 10_000
    work_queue_size: int = 40_000
    engine_request_limit: int | None = None  # set: it and `engine_queue_limit` replace the two sizes above
    engine_queue_limit: int = 16
    listen_backlog: int = 1024
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 5.0  # from a native request to its ACK
    response_host: str | None = None  # where native workers bring their answers; None: as `rpc_host`
    response_port: int = 0  # 0: the system chooses
    pool_size: int = 100  # native request connections to one worker
    pipeline_limit: int = 1024  # requests without an ACK on one of them
    dial_limit: int = 64  # native connections being opened at once
    idle_host_seconds: float = 300.0  # a native connection without requests is closed after this long
    nats_timeout_seconds: float = 10.0  # until the reply to a request over NATS
    tls_cert_path: str | None = None  # of a listener
    tls_key_path: str | None = None
    tls_client_ca_cert_path: str | None = None  # callers must show a certificate of this authority
    tls_ca_cert_path: str | None = None  # of a caller: the authority of the listeners' certificates
    tls_insecure: bool = False
    tls_server_name: str | None = None
    tls_client_cert_path: str | None = None  # what a caller shows
    tls_client_key_path: str | None = None
    tls_handshake_timeout_seconds: float = 3.0
    secret_path: str | None = None
    max_unauthenticated: int = 256  # connections, where there is TLS or a secret
    max_connections: int = 4096  # one per frontend for `mux`, up to 100 per frontend on the native wire
    handshake_timeout_seconds: float = 10.0  # until the wire is known and, for `mux`, HELLO was said
    message_timeout_seconds: float = 30.0  # from the first byte of a request to its last
    idle_seconds: float = 600.0  # of a native connection; its callers close theirs after 300 s
    silence_seconds: float = 90.0  # of a mux connection, whose callers ping every 20 s
    pending_bytes: int = 256 * 1024 * 1024  # of all requests that are still arriving
    connection_pending_bytes: int = 64 * 1024 * 1024  # of those on one connection; one message always fits
    max_decoded_bytes: int = 256 * 1024 * 1024  # of one request in memory, counted before it is decoded
    call_home_networks: tuple[str, ...] = ()  # beyond a native caller's own address; "any": no check
    max_streams: int = 16_384  # of one mux connection; more is declined per stream
    write_stall_seconds: float = 60.0  # how long a caller may read nothing of what waits for it
    credit_stall_seconds: float = 300.0  # the same for one stream; longer than a frontend bears with its own client

    @property
    def largest_connection_pending_bytes(self) -> int:
        """What the requests that arrive on one connection may hold: at least one message always fits."""
        return max(self.connection_pending_bytes, self.max_message_bytes)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RequestPlaneSettings:
        """Read the settings of this process."""
        default = cls()
        limit = env_int("DYN_ENGINE_REQUEST_LIMIT", 0, minimum=0, env=env)
        return cls(
            rpc_host=env_str("DYN_TCP_RPC_HOST", env=env),
            rpc_port=env_int("DYN_TCP_RPC_PORT", 0, minimum=0, env=env),
            max_message_bytes=env_int("DYN_TCP_MAX_MESSAGE_SIZE", default.max_message_bytes, minimum=1024, env=env),
            worker_pool_size=env_int("DYN_TCP_WORKER_POOL_SIZE", default.worker_pool_size, minimum=1, env=env),
            work_queue_size=env_int("DYN_TCP_WORK_QUEUE_SIZE", default.work_queue_size, minimum=0, env=env),
            engine_request_limit=limit or None,
            engine_queue_limit=env_int(
                "DYN_DYNAMO_REQUEST_QUEUE_LIMIT", default.engine_queue_limit, minimum=0, env=env
            ),
            listen_backlog=env_int("DYN_TCP_LISTEN_BACKLOG", default.listen_backlog, minimum=1, env=env),
            connect_timeout_seconds=env_float(
                "DYN_TCP_CONNECT_TIMEOUT", default.connect_timeout_seconds, minimum=0.1, env=env
            ),
            request_timeout_seconds=env_float(
                "DYN_TCP_REQUEST_TIMEOUT", default.request_timeout_seconds, minimum=0.1, env=env
            ),
            response_host=env_str("DYN_TCP_RESPONSE_STREAM_HOST", env=env),
            response_port=env_int("DYN_TCP_RESPONSE_STREAM_PORT", 0, minimum=0, env=env),
            pool_size=env_int("DYN_TCP_POOL_SIZE", default.pool_size, minimum=1, env=env),
            pipeline_limit=env_int("DYN_TCP_CHANNEL_BUFFER", default.pipeline_limit, minimum=1, env=env),
            dial_limit=env_int("DYN_TCP_GLOBAL_CONNECT_LIMIT", default.dial_limit, minimum=1, env=env),
            idle_host_seconds=env_float("DYN_TCP_HOST_IDLE_TTL_SECS", default.idle_host_seconds, minimum=1, env=env),
            nats_timeout_seconds=env_float(
                "DYN_NATS_REQUEST_TIMEOUT_SECS", default.nats_timeout_seconds, minimum=0.1, env=env
            ),
            tls_cert_path=env_str("DYN_TCP_TLS_CERT_PATH", env=env),
            tls_key_path=env_str("DYN_TCP_TLS_KEY_PATH", env=env),
            tls_client_ca_cert_path=env_str("DYN_TCP_TLS_CLIENT_CA_CERT_PATH", env=env),
            tls_ca_cert_path=env_str("DYN_TCP_TLS_CA_CERT_PATH", env=env),
            tls_insecure=env_bool("DYN_TCP_TLS_INSECURE", env=env),
            tls_server_name=env_str("DYN_TCP_TLS_SERVER_NAME", env=env),
            tls_client_cert_path=env_str("DYN_TCP_TLS_CLIENT_CERT_PATH", env=env),
            tls_client_key_path=env_str("DYN_TCP_TLS_CLIENT_KEY_PATH", env=env),
            tls_handshake_timeout_seconds=env_float(
                "DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS", default.tls_handshake_timeout_seconds, minimum=0.1, env=env
            ),
            secret_path=env_str("DYN_TCP_SECRET_PATH", env=env),
            max_unauthenticated=env_int("DYN_TCP_MAX_UNAUTHENTICATED", default.max_unauthenticated, minimum=1, env=env),
            max_connections=env_int("DYN_TCP_MAX_CONNECTIONS", default.max_connections, minimum=1, env=env),
            handshake_timeout_seconds=env_float(
                "DYN_TCP_HANDSHAKE_TIMEOUT_SECS", default.handshake_timeout_seconds, minimum=0.1, env=env
            ),
            message_timeout_seconds=env_float(
                "DYN_TCP_MESSAGE_TIMEOUT_SECS", default.message_timeout_seconds, minimum=0.1, env=env
            ),
            idle_seconds=env_float("DYN_TCP_IDLE_CONNECTION_SECS", default.idle_seconds, minimum=1, env=env),
            silence_seconds=env_float("DYN_TCP_SILENCE_SECS", default.silence_seconds, minimum=1, env=env),
            pending_bytes=env_int("DYN_TCP_PENDING_BODIES_LIMIT_MB", 256, minimum=1, env=env) * 1024 * 1024,
            connection_pending_bytes=env_int("DYN_TCP_CONNECTION_BODIES_LIMIT_MB", 64, minimum=1, env=env)
            * 1024
            * 1024,
            max_decoded_bytes=env_int("DYN_TCP_MAX_DECODED_MB", 256, minimum=1, env=env) * 1024 * 1024,
            call_home_networks=tuple(
                each.strip()
                for each in (env_str("DYN_TCP_CALL_HOME_NETWORKS", env=env) or "").split(",")
                if each.strip()
            ),
            max_streams=env_int("DYN_TCP_MAX_STREAMS", default.max_streams, minimum=1, env=env),
            write_stall_seconds=env_float(
                "DYN_TCP_WRITE_STALL_SECS", default.write_stall_seconds, minimum=0.1, env=env
            ),
            credit_stall_seconds=env_float(
                "DYN_TCP_CREDIT_STALL_SECS", default.credit_stall_seconds, minimum=0.1, env=env
            ),
        )


@dataclass(frozen=True, slots=True)
class SystemSettings:
    """`DYN_SYSTEM_*`: the status server of a worker."""

    port: int = -1  # -1: no server; 0: the system chooses
    host: str | None = None  # None: loopback where discovery is of one machine, else every address
    admin_host: str = LOOPBACK
    admin_port: int | None = None  # None: engine routes are on the port above, while that is bound to loopback
    health_path: str = "/health"
    live_path: str = "/live"
    starting_ready: bool | None = None  # None: the operator did not say
    lora_enabled: bool = False
    header_limit_bytes: int = 16 * 1024  # request line and headers; browsers and probes send well under 4 KiB
    header_count_limit: int = 64
    body_limit_bytes: int = 8 * 1024 * 1024  # admin bodies are small; a LoRA list is the largest
    request_timeout_seconds: float = 10.0  # from the first byte of a request to its last
    idle_seconds: float = 75.0  # between requests; above the 60 s that proxies commonly keep a connection
    max_connections: int = 256
    pipeline_limit: int = 8  # requests that wait behind the one being answered
    write_stall_seconds: float = 30.0  # how long a client may read nothing of its answer
    json_depth_limit: int = 128  # arrays and objects inside each other

    @property
    def enabled(self) -> bool:
        return self.port >= 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> SystemSettings:
        """Read the settings of this process."""
        for name in ("DYN_SYSTEM_ENABLED", "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"):
            if env_str(name, env=env) is not None:
                logger.warning("%s is deprecated and ignored; DYN_SYSTEM_PORT >= 0 starts the status server", name)
        port = env_int("DYN_SYSTEM_PORT", -1, minimum=-1, env=env)
        if port > 65535:
            logger.warning("DYN_SYSTEM_PORT=%s is not a valid port; the status server is off", port)
            port = -1
        admin_port = env_int("DYN_ADMIN_PORT", -1, minimum=-1, env=env)
        if admin_port > 65535:
            logger.warning("DYN_ADMIN_PORT=%s is no port; there is no admin listener", admin_port)
            admin_port = -1
        starting = env_str("DYN_SYSTEM_STARTING_HEALTH_STATUS", env=env)
        if starting is not None and starting.lower() not in ("ready", "notready"):
            logger.warning('DYN_SYSTEM_STARTING_HEALTH_STATUS=%r is neither "ready" nor "notready"; ignored', starting)
            starting = None
        return cls(
            port=port,
            host=env_str("DYN_SYSTEM_HOST", env=env),
            admin_host=env_str("DYN_ADMIN_HOST", LOOPBACK, env=env) or LOOPBACK,
            admin_port=admin_port if admin_port >= 0 else None,
            health_path=_path(env_str("DYN_SYSTEM_HEALTH_PATH", env=env) or "/health"),
            live_path=_path(env_str("DYN_SYSTEM_LIVE_PATH", env=env) or "/live"),
            starting_ready=None if starting is None else starting.lower() == "ready",
            lora_enabled=env_bool("DYN_LORA_ENABLED", env=env),
            header_limit_bytes=env_int("DYN_SYSTEM_HEADER_LIMIT_KB", 16, minimum=1, env=env) * 1024,
            header_count_limit=env_int("DYN_SYSTEM_HEADER_COUNT_LIMIT", 64, minimum=1, env=env),
            body_limit_bytes=env_int("DYN_SYSTEM_BODY_LIMIT_MB", 8, minimum=1, env=env) * 1024 * 1024,
            request_timeout_seconds=env_float("DYN_SYSTEM_REQUEST_TIMEOUT_SECS", 10.0, minimum=0.1, env=env),
            idle_seconds=env_float("DYN_SYSTEM_IDLE_CONNECTION_SECS", 75.0, minimum=0.1, env=env),
            max_connections=env_int("DYN_SYSTEM_MAX_CONNECTIONS", 256, minimum=1, env=env),
            pipeline_limit=env_int("DYN_SYSTEM_PIPELINE_LIMIT", 8, minimum=1, env=env),
            write_stall_seconds=env_float("DYN_SYSTEM_WRITE_STALL_SECS", 30.0, minimum=0.1, env=env),
            json_depth_limit=min(env_int("DYN_SYSTEM_JSON_DEPTH_LIMIT", 128, minimum=4, env=env), 512),
        )


def _path(value: str) -> str:
    return value if value.startswith("/") else f"/{value}"


@dataclass(frozen=True, slots=True)
class CanarySettings:
    """`DYN_HEALTH_CHECK_*`: the probe of idle endpoints."""

    enabled: bool = False
    wait_seconds: float = 10.0  # idle time before a probe
    timeout_seconds: float = 3.0  # for the first item, and for each one after it

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> CanarySettings:
        """Read the settings of this process."""
        return cls(
            enabled=env_bool("DYN_HEALTH_CHECK_ENABLED", env=env),
            wait_seconds=env_float("DYN_CANARY_WAIT_TIME", 10.0, minimum=0.01, env=env),
            timeout_seconds=env_float("DYN_HEALTH_CHECK_REQUEST_TIMEOUT", 3.0, minimum=0.01, env=env),
        )


@dataclass(frozen=True, slots=True)
class ProgressSettings:
    """When an engine whose requests stand still is reported."""

    limit_seconds: float = 300.0  # longer than any useful prefill; 0: never

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ProgressSettings:
        """Read the settings of this process."""
        return cls(limit_seconds=env_float("DYN_HEALTH_PROGRESS_TIMEOUT_SECS", cls().limit_seconds, minimum=0, env=env))


@dataclass(frozen=True, slots=True)
class WatchdogSettings:
    """When a callback that blocks the event loop is reported."""

    threshold_seconds: float = 1.0  # a stream that pauses for a second is seen by its reader; 0: never

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> WatchdogSettings:
        """Read the settings of this process."""
        default = cls()
        seconds = env_float("DYN_LOOP_BLOCK_THRESHOLD_SECS", default.threshold_seconds, minimum=0, env=env)
        return cls(threshold_seconds=seconds)


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """`ETCD_*`: where etcd is and how it is talked to (times in seconds; None: see the property of that name)."""

    endpoints: str | None = None  # URLs or HOST:PORT, with commas between them
    lease_ttl_seconds: float = 10.0  # etcd counts whole seconds, and has a floor of its own (2 s as it comes)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = None  # this and the next two: PEM text, or the path of a file with it
    client_cert: str | None = None
    client_key: str | None = field(default=None, repr=False)
    startup_timeout_seconds: float = 5.0  # longer where etcd and its users start together
    keepalive_interval_seconds: float | None = None  # a third of the TTL, and never more: one may get lost
    keepalive_timeout_seconds: float | None = None  # a sixth of the TTL: two other endpoints can still be asked in time

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> EtcdSettings:
        """Read the settings of this process."""
        ttl = env_int("ETCD_LEASE_TTL", 10, env=env)
        if ttl <= 0:
            logger.warning("ETCD_LEASE_TTL=%s is not a valid TTL; using 10", ttl)
            ttl = 10
        return cls(
            endpoints=env_str("ETCD_ENDPOINTS", env=env),
            lease_ttl_seconds=ttl,
            username=env_str("ETCD_AUTH_USERNAME", env=env),
            password=env_str("ETCD_AUTH_PASSWORD", env=env),
            ca=env_str("ETCD_AUTH_CA", env=env),
            client_cert=env_str("ETCD_AUTH_CLIENT_CERT", env=env),
            client_key=env_str("ETCD_AUTH_CLIENT_KEY", env=env),
            startup_timeout_seconds=env_float("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", 5.0, minimum=0.1, env=env),
            keepalive_interval_seconds=_positive("ETCD_KEEPALIVE_INTERVAL_SECONDS", env),
            keepalive_timeout_seconds=_positive("ETCD_KEEPALIVE_TIMEOUT_SECONDS", env),
        )


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """Who this process is in its cluster: the downward API's files, or variables of the same meaning."""

    pod_name: str | None = None
    pod_namespace: str | None = None
    pod_uid: str | None = None
    container_name: str | None = None  # only looked at in the container mode
    mode: str = "pod"  # "container": several workers in one pod, each ready by itself

    @property
    def resource_name(self) -> str:
        """The name of this process's resource; "" while the pod's is not known."""
        if self.mode == "pod" or self.pod_name is None or self.container_name in (None, "main"):
            return self.pod_name or ""
        return f"{self.pod_name}-{self.container_name}"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, podinfo: Path = Path("/etc/podinfo")) -> KubernetesSettings:
        """Read the settings of this process."""

        def identity(name: str) -> str | None:
            file = podinfo / name.lower()
            try:
                found = file.read_text().strip()
            except FileNotFoundError:
                found = ""
            except OSError as error:
                logger.warning("%s cannot be read (%s); using the variable %s", file, error.strerror, name)
                found = ""
            return found or env_str(name, env=env)

        mode = (env_str("DYN_KUBE_DISCOVERY_MODE", "pod", env=env) or "pod").lower()
        if mode not in ("pod", "container"):
            logger.warning("DYN_KUBE_DISCOVERY_MODE=%r is neither pod nor container; using pod", mode)
            mode = "pod"
        return cls(
            pod_name=identity("POD_NAME"),
            pod_namespace=identity("POD_NAMESPACE"),
            pod_uid=identity("POD_UID"),
            container_name=env_str("CONTAINER_NAME", env=env),
            mode=mode,
        )


def _positive(name: str, env: Mapping[str, str] | None) -> float | None:
    """Seconds, or None when nothing usable is set."""
    seconds = env_float(name, 0.0, env=env)
    if seconds < 0:
        logger.warning("%s=%s is not a valid duration; ignored", name, seconds)
    return seconds if seconds > 0 else None


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
class EventPlaneSettings:
    """How events travel over ZMQ."""

    host: str | None = None  # advertised; None: the address of this machine
    io_threads: int = 1  # of ZMQ, in a process that publishes or subscribes
    subscriber_capacity: int = 100_000  # unread messages of one subscriber
    broker: ZmqBroker | None = None
    broker_enabled: bool = False  # without `broker`: look for one in discovery

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> EventPlaneSettings:
        """Read the settings of this process. Raises InvalidArgument for a broker that cannot be read."""
        url = env_str("DYN_ZMQ_BROKER_URL", env=env)
        return cls(
            host=env_str("DYN_EVENT_PLANE_HOST", env=env),
            io_threads=env_int("DYN_ZMQ_IO_THREADS", 1, minimum=1, env=env),
            subscriber_capacity=env_int("DYN_ZMQ_EVENT_SUBSCRIBER_CHANNEL_CAPACITY", 100_000, minimum=1, env=env),
            broker=ZmqBroker.parse(url) if url is not None else None,
            broker_enabled=url is not None or env_bool("DYN_ZMQ_BROKER_ENABLED", env=env),
        )


@dataclass(frozen=True, slots=True)
class NatsSettings:
    """Where NATS is and how to get in. Of several ways to authenticate the first one set counts, in this order."""

    servers: tuple[str, ...] = ("nats://localhost:4222",)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    nkey: str | None = field(default=None, repr=False)
    credentials_file: str | None = None
    tls_ca_path: str | None = None
    tls_insecure: bool = False
    tls_client_cert_path: str | None = None
    tls_client_key_path: str | None = None
    connect_timeout_seconds: float = 4.0  # at start; a connection that was there is sought for ever

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> NatsSettings:
        """Read the settings of this process."""
        listed = (env_str("NATS_SERVER", env=env) or "nats://localhost:4222").split(",")
        username, password = env_str("NATS_AUTH_USERNAME", env=env), env_str("NATS_AUTH_PASSWORD", env=env)
        both = username is not None and password is not None
        return cls(
            servers=tuple(
                each if "://" in each else f"nats://{each}" for each in (one.strip() for one in listed) if each
            ),
            username=username if both else None,
            password=password if both else None,
            token=env_str("NATS_AUTH_TOKEN", env=env),
            nkey=env_str("NATS_AUTH_NKEY", env=env),
            credentials_file=env_str("NATS_AUTH_CREDENTIALS_FILE", env=env),
            tls_ca_path=env_str("NATS_TLS_CA_CERT_PATH", env=env),
            tls_insecure=env_bool("NATS_TLS_INSECURE", env=env),
            tls_client_cert_path=env_str("NATS_TLS_CLIENT_CERT_PATH", env=env),
            tls_client_key_path=env_str("NATS_TLS_CLIENT_KEY_PATH", env=env),
            connect_timeout_seconds=env_float("NATS_STARTUP_CONNECT_TIMEOUT_SECONDS", 4.0, minimum=0.1, env=env),
        )

    @property
    def address(self) -> str:
        """The servers, for people; without what a URL may hold of passwords."""
        return ", ".join(_CREDENTIALS.sub("//", server) for server in self.servers)

    @property
    def wants_tls(self) -> bool:
        own = (self.tls_ca_path, self.tls_client_cert_path)
        return any(own) or self.tls_insecure or any(server.startswith("tls://") for server in self.servers)


_TCP: Final = re.compile(r"tcp://[^/\s]+:\d{1,5}")
_CREDENTIALS: Final = re.compile(r"//[^@/]*@")


def discovery_store(backend: str, etcd_endpoints: str | None) -> str:
    """Return the store of a discovery backend's name: "auto" and "etcd" are files until an etcd is named.

    The guide's own engine asks for "etcd" unless an operator chooses. Where no etcd is named, the file store lets its
    commands run as printed on one machine; a deployment that has an etcd sets ETCD_ENDPOINTS.
    """
    name = backend.lower()
    return ("etcd" if etcd_endpoints else "file") if name in ("auto", "etcd") else name


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Which planes a runtime uses, and how its clients behave (times in seconds)."""

    discovery_backend: str = "auto"  # etcd when ETCD_ENDPOINTS is set, else file
    file_root: Path = Path("/tmp/dynamo_store_kv")
    etcd: EtcdSettings = field(default_factory=EtcdSettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    request_plane: str = "tcp"
    event_plane: str | None = None
    response_plane: str | None = None
    inhibit_seconds: float = 5.0  # how long a failed instance is left out; 0: not at all
    cuda_to_cpu_ratio: float = 8.0
    cancel_grace_seconds: float = 1.0  # for a handler whose caller has gone, until it is cancelled
    shutdown_seconds: float = 900.0  # for streams in flight at `DistributedRuntime.shutdown()`

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RuntimeSettings:
        """Read the settings of this process."""
        temporary = env_str("TMPDIR", "/tmp", env=env)
        plane = (env_str("DYN_REQUEST_PLANE", "tcp", env=env) or "tcp").lower()
        if plane not in ("tcp", "nats", "mem"):
            logger.warning("DYN_REQUEST_PLANE=%r is not a valid request plane; using tcp", plane)
            plane = "tcp"
        return cls(
            discovery_backend=(env_str("DYN_DISCOVERY_BACKEND", "auto", env=env) or "auto").lower(),
            file_root=Path(env_str("DYN_FILE_KV", env=env) or f"{temporary}/dynamo_store_kv"),
            etcd=EtcdSettings.from_env(env),
            kubernetes=KubernetesSettings.from_env(env),
            request_plane=plane,
            event_plane=env_str("DYN_EVENT_PLANE", env=env),
            response_plane=env_str("DYN_RESPONSE_PLANE", env=env),
            inhibit_seconds=env_float("DYN_RUNTIME_INHIBITED_DURATION_SECS", 5.0, minimum=0.0, env=env),
            cuda_to_cpu_ratio=env_float("DYN_ENCODER_CUDA_TO_CPU_RATIO", 8.0, minimum=0.001, env=env),
            cancel_grace_seconds=env_float("DYN_HANDLER_CANCEL_GRACE_SECS", 1.0, minimum=0.0, env=env),
            shutdown_seconds=env_float("DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", 900.0, minimum=0.0, env=env),
        )
