"""Takes the pictures of docs/img: every view of the inspector's page under load, light and dark, wide and narrow, and every page of `dynamo top`.

`make screenshots` runs it. What it takes pictures of is in `screenshot_stage.py`; the playground talks to the demonstration model.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from screenshot_stage import Served, served, stage
from textual.pilot import Pilot

from dynamo.cli.inspect.app import InspectorApp
from dynamo.cli.inspect.client import InspectorClient
from dynamo.cli.inspect.screens import PAGES

ROOT: Final = Path(__file__).resolve().parent.parent
INTO: Final = ROOT / "docs" / "img"
FLAGS: Final = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SCREENS: Final = {"wide": {"width": 1600, "height": 900}, "narrow": {"width": 400, "height": 860}}
NAMES: Final = {"prefixes": "cache"}  # of pictures, where the view's is another one
VIEWS: Final = (
    "fleet", "models", "workers", "streams", "recent", "routing", "prefixes", "errors", "batches", "keys", "config",
)  # fmt: skip
MAX_BYTES: Final = 200_000
SETTLE_MS: Final = 2500
STREAM_MS: Final = 30_000  # until the tokens of one stream are a curve
TERMINAL: Final = (172, 46)
FONT: Final = re.compile(r"@font-face \{[^}]*\}")  # of textual's SVG: it would be fetched from the network


def save(png: bytes, name: str) -> None:
    """Keep a picture as a small PNG."""
    picture = Image.open(BytesIO(png))
    for colours in (256, 128, 64):
        small = picture.convert("RGB").quantize(colours, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        path = INTO / f"{name}.png"
        small.save(path, optimize=True)
        if path.stat().st_size <= MAX_BYTES:
            return
    raise SystemExit(f"{name}.png has {path.stat().st_size} bytes, more than {MAX_BYTES}")


def shots(browser: Browser, server: Served, views: dict[str, Callable[[], str]], act: dict[str, Any]) -> None:
    """Take these views, addresses by names, on both screens, light and dark."""
    for screen, size in SCREENS.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
            page = context.new_page()
            page.goto(f"http://{server.url}/inspect/#k={server.key}")
            page.locator(".top .state.ok").wait_for()
            for name, address in views.items():  # asked now: a stream may have ended since
                page.goto(f"http://{server.url}/inspect/#/{address()}")
                page.wait_for_timeout(SETTLE_MS)
                if name in act:
                    act[name](page)
                for word in ("Reading ", "Asking "):
                    page.locator("main").get_by_text(word).first.wait_for(state="hidden")
                page.mouse.move(0, 0)  # no row is under it
                page.evaluate("scrollTo(0, 0)")
                save(page.screenshot(), f"inspect-{name}-{screen}-{scheme}")
            context.close()


def chat(page: Page) -> None:
    if page.locator(".said.assistant").count():
        return
    page.locator("input[name=logprobs]").check()
    page.locator("input[name=max_tokens]").fill("60")
    page.locator("input[name=temperature]").fill("2")
    page.locator("input[name=seed]").fill("7")
    page.locator("#prompt").fill("Spell lighthouse backwards, then count from 90 to 81.")
    page.keyboard.press("Control+Enter")
    page.locator(".said.assistant").get_by_text("finish:").wait_for()
    page.get_by_text("Raw request and events").click()
    page.wait_for_timeout(SETTLE_MS)


def explain(page: Page) -> None:
    page.locator(".what-if textarea").fill("You are assistant number 2. What is new?")
    page.get_by_role("button", name="Explain").click()
    page.wait_for_timeout(SETTLE_MS)


def one_error(page: Page) -> None:
    page.locator("main tbody tr[role=row]", has_text="500").first.click()
    page.locator("pre.bundle").wait_for()
    page.wait_for_timeout(SETTLE_MS)


ACTS: Final[dict[str, Callable[[Page], None]]] = {
    "playground": chat,
    "routing": explain,
    "error": one_error,
    "stream": lambda page: page.wait_for_timeout(STREAM_MS),
}


# -- the terminal ------------------------------------------------------------------------------------------------------


async def terminal_pages(server: Served, only: str) -> dict[str, str]:
    """Return every page of `dynamo top` as SVG, by name."""
    app = InspectorApp(InspectorClient(f"http://{server.url}", server.key))
    found: dict[str, str] = {}
    async with app.run_test(size=TERMINAL) as pilot:
        for page in PAGES:
            if only in f"top-{page.name}":
                await pilot.press(page.key)
                found[page.name] = await _svg(app, pilot, 4.0)
    if only in "top-request":
        app = InspectorApp(app.client, view="streams", filter="max>3000")  # the one that is there for long
        async with app.run_test(size=TERMINAL) as pilot:
            await pilot.pause(4.0)
            await pilot.press("enter")
            found["request"] = await _svg(app, pilot, STREAM_MS / 1000)
    return found


async def _svg(app: InspectorApp, pilot: Pilot[Any], seconds: float) -> str:
    await pilot.pause(seconds)
    return FONT.sub("", app.export_screenshot(title="dynamo top"))


def save_terminal(browser: Browser, pages: dict[str, str]) -> None:
    context = browser.new_context(viewport={"width": 1600, "height": 1000})
    page = context.new_page()
    for name, svg in pages.items():
        page.set_content(f"<style>body {{ margin: 0 }} svg {{ width: 1600px; display: block }}</style>{svg}")
        save(page.locator("svg").screenshot(), f"top-{name}")
    context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the pictures to take")
    only = parser.parse_args().only
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("no browser: install chromium (Debian: apt-get install chromium)")
    INTO.mkdir(exist_ok=True)
    addresses = {"config": "config?filter=!chaos"}  # its value is a path of this machine
    names = {NAMES.get(view, view): partial(str, addresses.get(view, view)) for view in (*VIEWS, "playground")}
    views = {name: address for name, address in names.items() if only in f"inspect-{name}"}
    playground = views.pop("playground", None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=list(FLAGS))
        if playground is not None:
            with served() as (server, _):
                shots(browser, server, {"playground": playground}, ACTS)
        if only == "playground":
            return
        with stage() as server:
            if only in "inspect-error":
                views["error"] = partial(str, "errors")
            if only in "inspect-stream":
                views["stream"] = server.long_stream
            shots(browser, server, views, ACTS)
            with ThreadPoolExecutor(1) as apart:  # playwright's own loop runs in this thread
                save_terminal(browser, apart.submit(lambda: asyncio.run(terminal_pages(server, only))).result())


if __name__ == "__main__":
    main()
