"""What all tests share: repeatable examples, and the marker of the tests that `make test` leaves to `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples at every run, so that a red build is red for everybody. `HYPOTHESIS_PROFILE=explore` (or
# --hypothesis-profile) looks further; what it finds becomes an @example.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("repeatable")

SLOW_FOLDERS = frozenset({"process", "long"})
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(_HERE).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.process)
