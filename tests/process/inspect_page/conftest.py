"""Fixtures of this folder: one browser for all tests, a fake inspector for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.browser import Watched, chromium, watched
from support.inspector_fake import FakeInspector, fake_inspector

if TYPE_CHECKING:
    from playwright.sync_api import Browser


_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def fake() -> Iterator[FakeInspector]:
    with fake_inspector() as found:
        yield found


@pytest.fixture
def page(browser: Browser, fake: FakeInspector) -> Iterator[Watched]:
    with watched(browser, fake.url.removesuffix("/inspect/")) as found:
        yield found
