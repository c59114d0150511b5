"""lm-eval scores the same items through this server and through another way to the same model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from process.foreign.suites import interpreter, served_demo
from support.demo_model import FILES
from support.patience import PATIENCE_SECONDS
from support.real_models import LLAMA, bare_llama, located, served_llama

CALLS: Final = Path(__file__).with_name("lm_eval_calls.py")
SLOTS: Final = 4

pytestmark = pytest.mark.timeout(10 * PATIENCE_SECONDS)  # above what the comparison may take


def compared(directory: Path, *arguments: str) -> dict[str, Any]:
    """Run the comparison without the network; return what it printed."""
    offline = {"HF_HOME": str(directory / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [str(interpreter("lm_eval")), str(CALLS), *arguments]
    environment = os.environ | offline
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=8 * PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


@pytest.mark.foreign
def test_scores_and_texts_are_those_of_transformers_on_the_same_weights(tmp_path: Path) -> None:
    (served := tmp_path / "served").mkdir()
    with served_demo(served) as url:
        found = compared(tmp_path, "hf", url, "demo", str(FILES))
    assert found["differing"] == []
    assert found["items"] == {"choices": 32, "texts": 32, "whole": 32}
    assert found["texts"] > 8  # or all answers would be alike


@pytest.mark.foreign
@pytest.mark.models
def test_texts_of_a_real_model_are_those_of_the_server_of_its_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = located(LLAMA, "smollm2")
    if isinstance(place, str):
        pytest.skip(place)
    python, file = place
    folder = tmp_path_factory.mktemp("real")  # short: the path of a socket within it has a limit
    with served_llama(folder / "served", python, "smollm2", SLOTS) as ours, bare_llama(python, file, SLOTS) as bare:
        addresses = [f"http://127.0.0.1:{each.port}" for each in (ours, bare)]
        found = compared(folder, "server", addresses[0], ours.model, addresses[1])
    assert found["differing"] == []
    assert found["texts"] > 8
