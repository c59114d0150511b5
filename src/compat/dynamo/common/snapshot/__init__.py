"""Snapshots of a warm engine: a process that is frozen by CRIU or its like, and goes on with another identity."""

from dynamo.common.snapshot.constants import (
    KUBERNETES_OPTIONAL_ENV_NAMES,
    KUBERNETES_REQUIRED_ENV_NAMES,
    READY_FOR_SNAPSHOT_FILE,
    RESTORE_COMPLETE_FILE,
    RESTORE_RUNTIME_ENV_NAMES,
    SENTINEL_POLL_INTERVAL_SEC,
    SNAPSHOT_COMPLETE_FILE,
    SNAPSHOT_CONTROL_DIR,
    SNAPSHOT_CONTROL_DIR_ENV,
    SNAPSHOT_RESTORE_CONTEXT_FILE,
    SNAPSHOT_RESTORE_STANDBY_ENV,
)
from dynamo.common.snapshot.lifecycle import (
    ControlPause,
    EngineSnapshotController,
    PauseController,
    SnapshotConfig,
    configure_snapshot_capture_env,
    elect_and_wake,
    is_snapshot_enabled,
)
from dynamo.common.snapshot.restore_context import (
    SnapshotRestoreRuntimeConfig,
    apply_snapshot_restore_env,
    maybe_run_restore_standby_mode,
    parse_snapshot_restore_runtime_config,
    refresh_snapshot_restore_config,
    write_snapshot_restore_context,
)
from dynamo.common.snapshot.running import run_with_snapshot

__all__ = [
    "KUBERNETES_OPTIONAL_ENV_NAMES", "KUBERNETES_REQUIRED_ENV_NAMES", "READY_FOR_SNAPSHOT_FILE",
    "RESTORE_COMPLETE_FILE", "RESTORE_RUNTIME_ENV_NAMES", "SENTINEL_POLL_INTERVAL_SEC", "SNAPSHOT_COMPLETE_FILE",
    "SNAPSHOT_CONTROL_DIR", "SNAPSHOT_CONTROL_DIR_ENV", "SNAPSHOT_RESTORE_CONTEXT_FILE",
    "SNAPSHOT_RESTORE_STANDBY_ENV", "ControlPause", "EngineSnapshotController", "PauseController", "SnapshotConfig",
    "SnapshotRestoreRuntimeConfig", "apply_snapshot_restore_env", "configure_snapshot_capture_env", "elect_and_wake",
    "is_snapshot_enabled", "maybe_run_restore_standby_mode", "parse_snapshot_restore_runtime_config",
    "refresh_snapshot_restore_config", "run_with_snapshot", "write_snapshot_restore_context",
]  # fmt: skip
