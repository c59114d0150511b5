"""A million texts put together from pieces of calls: `make test-fuzz`."""

from __future__ import annotations

import os
import random

import pytest

from support.format_runs import NAMES, fuzz

TEXTS = int(os.environ.get("FUZZ_TEXTS", "0"))


@pytest.mark.parametrize("name", NAMES)
def test_some_texts_of_pieces_of_calls(name: str) -> None:
    fuzz(name, 300, seed=1)


@pytest.mark.fuzz
@pytest.mark.skipif(not TEXTS, reason="make test-fuzz")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", NAMES)
def test_texts_of_pieces_of_calls(name: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    fuzz(name, TEXTS // len(NAMES), seed)
