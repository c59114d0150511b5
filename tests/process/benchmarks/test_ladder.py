"""The ladder of a one-token request: each stay has its time, share and bar, and nearly all of the time has a stay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

FOLDER: Final = Path(__file__).parents[3] / "benchmarks"
STAYS: Final = ["HTTP", "decode", "checks", "template", "tokeniser", "plan", "choice", "open", "first event", "answer", "end", "loop", "other"]  # fmt: skip


def test_the_ladder_tells_each_stay_beside_its_bar(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "bench.py"), "--quick", "--only", "ladder", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    rows = {row["figure"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert [name for name in rows if name in STAYS] == STAYS
    assert sum(rows[stay]["bar"] for stay in STAYS) == 300
    for ending in (" %", ", kv"):
        assert all(rows[stay]["beside"][stay + ending] >= 0 for stay in STAYS)
    assert sum(rows[stay]["beside"][f"{stay} %"] for stay in STAYS) == pytest.approx(100)
    assert sum(rows[stay]["median"] for stay in STAYS) == pytest.approx(rows["all"]["median"])
    assert rows["other %"]["bar"] == 10
    assert rows["other %"]["median"] < 20  # a quick run has some 250 samples
    assert min(rows["tokeniser"]["median"], rows["template"]["median"]) > 0
