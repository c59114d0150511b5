"""A process that is frozen when its engine is warm, and goes on elsewhere: what it does before and after.

The engine halts, a file reports that the snapshot can be made, and the process waits for one of two files: the original
ends at the one, and a restored copy goes on at the other.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol, Self

from dynamo.common.snapshot.constants import (
    CONTROL_DIR,
    FAILOVER_LOCK,
    FAILOVER_LOCK_PATH_ENV,
    READY_FOR_SNAPSHOT_FILE,
    RESTORE_COMPLETE_FILE,
    SENTINEL_POLL_INTERVAL_SEC,
    SNAPSHOT_COMPLETE_FILE,
)
from dynamo.contract.engine import BaseEngine
from dynamo.errors import EngineShutdown, InvalidArgument

__all__ = [
    "ControlPause", "EngineSnapshotController", "PauseController", "SnapshotConfig", "configure_snapshot_capture_env",
    "elect_and_wake", "is_snapshot_enabled",
]  # fmt: skip

logger = logging.getLogger(__name__)

READY: Final = "ready"
OFFLINE: Final = "HF_HUB_OFFLINE"
CAPTURE_ENVIRONMENT: Final = {
    "NCCL_IB_DISABLE": "1",  # a connection of InfiniBand cannot be frozen
    "NCCL_RAS_ENABLE": "0",  # nor a thread that talks to other ranks
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a frozen process misses its heartbeats
    OFFLINE: "1",  # no connection to a hub is open
}
CAPTURE_DEFAULTS: Final = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
PAUSES: Final = (
    ("sleep", "wake_up"),
    ("release_memory_occupation", "resume_memory_occupation"),
    ("pause_generation", "resume_generation"),
)


class PauseController(Protocol):
    """Halts an engine and has it go on."""

    async def pause(self, *args: Any) -> object: ...

    async def resume(self) -> object: ...

    def mark_resumed(self) -> object: ...


class ControlPause:
    """Halts an engine by its own controls: the one that gives most memory back."""

    def __init__(self, engine: BaseEngine) -> None:
        """Use once the engine has started. Raises InvalidArgument for one that has no such control."""
        known = engine.supported_controls()
        pair = next((names for names in PAUSES if known.issuperset(names)), None)
        if pair is None:
            wanted = " or ".join(names[0] for names in PAUSES)
            raise InvalidArgument(
                f"{type(engine).__name__} cannot be halted for a snapshot: it has no control {wanted}"
            )
        self._engine, (self._pause, self._resume) = engine, pair
        self.is_paused = False

    async def pause(self, *args: Any) -> None:
        """Halt the engine; `args`: the body of the control, or nothing."""
        await self._control(self._pause, dict(args[0]) if args else {})
        self.is_paused = True

    async def resume(self) -> None:
        await self._control(self._resume, {})

    def mark_resumed(self) -> None:
        self.is_paused = False

    async def _control(self, name: str, body: dict[str, Any]) -> None:
        answer = await self._engine.engine_control(name, body)
        if str(answer.get("status")).lower() == "error":
            raise EngineShutdown(f"{name} failed: {answer.get('message') or answer}")


def is_snapshot_enabled() -> bool:
    """Return whether this process is one that a snapshot is made of."""
    return bool(CONTROL_DIR.value(os.environ))


@dataclass(frozen=True)
class SnapshotConfig:
    """Where the files of a snapshot are."""

    control_dir: str

    @property
    def ready_file(self) -> str:
        """The file that reports a halted engine."""
        return str(Path(self.control_dir) / READY_FOR_SNAPSHOT_FILE)

    @classmethod
    def from_env(cls) -> Self | None:
        """Read the directory from the environment; None: no snapshot is made. Raises InvalidArgument where it is missing."""
        directory: str | None = CONTROL_DIR.value(os.environ)
        if not directory:
            return None
        if not Path(directory).is_dir():
            raise InvalidArgument(f"{CONTROL_DIR.variable}={directory!r} is not a directory")
        return cls(directory)

    async def run_lifecycle(self, pause_controller: PauseController, *args: Any) -> bool:
        """Halt the engine, report it, and wait. Return True in a restored process, False in the one that may end.

        `args` go to the pause. A `restore-complete` stays, as it is the restored pod's.
        """
        directory = Path(self.control_dir)
        ready, complete = Path(self.ready_file), directory / SNAPSHOT_COMPLETE_FILE
        for left in (ready, complete):  # of an earlier process
            left.unlink(missing_ok=True)
        await pause_controller.pause(*args)
        try:
            await asyncio.to_thread(ready.write_text, READY)
            logger.info("ready for a snapshot: %s", ready)
            while True:
                if (directory / RESTORE_COMPLETE_FILE).exists():
                    os.environ.pop(OFFLINE, None)
                    logger.info("restored from a snapshot")
                    return True
                if complete.exists():
                    logger.info("a snapshot was made of this process")
                    return False
                await asyncio.sleep(SENTINEL_POLL_INTERVAL_SEC)
        finally:
            for left in (ready, complete):
                left.unlink(missing_ok=True)


class EngineSnapshotController:
    """One engine, from the moment it is warm until it goes on in a restored process."""

    def __init__(
        self,
        engine: Any,
        pause_controller: PauseController,
        snapshot_config: SnapshotConfig,
        pause_args: tuple[Any, ...] = (),
    ) -> None:
        self.engine, self.pause_controller = engine, pause_controller
        self.snapshot_config, self.pause_args = snapshot_config, pause_args

    async def wait_for_restore(self) -> bool:
        """Run the lifecycle. Return True once the engine goes on in a restored process, False where this one may end."""
        if not await self.snapshot_config.run_lifecycle(self.pause_controller, *self.pause_args):
            return False
        await self.pause_controller.resume()
        self.pause_controller.mark_resumed()
        return True


def configure_snapshot_capture_env() -> None:
    """Set what a process needs that will be frozen, before its engine is made; a value that is overridden is a warning."""
    for name, value in CAPTURE_ENVIRONMENT.items():
        before = os.environ.get(name)
        if before not in (None, value):
            logger.warning("%s=%s is overridden with %s for a snapshot", name, before, value)
        os.environ[name] = value
    for name, value in CAPTURE_DEFAULTS.items():
        os.environ.setdefault(name, value)


async def elect_and_wake(
    pause_controller: PauseController,
    runtime: Any = None,
    *,
    lock_path: str | None = None,
    failover_metrics: Callable[[float], Awaitable[None] | None] | None = None,
) -> IO[str]:
    """Wait for the lock of the one that serves, then have the engine go on. Return the open file: it holds the lock.

    `lock_path`: default `FAILOVER_LOCK_PATH`. `failover_metrics` is called with the seconds that the wait took. `runtime`
    is not needed here. Raises InvalidArgument without a path.
    """
    path = lock_path or FAILOVER_LOCK.value(os.environ)
    if not path:
        raise InvalidArgument(f"lock_path: give the file, or set {FAILOVER_LOCK_PATH_ENV}")
    loop = asyncio.get_running_loop()
    began = loop.time()
    file = await asyncio.to_thread(open, path, "a", encoding="utf-8")
    try:
        while not _locked(file):
            await asyncio.sleep(SENTINEL_POLL_INTERVAL_SEC)
        if failover_metrics is not None and (noted := failover_metrics(loop.time() - began)) is not None:
            await noted
        await pause_controller.resume()
        pause_controller.mark_resumed()
    except BaseException:
        file.close()
        raise
    return file


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
