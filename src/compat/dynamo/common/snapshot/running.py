"""A worker that is frozen once its engine is warm: `run_with_snapshot` in the place of `run`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.common.snapshot.lifecycle import (
    ControlPause,
    EngineSnapshotController,
    SnapshotConfig,
    configure_snapshot_capture_env,
    is_snapshot_enabled,
)
from dynamo.common.snapshot.restore_context import maybe_run_restore_standby_mode, refresh_snapshot_restore_config
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import BaseEngine, EngineConfig
from dynamo.runtime.observe.logging import configure_dynamo_logging
from dynamo.worker.run import run

__all__ = ["run_with_snapshot"]

logger = logging.getLogger(__name__)

Factory = Callable[[list[str] | None], Awaitable[tuple[Any, WorkerConfig]]]

WORKER_ID = 0  # of an engine that starts before there is a worker: it has no instance yet


def run_with_snapshot(
    engine_cls: type[BaseEngine], argv: list[str] | None = None, engine_factory: Factory | None = None
) -> None:
    """Run a worker as `run` does. With `DYN_SNAPSHOT_CONTROL_DIR` the engine starts first, and then waits to be frozen.

    The process that is frozen has no runtime, so its image holds no connection and no identity. The restored one reads
    its environment again, and joins as a new instance.
    """
    maybe_run_restore_standby_mode()
    if not is_snapshot_enabled():
        run(engine_cls, argv, engine_factory)
        return
    make = engine_factory or engine_cls.from_args
    configure_dynamo_logging()
    configure_snapshot_capture_env()

    async def restored(given: list[str] | None = None) -> tuple[Any, WorkerConfig]:
        snapshot = SnapshotConfig.from_env()
        engine, config = await make(given)
        if snapshot is None:
            return engine, config
        described = await engine.start(WORKER_ID)
        try:
            is_restored = await EngineSnapshotController(engine, ControlPause(engine), snapshot).wait_for_restore()
        except BaseException:
            await engine.cleanup()
            raise
        if not is_restored:
            await engine.cleanup()
            raise SystemExit(0)

        async def parse(_argv: object) -> WorkerConfig:
            return (await make(given))[1]

        keep_started(engine, described)
        return engine, await refresh_snapshot_restore_config(config, parse)

    run(engine_cls, sys.argv[1:] if argv is None else argv, restored)


def keep_started(engine: BaseEngine, described: EngineConfig) -> None:
    """Make `start` return what it returned when the engine started, so that a worker takes it as it is."""

    async def started(worker_id: int) -> EngineConfig:
        return described

    engine.start = started  # type: ignore[method-assign]
