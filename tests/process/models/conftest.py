"""The models of these tests, where they are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.real_models import LLAMA, TRANSFORMERS, located


def _installed(variable: str, name: str) -> tuple[str, Path]:
    found = located(variable, name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="session")
def smollm2() -> tuple[str, Path]:
    """A Python with llama.cpp, and the file of SmolLM2-135M-Instruct."""
    return _installed(LLAMA, "smollm2")


@pytest.fixture(scope="session")
def packaged_minilm() -> tuple[str, Path]:
    """A Python with transformers, and the directory of all-MiniLM-L6-v2."""
    return _installed(TRANSFORMERS, "minilm")
