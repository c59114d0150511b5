"""From the error that a client saw to the same error on one's own machine: found in the page, downloaded, and replayed."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.runtime.http.inspector_token import find_access
from support.browser import watched
from support.patience import PATIENCE_SECONDS
from support.serve_command import ServeCommand, serve_command

if TYPE_CHECKING:
    from playwright.sync_api import Browser

APP = """
async def answer(messages, temperature=None):
    content = messages[-1]["content"]
    if "seven" in content:
        raise RuntimeError("the engine cannot count to seven")
    yield "fine"
"""
MARKER = "please count to seven"


def chat(served: ServeCommand, content: str) -> tuple[int, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_SECONDS)
    body = {"model": "answer", "messages": [{"role": "user", "content": content}], "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, answer.headers["x-request-id"]


def replayed(bundle: Path, served: ServeCommand) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "dynamo.cli.main", "replay", str(bundle), "--url", served.url, "--json"],
        capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_a_failed_request_is_found_in_the_page_and_its_bundle_fails_again(browser: Browser, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "app.py").write_text(APP)
    with serve_command(
        tmp_path, "--in-process", "--engine", "app.py:answer", "--http-port", "0",
        XDG_RUNTIME_DIR=str(run), DYN_KEEP_FAILED_CONTENT="1", DYN_INSPECT_CONTENT="1",
    ) as served:  # fmt: skip
        served.wait_ready()
        assert chat(served, "hello")[0] == 200
        status, request_id = chat(served, MARKER)
        assert status == 500
        access = find_access(served.port, {"XDG_RUNTIME_DIR": str(run)})
        assert access is not None
        with watched(browser, served.url, accept_downloads=True) as watch:
            page = watch.page
            page.set_default_timeout(PATIENCE_SECONDS * 1000)
            page.goto(f"{served.url}/inspect/#k={access.token}")
            page.locator(".top .state.ok").wait_for()
            page.keyboard.press("g")
            page.keyboard.press("e")
            row = page.locator("main tbody tr[role=row]", has_text="500")
            assert row.locator("td[data-label=Count]").inner_text() == "1"
            row.click()
            assert page.locator(".head a.id").inner_text() == request_id
            page.locator("pre.bundle").wait_for()
            with page.expect_download() as download:
                page.get_by_role("button", name="Download the bundle").click()
            bundle = tmp_path / "bundle.json"
            download.value.save_as(bundle)
            assert MARKER in bundle.read_text()  # the same prompt, or the engine would not fail again
            code, found = replayed(bundle, served)
            (result,) = found["results"]
            assert (code, found["requests"], found["different"]) == (0, 1, 0), found
            assert {"status", "error"} <= set(result["compared"])
            page.goto(f"{served.url}/inspect/#/errors")
            row.locator("td[data-label=Count]").get_by_text(
                "2", exact=True
            ).wait_for()  # it did fail again, in the same way

    (tmp_path / "app.py").write_text(APP.replace("seven", "eleven"))  # mended: the bundle shows that, too
    with serve_command(tmp_path, "--in-process", "--engine", "app.py:answer", "--http-port", "0") as served:
        served.wait_ready()
        code, found = replayed(bundle, served)
        assert (code, found["different"]) == (1, 1), found
