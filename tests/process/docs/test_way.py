"""The architecture page lists the stays of a chat request as they are traced."""

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


def test_the_page_lists_the_stays_of_a_request() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "way.py")],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    traced = [(stay["is_climb"], stay["module"]) for stay in json.loads(done.stdout)]
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"(?m)^\d+\. (\^ )?`([^`]+)`: ", page)
    assert [(bool(climb), module) for climb, module in listed] == traced
