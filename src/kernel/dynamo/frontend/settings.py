"""The settings of a frontend, read once at start: environment and flags, read at the edge into one frozen value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from dynamo.frontend.admission.model import RequestLimit
from dynamo.frontend.base.settings.inspector import InspectorSettings
from dynamo.frontend.base.settings.keys import KeySources, Network
from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.frontend.base.settings.recording import RecordingSettings
from dynamo.frontend.base.settings.request_trace import RequestTraceSettings
from dynamo.frontend.base.settings.stored_responses import IN_MEMORY, OFF, StoreLimits, read_store_place
from dynamo.frontend.models.file_policy import FilePolicy
from dynamo.placement.prefill_bypass import BypassRules
from dynamo.protocol.guided_limits import GuidedLimits
from dynamo.protocol.openai.body import DEPTH_CEILING, MAX_DEPTH, MAX_ITEMS, MAX_MEMBERS, MAX_MESSAGES
from dynamo.protocol.openai.errors import DEFAULT_OVERLOAD_STATUS, overload_status
from dynamo.router.dispatch.conditional import ConditionalSettings
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.workers.busy_settings import BusySettings
from dynamo.runtime.base.addresses import LOOPBACK, bind_host
from dynamo.runtime.base.http_limits import HttpLimits
from dynamo.runtime.base.settings import FromEnvironment, RuntimeSettings, discovery_store
from dynamo.settings.readers import (
    SettingReader,
    above_zero,
    integer,
    kibibytes,
    mebibytes,
    milliseconds,
    number,
    off_at_zero,
    one_of,
    port,
    seconds,
    switch,
    text,
    words,
)
from dynamo.settings.table import Setting, declared, section, setting
from dynamo.text.template_sandbox import BudgetSpec

MIB: Final = 1024 * 1024
MAX_WORKERS: Final = 64  # processes; each holds every model's tokenizer
MAX_MIGRATIONS: Final = 2**32 - 1
ROUTER_MODES: Final = (
    "round-robin", "random", "power-of-two", "least-loaded", "kv", "direct", "device-aware-weighted",
)  # fmt: skip

DEFAULT_MAX_REQUESTS_IN_FLIGHT: Final = 4096
"""Ours: the native frontend has no bound. One request in flight holds its prompt ids and one window of tokens, some tens
of KiB, so this many stay well below a GiB; the engine's own queue is shorter anyway."""

DEFAULT_PEEK_SECONDS: Final = 1.0
"""How long HTTP 200 is held back for the engine's first event, so that an early typed error gets its real status. Longer
than any healthy first token of a short prompt, shorter than the patience of a proxy that wants to see headers."""

KEEP_ALIVE_SECONDS: Final = 15.0  # ours: the native default is off, and then a proxy cuts a long prefill

INLINE_TOKENIZE_CHARACTERS: Final = 2048
"""A prompt up to this long is tokenised on the loop (about 0.5 ms); a longer one in the executor, which releases the
interpreter lock. The hand-over costs about 60 us, so short prompts must not pay it."""

_HTTP: Final = "http"
_ACCESS: Final = "access"
_CLUSTER: Final = "cluster"
_REQUESTS: Final = "requests"
_OTHER: Final = "other"

# -- readers ----------------------------------------------------------------------------------------------------------

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


def _read_overload_status(given: str) -> int:
    if given != str(overload_status(given)):
        raise ValueError(f"{given} is not a status from 200 to 999")
    return int(given)


_origins: Final = SettingReader(
    lambda given: tuple(read_origin(each) for each in words.parse(given)), show=",".join, metavar="URL"
)
_networks: Final = SettingReader(
    lambda given: tuple(map(ipaddress.ip_network, words.parse(given))),
    show=lambda networks: ",".join(map(str, networks)),
    metavar="CIDR",
)
_request_limit: Final = SettingReader(RequestLimit.parse, metavar="N|Nx")
_overload_status: Final = SettingReader(_read_overload_status)
_reasoning: Final = one_of("reasoning_content", "reasoning")
_never_at_zero: Final = off_at_zero(seconds())
_pings: Final = off_at_zero(milliseconds())

# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits(HttpLimits):
    """What the clients of the API may cost, connection by connection."""

    # fmt: off
    # An idle connection takes about 6 KiB.
    max_connections: int = setting(16_384, "DYN_HTTP_MAX_CONNECTIONS", integer(1),
        "Connections at once, fewer where the process may not open so many files; more is a 503")
    header_limit_bytes: int = setting(64 * 1024, "DYN_HTTP_HEADER_LIMIT_KB", kibibytes(4),
        "Size of the request line and headers, and of what stands between the chunks of a body; more is a 431")
    # Proxies add a dozen or two.
    header_count_limit: int = setting(128, "DYN_HTTP_HEADER_COUNT_LIMIT", integer(1),
        "Number of headers; more is a 431")
    header_timeout_seconds: float = setting(15.0, "DYN_HTTP_HEADER_TIMEOUT_SECS", seconds(0.1),
        "From the first byte of a request to the end of its headers; longer is a 408")
    body_limit_bytes: int = setting(45 * MIB, "DYN_HTTP_BODY_LIMIT_MB", mebibytes,
        "Size of a request body; more is a 413")
    # The largest body over 3 Mbit/s.
    body_timeout_seconds: float = setting(120.0, "DYN_HTTP_BODY_TIMEOUT_SECS", seconds(0.1),
        "From the end of the headers to the end of the body; longer is a 408")
    # Longer than the usual proxy keep-alive, so that the proxy closes first.
    idle_seconds: float = setting(75.0, "DYN_HTTP_IDLE_CONNECTION_SECS", seconds(1),
        "How long a connection without a request is kept")
    pipeline_limit: int = setting(16, "DYN_HTTP_PIPELINE_LIMIT", integer(1),
        "Requests of one connection that wait behind the one being answered; more is a 429")
    write_stall_seconds: float = setting(60.0, "DYN_HTTP_WRITE_STALL_SECS", seconds(0.1),
        "How long a client may leave what was sent to it unread; then it is cut, and its work ended")
    # fmt: on


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
TOKENIZER_CACHE: Final = declared(
    "DYN_TOKENIZER_CACHE", switch, "Remember the token ids of long shared prompts", unset=True
)
DUMP_CONFIG_TO: Final = declared(
    "DYN_DUMP_CONFIG_TO",
    SettingReader(Path, metavar="FILE"),
    "Write the settings to this file, as JSON, without secrets",
    flag="--dump-config-to",
    group=_OTHER,
)


