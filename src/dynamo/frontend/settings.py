"""The settings of a frontend, read once at start: environment and flags, read at the edge into one frozen value."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from dynamo.frontend.admission.model import RequestLimit
from dynamo.frontend.models.file_policy import FilePolicy
from dynamo.protocol.guided_limits import DEFAULT_GUIDED_LIMITS, GuidedLimits
from dynamo.protocol.openai.body import DEPTH_CEILING, MAX_DEPTH, MAX_ITEMS, MAX_MEMBERS, MAX_MESSAGES
from dynamo.protocol.openai.errors import DEFAULT_OVERLOAD_STATUS, overload_status
from dynamo.runtime.addresses import LOOPBACK, bind_host
from dynamo.runtime.http_limits import HttpLimits
from dynamo.runtime.settings import discovery_store, env_bool, env_float, env_int, env_str
from dynamo.settings.readers import integer, kibibytes, mebibytes, seconds
from dynamo.settings.table import read_settings, section, setting
from dynamo.text.template_sandbox import BudgetSpec

logger = logging.getLogger(__name__)

MIB: Final = 1024 * 1024

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

_ROUTE_VARIABLES: Final[Mapping[str, tuple[str, str]]] = {
    # route name: (variable, default path)
    "chat": ("DYN_HTTP_SVC_CHAT_PATH", "/v1/chat/completions"),
    "completions": ("DYN_HTTP_SVC_CMP_PATH", "/v1/completions"),
    "models": ("DYN_HTTP_SVC_MODELS_PATH", "/v1/models"),
    "health": ("DYN_HTTP_SVC_HEALTH_PATH", "/health"),
    "live": ("DYN_HTTP_SVC_LIVE_PATH", "/live"),
    "metrics": ("DYN_HTTP_SVC_METRICS_PATH", "/metrics"),
}


def path_variable(route: str) -> str:
    """Return the variable that moves a route."""
    return _ROUTE_VARIABLES[route][0]


def default_paths() -> dict[str, str]:
    """Return the path of each route when nothing overrides it."""
    return {name: path for name, (_, path) in _ROUTE_VARIABLES.items()}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """Sizes in bytes, times in seconds; None means off or unknown unless a comment states otherwise."""

    http_host: str = LOOPBACK  # of a process: see `listening_host`
    http_port: int = 8000
    admin_host: str = LOOPBACK
    admin_port: int | None = None  # None: admin routes are on the port above, while that is bound to loopback
    workers: int = 1  # processes on the one port
    tls_cert_path: str | None = None
    tls_key_path: str | None = None
    tls_client_ca_cert_path: str | None = None
    tls_handshake_timeout_seconds: float = 10.0  # three round trips and a busy machine
    max_tls_handshakes: int = 1024  # at once; each takes 1 to 2 ms of CPU
    exported: Mapping[str, str] = field(default_factory=dict)  # flags that the runtime reads as variables

    namespace: str | None = None  # serve only this namespace
    namespace_prefix: str | None = None  # serve namespaces that begin so; wins over `namespace`
    discovery_backend: str | None = None  # None: the runtime's own choice
    request_plane: str | None = None
    event_plane: str | None = None
    router_mode: str = "round-robin"
    migration_limit: int | None = None  # None: the model card's value
    migration_max_seq_len: int | None = None
    enforce_disagg: bool = (
        False  # a prompt that no prefill worker takes fails, instead of being computed by its decoder
    )

    chaos: str | None = None  # a plan of faults on purpose
    allow_chaos: bool = False
    chaos_name: str | None = None

    metrics_prefix: str = "dynamo_frontend"
    active_decode_blocks_threshold: float | None = None  # a part of a worker's KV blocks, 0 to 1
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None  # of `max_num_batched_tokens`
    disable_admin_api: bool = False
    cors_origins: tuple[str, ...] = ()  # pages of these origins may call; "*": of any, without credentials
    max_requests_in_flight: int = DEFAULT_MAX_REQUESTS_IN_FLIGHT
    max_requests_per_model: RequestLimit | None = None  # off: an engine's own queue is a legitimate place to wait
    max_queue_age_seconds: float | None = None  # None: see `model_admission`; 0: off
    capacity_share: float = 1.0  # of the models' capacity that is this process's: one of several on a port has a part
    overload_status: int = DEFAULT_OVERLOAD_STATUS
    limits: ApiLimits = section(ApiLimits)
    pending_bodies_limit_bytes: int = 1024 * 1024 * 1024  # of all requests that are still arriving
    json_depth_limit: int = MAX_DEPTH
    body_bytes_per_token: int = 64  # of the longest context served here, beside 16 MiB; text has 4; 0: any body
    json_members_limit: int = MAX_MEMBERS
    json_items_limit: int = MAX_ITEMS
    messages_limit: int = MAX_MESSAGES
    guided: GuidedLimits = DEFAULT_GUIDED_LIMITS
    peek_seconds: float = DEFAULT_PEEK_SECONDS
    keep_alive_seconds: float | None = KEEP_ALIVE_SECONDS
    backend_stream_timeout_seconds: float | None = None
    replacement_wait_seconds: float = 10.0  # for a worker in place of the last one, which was lost; 0: not at all
    stall_floor_seconds: float = 10.0  # no stream is taken for stalled before; 0: none ever is
    stall_factor: float = 20.0  # nor before this many times its own longest gap between tokens
    first_token_timeout_seconds: float | None = None  # of each worker that is tried
    inter_token_timeout_seconds: float | None = None
    request_timeout_seconds: float | None = None  # from the complete body to the last byte of the answer
    graceful_shutdown_seconds: float = 5.0
    grace_period_seconds: float = 0.0  # not ready, and still taking requests

    context_window: int | None = None  # overrides what /v1/models says
    max_output_tokens: int | None = None
    ignore_unsupported_fields: bool = False
    disable_nvext: bool = False
    force_include_usage: bool = False
    exclude_tools_when_tool_choice_none: bool = True
    custom_jinja_template: str | None = None
    template_budget: BudgetSpec = field(default_factory=BudgetSpec)  # of each rendering of a chat template
    open_guided_objects: bool = False  # guided objects may have members that their schema does not list
    allow_control_tokens_in_text: bool = False  # a message may spell the tokens that end a turn
    reasoning_field_name: str = "reasoning_content"
    streaming_tool_dispatch: bool = False
    streaming_reasoning_dispatch: bool = False
    metadata_header_prefix: str = "x-dynamo-meta-"

    preprocess_workers: int = 0  # threads for long prompts and model files; 0: chosen by the number of processors
    inline_tokenize_characters: int = INLINE_TOKENIZE_CHARACTERS
    tokenizer_cache_bytes: int = 64 * 1024 * 1024  # 0: off
    max_models: int = 2000  # by name, namespace and role; adapters count
    concurrent_model_loads: int = 2
    model_files: FilePolicy = field(default_factory=FilePolicy)
    model_cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "dynamo" / "mdc" / "by-slug")
    paths: Mapping[str, str] = field(default_factory=default_paths)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> FrontendSettings:
        """Read the settings of this process without any flag."""
        env = os.environ if env is None else env
        default = cls()
        peek_ms = env_float("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS", default.peek_seconds * 1000, minimum=0, env=env)
        alive_ms = env_float("DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS", KEEP_ALIVE_SECONDS * 1000, minimum=0, env=env)
        inactive = env_float("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", 0, minimum=0, env=env)
        first_token = env_float("DYN_HTTP_FIRST_TOKEN_TIMEOUT_SECS", 0, minimum=0, env=env)
        inter_token = env_float("DYN_HTTP_INTER_TOKEN_TIMEOUT_SECS", 0, minimum=0, env=env)
        whole = env_float("DYN_HTTP_REQUEST_TIMEOUT_SECS", 0, minimum=0, env=env)
        cache_bytes = env_int("DYN_TOKENIZER_CACHE_BYTES", default.tokenizer_cache_bytes, minimum=0, env=env)
        return cls(
            http_host=listening_host(env_str("DYN_HTTP_HOST", env=env), None, env),
            http_port=env_int("DYN_HTTP_PORT", default.http_port, minimum=0, env=env),
            admin_host=env_str("DYN_ADMIN_HOST", default.admin_host, env=env) or default.admin_host,
            admin_port=_optional_int("DYN_ADMIN_PORT", minimum=0, env=env),
            workers=env_int("DYN_FRONTEND_WORKERS", default.workers, minimum=1, env=env),
            tls_cert_path=env_str("DYN_TLS_CERT_PATH", env=env),
            tls_key_path=env_str("DYN_TLS_KEY_PATH", env=env),
            tls_client_ca_cert_path=env_str("DYN_TLS_CLIENT_CA_CERT_PATH", env=env),
            tls_handshake_timeout_seconds=env_float(
                "DYN_TLS_HANDSHAKE_TIMEOUT_SECS", default.tls_handshake_timeout_seconds, minimum=0.1, env=env
            ),
            max_tls_handshakes=env_int("DYN_TLS_MAX_HANDSHAKES", default.max_tls_handshakes, minimum=1, env=env),
            namespace=env_str("DYN_NAMESPACE", env=env),
            namespace_prefix=env_str("DYN_NAMESPACE_PREFIX", env=env),
            discovery_backend=env_str("DYN_DISCOVERY_BACKEND", env=env),
            request_plane=env_str("DYN_REQUEST_PLANE", env=env),
            event_plane=env_str("DYN_EVENT_PLANE", env=env),
            router_mode=env_str("DYN_ROUTER_MODE", default.router_mode, env=env) or default.router_mode,
            migration_limit=_optional_int("DYN_MIGRATION_LIMIT", minimum=0, env=env),
            migration_max_seq_len=_optional_int("DYN_MIGRATION_MAX_SEQ_LEN", minimum=1, env=env),
            enforce_disagg=env_bool("DYN_ENFORCE_DISAGG", env=env),
            chaos=env_str("DYN_CHAOS", env=env),
            allow_chaos=env_bool("DYN_ALLOW_CHAOS", env=env),
            chaos_name=env_str("DYN_CHAOS_NAME", env=env),
            metrics_prefix=env_str("DYN_METRICS_PREFIX", default.metrics_prefix, env=env) or default.metrics_prefix,
            active_decode_blocks_threshold=_optional_float("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", env=env),
            active_prefill_tokens_threshold=_optional_int("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", minimum=0, env=env),
            active_prefill_tokens_threshold_frac=_optional_float("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC", env=env),
            disable_admin_api=env_bool("DYN_DISABLE_FRONTEND_ADMIN_API", env=env),
            cors_origins=tuple(filter(None, map(str.strip, (env_str("DYN_CORS_ORIGINS", env=env) or "").split(",")))),
            max_requests_in_flight=env_int(
                "DYN_HTTP_MAX_REQUESTS_IN_FLIGHT", default.max_requests_in_flight, minimum=1, env=env
            ),
            max_requests_per_model=_request_limit("DYN_HTTP_MAX_REQUESTS_PER_MODEL", env=env),
            max_queue_age_seconds=_optional_float("DYN_HTTP_MAX_QUEUE_AGE_SECS", env=env),
            overload_status=_overload_status(env),
            limits=read_settings(ApiLimits, env),
            pending_bodies_limit_bytes=env_int("DYN_HTTP_PENDING_BODIES_LIMIT_MB", 1024, minimum=1, env=env)
            * 1024
            * 1024,
            json_depth_limit=min(
                env_int("DYN_HTTP_JSON_DEPTH_LIMIT", default.json_depth_limit, minimum=4, env=env), DEPTH_CEILING
            ),
            guided=GuidedLimits.read(partial(env_int, minimum=1, env=env)),
            body_bytes_per_token=env_int(
                "DYN_HTTP_BODY_BYTES_PER_TOKEN", default.body_bytes_per_token, minimum=0, env=env
            ),
            json_members_limit=env_int("DYN_HTTP_JSON_MEMBERS_LIMIT", default.json_members_limit, minimum=64, env=env),
            json_items_limit=env_int("DYN_HTTP_JSON_ITEMS_LIMIT", default.json_items_limit, minimum=64, env=env),
            messages_limit=env_int("DYN_HTTP_MESSAGES_LIMIT", default.messages_limit, minimum=1, env=env),
            peek_seconds=peek_ms / 1000,
            keep_alive_seconds=alive_ms / 1000 or None,
            backend_stream_timeout_seconds=inactive or None,
            grace_period_seconds=env_float("DYN_HTTP_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", 0.0, minimum=0, env=env),
            replacement_wait_seconds=env_float(
                "DYN_REPLACEMENT_WAIT_SECS", default.replacement_wait_seconds, minimum=0, env=env
            ),
            stall_floor_seconds=env_float("DYN_STALL_FLOOR_SECS", default.stall_floor_seconds, minimum=0, env=env),
            stall_factor=env_float("DYN_STALL_FACTOR", default.stall_factor, minimum=1, env=env),
            first_token_timeout_seconds=first_token or None,
            inter_token_timeout_seconds=inter_token or None,
            request_timeout_seconds=whole or None,
            graceful_shutdown_seconds=env_float("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", 5.0, minimum=0, env=env),
            context_window=_optional_int("DYN_CONTEXT_WINDOW", minimum=1, env=env),
            max_output_tokens=_optional_int("DYN_MAX_OUTPUT_TOKENS", minimum=1, env=env),
            ignore_unsupported_fields=env_bool("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", env=env),
            disable_nvext=env_bool("DYN_DISABLE_FRONTEND_NVEXT", env=env),
            force_include_usage=env_bool("DYN_ENABLE_FORCE_INCLUDE_USAGE", env=env),
            template_budget=BudgetSpec(
                steps=env_int("DYN_TEMPLATE_MAX_STEPS", default.template_budget.steps, minimum=1, env=env),
                sizes=env_int("DYN_TEMPLATE_MAX_MB", 256, minimum=1, env=env) * 1024 * 1024,
                seconds=env_float("DYN_TEMPLATE_SECS", default.template_budget.seconds, minimum=0.001, env=env),
            ),
            open_guided_objects=env_bool("DYN_OPEN_GUIDED_OBJECTS", env=env),
            allow_control_tokens_in_text=env_bool("DYN_ALLOW_CONTROL_TOKENS_IN_TEXT", env=env),
            exclude_tools_when_tool_choice_none=env_bool("DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", True, env=env),
            reasoning_field_name=env_str("DYN_REASONING_FIELD_NAME", default.reasoning_field_name, env=env)
            or default.reasoning_field_name,
            streaming_tool_dispatch=env_bool("DYN_ENABLE_STREAMING_TOOL_DISPATCH", env=env),
            streaming_reasoning_dispatch=env_bool("DYN_ENABLE_STREAMING_REASONING_DISPATCH", env=env),
            custom_jinja_template=env_str("DYN_CUSTOM_JINJA_TEMPLATE", env=env),
            metadata_header_prefix=(
                env_str("DYN_METADATA_HEADER", default.metadata_header_prefix, env=env) or ""
            ).lower(),
            preprocess_workers=env_int("DYN_PREPROCESS_WORKERS", 0, minimum=0, env=env),
            max_models=env_int("DYN_MAX_MODELS", default.max_models, minimum=1, env=env),
            concurrent_model_loads=env_int(
                "DYN_CONCURRENT_MODEL_LOADS", default.concurrent_model_loads, minimum=1, env=env
            ),
            model_files=_file_policy(env),
            tokenizer_cache_bytes=cache_bytes if env_bool("DYN_TOKENIZER_CACHE", True, env=env) else 0,
            paths={
                name: env_str(variable, path, env=env) or path for name, (variable, path) in _ROUTE_VARIABLES.items()
            },
        )


def store_of(backend: str | None, env: Mapping[str, str]) -> str:
    """Return the discovery store that a frontend with this backend uses (None: as the variables choose)."""
    named = backend or env_str("DYN_DISCOVERY_BACKEND", "auto", env=env) or "auto"
    return discovery_store(named, env_str("ETCD_ENDPOINTS", env=env))


def listening_host(asked: str | None, backend: str | None, env: Mapping[str, str]) -> str:
    """Choose the address of the API: the configured one, else loopback where discovery is of one machine."""
    return bind_host(store_of(backend, env), asked, "0.0.0.0")


def _file_policy(env: Mapping[str, str]) -> FilePolicy:
    default = FilePolicy()
    mib = 1024 * 1024
    return FilePolicy(
        schemes=_names("DYN_MODEL_FILE_SCHEMES", env=env) or default.schemes,
        hosts=_names("DYN_MODEL_FILE_HOSTS", env=env),
        file_bytes=env_int("DYN_MODEL_FILE_LIMIT_MB", default.file_bytes // mib, minimum=1, env=env) * mib,
        card_bytes=env_int("DYN_MODEL_CARD_LIMIT_MB", default.card_bytes // mib, minimum=1, env=env) * mib,
        seconds=env_float("DYN_MODEL_FILE_TIMEOUT_SECS", default.seconds, minimum=0.1, env=env),
    )


def _names(variable: str, *, env: Mapping[str, str]) -> frozenset[str]:
    given = env_str(variable, env=env) or ""
    return frozenset(name.strip().lower() for name in given.split(",") if name.strip())


def _request_limit(name: str, *, env: Mapping[str, str]) -> RequestLimit | None:
    asked = env_str(name, env=env)
    try:
        return None if asked is None else RequestLimit.parse(asked.strip())
    except ValueError as error:
        logger.warning("%s: %s; ignoring it", name, error)
        return None


def _optional_float(name: str, *, env: Mapping[str, str]) -> float | None:
    if env_str(name, env=env) is None:
        return None
    number = env_float(name, -1, env=env)
    if number < 0:  # unreadable or negative: `env_float` has warned about the first case
        logger.warning("%s must be at least 0; ignoring it", name)
        return None
    return number


def _optional_int(name: str, *, minimum: int, env: Mapping[str, str]) -> int | None:
    if env_str(name, env=env) is None:
        return None
    number = env_int(name, minimum - 1, env=env)
    if number < minimum:  # unreadable or too small: `env_int` has warned about the first case
        logger.warning("%s must be an integer of at least %d; ignoring it", name, minimum)
        return None
    return number


def _overload_status(env: Mapping[str, str]) -> int:
    asked = env_str("DYN_HTTP_OVERLOAD_STATUS_CODE", env=env)
    status = overload_status(asked)
    if asked is not None and asked.strip() != str(status):
        logger.warning("DYN_HTTP_OVERLOAD_STATUS_CODE=%s is no status in 200..999; using %d", asked, status)
    return status
