"""The identity of the pod in which a frozen process goes on: written there, and read by the process once it is restored."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.common.snapshot.constants import (
    CONTROL_DIR,
    KUBERNETES_REQUIRED_ENV_NAMES,
    RESTORE_STANDBY,
    SNAPSHOT_CONTROL_DIR,
    SNAPSHOT_RESTORE_CONTEXT_FILE,
    SUPPORTED_ENV_NAMES,
)
from dynamo.contract.args import add_backend_arguments, worker_config_from

__all__ = [
    "SnapshotRestoreRuntimeConfig", "apply_snapshot_restore_env", "maybe_run_restore_standby_mode",
    "parse_snapshot_restore_runtime_config", "refresh_snapshot_restore_config", "write_snapshot_restore_context",
]  # fmt: skip

logger = logging.getLogger(__name__)

REFRESHED: Final = ("namespace", "discovery_backend", "request_plane", "event_plane")


@dataclass(frozen=True)
class SnapshotRestoreRuntimeConfig:
    """What a restored process takes from its new environment."""

    namespace: str
    discovery_backend: str
    request_plane: str
    event_plane: str | None


def parse_snapshot_restore_runtime_config(argv: Sequence[str]) -> SnapshotRestoreRuntimeConfig:
    """Read namespace, discovery and planes from flags and the environment; flags of the engine are left alone."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_backend_arguments(parser)
    known, _ = parser.parse_known_args(list(argv))
    config = worker_config_from(known)
    return SnapshotRestoreRuntimeConfig(*(getattr(config, name) for name in REFRESHED))


def context_file(control_dir: str | None = None) -> Path:
    """Return where the restored pod's variables are."""
    directory = control_dir or CONTROL_DIR.value(os.environ) or SNAPSHOT_CONTROL_DIR
    return Path(directory) / SNAPSHOT_RESTORE_CONTEXT_FILE


def write_snapshot_restore_context(control_dir: str | None = None) -> str:
    """Write this process's value of every supported variable, null for one that is not set; return the path.

    The file appears whole: a reader never finds a part of it.
    """
    path = context_file(control_dir)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    values = {name: os.environ.get(name) for name in sorted(SUPPORTED_ENV_NAMES)}
    try:
        part.write_text(json.dumps({"env": values}, indent=1))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return str(path)


def apply_snapshot_restore_env(control_dir: str | None = None) -> None:
    """Take over the variables of the pod that the process goes on in; null clears one.

    Raises RuntimeError for a file that is missing or holds something else.
    """
    path = context_file(control_dir)
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise RuntimeError(f"snapshot restore context file not found: {path}") from error
    except (OSError, ValueError) as error:
        raise RuntimeError(f"snapshot restore context file {path} cannot be read: {error}") from error
    values = found.get("env") if isinstance(found, dict) else None
    if not isinstance(values, dict):
        raise RuntimeError(f"snapshot restore context file {path}: env must be an object")
    for name, value in values.items():
        if name not in SUPPORTED_ENV_NAMES:
            logger.warning("snapshot restore context: %s is not supported and stays as it was", name)
        elif value is None:
            os.environ.pop(name, None)
        elif isinstance(value, str):
            os.environ[name] = value
        else:
            raise RuntimeError(f"snapshot restore context file {path}: env.{name} must be a string or null")


async def refresh_snapshot_restore_config(
    config: Any,
    parse_config: Callable[[Sequence[str]], Any | Awaitable[Any]],
    runtime_config: Any = None,
) -> Any:
    """Give `config` the namespace, the discovery backend and the planes of the new environment; return it.

    `parse_config(argv)` reads a configuration once the environment was taken over. `runtime_config` gets the same, where
    it has these members. Settings of a runtime that were read before are replaced by those that `parse_config` read, or
    by none: the runtime then reads them from the environment. Raises RuntimeError where discovery is that of Kubernetes and a variable it needs is empty.
    """
    apply_snapshot_restore_env()
    found = parse_config(sys.argv[1:])
    fresh = await found if inspect.isawaitable(found) else found
    if fresh.discovery_backend == "kubernetes":
        missing = sorted(name for name in KUBERNETES_REQUIRED_ENV_NAMES if not os.environ.get(name))
        if missing:
            raise RuntimeError(f"snapshot restore: discovery in Kubernetes needs {', '.join(missing)}")
    for target in (config, runtime_config):
        for name in REFRESHED:
            if target is not None and hasattr(target, name):
                setattr(target, name, getattr(fresh, name))
        if hasattr(target, "runtime_settings"):
            target.runtime_settings = getattr(fresh, "runtime_settings", None)
    return config


def maybe_run_restore_standby_mode() -> None:
    """Write this pod's variables and wait in a program without Python, with `SNAPSHOT_RESTORE_STANDBY=1`; else return."""
    if RESTORE_STANDBY.value(os.environ) != "1":
        return
    path = write_snapshot_restore_context()
    logger.info("waiting for a snapshot to be restored: %s", path)
    os.execvp("sleep", ["sleep", "infinity"])
