"""The command line of `python -m dynamo.frontend`: the flags of its tables, and what no single setting can judge."""

from __future__ import annotations

import argparse
import functools
import json
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.metrics.buckets import check_buckets
from dynamo.frontend.http.settings import ROUTES
from dynamo.frontend.settings import DUMP_CONFIG_TO, FrontendSettings
from dynamo.runtime.base.addresses import is_loopback
from dynamo.runtime.calls.faults import injection
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import one_of, switch, text
from dynamo.settings.table import Setting, Status, declared, settings_of, without_secrets
from dynamo.text.templates import ChatTemplate

_EPILOG: Final = """\
every flag has an environment variable, shown in brackets; a flag wins over its variable.
flags of the native frontend that would change nothing here are accepted without effect; flags of features that
this version does not have end with an error that names them. docs/settings.md has the variables without a flag.
"""
_WORKERS_ONLY: Final = frozenset({"engine_request_limit"})  # of the runtime's flags


def parse_args(
    argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None, *, dump: bool = True
) -> FrontendSettings:
    """Read the settings from a command line over its environment; `dump` false writes no `--dump-config-to`.

    Leaves the process as argparse does: status 0 after `--help` and `--version`, 2 with one line after an error of use.
    """
    env = os.environ if env is None else env
    parser = build_parser(env)
    given = vars(parser.parse_args(argv))
    try:
        settings = FrontendSettings.from_env(env, given)
        check_buckets(env)
        _check(settings)
    except (ValueError, InvalidArgument) as error:
        parser.error(str(error))
    if dump and given[DUMP_CONFIG_TO.dest] is not None:
        _dump(parser, settings, given[DUMP_CONFIG_TO.dest])
    return settings


_GROUPS: Final = ("http", "access", "cluster", "requests", "media", "recording", "other", "inspector")


