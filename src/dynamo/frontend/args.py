"""The command line of `python -m dynamo.frontend`: the native flags, served, harmless, or refused by name."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import ssl
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from dynamo.errors import InvalidArgument
from dynamo.frontend.admission.model import RequestLimit
from dynamo.frontend.metrics import check_buckets
from dynamo.frontend.settings import FrontendSettings, listening_host, path_variable
from dynamo.runtime.distributed import REQUEST_PLANES
from dynamo.runtime.settings import DISCOVERY_BACKENDS, env_str
from dynamo.text.templates import ChatTemplate

__all__ = ["parse_args"]

ROUTER_MODES: Final = ("round-robin", "random", "power-of-two", "least-loaded", "direct", "device-aware-weighted")
REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
EVENT_PLANES: Final = ("nats", "zmq")
MAX_WORKERS: Final = 64  # processes; each holds every model's tokenizer
MAX_MIGRATIONS: Final = 2**32 - 1
_METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")

# Native flags whose meaning does not exist yet. Naming one is an error: a flag that is silently ignored is a trap.
_LATER_WITH_VALUE: Final = (
    "--model-name", "--model-path", "--grpc-metrics-port", "--frontend-route-extension",
    "--router-min-initial-workers", "--router-session-affinity-ttl-secs", "--router-session-affinity-mode",
    "--router-policy-config", "--router-conditional-disagg-config", "--router-prefill-policy",
    "--router-decode-policy", "--router-prefill-load-model", "--router-tracking-key-file", "--router-tracking-key-id",
    "--tool-call-parser", "--reasoning-parser",
)  # fmt: skip
_LATER_SWITCHES: Final = (
    "--interactive", "--serve-indexer", "--use-remote-indexer", "--kserve-grpc-server",
    "--enable-anthropic-api",
    "--load-aware", "--router-conditional-disagg", "--router-replica-sync", "--enable-session-prefix-index",
)  # fmt: skip

# Native flags without an effect here, accepted because leaving them out of a script would change nothing: most tune a
# mode that is refused by `--router-mode` itself.
_INERT_WITH_VALUE: Final = (
    "--kv-cache-block-size", "--router-kv-overlap-score-credit", "--router-kv-overlap-score-credit-decay",
    "--router-prefill-load-scale", "--router-decode-active-request-weight", "--router-host-cache-hit-weight",
    "--router-disk-cache-hit-weight", "--router-temperature", "--router-tracking-hash", "--router-ttl-secs",
    "--router-approximate-cache-policy", "--router-queue-threshold", "--router-event-threads",
    "--router-queue-policy", "--shared-cache-multiplier", "--shared-cache-type", "--router-predicted-ttl-secs",
    # of the load model that `--router-prefill-load-model ais` names, under both of its names
    "--aic-attention-dp-size", "--aic-backend", "--aic-backend-version", "--aic-model-path", "--aic-moe-ep-size",
    "--aic-moe-tp-size", "--aic-mtp-seed", "--aic-nextn", "--aic-nextn-accept-rates", "--aic-perf-config",
    "--aic-system", "--aic-tp-size", "--ais-attention-dp-size", "--ais-backend", "--ais-backend-version",
    "--ais-model-path", "--ais-moe-ep-size", "--ais-moe-tp-size", "--ais-mtp-seed", "--ais-nextn",
    "--ais-nextn-accept-rates", "--ais-perf-config", "--ais-system", "--ais-tp-size",
)  # fmt: skip
_INERT_SWITCHES: Final = (
    "--dyn-debug-perf", "--tokenizer-fallback", "--trust-remote-code",
    "--strip-anthropic-preamble", "--router-kv-events", "--kv-events", "--router-track-active-blocks",
    "--track-active-blocks", "--router-track-output-blocks", "--track-output-blocks", "--router-assume-kv-reuse",
    "--assume-kv-reuse", "--router-track-prefill-tokens",
)  # fmt: skip

_EPILOG: Final = """\
every flag has an environment variable, shown in brackets; a flag wins over its variable.
flags of the native frontend that tune the kv router are accepted without effect; flags of features that this
version does not have end with an error that names them.
"""


# Flags of the request plane, which reads its settings from the environment.
_EXPORTED: Final = {
    "--tcp-tls-cert-path": ("DYN_TCP_TLS_CERT_PATH", "certificate for the answers of native workers"),
    "--tcp-tls-key-path": ("DYN_TCP_TLS_KEY_PATH", "its key"),
    "--tcp-tls-ca-cert-path": (
        "DYN_TCP_TLS_CA_CERT_PATH",
        "call workers with TLS; this authority signs their certificates",
    ),
    "--tcp-tls-client-cert-path": ("DYN_TCP_TLS_CLIENT_CERT_PATH", "certificate shown to workers (mutual TLS)"),
    "--tcp-tls-client-key-path": ("DYN_TCP_TLS_CLIENT_KEY_PATH", "its key"),
    "--tcp-tls-client-ca-cert-path": (
        "DYN_TCP_TLS_CLIENT_CA_CERT_PATH",
        "ask native workers that bring answers for a certificate of this authority",
    ),
    "--nats-tls-ca-cert-path": ("NATS_TLS_CA_CERT_PATH", "authority of the NATS server"),
    "--nats-tls-client-cert-path": ("NATS_TLS_CLIENT_CERT_PATH", "certificate shown to the NATS server"),
    "--nats-tls-client-key-path": ("NATS_TLS_CLIENT_KEY_PATH", "its key"),
}


class _Parser(argparse.ArgumentParser):
    """One line on stderr and exit status 2: an error of use needs no page of usage."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)  # noqa: T201 - the command line's own voice
        raise SystemExit(2)


