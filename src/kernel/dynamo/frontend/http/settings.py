"""The settings of the listeners and routes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from dynamo.frontend.base.settings.inspector import InspectorSettings
from dynamo.frontend.base.settings.keys import KeySettings
from dynamo.frontend.base.settings.recording import RecordingSettings, RequestTraceSettings
from dynamo.frontend.pipeline.settings import PipelineSettings
from dynamo.runtime.base.addresses import LOOPBACK
from dynamo.runtime.base.settings import RuntimeSettings, discovery_store
from dynamo.settings.readers import (
    SettingReader,
    integer,
    mebibytes,
    path_prefix,
    placeholder,
    port,
    port_or_off,
    seconds,
    switch,
    text,
    words,
)
from dynamo.settings.table import Setting, declared, section, setting

MIB: Final = 1024 * 1024
MAX_WORKERS: Final = 64  # processes; each holds every model's tokenizer


_HTTP: Final = "http"
_REQUESTS: Final = "requests"
_OTHER: Final = "other"


_METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def _read_metrics_prefix(given: str) -> str:
    if _METRIC_NAME.fullmatch(given) is None:
        raise ValueError(f"{given!r} is no prefix of metrics: use letters, digits and _, no digit first")
    return given


def read_origin(given: str) -> str:
    """Check an origin as browsers send it: scheme, host and port, and nothing behind. Raises ValueError."""
    parts = urlsplit(given)
    if given != "*" and (
        parts.scheme not in {"http", "https"} or not parts.netloc or given.rstrip("/") != given or parts.path
    ):
        raise ValueError(f"{given!r} is not an origin; write for example https://app.example.com, or *")
    return given


_origins: Final = SettingReader(
    lambda given: tuple(read_origin(each) for each in words.parse(given)), show=",".join, metavar="URL"
)


def _path(variable: str, path: str, what: str) -> Setting:
    return declared(variable, text, f"Where {what} lives", unset=path)


ROUTES: Final[Mapping[str, Setting]] = {
    "chat": _path("DYN_HTTP_SVC_CHAT_PATH", "/v1/chat/completions", "the chat route"),
    "completions": _path("DYN_HTTP_SVC_CMP_PATH", "/v1/completions", "the completions route"),
    "responses": _path("DYN_HTTP_SVC_RESPONSES_PATH", "/v1/responses", "the responses route"),
    "messages": _path("DYN_HTTP_SVC_ANTHROPIC_PATH", "/v1/messages", "the messages route"),
    "embeddings": _path("DYN_HTTP_SVC_EMB_PATH", "/v1/embeddings", "the embeddings route"),
    "models": _path("DYN_HTTP_SVC_MODELS_PATH", "/v1/models", "the list of models"),
    "health": _path("DYN_HTTP_SVC_HEALTH_PATH", "/health", "the health route"),
    "live": _path("DYN_HTTP_SVC_LIVE_PATH", "/live", "the liveness route"),
    "ready": _path("DYN_HTTP_SVC_READY_PATH", "/ready", "the readiness route"),
    "metrics": _path("DYN_HTTP_SVC_METRICS_PATH", "/metrics", "the metrics route"),
}


def default_paths() -> dict[str, str]:
    """Return the path of each route when nothing overrides it."""
    return {name: made.default for name, made in ROUTES.items()}


@dataclass(frozen=True, kw_only=True)
class HttpSettings(PipelineSettings, KeySettings):
    """Sizes in bytes, times in seconds; None means off or unknown unless a meaning states otherwise."""

    # fmt: off
    http_host: str = setting(LOOPBACK, "DYN_HTTP_HOST", text,
        "Address to listen on. Unset: 127.0.0.1 with `file` or `mem` discovery, else 0.0.0.0. See [where processes "
        "listen](security.md#where-processes-listen)",
        flag="--http-host", group=_HTTP, unset=None, shown="127.0.0.1 or 0.0.0.0")
    http_port: int | None = setting(8000, "DYN_HTTP_PORT", port_or_off,
        "Port to listen on; 0: any free port, which the log names; `off`: none, with `--uds`", flag="--http-port",
        group=_HTTP)
    uds: str | None = setting(None, "DYN_HTTP_UDS", placeholder("PATH", text),
        "Serve the API at this [Unix socket](deployment.md#a-unix-socket), too, which only this user may use; without TLS",
        flag="--uds", group=_HTTP)
    root_path: str = setting("", "DYN_HTTP_ROOT_PATH", path_prefix,
        "A prefix of all paths that a proxy in front does not remove; the pages and `/openapi.json` have it, and paths "
        "without it are served, too", flag="--root-path", group=_HTTP)
    admin_host: str = setting(LOOPBACK, "DYN_ADMIN_HOST", text,
        "Address of the admin port; another one than loopback needs `--admin-keys`", flag="--admin-host", group=_HTTP)
    admin_port: int | None = setting(None, "DYN_ADMIN_PORT", port,
        "Port that serves the [admin routes](security.md#admin-routes) (`/busy_threshold`), and then nothing else "
        "does; 0: any free port, which the log names. Unset: they are on the HTTP port while that is bound to "
        "loopback", flag="--admin-port", group=_HTTP)
    workers: int = setting(1, "DYN_FRONTEND_WORKERS", integer(1, MAX_WORKERS),
        "Processes that share the port, at most 64; see [several "
        "processes](architecture.md#several-frontend-processes). Limits hold for all of them together",
        flag="--workers", group=_HTTP)
    tls_cert_path: str | None = setting(None, "DYN_TLS_CERT_PATH", text,
        "Serve HTTPS with this certificate", flag="--tls-cert-path", group=_HTTP)
    tls_key_path: str | None = setting(None, "DYN_TLS_KEY_PATH", text,
        "The certificate's key", flag="--tls-key-path", group=_HTTP)
    tls_client_ca_cert_path: str | None = setting(None, "DYN_TLS_CLIENT_CA_CERT_PATH", text,
        "Ask clients for a certificate of this authority", flag="--tls-client-ca-cert-path", group=_HTTP)
    # Three round trips and a busy machine.
    tls_handshake_timeout_seconds: float = setting(10.0, "DYN_TLS_HANDSHAKE_TIMEOUT_SECS", seconds(0.1),
        "How long the TLS handshake of a client may take")
    # Each takes 1 to 2 ms of CPU.
    max_tls_handshakes: int = setting(1024, "DYN_TLS_MAX_HANDSHAKES", integer(1),
        "Connections whose TLS handshake has not ended")
    disable_admin_api: bool = setting(False, "DYN_DISABLE_FRONTEND_ADMIN_API", switch,
        "No `/busy_threshold` on any port")
    pending_bodies_limit_bytes: int = setting(1024 * MIB, "DYN_HTTP_PENDING_BODIES_LIMIT_MB", mebibytes,
        "Size of all bodies that are still arriving; more is a 503")
    grace_period_seconds: float = setting(0.0, "DYN_HTTP_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", seconds(),
        "After SIGTERM: how long `/health` says 503 and requests are still taken, so that balancers notice before "
        "anything is refused")
    graceful_shutdown_seconds: float = setting(5.0, "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", seconds(),
        "Then: how long requests in flight may go on")
    paths: Mapping[str, str] = field(default_factory=default_paths)
    anthropic_api: bool = setting(True, "DYN_ENABLE_ANTHROPIC_API", switch,
        "Serve Anthropic's [Messages API](messages.md)", flag="--enable-anthropic-api", group=_REQUESTS)
    strip_anthropic_preamble: bool = setting(True, "DYN_STRIP_ANTHROPIC_PREAMBLE", switch,
        "Leave out the billing line that Claude Code puts in front of its system text: it differs in every request, and "
        "would keep prompts from sharing a prefix", flag="--strip-anthropic-preamble", group=_REQUESTS)
    context_window: int | None = setting(None, "DYN_CONTEXT_WINDOW", integer(1),
        "What `/v1/models` says instead of the model's context length")
    max_output_tokens: int | None = setting(None, "DYN_MAX_OUTPUT_TOKENS", integer(1),
        "`max_output_tokens` in `/v1/models`")
    recording: RecordingSettings = section(RecordingSettings)
    request_trace: RequestTraceSettings = section(RequestTraceSettings)
    cors_origins: tuple[str, ...] = setting((), "DYN_CORS_ORIGINS", _origins,
        "Let web pages of this origin call the API (`https://app.example.com`; repeatable, in the variable separated "
        "by commas; `*`: any, without credentials)", flag="--cors-origin", group=_OTHER, repeats=True)
    metrics_prefix: str = setting("dynamo_frontend", "DYN_METRICS_PREFIX", SettingReader(_read_metrics_prefix),
        "Prefix of the frontend's metrics", flag="--metrics-prefix", group=_OTHER)
    inspector: InspectorSettings = section(InspectorSettings)
    runtime: RuntimeSettings = section(RuntimeSettings)
    # fmt: on

    @property
    def store(self) -> str:
        """The discovery store in use."""
        return discovery_store(self.runtime.discovery_backend, self.runtime.etcd.endpoints)
