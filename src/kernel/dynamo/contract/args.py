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
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NoReturn, Unpack

from dynamo.contract.config import (
    DEFAULT_COMPONENT,
    DEFAULT_ENDPOINT,
    DEFAULT_ENDPOINT_TYPES,
    ENABLE_STRUCTURAL_TAG,
    HEALTH_CHECK_PAYLOAD,
    NAMESPACE_SUFFIX,
    WorkerConfig,
    WorkerFields,
)
from dynamo.contract.endpoint_name import ENDPOINT_SCHEME, parse_endpoint
from dynamo.errors import InvalidArgument
from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.calls.faults import injection
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import SettingReader, number, switch, text, words
from dynamo.settings.table import Setting, Status, declared, settings_of, without_secrets

__all__ = ["BackendArgumentParser", "add_backend_arguments", "worker_config_from"]

_STORED: Final = "multimodal and diagnostics"
_words: Final = SettingReader(lambda given: list(words.parse(given)))


def _kept(variable: str, flag: str, read: SettingReader[Any], meaning: str, unset: Any = None) -> Setting:
    return declared(variable, read, meaning, unset=unset, flag=flag, group=_STORED, status=Status.KEPT)


# On the parsed arguments, for engines that read them.
KEPT: Final = (
    _kept("DYN_FPM_TRACE", "--fpm-trace", switch, "Trace forward passes", False),
    _kept("DYN_CONNECTOR", "--connector", _words, "KV connectors of the engine, a comma list"),
    _kept("DYN_OUTPUT_MODALITIES", "--output-modalities", _words, "What the engine makes, a comma list"),
    _kept("DYN_MEDIA_OUTPUT_FS_URL", "--media-output-fs-url", text, "Where media are written, a file URL"),
    _kept("DYN_MEDIA_OUTPUT_HTTP_URL", "--media-output-http-url", text, "Where clients fetch them, an HTTP URL"),
    _kept(
        "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB",
        "--multimodal-embedding-cache-capacity-gb",
        number(0, unit="GB"),
        "Memory for cached embeddings",
    ),
)
DUMP_CONFIG_TO: Final = declared(
    "DYN_DUMP_CONFIG_TO",
    text,
    "Write the resolved configuration to this file, as JSON",
    flag="--dump-config-to",
    group="operation",
)


class BackendArgumentParser(CommandParser):
    """An `ArgumentParser` whose errors are one line: the usage of thirty flags would bury the sentence that matters."""


def flagged_settings() -> Iterator[Setting]:
    """Walk the settings that every worker takes as flags, in the order of --help."""
    yield from (made for _, made in settings_of(WorkerConfig))
    yield from (ENABLE_STRUCTURAL_TAG, HEALTH_CHECK_PAYLOAD, DUMP_CONFIG_TO)
    yield from (made for _, made in settings_of(RuntimeSettings) if made.flags)
    yield from KEPT


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
    env = os.environ if env is None else env
    defaults = {"component": component, "endpoint": endpoint, "endpoint_types": endpoint_types}
    suffix = NAMESPACE_SUFFIX.value(env)

    def adapted(made: Setting) -> Setting:
        if made.dest == "namespace" and suffix is not None:
            read = made.read.parse
            return replace(made, read=SettingReader(lambda given: f"{read(given)}-{suffix}"))
        return replace(made, default=defaults.get(made.dest, made.default))

    add_flags(parser, map(adapted, flagged_settings()), env)


def worker_config_from(
    args: argparse.Namespace,
    *,
    model_name: str = "",
    served_model_name: str | None = None,
    environ: Mapping[str, str] | None = None,
    **overrides: Unpack[WorkerFields],
) -> WorkerConfig:
    """Make the `WorkerConfig` of parsed arguments. `overrides` are fields of it and win over the command line.

    Its `runtime_settings` hold what the flags set of the runtime (TLS, request limits, fault injection), and for the rest
    the variables of `environ`, the process's own by default.
    """
    merged: WorkerFields = {
        "runtime_settings": _runtime_settings(args, os.environ if environ is None else environ),
        **_endpoint_fields(args.endpoint),
        **overrides,
    }
    config = WorkerConfig.from_runtime_config(args, model_name, served_model_name, **merged)
    if args.dump_config_to:
        _dump(config, args)
    return config


def _endpoint_fields(name: str) -> WorkerFields:
    if not name.startswith(ENDPOINT_SCHEME):
        return {}
    namespace, component, endpoint = parse_endpoint(name)
    return {"namespace": namespace, "component": component, "endpoint": endpoint}


def _runtime_settings(args: argparse.Namespace, env: Mapping[str, str]) -> RuntimeSettings:
    try:
        settings = RuntimeSettings.from_env(env, vars(args))
        if settings.chaos.plan is not None:
            injection().check(settings.chaos)
    except InvalidArgument as error:
        _refuse(str(error))
    return settings


def _dump(config: WorkerConfig, args: argparse.Namespace) -> None:
    worker = {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name != "runtime_settings"}
    document = {
        "worker": worker,
        "runtime": without_secrets(config.runtime_settings),
        "arguments": vars(args),
    }
    try:
        Path(args.dump_config_to).write_text(json.dumps(document, indent=2, default=_plain) + "\n", encoding="utf-8")
    except OSError as error:
        _refuse(f"--dump-config-to: cannot write {args.dump_config_to}: {error.strerror}")


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(2)


def _plain(value: object) -> str:
    return str(value) if isinstance(value, Enum | Path) else repr(value)