def default_paths() -> dict[str, str]:
    """Return the path of each route when nothing overrides it."""
    return {name: made.default for name, made in ROUTES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings(BusySettings, FromEnvironment):
    """Sizes in bytes, times in seconds; None means off or unknown unless a meaning states otherwise."""

    # fmt: off
    http_host: str = setting(LOOPBACK, "DYN_HTTP_HOST", text,
        "Address to listen on. Unset: 127.0.0.1 with `file` or `mem` discovery, else 0.0.0.0. See [where processes "
        "listen](security.md#where-processes-listen)",
        flag="--http-host", group=_HTTP, unset=None, shown="127.0.0.1 or 0.0.0.0")
    http_port: int = setting(8000, "DYN_HTTP_PORT", port,
        "Port to listen on; 0: any free port, which the log names", flag="--http-port", group=_HTTP)
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
    max_requests_in_flight: int = setting(DEFAULT_MAX_REQUESTS_IN_FLIGHT, "DYN_HTTP_MAX_REQUESTS_IN_FLIGHT", integer(1),
        "Requests at once; more are declined with 529 and Retry-After", flag="--max-requests-in-flight", group=_HTTP)
    # Off: an engine's own queue is a legitimate place to wait.
    max_requests_per_model: RequestLimit | None = setting(None, "DYN_HTTP_MAX_REQUESTS_PER_MODEL", _request_limit,
        "The same for each model: `64`, or `1.5x` for so many times what its workers run at once (`max_num_seqs`). "
        "The last places are for requests of higher priority. See [overload](errors.md#overload)",
        flag="--max-requests-per-model", group=_HTTP)
    max_queue_age_seconds: float | None = setting(None, "DYN_HTTP_MAX_QUEUE_AGE_SECS", seconds(),
        "A model whose oldest request has waited longer for its first token gets no more; 0: never. Unset: 120 where "
        "all its workers say their `max_num_seqs`, else never", flag="--max-queue-age", group=_HTTP)
    keys_file: str | None = setting(None, "DYN_KEYS", text,
        "File of [API keys](keys.md), TOML or JSON: every route needs one of them, but for `/health`, `/ready` and `/live`. Read "
        "again when it changes", flag="--keys", dest="keys_file", group=_ACCESS)
    api_key: str | None = setting(None, "DYN_API_KEY", text,
        "One API key, of at least 16 characters, that may use every route of the API; alone, or beside `--keys`",
        secret=True)
    admin_keys_file: str | None = setting(None, "DYN_ADMIN_KEYS", text,
        "File of the keys for the admin routes. Without one the admin port is at a loopback address only",
        flag="--admin-keys", dest="admin_keys_file", group=_ACCESS)
    usage_db: str | None = setting(None, "DYN_USAGE_DB", text,
        "File of SQLite with [what keys have used](keys.md#what-keys-use); budgets go on with it when the frontend is "
        "started again", flag="--usage-db", group=_ACCESS)
    divide_limits: bool = setting(True, "DYN_DIVIDE_LIMITS", switch,
        "Divide limits and budgets of keys among [the frontends of a cluster](keys.md#several-processes-and-frontends), "
        "where discovery is etcd. Off: each frontend enforces the whole limit", flag="--divide-limits", group=_ACCESS)
    usage_keep_days: int = setting(90, "DYN_USAGE_KEEP_DAYS", integer(1),
        "How many days the minutes in that file are kept")
    access_log: str | None = setting(None, "DYN_ACCESS_LOG", text,
        "File for [one JSON line for each request](keys.md#logs), without content; `-`: standard error",
        flag="--access-log", group=_ACCESS)
    audit_log: str | None = setting(None, "DYN_AUDIT_LOG", text,
        "File for one JSON line for each action on an admin route, on the disk before the answer",
        flag="--audit-log", group=_ACCESS)
    open_metrics: bool = setting(False, "DYN_OPEN_METRICS", switch,
        "`/metrics` needs no key, also where the other routes do", flag="--open-metrics", group=_ACCESS)
    trusted_proxies: tuple[Network, ...] = setting((), "DYN_TRUSTED_PROXIES", _networks,
        "Networks of proxies whose `X-Forwarded-For` is believed, separated by commas", flag="--trusted-proxies",
        group=_ACCESS, repeats=True)
    disable_admin_api: bool = setting(False, "DYN_DISABLE_FRONTEND_ADMIN_API", switch,
        "No `/busy_threshold` on any port")
    overload_status: int = setting(DEFAULT_OVERLOAD_STATUS, "DYN_HTTP_OVERLOAD_STATUS_CODE", _overload_status,
        "Status of every \"full\" answer, 200 to 999")
    capacity_share: float = 1.0  # of the models' capacity that is this process's: one of several on a port has a part
    limits: ApiLimits = section(ApiLimits)
    pending_bodies_limit_bytes: int = setting(1024 * MIB, "DYN_HTTP_PENDING_BODIES_LIMIT_MB", mebibytes,
        "Size of all bodies that are still arriving; more is a 503")
    json_depth_limit: int = setting(MAX_DEPTH, "DYN_HTTP_JSON_DEPTH_LIMIT", integer(4, DEPTH_CEILING),
        "Arrays and objects inside each other, at most 512; more is a 400")
    json_members_limit: int = setting(MAX_MEMBERS, "DYN_HTTP_JSON_MEMBERS_LIMIT", integer(64),
        "Members of all JSON objects in one body; more is a 400, before any is read")
    json_items_limit: int = setting(MAX_ITEMS, "DYN_HTTP_JSON_ITEMS_LIMIT", integer(64),
        "The same of the items of all arrays, token ids among them")
    # Text has about four bytes for a token.
    body_bytes_per_token: int = setting(64, "DYN_HTTP_BODY_BYTES_PER_TOKEN", integer(0, unit="bytes"),
        "A body of more than 16 MiB and so many bytes for each token of the longest context served here is a 400, "
        "before it is read. 0: read every body")
    messages_limit: int = setting(MAX_MESSAGES, "DYN_HTTP_MESSAGES_LIMIT", integer(1),
        "Messages of one conversation; more is a 400")
    peek_seconds: float = setting(DEFAULT_PEEK_SECONDS, "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS", milliseconds(),
        "How long the 200 of a stream is held back for the engine's first event")
    keep_alive_seconds: float | None = setting(KEEP_ALIVE_SECONDS, "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS", _pings,
        "Silence after which a stream gets a comment; 0: never")
    grace_period_seconds: float = setting(0.0, "DYN_HTTP_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", seconds(),
        "After SIGTERM: how long `/health` says 503 and requests are still taken, so that balancers notice before "
        "anything is refused")
    graceful_shutdown_seconds: float = setting(5.0, "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", seconds(),
        "Then: how long requests in flight may go on")
    paths: Mapping[str, str] = field(default_factory=default_paths)

    namespace: str | None = setting(None, "DYN_NAMESPACE", text,
        "Serve models of this namespace only", flag="--namespace", group=_CLUSTER)
    namespace_prefix: str | None = setting(None, "DYN_NAMESPACE_PREFIX", text,
        "Serve models of namespaces that begin so; wins over `--namespace`", flag="--namespace-prefix", group=_CLUSTER)
    router_mode: str = setting("round-robin", "DYN_ROUTER_MODE", one_of(*ROUTER_MODES, metavar="MODE"),
        "How a worker is chosen: `round-robin`, `random`, `power-of-two`, `least-loaded`, `kv` (by what the workers have "
        "cached and what they have to do: [KV routing](#kv-routing)), `direct` or `device-aware-weighted`", flag="--router-mode", group=_CLUSTER)
    router_min_initial_workers: int = setting(0, "DYN_ROUTER_MIN_INITIAL_WORKERS", integer(0),
        "A model gets no requests before so many workers of it are there at once, in each namespace and role that answers; "
        "it keeps getting them when they leave. 0: one is enough", flag="--router-min-initial-workers", group=_CLUSTER)
    embedding_tokens_limit: int = setting(300_000, "DYN_HTTP_EMBEDDING_TOKENS_LIMIT", integer(1),
        "How many tokens the inputs of one request for embeddings, classes or scores may have together")
    migration_limit: int | None = setting(None, "DYN_MIGRATION_LIMIT", integer(0, MAX_MIGRATIONS),
        "How many other workers each choice of a request may need, before or after its first token; unset: what the "
        "model's card allows, at least 3", flag="--migration-limit", group=_CLUSTER)
    migration_max_seq_len: int | None = setting(None, "DYN_MIGRATION_MAX_SEQ_LEN", integer(1),
        "A request whose prompt and answer so far are longer than so many tokens does not change its worker",
        flag="--migration-max-seq-len", group=_CLUSTER)
    replacement_wait_seconds: float = setting(10.0, "DYN_REPLACEMENT_WAIT_SECS", seconds(),
        "How long a request waits for [a replacement](migration.md#the-last-worker) when the model's last worker was "
        "lost; 0: not at all", flag="--replacement-wait-seconds", group=_CLUSTER)
    autoscale: bool = setting(False, "DYN_AUTOSCALE", switch,
        "Measure how full the workers of each model are, as [metrics and JSON for autoscalers](scaling.md)",
        flag="--autoscale", group=_CLUSTER)
    autoscale_target: float = setting(0.7, "DYN_AUTOSCALE_TARGET", above_zero(1),
        "How full workers are meant to be; 1: full", flag="--autoscale-target", group=_CLUSTER)
    cold_start_wait_seconds: float = setting(0.0, "DYN_COLD_START_WAIT_SECS", seconds(),
        "A model that has lost its last worker stays listed, and its requests wait so long for the next one, as where "
        "[workers are scaled to none](scaling.md#none-at-all); 0: it goes after the replacement wait",
        flag="--cold-start-wait-seconds", group=_CLUSTER)
    stall_floor_seconds: float = setting(10.0, "DYN_STALL_FLOOR_SECS", seconds(),
        "Minimum silence before a stream counts as [stalled](migration.md#no-progress); 0: off",
        flag="--stall-floor-seconds", group=_CLUSTER)
    stall_factor: float = setting(20.0, "DYN_STALL_FACTOR", number(1),
        "Nor before so many times its own longest gap between tokens", flag="--stall-factor", group=_CLUSTER)
    first_token_timeout_seconds: float | None = setting(None, "DYN_HTTP_FIRST_TOKEN_TIMEOUT_SECS", _never_at_zero,
        "A worker that has said nothing by then is left for another, or the request ends with 504; 0: never",
        flag="--first-token-timeout-seconds", group=_CLUSTER)
    inter_token_timeout_seconds: float | None = setting(None, "DYN_HTTP_INTER_TOKEN_TIMEOUT_SECS", _never_at_zero,
        "The same between two tokens of a choice", flag="--inter-token-timeout-seconds", group=_CLUSTER)
    backend_stream_timeout_seconds: float | None = setting(None, "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", _never_at_zero,
        "Silence of an engine after which a request goes on at another worker, or ends with 504 where there is none; "
        "0: never", shown="0")
    request_timeout_seconds: float | None = setting(None, "DYN_HTTP_REQUEST_TIMEOUT_SECS", _never_at_zero,
        "From the complete body to the end of the answer; then 504. 0: never",
        flag="--request-timeout-seconds", group=_CLUSTER)
    enforce_disagg: bool = setting(False, "DYN_ENFORCE_DISAGG", switch,
        "A prompt that no prefill worker can take fails with 503, instead of being computed by its decode worker. "
        "See [disaggregation](disaggregation.md)", flag="--enforce-disagg", group=_CLUSTER)

    anthropic_api: bool = setting(True, "DYN_ENABLE_ANTHROPIC_API", switch,
        "Serve Anthropic's [Messages API](messages.md)", flag="--enable-anthropic-api", group=_REQUESTS)
    strip_anthropic_preamble: bool = setting(True, "DYN_STRIP_ANTHROPIC_PREAMBLE", switch,
        "Leave out the billing line that Claude Code puts in front of its system text: it differs in every request, and "
        "would keep prompts from sharing a prefix", flag="--strip-anthropic-preamble", group=_REQUESTS)
    exclude_tools_when_tool_choice_none: bool = setting(True, "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", switch,
        "Keep the tools out of the prompt when the client sends `tool_choice: none`",
        flag="--exclude-tools-when-tool-choice-none", group=_REQUESTS)
    ignore_unsupported_fields: bool = setting(False, "DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", switch,
        "Ignore unknown fields instead of answering 400", flag="--ignore-unsupported-fields", group=_REQUESTS)
    open_guided_objects: bool = setting(False, "DYN_OPEN_GUIDED_OBJECTS", switch,
        "Read schemas of guided output to the letter: an object that lists properties and has no "
        "`additionalProperties` may have others", flag="--open-guided-objects", group=_REQUESTS)
    allow_control_tokens_in_text: bool = setting(False, "DYN_ALLOW_CONTROL_TOKENS_IN_TEXT", switch,
        "Text of messages, tools and documents may spell control tokens such as `<\\|im_end\\|>`; otherwise they are "
        "plain text there", flag="--allow-control-tokens-in-text", group=_REQUESTS)
    reasoning_field_name: str = setting("reasoning_content", "DYN_REASONING_FIELD_NAME", _reasoning,
        "The member of an answer that holds its reasoning: `reasoning_content` or `reasoning`",
        flag="--reasoning-field-name", group=_REQUESTS)
    streaming_tool_dispatch: bool = setting(False, "DYN_ENABLE_STREAMING_TOOL_DISPATCH", switch,
        "Streams also tell every complete tool call in an event of its own, `tool_call_dispatch`",
        flag="--enable-streaming-tool-dispatch", group=_REQUESTS)
    streaming_reasoning_dispatch: bool = setting(False, "DYN_ENABLE_STREAMING_REASONING_DISPATCH", switch,
        "Streams also tell the whole reasoning in an event of its own, `reasoning_dispatch`",
        flag="--enable-streaming-reasoning-dispatch", group=_REQUESTS)
    responses_store: str = setting(IN_MEMORY, "DYN_RESPONSES_STORE", SettingReader(read_store_place, metavar="PLACE"),
        "Where [responses are kept](responses.md#stored-responses): `memory`, `off`, or `sqlite:FILE`, which several "
        "processes of a machine share. With `--workers` above 1 `memory` is `off`",
        flag="--responses-store", group=_REQUESTS)
    responses_store_entries: int = setting(10_000, "DYN_RESPONSES_STORE_ENTRIES", integer(1),
        "How many responses are kept at most; the one that was used longest ago goes first")
    responses_store_bytes: int = setting(256 * MIB, "DYN_RESPONSES_STORE_MB", mebibytes,
        "How much they may take, their inputs included")
    responses_store_ttl_seconds: float = setting(86_400.0, "DYN_RESPONSES_STORE_TTL_SECS", seconds(1),
        "How long a response is kept without being used")
    files_dir: Path | None = setting(None, "DYN_FILES_DIR", SettingReader(Path, metavar="DIR"),
        "Serve [files and batches](batches.md), and keep them in this directory; several frontends of one machine may share "
        "it. Unset: they are switched off", flag="--files-dir", group=_REQUESTS)
    files_dir_force: bool = setting(False, "DYN_FILES_DIR_FORCE", switch,
        "Take a directory on a network file system, too, which one machine alone uses")
    file_limit_bytes: int = setting(512 * MIB, "DYN_FILES_MAX_MB", mebibytes, "Size of one file; more is a 413")
    batch_file_limit_bytes: int = setting(200 * MIB, "DYN_FILES_MAX_BATCH_MB", mebibytes,
        "Size of the input of a batch; more is a 413")
    files_total_bytes: int = setting(100 * 1024 * MIB, "DYN_FILES_TOTAL_MB", mebibytes,
        "Size of all files of a project; more is a 413")
    batch_concurrency: int | None = setting(None, "DYN_BATCH_CONCURRENCY", integer(1),
        "Lines of batches that run at once. Unset: a quarter of `--max-requests-in-flight`",
        flag="--batch-concurrency", group=_REQUESTS)
    batch_model_wait_seconds: float = setting(30.0, "DYN_BATCH_MODEL_WAIT_SECS", seconds(),
        "How long after its start a frontend lets lines wait for a model that it has not found yet; later they fail")
    preprocess_workers: int = setting(0, "DYN_PREPROCESS_WORKERS", integer(0),
        "Threads for long prompts; 0 chooses by the number of processors",
        flag="--dyn-preprocess-workers", group=_REQUESTS)
    custom_jinja_template: str | None = setting(None, "DYN_CUSTOM_JINJA_TEMPLATE", SettingReader(str, metavar="FILE"),
        "A Jinja template that replaces every model's own", flag="--chat-template", group=_REQUESTS)
    context_window: int | None = setting(None, "DYN_CONTEXT_WINDOW", integer(1),
        "What `/v1/models` says instead of the model's context length")
    max_output_tokens: int | None = setting(None, "DYN_MAX_OUTPUT_TOKENS", integer(1),
        "`max_output_tokens` in `/v1/models`")
    completions_max_tokens: int = setting(16, "DYN_COMPLETIONS_MAX_TOKENS", integer(0),
        "How long an answer of `/v1/completions` may get whose request has no `max_tokens`; 0: as the context allows")
    disable_nvext: bool = setting(False, "DYN_DISABLE_FRONTEND_NVEXT", switch, "Ignore `nvext`")
    force_include_usage: bool = setting(False, "DYN_ENABLE_FORCE_INCLUDE_USAGE", switch, "Every stream ends with usage")
    metadata_header_prefix: str = setting("x-dynamo-meta-", "DYN_METADATA_HEADER", SettingReader(str.lower),
        "Request headers with this prefix become request metadata")
    tokenizer_cache_bytes: int = setting(64 * MIB, "DYN_TOKENIZER_CACHE_BYTES", integer(0, unit="bytes"),
        "How much of that, per model")
    inline_tokenize_characters: int = INLINE_TOKENIZE_CHARACTERS
    guided: GuidedLimits = section(GuidedLimits)
    media: MediaSettings = section(MediaSettings)
    recording: RecordingSettings = section(RecordingSettings)
    request_trace: RequestTraceSettings = section(RequestTraceSettings)
    template_budget: BudgetSpec = section(BudgetSpec)

    max_models: int = setting(2000, "DYN_MAX_MODELS", integer(1),
        "Models by name, namespace and role, adapters included")
    concurrent_model_loads: int = setting(2, "DYN_CONCURRENT_MODEL_LOADS", integer(1),
        "Models whose files are fetched and read at once, in threads of their own")
    model_files: FilePolicy = section(FilePolicy)
    model_cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "dynamo" / "mdc" / "by-slug")

    cors_origins: tuple[str, ...] = setting((), "DYN_CORS_ORIGINS", _origins,
        "Let web pages of this origin call the API (`https://app.example.com`; repeatable, in the variable separated "
        "by commas; `*`: any, without credentials)", flag="--cors-origin", group=_OTHER, repeats=True)
    metrics_prefix: str = setting("dynamo_frontend", "DYN_METRICS_PREFIX", SettingReader(_read_metrics_prefix),
        "Prefix of the frontend's metrics", flag="--metrics-prefix", group=_OTHER)
    # fmt: on

    inspector: InspectorSettings = section(InspectorSettings)
    kv_router: KvRouterSettings = section(KvRouterSettings)
    conditional_disagg: ConditionalSettings = section(ConditionalSettings)
    runtime: RuntimeSettings = section(RuntimeSettings)

    def bypass_rules(self) -> BypassRules | None:
        """Return the rules by which decode workers compute prompts alone; None: they never do.

        Raises ValueError for rules that need a threshold that is not given.
        """
        conditional = self.conditional_disagg
        return conditional.rules.with_default(self.kv_router.router_queue_threshold) if conditional.is_on else None

    @property
    def key_sources(self) -> KeySources:
        """Where the API keys come from."""
        return KeySources(self.keys_file, self.admin_keys_file, self.api_key)

    @property
    def response_limits(self) -> StoreLimits:
        """How much of the Responses API is kept."""
        return StoreLimits(self.responses_store_entries, self.responses_store_bytes, self.responses_store_ttl_seconds)

    @property
    def stores_responses(self) -> bool:
        """Whether responses are to be kept anywhere."""
        return self.responses_store != OFF

    @property
    def store(self) -> str:
        """The discovery store in use."""
        return discovery_store(self.runtime.discovery_backend, self.runtime.etcd.endpoints)

    def settle(self, env: Mapping[str, str]) -> Self:
        """Choose the address of the API: the configured one, else loopback where discovery is of one machine.

        `--load-aware` is a way of the kv router mode.

        The status server is a worker's: a frontend shares its machine, not its port. Raises ValueError for a flag that the
        router mode has no use for.
        """
        router_mode = "kv" if self.kv_router.load_aware else self.router_mode
        if self.kv_router.router_session_affinity_ttl_secs is not None and router_mode != "kv":
            raise ValueError(f"--router-session-affinity-ttl-secs needs --router-mode kv, got {router_mode}")
        return replace(
            self,
            router_mode=router_mode,
            http_host=bind_host(self.store, self.http_host, "0.0.0.0"),
            paths={name: made.value(env) for name, made in ROUTES.items()},
            tokenizer_cache_bytes=self.tokenizer_cache_bytes if TOKENIZER_CACHE.value(env) else 0,
            runtime=replace(self.runtime, system=replace(self.runtime.system, port=-1)),
        )
