"""`dynamo conformance URL` over `dynamo serve demo`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.patience import PATIENCE_SECONDS
from support.serve_command import serve_command

AT_HOST = ("--http-host", "127.0.0.1", "--http-port", "0")


def _judged(directory: Path, *argv: str) -> list[dict[str, Any]]:
    """Serve the demonstration model, and return what a run of all APIs found. It exits with 0."""
    file = directory / "report.json"
    with serve_command(directory, *AT_HOST, *argv) as command:
        command.wait_ready()
        argv = (
            "conformance",
            f"{command.url}/v1",
            "--api",
            "all",
            "--json",
            str(file),
            "--limit",
            str(PATIENCE_SECONDS),
        )
        ran = subprocess.run(
            [sys.executable, "-m", "dynamo.cli.main", *argv],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_SECONDS,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(file.read_text())
    assert report["core_passed"] is True
    found: list[dict[str, Any]] = report["checks"]
    return found


def test_the_demonstration_model_passes_every_check_that_applies(tmp_path: Path) -> None:
    types = ("--", "--endpoint-types", "chat,completions,embeddings")
    checks = _judged(tmp_path, "--files-dir", str(tmp_path / "files"), *types)
    others = [(check["id"], check["cause"]) for check in checks if check["outcome"] != "passed"]
    assert others == [("embeddings.dimensions", "not offered")]  # its vectors were not trained to be shortened


def test_what_the_demonstration_model_does_not_offer_is_named_and_no_fault(tmp_path: Path) -> None:
    checks = _judged(tmp_path, "--in-process")
    others = [check for check in checks if check["outcome"] != "passed"]
    assert {check["id"].partition(".")[0] for check in others} == {"embeddings", "files"}
    assert {(check["outcome"], check["cause"]) for check in others} == {("cannot judge", "not offered")}
    assert all("does not serve it" in check["reason"] for check in others)
