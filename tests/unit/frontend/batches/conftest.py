"""The clocks of batches run faster here: what waits for a second in a frontend waits for some hundredths."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def fast_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        ("conductor", "LOOK_SECONDS", 0.02),
        ("conductor", "SHOW_SECONDS", 0.05),
        ("group_commit", "MIN_GAP_SECONDS", 0.01),
        ("model_gate", "FIRST_HOLD_SECONDS", 0.05),
        ("run", "LOOK_AGAIN_SECONDS", 0.02),
    ):
        monkeypatch.setattr(f"dynamo.frontend.parts.batches.{module}.{name}", seconds)
