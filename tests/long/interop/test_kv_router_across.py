"""`KvRouter` of the bindings: the same script, run in the native system and in ours, sees the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import kv_router_script
from support.native_frontend import NATIVE_PYTHON, why_not
from support.tiny_model import write_tiny_model

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(180),
]


def seen_by(python: str, model: Path) -> dict[str, Any]:
    command = [python, kv_router_script.__file__, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout.startswith("{"), done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_caller_of_a_kv_router_sees_the_same_in_both_systems(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    native, ours = seen_by(NATIVE_PYTHON, model), seen_by(sys.executable, model)
    assert native.keys() == ours.keys()
    weights = {step for step in native if step.startswith("weights overridden: ")}
    differing = {step: (native[step], ours[step]) for step in native if native[step] != ours[step]}
    assert differing.keys() == weights
    # 1.6.1 reads and checks the weights of one request, and goes by those of the router all the same.
    assert {str(native[step]) for step in weights} == {str(native["overridden: None"])}
