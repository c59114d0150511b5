"""Checks of the settings: variables that nothing reads, values that cannot be read, and settings that contradict."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import dynamo
from dynamo.cli.doctor.diagnosis import Diagnosis, Examined
from dynamo.cli.serve import read_options
from dynamo.cli.usage import UsageError
from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.args import flagged_settings as worker_settings
from dynamo.contract.health_check import load_health_check_from_env
from dynamo.errors import DynamoException
from dynamo.frontend.args import flagged_settings as frontend_settings
from dynamo.frontend.args import parse_args
from dynamo.frontend.base.settings.stored_responses import SQLITE
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.observe.logging import LoggingSettings
from dynamo.runtime.observe.tracing import TracingSettings
from dynamo.settings.command import did_you_mean
from dynamo.settings.extras import install_command

# What a start would refuse: each start's own reader runs over this environment, and its own words are the finding.

MOST_FINDINGS: Final = 50  # of one reader: each run takes the variables of one finding away
_NAMED: Final = re.compile(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9]\b")
_SEE_HELP: Final = re.compile(r" \(see [^()]* --help\)$")
_FLAG: Final = re.compile(r"--[a-z][a-z0-9-]*")

Reader = Callable[[Mapping[str, str]], object]


def _worker(env: Mapping[str, str]) -> object:
    parser = BackendArgumentParser("worker")
    add_backend_arguments(parser, env=env)
    return worker_config_from(parser.parse_args([]), environ=env)


def _logging(env: Mapping[str, str]) -> None:
    for complaint in LoggingSettings.from_env(env).complaints:
        logging.getLogger("dynamo.runtime.observe.logging").warning("%s", complaint)


START_READERS: Final[Mapping[str, Reader]] = {
    "a frontend": lambda env: parse_args([], env, dump=False),
    "a worker": _worker,
    "dynamo serve": lambda env: read_options([], env),
    "a process that logs": _logging,
    "a process that traces": TracingSettings.from_env,
    "a worker's canary": lambda env: load_health_check_from_env(env=env),
}
"""By what starts: the reader that its start uses."""


def starts(examined: Examined) -> Iterator[Diagnosis]:
    """Name each setting that a start refuses or ignores, in the words of that start."""
    found: set[str] = set()
    for what, read in START_READERS.items():
        for text, ends_the_start in _complaints(read, examined.env):
            if text in found:
                continue
            found.add(text)
            result = f"{what} does not start with it" if ends_the_start else "the default holds instead"
            yield Diagnosis.bad(f"{text} ({result})", "mend the variable: docs/settings.md has what is allowed")


def _complaints(read: Reader, env: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Run a reader until nothing is wrong, without the variables that it has named; also return whether it gave up."""
    env = dict(env)
    warned: set[str] = set()
    for _ in range(MOST_FINDINGS):
        refusal, warnings = _run(read, env)
        for text in warnings:
            if text not in warned:
                warned.add(text)
                yield text, False
        if refusal is None:
            return
        yield refusal, True
        named = _named_in(refusal, env)
        if not named:
            return
        for name in named:
            del env[name]


