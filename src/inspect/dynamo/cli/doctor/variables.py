"""Checks of the settings: variables that nothing reads, values that cannot be read, and settings that contradict."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import dynamo
from dynamo.cli.doctor.diagnosis import Diagnosis, Examined
from dynamo.cli.doctor.starts import places, starts
from dynamo.errors import DynamoException
from dynamo.frontend.settings import FrontendSettings
from dynamo.settings.command import did_you_mean

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
