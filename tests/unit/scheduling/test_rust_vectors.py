"""The vectors that the Rust implementation is tested with are what this one computes now."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]
TOOL = runpy.run_path(str(ROOT / "tools" / "rust_vectors.py"))


def test_the_names_of_blocks_are_current() -> None:
    assert json.loads((ROOT / "rust" / "kv-vectors.json").read_text()) == TOOL["kv_vectors"]()


def test_the_passes_of_the_mocker_are_current() -> None:
    assert json.loads((ROOT / "rust" / "mocker-vectors.json").read_text()) == TOOL["mocker_vectors"]()


def test_the_frames_of_the_native_wire_are_current() -> None:
    assert json.loads((ROOT / "rust" / "native-vectors.json").read_text()) == TOOL["native_vectors"]()
