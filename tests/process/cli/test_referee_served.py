"""`dynamo conformance URL` over `dynamo serve demo`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.serve_command import serve_command


def test_the_demonstration_model_passes_every_core_check(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with serve_command(tmp_path, "--http-host", "127.0.0.1", "--http-port", "0", "--in-process") as command:
        command.wait_ready()
        ran = subprocess.run(
            [sys.executable, "-m", "dynamo.cli.main", "conformance", f"{command.url}/v1", "--json", str(file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    checks = json.loads(file.read_text())["checks"]
    assert {check["outcome"] for check in checks if check["level"] == "core"} == {"passed"}
    assert [check["id"] for check in checks if check["outcome"] == "failed"] == []
