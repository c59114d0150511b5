"""What a fault scenario did to its requests, kept as one line for the table of `docs/faults.md`."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["TABLE_VARIABLE", "Say", "record"]

Say = Callable[[str], None]
"""Prints a line of figures."""

TABLE_VARIABLE = "FAULT_TABLE"
DEFAULT_TABLE = Path(__file__).parents[2] / "build" / "fault-table.jsonl"


def record(
    scenario: str,
    *,
    sent: int,
    lost: int = 0,
    doubled: int = 0,
    hung: int = 0,
    recovery_ms: Sequence[float] = (),
    note: str = "",
) -> None:
    """Append one row; call it before the asserts, so that a scenario that failed shows how.

    `scenario` begins with its number and is unique ("R2 SIGTERM workers in turn, streamed"): of several rows of one name
    the last one counts. All counts are requests: `sent` in all; `lost` got an error, or less text than without the fault;
    `doubled` got some of it twice; `hung` had no end within the test's patience. `recovery_ms`: how long each request
    that the fault touched had to wait for it to be over (say in `note` what was measured when that is not plain).
    """
    samples = sorted(recovery_ms)
    row = {
        "scenario": scenario,
        "sent": sent,
        "lost": lost,
        "doubled": doubled,
        "hung": hung,
        "recoveries": len(samples),
        "p50_ms": statistics.median(samples) if samples else None,
        "p99_ms": samples[min(len(samples) - 1, int(0.99 * len(samples)))] if samples else None,
        "note": note,
    }
    file = Path(os.environ.get(TABLE_VARIABLE) or DEFAULT_TABLE)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as table:
        table.write(json.dumps(row).encode() + b"\n")  # one write: several test processes may append at a time