def flagged_settings() -> Iterator[Setting]:
    """Walk the settings that this command takes as flags, in the order of its help."""
    found = [made for _, made in settings_of(FrontendSettings) if made.dest not in _WORKERS_ONLY]
    yield from sorted(found, key=lambda made: _GROUPS.index(made.group) if made.group in _GROUPS else len(_GROUPS))
    yield from (*ONE_VALUE, DUMP_CONFIG_TO, *REFUSED, *INERT)


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command over an environment."""
    parser = CommandParser(
        "python -m dynamo.frontend",
        usage="python -m dynamo.frontend [options]",
        description="Serve the models that workers register behind an OpenAI-compatible HTTP API.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=_version())
    add_flags(parser, flagged_settings(), env)
    return parser


@functools.cache
def _version() -> str:
    try:
        return version("dynamo-unified")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


# -- what more than one setting decides, and what only the machine knows: each raises ValueError or InvalidArgument ---


def _check(settings: FrontendSettings) -> None:
    _check_routes(settings)
    _check_files(settings)
    _check_keys(settings)
    _check_tls(settings)
    _check_uds(settings)
    _check_chaos(settings)
    _check_decisions(settings)
    _check_conditional(settings)
    if settings.admin_port is not None and settings.disable_admin_api:
        raise ValueError("--admin-port has nothing to serve: DYN_DISABLE_FRONTEND_ADMIN_API is set")
    if settings.runtime.response_plane == "quic":
        raise ValueError("--response-plane quic is not in this version; tcp is")


def _check_routes(settings: FrontendSettings) -> None:
    taken: dict[str, str] = {}
    for route, path in settings.paths.items():
        if not path.startswith("/"):
            raise ValueError(f"{ROUTES[route].variable}: a path begins with /, got {path!r}")
        if "//" in path:
            raise ValueError(f"{ROUTES[route].variable}: a path has no doubled slash, got {path!r}")
        if path in taken:
            raise ValueError(f"{ROUTES[route].variable}: {path} is the path of {taken[path]} already")
        taken[path] = route


def _check_files(settings: FrontendSettings) -> None:
    if (settings.tls_cert_path is None) != (settings.tls_key_path is None):
        raise ValueError("--tls-cert-path and --tls-key-path need each other")
    if settings.tls_client_ca_cert_path is not None and settings.tls_cert_path is None:
        raise ValueError("--tls-client-ca-cert-path needs --tls-cert-path and --tls-key-path")
    for flag, path in {
        "--tls-cert-path": settings.tls_cert_path,
        "--tls-key-path": settings.tls_key_path,
        "--tls-client-ca-cert-path": settings.tls_client_ca_cert_path,
        "--chat-template": settings.custom_jinja_template,
    }.items():
        if path is not None and not Path(path).is_file():
            raise ValueError(f"{flag}: there is no file {path}")
    if settings.custom_jinja_template is not None:
        try:
            ChatTemplate(Path(settings.custom_jinja_template).read_text(encoding="utf-8"))
        except (InvalidArgument, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template {settings.custom_jinja_template}: {error}") from None


def _check_keys(settings: FrontendSettings) -> None:
    if settings.key_sources.exist:  # a frontend without keys imports nothing of theirs
        # By its name, as the kernel imports nothing of the wing `parts`.
        import_module("dynamo.frontend.parts.keys.key_store").check_sources(settings.key_sources)
    if settings.admin_port is not None and settings.admin_keys_file is None and not is_loopback(settings.admin_host):
        raise ValueError(
            f"--admin-host {settings.admin_host} opens the admin routes to a network: that needs keys for them "
            "(--admin-keys FILE, made by dynamo keys create --admin)"
        )


def _check_tls(settings: FrontendSettings) -> None:
    if settings.tls_cert_path is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert_path, settings.tls_key_path, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ValueError(f"--tls-cert-path, --tls-key-path: these are no certificate and its key: {error}") from None
    if settings.tls_client_ca_cert_path is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca_cert_path)
        except OSError as error:
            raise ValueError(f"--tls-client-ca-cert-path: this is no certificate: {error}") from None


def _check_uds(settings: FrontendSettings) -> None:
    if settings.uds is None and settings.http_port is None:
        raise ValueError("--http-port off leaves no way to the API: add --uds PATH")
    if settings.uds is not None and settings.tls_cert_path is not None:
        raise ValueError("--uds is served without TLS: leave it or --tls-cert-path out")


def _check_chaos(settings: FrontendSettings) -> None:
    chaos = settings.runtime.chaos
    if chaos.plan is None:
        return
    try:
        injection().check(chaos)
    except InvalidArgument as error:
        raise ValueError(f"--chaos: {error}") from None
    if settings.workers > 1:
        raise ValueError(
            f"--chaos is for one process: --workers {settings.workers} would count requests in each; use 1"
        )


def _check_conditional(settings: FrontendSettings) -> None:
    if not settings.conditional_disagg.is_on:
        return
    if settings.router_mode != "kv":
        raise ValueError(f"--router-conditional-disagg needs --router-mode kv, not {settings.router_mode}")
    if not settings.kv_router.reads_events:
        raise ValueError("--router-conditional-disagg needs KV events: it has no meaning with --no-router-kv-events")
    try:
        settings.bypass_rules()
    except ValueError as error:
        raise ValueError(f"--router-conditional-disagg-config: {error}") from None


def _check_decisions(settings: FrontendSettings) -> None:
    if settings.kv_router.decisions_path is not None and settings.workers > 1:
        raise ValueError(
            f"--router-decisions is for one process: each of --workers {settings.workers} would write to the same file; use 1"
        )


def _dump(parser: argparse.ArgumentParser, settings: FrontendSettings, path: Path) -> None:
    try:
        path.write_text(json.dumps(without_secrets(settings), default=str, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        parser.error(f"--dump-config-to: {error}")


def _flags(status: Status, with_value: str, switches: str) -> tuple[Setting, ...]:
    return (
        *(declared(None, text, "", flag=name, status=status) for name in with_value.split()),
        *(declared(None, switch, "", flag=name, status=status) for name in switches.split()),
    )


# What they switch on does not exist yet. Naming one is an error: a flag that is silently ignored is a trap.
REFUSED: Final = (
    declared(None, switch, "", flag=("--interactive", "-i"), status=Status.REFUSED),
    *_flags(
        Status.REFUSED,
        """
    --model-name --model-path --grpc-metrics-port
    --router-prefill-load-model
    --router-tracking-key-file --router-tracking-key-id --tool-call-parser --reasoning-parser
    """,
        """
    --serve-indexer --use-remote-indexer --kserve-grpc-server
    --enable-session-prefix-index
    """,
    ),
)

# Accepted, because leaving them out of a script would change nothing: the kv router has one thread, and no shared cache; the `--ai?-...` ones tune the load model that `--router-prefill-load-model ais` names, under both of its
# names.
INERT: Final = _flags(
    Status.INERT,
    """
    --router-event-threads --shared-cache-multiplier
    --aic-attention-dp-size --aic-backend --aic-backend-version --aic-model-path --aic-moe-ep-size --aic-moe-tp-size
    --aic-mtp-seed --aic-nextn --aic-nextn-accept-rates --aic-perf-config --aic-system --aic-tp-size
    --ais-attention-dp-size --ais-backend --ais-backend-version --ais-model-path --ais-moe-ep-size --ais-moe-tp-size
    --ais-mtp-seed --ais-nextn --ais-nextn-accept-rates --ais-perf-config --ais-system --ais-tp-size
    """,
    """
    --dyn-debug-perf --trust-remote-code
    """,
)

ONE_VALUE: Final = (
    declared(None, one_of("dynamo"), "`dynamo` is the only one", flag="--dyn-chat-processor", group="requests"),
    declared(None, one_of("public-xxh3-v1"), "`public-xxh3-v1` is the only one", flag="--router-tracking-hash",
             group="kv router"),
    declared(None, one_of("none"), "`none` is the only one", flag="--shared-cache-type", group="kv router"),
)  # fmt: skip
