"""Takes the pictures of docs/img: every view of the inspector's page under a realistic load, light and dark, wide and narrow.

`make screenshots` runs it. It starts a cluster of mock workers behind a real frontend, keeps some hundred requests in flight, has
one stream stall, some fail and one worker quarantined, and the demonstration model for the playground.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT: Final = Path(__file__).resolve().parent.parent
INTO: Final = ROOT / "docs" / "img"
FLAGS: Final = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SCREENS: Final = {"wide": {"width": 1600, "height": 900}, "narrow": {"width": 400, "height": 860}}
VIEWS: Final = (
    "fleet",
    "models",
    "workers",
    "streams",
    "recent",
    "routing",
    "prefixes",
    "errors",
    "batches",
    "keys",
    "config",
)
MAX_BYTES: Final = 200_000
READY_SECONDS: Final = 120
WARM_SECONDS: Final = 45  # until the curves have a shape

MODEL: Final = "acme/assistant-8b"
WORKERS: Final = 6
CHAOS: Final = """
[[fault]]
kind = "stall"
metadata = { tag = "stall" }
point = 40
times = 100000

[[fault]]
kind = "engine-error"
metadata = { tag = "fail" }
point = 2
times = 100000
"""
SYSTEM_PROMPTS: Final = tuple(
    f"You are assistant number {n}. " + "Answer briefly, name your sources. " * (20 + 12 * n) for n in range(5)
)


class Served:
    """A running `dynamo serve`: the address of its frontend, and the token of its inspector."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self._out = folder / "out"
        run_folder = folder / "run"
        run_folder.mkdir()
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dynamo.cli.main", "serve", "--port", "0", *arguments],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, "XDG_RUNTIME_DIR": str(run_folder), "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        ends_at = time.monotonic() + READY_SECONDS
        while "Ctrl-C stops it" not in (text := self._out.read_text()):
            if self._process.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit(f"dynamo serve did not become ready:\n{text}")
            time.sleep(0.1)
        self.url = re.findall(r"serving HTTP on (\S+)", text)[0]
        access = next((run_folder / "dynamo").glob("inspect-*.json"), None)
        self.token = "" if access is None else str(json.loads(access.read_text())["token"])

    def post(self, path: str, body: Any, **headers: str) -> Iterator[bytes]:
        """Send a request; gives the lines of the answer as they come."""
        host, _, port = self.url.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=600)
        try:
            given = {"content-type": "application/json", "authorization": f"Bearer {self.token}", **headers}
            connection.request("POST", path, json.dumps(body), given)
            yield from connection.getresponse()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        host, _, port = self.url.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {self.token}"})
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="screenshots-") as folder:
        (Path(folder) / "chaos.toml").write_text(CHAOS)
        found = Served(Path(folder), list(arguments))
        try:
            yield found
        finally:
            found.stop()


class Load:
    """Clients that send request after request until they are told to stop."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,), daemon=True) for number in range(48)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # the threads end with the server

    def _client(self, number: int) -> None:
        chance = random.Random(number)
        time.sleep(chance.random() * 3)
        while not self._stop.is_set():
            headers = {}
            if number == 7:
                headers["x-dynamo-meta-tag"] = "stall"
            elif chance.random() < 0.04:
                headers["x-dynamo-meta-tag"] = "fail"
            body = {
                "model": MODEL if chance.random() > 0.01 else "acme/unknown", "stream": chance.random() < 0.9,
                "max_tokens": chance.choice([60, 120, 400, 1200]) if number != 7 else 4000, "temperature": 0.7, "top_p": 0.95,
                "messages": [
                    {"role": "system", "content": chance.choice(SYSTEM_PROMPTS)},
                    {"role": "user", "content": "What is new? " * chance.randrange(1, 60)},
                ],
            }  # fmt: skip
            with contextlib.suppress(OSError, http.client.HTTPException):  # the server stops before the clients
                for _ in self._server.post("/v1/chat/completions", body, **headers):
                    if self._stop.is_set():
                        return


def save(page: Page, name: str) -> None:
    """Keep what is on the screen as a small PNG."""
    picture = Image.open(BytesIO(page.screenshot()))
    for colours in (256, 128, 64):
        small = picture.convert("RGB").quantize(colours, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        path = INTO / f"{name}.png"
        small.save(path, optimize=True)
        if path.stat().st_size <= MAX_BYTES:
            return
    raise SystemExit(f"{name}.png has {path.stat().st_size} bytes, more than {MAX_BYTES}")


def shots(
    browser: Browser, server: Served, views: dict[str, Callable[[], str]], act: dict[str, Any] | None = None
) -> None:
    """Take these views, addresses by names, on both screens, light and dark."""
    for screen, size in SCREENS.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
            page = context.new_page()
            page.goto(f"http://{server.url}/inspect/#k={server.token}")
            page.locator(".top .state.ok").wait_for()
            for name, address in views.items():  # asked now: a stream may have ended since
                page.goto(f"http://{server.url}/inspect/#/{address()}")
                if act and name in act:
                    act[name](page)
                page.wait_for_timeout(2500)
                page.evaluate("scrollTo(0, 0)")
                save(page, f"inspect-{name}-{screen}-{scheme}")
            context.close()


def one_stream(server: Served) -> str:
    picture = server.get("/admin/v1/snapshot?views=streams")
    streams = picture["streams"]
    found = next((one for one in streams if one["is_stalled"]), streams[0])
    return "streams/" + urllib.parse.quote(found["id"], safe="")


def chat(page: Page) -> None:
    if page.locator(".said.assistant").count():
        return
    page.locator("input[name=logprobs]").check()
    page.locator("input[name=max_tokens]").fill("120")
    page.locator("#prompt").fill("Tell me a short story about a lighthouse.")
    page.keyboard.press("Control+Enter")
    page.locator(".composer button.primary").wait_for()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the views to take")
    only = parser.parse_args().only
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("no browser: install chromium (Debian: apt-get install chromium)")
    INTO.mkdir(exist_ok=True)
    mocker = [
        "--",
        "--model-path",
        MODEL,
        "--block-size",
        "16",
        "--num-gpu-blocks-override",
        "1600",
        "--max-num-seqs",
        "16",
    ]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=list(FLAGS))
        if only in "playground":
            with served() as server:
                shots(browser, server, {"playground": lambda: "playground"}, {"playground": chat})
        if only in "playground" and only:
            return
        arguments = [
            "--engine", "dynamo.mocker.engine:MockEngine", "--workers", str(WORKERS), "--router-mode", "kv",
            "--chaos", "chaos.toml", "--allow-chaos",
        ]  # fmt: skip
        with served(*arguments, *mocker) as server, Load(server):
            time.sleep(WARM_SECONDS)
            workers = sorted(server.get("/admin/v1/snapshot?views=workers")["workers"], key=lambda one: str(one["id"]))
            for worker, action in ((workers[1], "quarantine"), (workers[4], "drain")):
                body = {"reason": "a picture of it", **({"seconds": 3600} if action == "quarantine" else {})}
                for _ in server.post(f"/admin/v1/workers/{worker['id']}/{action}", body):
                    pass
            for _ in server.post(f"/admin/v1/requests/{one_stream(server)[8:]}/abort", {"reason": "a picture of it"}):
                pass
            time.sleep(5)
            views = {view: partial(str, view) for view in VIEWS if only in view}
            if only in "stream":
                views["stream"] = partial(one_stream, server)
            shots(browser, server, views)


if __name__ == "__main__":
    main()
