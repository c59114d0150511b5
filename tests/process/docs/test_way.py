"""The architecture page lists the stays of a chat request and of a token as they are traced."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("heading", "arguments"),
    [("### Its stays", []), ("### The stays of a token", ["--token"])],
    ids=["request", "token"],
)
def test_the_page_lists_the_stays(heading: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "way.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    traced = [(stay["is_climb"], stay["module"]) for stay in json.loads(done.stdout)]
    section = re.split(r"(?m)^#", (ROOT / "docs" / "architecture.md").read_text().split(f"{heading}\n")[1])[0]
    listed = re.findall(r"(?m)^\d+\. (\^ )?`([^`]+)`: ", section)
    assert [(bool(climb), module) for climb, module in listed] == traced
