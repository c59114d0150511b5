"""A worker in Rust, held to both wires by `dynamo conformance worker`."""

from __future__ import annotations

from pathlib import Path

from dynamo.cli.referee.checks import CheckOutcome
from dynamo.cli.referee.wire.command import WireFlags, find_wires, judge, made_run
from dynamo.cli.referee.wire.run import WIRES
from support.patience import PATIENCE_SECONDS
from support.rust_worker import NEEDS_ENGINE, RustWorker

pytestmark = NEEDS_ENGINE


async def test_it_fails_at_no_check_of_either_wire(tmp_path: Path) -> None:
    worker = RustWorker.start(tmp_path)
    try:
        flags = WireFlags(timeout=PATIENCE_SECONDS, limit=2 * PATIENCE_SECONDS)
        run = made_run(flags, worker.instance().transport["tcp"])
        await find_wires(run, WIRES)
        found = await judge(run, WIRES)
    finally:
        worker.close()
    assert [(one.check.id, one.reason) for one in found if one.outcome is CheckOutcome.FAILED] == []
    assert run.lacking == {}
