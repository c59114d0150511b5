"""A headless Chromium for tests of pages: the distribution's, driven by playwright. Without either, the tests are skipped."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

FLAGS: Final = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile; skips the test, with the reason, where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make test-browser installs it"
    )
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH (Debian: apt-get install chromium)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of playwright's own event loop
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
            try:
                yield browser
            finally:
                browser.close()


class Watched:
    """A page, and everything that went wrong on it: errors, console errors, refused by the policy, requests elsewhere."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.expected: tuple[str, ...] = ()  # parts of console errors that a test means to cause
        page.on("pageerror", lambda error: self.errors.append(f"{error}"))
        page.on("console", self._said)
        page.on("request", lambda asked: self._asked(asked.url, origin))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, url: str, origin: str) -> None:
        if not url.startswith((origin, "blob:", "data:")):
            self.elsewhere.append(url)

    def check(self) -> None:
        """Fail for an error that the test did not expect, and for a request to any other place."""
        unexpected = [error for error in self.errors if not any(part in error for part in self.expected)]
        assert unexpected == [], unexpected
        assert self.elsewhere == [], self.elsewhere


@contextmanager
def watched(browser: Browser, origin: str, **context: Any) -> Iterator[Watched]:
    """A page of a fresh profile, 1,600 x 900 unless said otherwise, checked at the end."""
    made = browser.new_context(viewport=context.pop("viewport", {"width": 1600, "height": 900}), **context)
    try:
        found = Watched(made.new_page(), origin)
        yield found
        found.check()
    finally:
        made.close()
