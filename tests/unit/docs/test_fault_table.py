"""The rows that fault scenarios leave, and the table that is made of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.doc_pages import ROOT
from support.scenario_table import TABLE_VARIABLE, record

SCRIPT = ROOT / "benchmarks" / "fault_table.py"


def make_table(file: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(file), *more], capture_output=True, text=True, check=False)


def test_rows_become_a_table_and_the_last_of_a_scenario_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "table.jsonl"
    monkeypatch.setenv(TABLE_VARIABLE, str(file))
    record("R10 later", sent=3)
    record("R2 drain", sent=9, lost=9)
    record("R2 drain", sent=200, lost=1, doubled=2, hung=3, recovery_ms=[*range(1, 100), 12_345.0], note="a | b")
    done = make_table(file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2:] == [
        "| R2 drain | 200 | 1 | 2 | 3 | 50 ms | 12.3 s | a / b |",
        "| R10 later | 3 | 0 | 0 | 0 |  |  |  |",
    ]


def test_the_table_goes_between_the_marks_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page = tmp_path / "table.jsonl", tmp_path / "page.md"
    monkeypatch.setenv(TABLE_VARIABLE, str(file))
    record("R1", sent=1)
    page.write_text("before\n<!-- measured -->\nold\n<!-- end -->\nafter\n")
    for _ in range(2):  # the second time it replaces its own
        done = make_table(file, "--into", str(page))
        assert page.read_text() == f"before\n<!-- measured -->\n\n{done.stdout}\n<!-- end -->\nafter\n"
    page.write_text("no marks\n")
    done = make_table(file, "--into", str(page))
    assert (done.returncode, page.read_text()) == (2, "no marks\n")
    assert "has no <!-- measured -->" in done.stderr


def test_without_measurements_it_says_what_to_run(tmp_path: Path) -> None:
    done = make_table(tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"there is no {tmp_path / 'none'}; run make test-faults first\n"
