"""The flags every backend shares: one call adds them, one call reads them.

    parser = BackendArgumentParser("my-backend")
    parser.add_argument("--model-name", default="my-model")
    add_backend_arguments(parser)
    args = parser.parse_args(argv)
    config = worker_config_from(args, model_name=args.model_name)

A flag beats its environment variable, which beats the default. A value that cannot be read, from either, is one line
on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, Final, NoReturn, Unpack

from dynamo.contract.config import (
    DEFAULT_COMPONENT,
    DEFAULT_ENDPOINT,
    DEFAULT_ENDPOINT_TYPES,
    RESPONSE_PLANES,
    WorkerConfig,
    WorkerFields,
)
from dynamo.contract.endpoint_name import ENDPOINT_SCHEME, parse_endpoint
from dynamo.contract.flag_values import (
    one_of,
    read_chaos_plan,
    read_endpoint,
    read_endpoint_types,
    read_name,
    read_non_negative,
    read_positive,
    read_structural_tag,
    read_template,
    read_words,
)
from dynamo.contract.flags import FlagGroup
from dynamo.contract.modes import DisaggregationMode, parse_disaggregation_mode
from dynamo.contract.parsers import get_reasoning_parser_names, get_tool_parser_names
from dynamo.errors import InvalidArgument
from dynamo.protocol.parsers import REASONING_PARSERS, TOOL_PARSERS
from dynamo.protocol.structural_tag import TAG_SCHEMAS, TAG_SCOPES
from dynamo.runtime.settings import DISCOVERY_BACKENDS

__all__ = ["BackendArgumentParser", "add_backend_arguments", "worker_config_from"]

REQUEST_PLANES: Final = ("tcp", "nats")
EVENT_PLANES: Final = ("zmq", "nats")
THINKING_MODES: Final = ("enabled", "disabled")


class BackendArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line: the usage of thirty flags would bury the sentence that matters."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)  # an abbreviation breaks on the day a new flag shares its start
        super().__init__(prog, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_backend_arguments(
    parser: argparse.ArgumentParser,
    *,
    component: str = DEFAULT_COMPONENT,
    endpoint: str = DEFAULT_ENDPOINT,
    endpoint_types: str = DEFAULT_ENDPOINT_TYPES,
    env: Mapping[str, str] | None = None,
) -> None:
    """Add every common flag to any argparse parser. The keywords change the defaults of your backend.

    The environment is read here, and judged when the arguments are parsed (a bad variable does not matter when the flag
    is given).
    """
    flags = FlagGroup(os.environ if env is None else env)
    _add_identity(flags.group(parser, "worker identity"), component, endpoint, endpoint_types)
    _add_planes(flags.group(parser, "discovery and transport"))
    _add_role(flags.group(parser, "role and routing"))
    _add_text(flags.group(parser, "templates and parsers"))
    _add_operation(flags.group(parser, "operation"))
    _add_stored(flags.group(parser, "multimodal and diagnostics"))
    _add_tls(flags.group(parser, "transport security"))
    _add_chaos(flags.group(parser, "fault injection"))


def worker_config_from(
    args: argparse.Namespace,
    *,
    model_name: str = "",
    served_model_name: str | None = None,
    environ: MutableMapping[str, str] | None = None,
    **overrides: Unpack[WorkerFields],
) -> WorkerConfig:
    """Make the `WorkerConfig` of parsed arguments. `overrides` are fields of it and win over the command line.

    Flags that configure the runtime rather than the worker (TLS, request limits) are written to the environment
    (`environ`, the process's own by default), where the runtime reads them.
    """
    _check_chaos(args)
    merged: WorkerFields = {**_endpoint_fields(args.endpoint), **overrides}
    config = WorkerConfig.from_runtime_config(args, model_name, served_model_name, **merged)
    _export(args, os.environ if environ is None else environ)
    if args.dump_config_to:
        _dump(config, args)
    return config


# -- the groups, in the order of --help -------------------------------------------------------------------------------


def _add_identity(flags: FlagGroup, component: str, endpoint: str, endpoint_types: str) -> None:
    suffix = flags.env.get("DYN_NAMESPACE_WORKER_SUFFIX", "").strip()
    flags.add(
        "--namespace",
        "DYN_NAMESPACE",
        "dynamo",
        "deployment this worker belongs to; DYN_NAMESPACE_WORKER_SUFFIX, when set, is appended with a dash",
        read=lambda text: read_name(text) + (f"-{suffix}" if suffix else ""),
    )
    flags.add("--component", "DYN_COMPONENT", component, "name shared by the replicas of this worker", read=read_name)
    flags.add(
        "--endpoint",
        "DYN_ENDPOINT",
        endpoint,
        "endpoint name, or dyn://NAMESPACE.COMPONENT.ENDPOINT for all three at once",
        read=read_endpoint,
    )
    flags.add(
        "--endpoint-types",
        "DYN_ENDPOINT_TYPES",
        endpoint_types,
        "OpenAI surfaces to serve, a comma list of chat, completions, embeddings, tensor, images, videos, audios",
        read=read_endpoint_types,
        aliases=("--dyn-endpoint-types",),
    )


def _add_planes(flags: FlagGroup) -> None:
    flags.add(
        "--discovery-backend",
        "DYN_DISCOVERY_BACKEND",
        "auto",  # the runtime decides, and logs what and why in one line
        f"where workers and frontends find each other: {', '.join(DISCOVERY_BACKENDS)}; "
        "file needs no service (its root is DYN_FILE_KV); auto is etcd when ETCD_ENDPOINTS is set, else file",
        read=one_of(DISCOVERY_BACKENDS),
    )
    flags.add(
        "--request-plane",
        "DYN_REQUEST_PLANE",
        "tcp",
        f"how requests travel: {', '.join(REQUEST_PLANES)}",
        read=one_of(REQUEST_PLANES),
    )
    flags.add(
        "--response-plane",
        "DYN_RESPONSE_PLANE",
        "tcp",
        f"how answers travel on the native wire: {', '.join(RESPONSE_PLANES)}",
        read=one_of(RESPONSE_PLANES),
    )
    flags.add(
        "--event-plane",
        "DYN_EVENT_PLANE",
        None,
        f"how KV events and load reports travel: {', '.join(EVENT_PLANES)} (default: zmq)",
        read=one_of(EVENT_PLANES),
    )


def _add_role(flags: FlagGroup) -> None:
    flags.add(
        "--disaggregation-mode",
        "DYN_DISAGGREGATION_MODE",
        DisaggregationMode.AGGREGATED.value,
        f"role of this worker: {', '.join(mode.value for mode in DisaggregationMode)}",
        read=parse_disaggregation_mode,
    )
    flags.switch(
        "--route-to-encoder",
        "DYN_ROUTE_TO_ENCODER",
        False,
        "send multimodal requests through an encode worker first (agg and prefill only)",
    )
    flags.switch(
        "--enable-kv-routing",
        "DYN_ENABLE_KV_ROUTING",
        True,
        "publish KV events and load snapshots",
        negative="--disable-kv-routing",
    )
    flags.switch(
        "--enable-local-indexer",
        "DYN_LOCAL_INDEXER",
        True,
        "let routers recover lost KV events from this worker (never on decode and encode workers)",
    )
    flags.add(
        "--kv-state-endpoint",
        "DYN_KV_STATE_ENDPOINT",
        None,
        "endpoint that owns the KV state (default: the serving endpoint)",
    )


def _add_text(flags: FlagGroup) -> None:
    flags.add(
        "--custom-jinja-template",
        "DYN_CUSTOM_JINJA_TEMPLATE",
        None,
        "file with a chat template that replaces the model's own",
        read=read_template,
    )
    flags.add(
        "--dyn-tool-call-parser",
        "DYN_TOOL_CALL_PARSER",
        None,
        f"parser of the model's tool calls: {', '.join(get_tool_parser_names())}",
        read=one_of(TOOL_PARSERS),
    )
    flags.add(
        "--dyn-reasoning-parser",
        "DYN_REASONING_PARSER",
        None,
        f"parser of the model's reasoning: {', '.join(get_reasoning_parser_names())}",
        read=one_of(REASONING_PARSERS),
    )
    flags.add(
        "--dyn-default-thinking-mode",
        "DYN_DEFAULT_THINKING_MODE",
        None,
        f"whether a request thinks when it does not choose: {', '.join(THINKING_MODES)}",
        read=one_of(THINKING_MODES),
    )
    flags.switch(
        "--exclude-tools-when-tool-choice-none",
        "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
        True,
        "keep the tools out of the prompt when the client sends tool_choice: none",
    )
    flags.switch(
        "--dyn-enable-structural-tag",
        "DYN_ENABLE_STRUCTURAL_TAG",
        False,
        "constrain tool calls with structural tags",
    )
    flags.add(
        "--dyn-structural-tag-scope",
        "DYN_STRUCTURAL_TAG_SCOPE",
        "auto",
        "when the tag applies: auto, always",
        read=one_of(TAG_SCOPES),
    )
    flags.add(
        "--dyn-structural-tag-schema",
        "DYN_STRUCTURAL_TAG_SCHEMA",
        "auto",
        "how strictly arguments follow their schema: auto, strict",
        read=one_of(TAG_SCHEMAS),
    )
    flags.add(
        "--dyn-structural-tag",
        "DYN_STRUCTURAL_TAG",
        None,
        "true, false, or a JSON object; the newer form of the three flags above",
        read=read_structural_tag,
        dest="structural_tag",
    )


def _add_operation(flags: FlagGroup) -> None:
    # Judged in `health_check`, which warns and goes without a canary: a bad probe must not stop a worker.
    # Its variable is read there too, because it also applies to workers that never parse a command line.
    flags.add(
        "--health-check-payload",
        None,
        None,
        "canary request: a JSON object or @FILE [DYN_HEALTH_CHECK_PAYLOAD]",
    )
    flags.add(
        "--engine-request-limit",
        "DYN_ENGINE_REQUEST_LIMIT",
        None,
        "requests this worker runs at once; a few more wait, the rest are declined",
        read=read_positive,
    )
    flags.switch("--enable-rl", "DYN_ENABLE_RL", False, "serve the reinforcement-learning discovery endpoint")
    flags.switch("--allow-download", "DYN_ALLOW_DOWNLOAD", False, "look model names up on the hub (or write hub:NAME)")
    flags.add("--dump-config-to", "DYN_DUMP_CONFIG_TO", None, "write the resolved configuration to this file as JSON")


def _add_stored(flags: FlagGroup) -> None:
    flags.switch("--fpm-trace", "DYN_FPM_TRACE", False, "trace forward passes (engines that support it)")
    flags.add("--connector", "DYN_CONNECTOR", None, "KV connectors of the engine, a comma list", read=read_words)
    flags.add(
        "--output-modalities", "DYN_OUTPUT_MODALITIES", None, "what the engine makes, a comma list", read=read_words
    )
    flags.add("--media-output-fs-url", "DYN_MEDIA_OUTPUT_FS_URL", None, "where media are written, a file URL")
    flags.add("--media-output-http-url", "DYN_MEDIA_OUTPUT_HTTP_URL", None, "where clients fetch them, an HTTP URL")
    flags.add(
        "--multimodal-embedding-cache-capacity-gb",
        "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB",
        None,
        "memory for cached embeddings, GB",
        read=read_non_negative,
    )


def _add_tls(flags: FlagGroup) -> None:
    for flag, variable, what in _TLS_FLAGS:
        if flag.endswith("-insecure"):
            flags.switch(flag, variable, None, what)
        else:
            flags.add(flag, variable, None, what)


def _add_chaos(flags: FlagGroup) -> None:
    flags.add(
        "--chaos",
        "DYN_CHAOS",
        None,
        "break as this plan (TOML) describes; needs --allow-chaos too",
        read=read_chaos_plan,
    )
    flags.switch("--allow-chaos", "DYN_ALLOW_CHAOS", None, "permit fault injection in this process")
    flags.add("--chaos-name", "DYN_CHAOS_NAME", None, "the name of this process in the plan (default: worker)")


_TLS_FLAGS: Final = (
    ("--tcp-tls-cert-path", "DYN_TCP_TLS_CERT_PATH", "certificate of this worker's listener"),
    ("--tcp-tls-key-path", "DYN_TCP_TLS_KEY_PATH", "its private key"),
    ("--tcp-tls-ca-cert-path", "DYN_TCP_TLS_CA_CERT_PATH", "authority that signs the peers' certificates"),
    ("--tcp-tls-insecure", "DYN_TCP_TLS_INSECURE", "do not verify peers"),
    ("--tcp-tls-server-name", "DYN_TCP_TLS_SERVER_NAME", "name expected in a peer's certificate"),
    ("--tcp-tls-client-cert-path", "DYN_TCP_TLS_CLIENT_CERT_PATH", "certificate shown to peers (mutual TLS)"),
    ("--tcp-tls-client-key-path", "DYN_TCP_TLS_CLIENT_KEY_PATH", "its private key"),
    ("--tcp-tls-client-ca-cert-path", "DYN_TCP_TLS_CLIENT_CA_CERT_PATH", "authority that signs callers' certificates"),
    ("--nats-tls-ca-cert-path", "NATS_TLS_CA_CERT_PATH", "authority of the NATS server"),
    ("--nats-tls-insecure", "NATS_TLS_INSECURE", "do not verify the NATS server"),
    ("--nats-tls-client-cert-path", "NATS_TLS_CLIENT_CERT_PATH", "certificate shown to the NATS server"),
    ("--nats-tls-client-key-path", "NATS_TLS_CLIENT_KEY_PATH", "its private key"),
)

# dest -> variable of what the runtime reads from the environment
_EXPORTED: Final = {
    "engine_request_limit": "DYN_ENGINE_REQUEST_LIMIT",
    "chaos": "DYN_CHAOS",
    "allow_chaos": "DYN_ALLOW_CHAOS",
    "chaos_name": "DYN_CHAOS_NAME",
    **{flag.removeprefix("--").replace("-", "_"): variable for flag, variable, _ in _TLS_FLAGS},
}


def _endpoint_fields(text: str) -> WorkerFields:
    if not text.startswith(ENDPOINT_SCHEME):
        return {}
    namespace, component, endpoint = parse_endpoint(text)
    return {"namespace": namespace, "component": component, "endpoint": endpoint}


# -- effects ----------------------------------------------------------------------------------------------------------


def _export(args: argparse.Namespace, environ: MutableMapping[str, str]) -> None:
    for dest, variable in _EXPORTED.items():
        value = getattr(args, dest, None)
        if value is not None:
            environ[variable] = ("1" if value else "0") if isinstance(value, bool) else str(value)


def _check_chaos(args: argparse.Namespace) -> None:
    if getattr(args, "chaos", None) is None:
        return
    from dynamo.runtime.chaos.admission import admitted

    try:
        admitted(args.chaos, bool(args.allow_chaos))
    except InvalidArgument as error:
        sys.stderr.write(f"error: --chaos: {error}\n")
        raise SystemExit(2) from error


def _dump(config: WorkerConfig, args: argparse.Namespace) -> None:
    document = {
        "worker": {entry.name: getattr(config, entry.name) for entry in fields(config)},
        "arguments": vars(args),
    }
    try:
        Path(args.dump_config_to).write_text(json.dumps(document, indent=2, default=_plain) + "\n", encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"error: --dump-config-to: cannot write {args.dump_config_to}: {error.strerror}\n")
        raise SystemExit(2) from error


def _plain(value: object) -> str:
    return str(value) if isinstance(value, Enum | Path) else repr(value)