class _NotInThisVersion(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option is not None and not option.startswith("--no-"):  # switching off what does not exist is fine
            parser.error(f"{option} is not in this version")


def parse_args(
    argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None, *, dump: bool = True
) -> FrontendSettings:
    """Read the settings from a command line over its environment; `dump` false writes no `--dump-config-to`.

    Leaves the process as argparse does: status 0 after `--help` and `--version`, 2 with one line after an error of use.
    """
    env = os.environ if env is None else env
    base = FrontendSettings.from_env(env)
    parser = _build(base)
    given = vars(parser.parse_args(argv))
    dump_to = given.pop("dump_config_to") or env.get("DYN_DUMP_CONFIG_TO", "").strip()
    exported = {
        variable: given.pop(name)
        for flag, (variable, _) in _EXPORTED.items()
        if (name := flag.removeprefix("--").replace("-", "_")) in given
    }
    if "nats_tls_insecure" in given:
        exported["NATS_TLS_INSECURE"] = "1" if given.pop("nats_tls_insecure") else "0"
    if "cors_origins" in given:
        given["cors_origins"] = tuple(given["cors_origins"])
    if "http_host" not in given and env_str("DYN_HTTP_HOST", env=env) is None:
        given["http_host"] = listening_host(None, given["discovery_backend"], env)
    settings = dataclasses.replace(base, **given, exported=exported)
    _check(parser, settings)
    try:
        check_buckets(env)
    except ValueError as error:
        parser.error(str(error))
    if dump_to and dump:
        _dump(parser, settings, Path(dump_to))
    return settings


def _build(base: FrontendSettings) -> _Parser:
    parser = _Parser(
        prog="python -m dynamo.frontend",
        description="Serve the models that workers register behind an OpenAI-compatible HTTP API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=_version())

    http = parser.add_argument_group("http").add_argument
    http(
        "--http-host",
        default=argparse.SUPPRESS,
        metavar="HOST",
        help="address to listen on (127.0.0.1 where discovery is of one machine, else 0.0.0.0) [DYN_HTTP_HOST]",
    )
    http("--http-port", type=_port, default=base.http_port, help="port to listen on (%(default)s) [DYN_HTTP_PORT]")
    http("--admin-host", default=base.admin_host, help="address of the admin routes (%(default)s) [DYN_ADMIN_HOST]")
    http(
        "--admin-port",
        type=_port,
        default=base.admin_port,
        metavar="PORT",
        help="serve the admin routes on a port of their own, and nowhere else; 0 takes any free one (on the HTTP port, "
        "while that is bound to loopback) [DYN_ADMIN_PORT]",
    )
    http(
        "--workers",
        type=_positive,
        default=base.workers,
        metavar="N",
        help=f"processes that share the port, at most {MAX_WORKERS} (%(default)s) [DYN_FRONTEND_WORKERS]",
    )
    http("--tls-cert-path", default=base.tls_cert_path, help="serve HTTPS with this certificate [DYN_TLS_CERT_PATH]")
    http("--tls-key-path", default=base.tls_key_path, help="the certificate's key [DYN_TLS_KEY_PATH]")
    http(
        "--tls-client-ca-cert-path",
        default=base.tls_client_ca_cert_path,
        help="ask clients for a certificate of this authority [DYN_TLS_CLIENT_CA_CERT_PATH]",
    )
    http(
        "--max-requests-in-flight",
        type=_positive,
        default=base.max_requests_in_flight,
        help="requests at once; more are declined with Retry-After (%(default)s) [DYN_HTTP_MAX_REQUESTS_IN_FLIGHT]",
    )
    http(
        "--max-requests-per-model",
        type=_request_limit,
        default=base.max_requests_per_model,
        metavar="N|Nx",
        help="the same for each model: a number, or so many times what its workers run at once, as in 1.5x; the last "
        "places are for requests of higher priority [DYN_HTTP_MAX_REQUESTS_PER_MODEL]",
    )
    http(
        "--max-queue-age",
        dest="max_queue_age_seconds",
        type=_factor,
        default=base.max_queue_age_seconds,
        metavar="SECONDS",
        help="a model whose oldest request has waited longer for its first token gets no more; 0: never (120 where its "
        "workers say how much they run) [DYN_HTTP_MAX_QUEUE_AGE_SECS]",
    )

    where = parser.add_argument_group("cluster").add_argument
    where("--namespace", default=base.namespace, help="serve models of this namespace only [DYN_NAMESPACE]")
    where(
        "--namespace-prefix",
        default=base.namespace_prefix,
        help="serve models of namespaces that begin so; wins over --namespace [DYN_NAMESPACE_PREFIX]",
    )
    where(
        "--discovery-backend",
        default=base.discovery_backend,
        help="file, mem, etcd or kubernetes (etcd when ETCD_ENDPOINTS is set, else file) [DYN_DISCOVERY_BACKEND]",
    )
    where("--request-plane", choices=("tcp", "nats"), default=base.request_plane, help="(tcp) [DYN_REQUEST_PLANE]")
    where(
        "--response-plane",
        action=_Inert,
        choices=("tcp",),
        default=argparse.SUPPRESS,
        help="only tcp is in this version",
    )
    where("--event-plane", choices=EVENT_PLANES, default=base.event_plane, help="(zmq) [DYN_EVENT_PLANE]")
    where(
        "--router-mode",
        default=base.router_mode,
        metavar="MODE",
        help=f"how a worker is chosen: {', '.join(ROUTER_MODES)} (%(default)s) [DYN_ROUTER_MODE]",
    )
    where(
        "--migration-limit",
        type=_migrations,
        default=base.migration_limit,
        help="how often a request may be tried on another worker (the model card's value) [DYN_MIGRATION_LIMIT]",
    )
    where(
        "--migration-max-seq-len",
        type=_positive,
        default=base.migration_max_seq_len,
        help="no other worker for a sequence longer than this [DYN_MIGRATION_MAX_SEQ_LEN]",
    )
    where(
        "--replacement-wait-seconds",
        type=_factor,
        default=base.replacement_wait_seconds,
        metavar="SECONDS",
        help="how long a request waits for a replacement when a model's last worker was lost (%(default)s; 0: not at all) "
        "[DYN_REPLACEMENT_WAIT_SECS]",
    )
    where(
        "--stall-floor-seconds",
        type=_factor,
        default=base.stall_floor_seconds,
        metavar="SECONDS",
        help="minimum silence before a stream counts as stalled; 0: off (%(default)s) [DYN_STALL_FLOOR_SECS]",
    )
    where(
        "--stall-factor",
        type=_factor_of_gap,
        default=base.stall_factor,
        metavar="N",
        help="nor before so many times its own longest gap between tokens (%(default)s) [DYN_STALL_FACTOR]",
    )
    where(
        "--first-token-timeout-seconds",
        type=_seconds,
        default=base.first_token_timeout_seconds,
        metavar="SECONDS",
        help="a worker that has not said anything by then is left for another; 0 never "
        "[DYN_HTTP_FIRST_TOKEN_TIMEOUT_SECS]",
    )
    where(
        "--inter-token-timeout-seconds",
        type=_seconds,
        default=base.inter_token_timeout_seconds,
        metavar="SECONDS",
        help="the same between two tokens [DYN_HTTP_INTER_TOKEN_TIMEOUT_SECS]",
    )
    where(
        "--request-timeout-seconds",
        type=_seconds,
        default=base.request_timeout_seconds,
        metavar="SECONDS",
        help="a request that has not been answered in full by then ends with 504; 0 never "
        "[DYN_HTTP_REQUEST_TIMEOUT_SECS]",
    )
    where(
        "--enforce-disagg",
        action=argparse.BooleanOptionalAction,
        default=base.enforce_disagg,
        help="a prompt that no prefill worker can take fails, instead of being computed by its decode worker "
        "[DYN_ENFORCE_DISAGG]",
    )

    where(
        "--active-decode-blocks-threshold",
        type=_part,
        default=base.active_decode_blocks_threshold,
        help="a worker with more than this part of its KV blocks in use gets no request "
        "[DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD]",
    )
    where(
        "--active-prefill-tokens-threshold",
        type=_not_negative,
        default=base.active_prefill_tokens_threshold,
        help="nor one with more prompt tokens under way [DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD]",
    )
    where(
        "--active-prefill-tokens-threshold-frac",
        type=_factor,
        default=base.active_prefill_tokens_threshold_frac,
        help="the same as a part of one engine step's tokens [DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC]",
    )

    tls = parser.add_argument_group("TLS with workers and NATS").add_argument
    for flag, (variable, what) in _EXPORTED.items():
        tls(flag, default=argparse.SUPPRESS, metavar="FILE", help=f"{what} [{variable}]")

    tls(
        "--nats-tls-insecure",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="do not verify the NATS server [NATS_TLS_INSECURE]",
    )

    text = parser.add_argument_group("requests").add_argument
    text(
        "--exclude-tools-when-tool-choice-none",
        action=argparse.BooleanOptionalAction,
        default=base.exclude_tools_when_tool_choice_none,
        help="leave tools out of the prompt [DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE]",
    )
    text(
        "--ignore-unsupported-fields",
        action=argparse.BooleanOptionalAction,
        default=base.ignore_unsupported_fields,
        help="ignore unknown request fields instead of refusing them [DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS]",
    )
    text(
        "--open-guided-objects",
        action=argparse.BooleanOptionalAction,
        default=base.open_guided_objects,
        help="let guided objects have members that their schema does not list [DYN_OPEN_GUIDED_OBJECTS]",
    )
    text(
        "--allow-control-tokens-in-text",
        action=argparse.BooleanOptionalAction,
        default=base.allow_control_tokens_in_text,
        help="let messages spell control tokens such as <|im_end|> [DYN_ALLOW_CONTROL_TOKENS_IN_TEXT]",
    )
    text(
        "--reasoning-field-name",
        choices=REASONING_FIELDS,
        default=base.reasoning_field_name,
        help="the member of an answer that holds its reasoning (%(default)s) [DYN_REASONING_FIELD_NAME]",
    )
    text(
        "--enable-streaming-tool-dispatch",
        action=argparse.BooleanOptionalAction,
        dest="streaming_tool_dispatch",
        default=base.streaming_tool_dispatch,
        help="also tell every complete tool call in an event of its own [DYN_ENABLE_STREAMING_TOOL_DISPATCH]",
    )
    text(
        "--enable-streaming-reasoning-dispatch",
        action=argparse.BooleanOptionalAction,
        dest="streaming_reasoning_dispatch",
        default=base.streaming_reasoning_dispatch,
        help="also tell the whole reasoning in an event of its own [DYN_ENABLE_STREAMING_REASONING_DISPATCH]",
    )
    text(
        "--dyn-preprocess-workers",
        dest="preprocess_workers",
        type=_not_negative,
        default=base.preprocess_workers,
        metavar="N",
        help="threads for long prompts; 0 chooses by the number of processors [DYN_PREPROCESS_WORKERS]",
    )
    text(
        "--chat-template",
        dest="custom_jinja_template",
        default=base.custom_jinja_template,
        metavar="FILE",
        help="a Jinja template that replaces every model's own [DYN_CUSTOM_JINJA_TEMPLATE]",
    )
    text(
        "--dyn-chat-processor",
        action=_Inert,
        choices=("dynamo",),
        default=argparse.SUPPRESS,
        help="only dynamo is in this version",
    )
    text(
        "--tokenizer",
        action=_Inert,
        choices=("default",),
        default=argparse.SUPPRESS,
        help="only default is in this version",
    )

    other = parser.add_argument_group("other").add_argument
    other(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        type=_origin,
        default=argparse.SUPPRESS,
        metavar="URL",
        help="let web pages of this origin call the API (repeatable; * for any, without credentials) [DYN_CORS_ORIGINS]",
    )
    other("--metrics-prefix", default=base.metrics_prefix, help="(%(default)s) [DYN_METRICS_PREFIX]")
    other(
        "--chaos",
        default=base.chaos,
        metavar="FILE",
        help="break as this plan says (TOML); needs --allow-chaos too [DYN_CHAOS]",
    )
    other(
        "--allow-chaos",
        action=argparse.BooleanOptionalAction,
        default=base.allow_chaos,
        help="permit fault injection in this process [DYN_ALLOW_CHAOS]",
    )
    other(
        "--chaos-name",
        default=base.chaos_name,
        metavar="NAME",
        help="what this process is called in the plan (frontend) [DYN_CHAOS_NAME]",
    )
    other("--dump-config-to", default=None, metavar="FILE", help="write the settings as JSON [DYN_DUMP_CONFIG_TO]")

    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for flag in _LATER_WITH_VALUE:
        add(flag, action=_NotInThisVersion, **hidden)
    for flag in _LATER_SWITCHES:
        names = [flag, f"--no-{flag[2:]}"] + (["-i"] if flag == "--interactive" else [])
        add(*names, action=_NotInThisVersion, nargs=0, **hidden)
    for flag in _INERT_WITH_VALUE:
        add(flag, action=_Inert, **hidden)
    for flag in _INERT_SWITCHES:
        add(flag, f"--no-{flag[2:]}", action=_Inert, nargs=0, **hidden)
    return parser


class _Inert(argparse.Action):
    """Accept and forget."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        return None


def _version() -> str:
    try:
        return version("dynamo-unified")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def _port(text: str) -> int:
    number = _not_negative(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: use 0..65535")
    return number


def _not_negative(text: str) -> int:
    return _at_least(text, 0)


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _factor(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is below 0 or no number")
    return number


def _request_limit(text: str) -> RequestLimit:
    try:
        return RequestLimit.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _factor_of_gap(text: str) -> float:
    number = _factor(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1: every gap would be a stall")
    return number


def _seconds(text: str) -> float | None:
    return _factor(text) or None


def _part(text: str) -> float:
    number = _factor(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return number


def _migrations(text: str) -> int:
    number = _not_negative(text)
    if number > MAX_MIGRATIONS:
        raise argparse.ArgumentTypeError(f"{text} is above {MAX_MIGRATIONS}")
    return number


def _at_least(text: str, minimum: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if number < minimum:
        raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
    return number


def _check(parser: _Parser, settings: FrontendSettings) -> None:
    _check_places(parser, settings)
    _check_admin(parser, settings)
    for origin in settings.cors_origins:  # from the environment: argparse judges only the flag
        try:
            _origin(origin)
        except argparse.ArgumentTypeError as error:
            parser.error(f"DYN_CORS_ORIGINS: {error}")
    if settings.reasoning_field_name not in REASONING_FIELDS:  # from the environment: argparse judges only the flag
        parser.error(f"DYN_REASONING_FIELD_NAME must be one of {', '.join(REASONING_FIELDS)}")
    if settings.router_mode == "kv":
        parser.error("--router-mode kv is not in this version")
    if settings.router_mode not in ROUTER_MODES:
        parser.error(f"--router-mode {settings.router_mode!r} is unknown; use one of {', '.join(ROUTER_MODES)}")
    if (settings.tls_cert_path is None) != (settings.tls_key_path is None):
        parser.error("--tls-cert-path and --tls-key-path need each other")
    if settings.tls_client_ca_cert_path is not None and settings.tls_cert_path is None:
        parser.error("--tls-client-ca-cert-path needs --tls-cert-path and --tls-key-path")
    for flag, path in {
        "--tls-cert-path": settings.tls_cert_path,
        "--tls-key-path": settings.tls_key_path,
        "--tls-client-ca-cert-path": settings.tls_client_ca_cert_path,
        "--chat-template": settings.custom_jinja_template,
    }.items():
        if path is not None and not Path(path).is_file():
            parser.error(f"{flag}: there is no file {path}")
    _check_tls(parser, settings)
    _check_chaos(parser, settings)
    if settings.custom_jinja_template is not None:
        try:
            ChatTemplate(Path(settings.custom_jinja_template).read_text(encoding="utf-8"))
        except (InvalidArgument, OSError, UnicodeDecodeError) as error:
            parser.error(f"--chat-template {settings.custom_jinja_template}: {error}")


def _check_admin(parser: _Parser, settings: FrontendSettings) -> None:
    if settings.admin_port is None:
        return
    if settings.admin_port > 65535:  # from the environment: argparse judges only the flag
        parser.error(f"DYN_ADMIN_PORT={settings.admin_port} is not a port: use 0..65535")
    if settings.disable_admin_api:
        parser.error("--admin-port has nothing to serve: DYN_DISABLE_FRONTEND_ADMIN_API is set")


def _origin(text: str) -> str:
    """Check an origin as browsers send it: scheme, host and port, and nothing behind."""
    parts = urlsplit(text)
    if text != "*" and (
        parts.scheme not in {"http", "https"} or not parts.netloc or text.rstrip("/") != text or parts.path
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not an origin; write for example https://app.example.com, or *")
    return text


def _check_chaos(parser: _Parser, settings: FrontendSettings) -> None:
    if settings.chaos is None:
        return
    from dynamo.runtime.chaos.admission import admitted  # a frontend without a plan does without this

    try:
        admitted(settings.chaos, settings.allow_chaos)
    except InvalidArgument as error:
        parser.error(f"--chaos: {error}")
    if settings.workers > 1:
        parser.error(f"--chaos is for one process: --workers {settings.workers} would count requests in each; use 1")


def _check_places(parser: _Parser, settings: FrontendSettings) -> None:
    """Reject values that the environment may hold and no flag would let pass."""
    if (settings.active_decode_blocks_threshold or 0) > 1:
        parser.error(f"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD: {settings.active_decode_blocks_threshold} is above 1")
    if settings.workers > MAX_WORKERS:
        parser.error(f"--workers {settings.workers}: use 1..{MAX_WORKERS}")
    if not 0 <= settings.http_port <= 65535:
        parser.error(f"DYN_HTTP_PORT: {settings.http_port} is not a port: use 0..65535")
    for what, value, known in (
        ("--discovery-backend", settings.discovery_backend, DISCOVERY_BACKENDS),
        ("--request-plane", settings.request_plane, REQUEST_PLANES),
        ("--event-plane", settings.event_plane, EVENT_PLANES),
    ):
        if value is not None and value.lower() not in known:
            parser.error(f"{what} {value!r} is unknown; use one of {', '.join(known)}")
    if _METRIC_NAME.fullmatch(settings.metrics_prefix) is None:
        parser.error(f"--metrics-prefix {settings.metrics_prefix!r}: use letters, digits and _, no digit first")
    taken: dict[str, str] = {}
    for route, path in settings.paths.items():
        if not path.startswith("/"):
            parser.error(f"{path_variable(route)}: a path begins with /, got {path!r}")
        if path in taken:
            parser.error(f"{path_variable(route)}: {path} is the path of {taken[path]} already")
        taken[path] = route


def _check_tls(parser: _Parser, settings: FrontendSettings) -> None:
    if settings.tls_cert_path is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert_path, settings.tls_key_path, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        parser.error(f"--tls-cert-path, --tls-key-path: these are no certificate and its key: {error}")
    if settings.tls_client_ca_cert_path is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca_cert_path)
        except OSError as error:
            parser.error(f"--tls-client-ca-cert-path: this is no certificate: {error}")


def _dump(parser: _Parser, settings: FrontendSettings, path: Path) -> None:
    try:
        path.write_text(json.dumps(dataclasses.asdict(settings), default=str, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        parser.error(f"--dump-config-to: {error}")