def _run(read: Reader, env: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """Return the refusal of a reader, if it refuses, and the warnings that it logs."""
    warnings: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logger = logging.getLogger("dynamo")
    before = logger.propagate
    logger.addHandler(listener)
    logger.propagate = False  # they are shown as findings
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            read(env)
    except SystemExit:  # a parser's: its line is on stderr
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        line = lines[-1].partition("error: ")[2] or lines[-1] if lines else "the command line is refused"
        return _SEE_HELP.sub("", line), warnings
    except (DynamoException, UsageError, ValueError, OSError) as error:
        return str(error), warnings
    finally:
        logger.removeHandler(listener)
        logger.propagate = before
    return None, warnings


def _named_in(refusal: str, env: Mapping[str, str]) -> set[str]:
    """Return the variables of the environment that a refusal names, also by their flags."""
    flags = set(_FLAG.findall(refusal))
    by_flag = {
        made.variable
        for made in (*frontend_settings(), *worker_settings())
        if made.variable is not None and flags.intersection(made.flags)
    }
    return {name for name in {*_NAMED.findall(refusal), *by_flag} if name in env}


def places(examined: Examined) -> Iterator[Diagnosis]:
    """Check whether the files and directories that the settings name can be used, and whether what they need is installed."""
    settings = examined.settings
    for variable, path in _written(settings):
        yield _writable(variable, path)
    for variable, package, extra in _needed(settings):
        if importlib.util.find_spec(package) is None:
            yield Diagnosis.bad(
                f"{variable} needs the package {package}, which is not installed",
                install_command(extra),
            )


def _written(settings: FrontendSettings) -> Iterator[tuple[str, Path]]:
    """Walk what a frontend writes to: the variable, and the directory or file."""
    if settings.files_dir is not None:
        yield "DYN_FILES_DIR", settings.files_dir
    if settings.usage_db is not None:
        yield "DYN_USAGE_DB", Path(settings.usage_db)
    if settings.responses_store.startswith(SQLITE):
        yield "DYN_RESPONSES_STORE", Path(settings.responses_store.removeprefix(SQLITE))
    if settings.media.store_dir is not None:
        yield "DYN_MEDIA_STORE", settings.media.store_dir
    if settings.request_trace.is_on:
        yield "DYN_REQUEST_TRACE_FILE_PATH", Path(settings.request_trace.path).parent
    if settings.store == "file":
        yield "DYN_FILE_KV", settings.runtime.file_root


def _needed(settings: FrontendSettings) -> Iterator[tuple[str, str, str]]:
    """Walk the packages that the settings need: the variable, the package, the extra that brings it."""
    if settings.store == "etcd":
        yield "ETCD_ENDPOINTS", "aiohttp", "etcd"
    if settings.store == "kubernetes":
        yield "DYN_DISCOVERY_BACKEND", "kubernetes_asyncio", "kubernetes"
    if settings.runtime.event_plane == "nats":
        yield "DYN_EVENT_PLANE", "nats", "nats"


def _writable(variable: str, path: Path) -> Diagnosis:
    """Judge a place that is written to. What is not there yet is made, so its nearest parent counts."""
    path = path.expanduser().absolute()
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if nearest != path and not nearest.is_dir():
        return Diagnosis.bad(f"{variable}: {nearest} is a file, so {path} cannot be made", "name another place")
    if not os.access(nearest, os.W_OK | (os.X_OK if nearest.is_dir() else 0)):
        return Diagnosis.bad(
            f"{variable}: this user cannot write to {nearest}", "name another place, or give the right to"
        )
    return Diagnosis.ok(f"{variable}: {path} can be written to")


_VARIABLE: Final = re.compile(rb"\b(?:DYN|ETCD|NATS)_[A-Z0-9_]*[A-Z0-9]\b")
OURS: Final = ("DYN_", "ETCD_AUTH_", "ETCD_LEASE_")  # prefixes that nothing else uses


@functools.cache
def known_variables(root: Path | None = None) -> frozenset[str]:
    """Return the variables that the source of this version names. A test holds the source against the settings page."""
    folders = dynamo.__path__ if root is None else [root]
    files = (path for folder in folders for path in Path(folder).rglob("*.py"))
    return frozenset(name.decode() for path in files for name in _VARIABLE.findall(path.read_bytes()))


def unknown_variables(env: Mapping[str, str], known: frozenset[str]) -> Iterator[Diagnosis]:
    """Name the variables that resemble ours and that nothing reads."""
    for name in sorted(env):
        if name.startswith(OURS) and name not in known:
            hint = did_you_mean(name, known).removeprefix("; ")
            yield Diagnosis.warn(f"nothing reads {name}", hint or "take it away; docs/settings.md lists all")


def read_frontend_settings(env: Mapping[str, str]) -> FrontendSettings:
    """Read the settings as a frontend does; without those that it refuses, so that the other checks have something to read."""
    try:
        return FrontendSettings.from_env(env)
    except (DynamoException, ValueError):
        return FrontendSettings.from_env({})


def variables(examined: Examined) -> Iterator[Diagnosis]:
    """Check the variables of this environment, each with the reader of the start that it is for."""
    yield from starts(examined)
    yield from unknown_variables(examined.env, known_variables())
    yield from contradictions(examined)
    yield from places(examined)
    given = sum(name in known_variables() for name in examined.env)
    yield Diagnosis.ok(f"{given} variable{'' if given == 1 else 's'} of ours set")


def contradictions(examined: Examined) -> Iterator[Diagnosis]:
    """Name settings that do not go together."""
    runtime = examined.settings.runtime
    wire = runtime.requests
    if wire.tls_insecure and wire.tls_ca_cert_path:
        yield Diagnosis.warn(
            "DYN_TCP_TLS_INSECURE accepts any certificate in spite of DYN_TCP_TLS_CA_CERT_PATH", "set one of them"
        )
    if runtime.discovery_backend == "file" and runtime.etcd.endpoints:
        yield Diagnosis.warn(
            "ETCD_ENDPOINTS is set, and DYN_DISCOVERY_BACKEND is file",
            "take one of them away: other processes may be on etcd",
        )
    if bool(runtime.etcd.username) != bool(runtime.etcd.password):
        yield Diagnosis.bad("of ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD only one is set", "set both or none")
    if wire.credit_stall_seconds < wire.write_stall_seconds:
        yield Diagnosis.warn(
            "DYN_TCP_CREDIT_STALL_SECS is below DYN_TCP_WRITE_STALL_SECS",
            "a slow client would be cut by the worker first: raise it",
        )
