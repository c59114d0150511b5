"""Names of a snapshot: its directory, the files in it, and the variables that a restored process takes over."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Final

from dynamo.settings.readers import text
from dynamo.settings.table import Setting, declared

__all__ = [
    "KUBERNETES_OPTIONAL_ENV_NAMES", "KUBERNETES_REQUIRED_ENV_NAMES", "READY_FOR_SNAPSHOT_FILE",
    "RESTORE_COMPLETE_FILE", "RESTORE_RUNTIME_ENV_NAMES", "SENTINEL_POLL_INTERVAL_SEC", "SETTINGS",
    "SNAPSHOT_COMPLETE_FILE", "SNAPSHOT_CONTROL_DIR", "SNAPSHOT_CONTROL_DIR_ENV", "SNAPSHOT_RESTORE_CONTEXT_FILE",
    "SNAPSHOT_RESTORE_STANDBY_ENV", "SUPPORTED_ENV_NAMES",
]  # fmt: skip

SNAPSHOT_CONTROL_DIR_ENV: Final = "DYN_SNAPSHOT_CONTROL_DIR"
SNAPSHOT_CONTROL_DIR: Final = "/snapshot-control"
READY_FOR_SNAPSHOT_FILE: Final = "ready-for-snapshot"
SNAPSHOT_COMPLETE_FILE: Final = "snapshot-complete"
RESTORE_COMPLETE_FILE: Final = "restore-complete"
SNAPSHOT_RESTORE_CONTEXT_FILE: Final = "restore-context.json"
SNAPSHOT_RESTORE_STANDBY_ENV: Final = "SNAPSHOT_RESTORE_STANDBY"
FAILOVER_LOCK_PATH_ENV: Final = "FAILOVER_LOCK_PATH"
SENTINEL_POLL_INTERVAL_SEC: Final = 0.1

_NAMES: Final = tomllib.loads((files(__package__) / "environment.toml").read_text(encoding="utf-8"))
KUBERNETES_REQUIRED_ENV_NAMES: Final = frozenset(_NAMES["kubernetes_required"])
KUBERNETES_OPTIONAL_ENV_NAMES: Final = frozenset(_NAMES["kubernetes_optional"])
RESTORE_RUNTIME_ENV_NAMES: Final = frozenset(_NAMES["restore_runtime"])
SUPPORTED_ENV_NAMES: Final = frozenset(
    {*KUBERNETES_REQUIRED_ENV_NAMES, *KUBERNETES_OPTIONAL_ENV_NAMES, *RESTORE_RUNTIME_ENV_NAMES, *_NAMES["restore_own"]}
)
"""Every variable that a restored process takes over; others stay as they were when the snapshot was made."""

CONTROL_DIR: Final[Setting] = declared(
    SNAPSHOT_CONTROL_DIR_ENV,
    text,
    "Directory of the files by which a [snapshot](snapshot.md) of this worker is made and restored; unset: none is made",
)
RESTORE_STANDBY: Final[Setting] = declared(
    SNAPSHOT_RESTORE_STANDBY_ENV,
    text,
    "`1`: write the variables of this pod for a [snapshot](snapshot.md) that goes on in it, and wait",
)
FAILOVER_LOCK: Final[Setting] = declared(
    FAILOVER_LOCK_PATH_ENV,
    text,
    "File whose lock the one of several restored [snapshots](snapshot.md) has that serves",
)
SETTINGS: Final = (CONTROL_DIR, RESTORE_STANDBY, FAILOVER_LOCK)
