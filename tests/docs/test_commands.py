"""What the docs tell people to type works: blocks are run in order, servers as real processes on free ports.

The mark above a ```bash or ```python block says how: `run` (to its end, status 0), `run: TEXT` (and TEXT is in the output),
`start: REGEX` (a server; it is up when its log matches), `start afresh: REGEX` (the servers before it are stopped),
`not run: WHY`. `file: PATH` above any block writes the file. Python blocks without such a mark are executed in a row.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.conformance import run_conformance
from support.doc_pages import READ, ROOT, Block, Page

PATIENCE_SECONDS = 30.0  # for a loaded machine; nothing waits that long when it works
PORT = re.compile(r"\b8000\b")


class Shell:
    """One reader following one page: a working directory, an environment, and the servers left running."""

    def __init__(self, cwd: Path, home: Path) -> None:
        with socket.socket() as probe:  # the docs say 8000; another test may be there
            probe.bind(("127.0.0.1", 0))
            self._port = str(probe.getsockname()[1])
        self._cwd, self._home = cwd, home
        self._servers: list[subprocess.Popen[bytes]] = []
        self._numbers = itertools.count()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "OTEL_", "PYTEST_"))}
        self._env = inherited | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(cwd / "src"),
            "HOME": str(home),
            "TMPDIR": str(home),
            "DYN_HTTP_PORT": self._port,
            "DYN_FILE_KV": str(home / "store"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "HF_HUB_OFFLINE": "1",
        }

    def _command(self, text: str) -> list[str]:
        text = re.sub(r"^exec make serve$", "exec dynamo serve", text)  # make would look at this environment's packages
        return ["bash", "-euo", "pipefail", "-c", PORT.sub(self._port, text)]

    def run(self, text: str) -> str:
        done = subprocess.run(
            self._command(text), cwd=self._cwd, env=self._env, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        assert done.returncode == 0, f"{text}\nstatus {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, text: str, up: str) -> None:
        log = self._home / f"server-{next(self._numbers)}.log"
        with log.open("wb") as out:
            # `exec` so that the server is the process we end, not a shell around it.
            server = subprocess.Popen(
                self._command("exec " + text.strip()), cwd=self._cwd, env=self._env, stdout=out, stderr=out
            )
        self._servers.append(server)
        ends_at = time.monotonic() + PATIENCE_SECONDS
        while not re.search(up, log.read_text()):
            assert server.poll() is None, f"{text}\nended\n{log.read_text()}"
            assert time.monotonic() < ends_at, f"{text}\nis not up\n{log.read_text()}"
            time.sleep(0.01)

    def close(self) -> None:
        """End the servers as Ctrl-C would; every one of them must end with status 0."""
        servers, self._servers = self._servers, []
        for server in servers:
            if server.poll() is None:
                server.send_signal(signal.SIGINT)
        try:
            assert [server.wait(PATIENCE_SECONDS) for server in servers] == [0] * len(servers)
        finally:
            for server in servers:
                if server.poll() is None:
                    server.kill()
                    server.wait()


def follow(page: Page, shell: Shell, cwd: Path) -> None:
    for block in page.blocks:
        where = f"{page.name}:{block.line}"
        kind, _, detail = block.mark.partition(": ")
        if kind == "file":
            path = cwd / detail
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "python" and kind == "run":
            output = shell.run(f"python - <<'END'\n{block.text}END\n")
            assert detail in output.lower(), f"{where}: {detail!r} is not in\n{output}"
        elif block.language == "bash":
            match kind:
                case "run":
                    output = shell.run(block.text)
                    assert detail in output, f"{where}: {detail!r} is not in\n{output}"
                case "start" | "start afresh":
                    if kind == "start afresh":
                        shell.close()
                    shell.start(block.text, detail)
                case "not run":
                    assert detail, f"{where}: say why it is not run"
                case _:
                    raise AssertionError(f"{where}: a bash block needs a mark above it (run, start, not run)")


@pytest.mark.parametrize(
    "name", [name for name, page in READ.items() if any(b.language == "bash" for b in page.blocks)]
)
def test_what_a_page_tells_people_to_type_works(name: str, tmp_path: Path) -> None:
    page = READ[name]
    cwd = tmp_path / "here"
    cwd.mkdir()
    shell = Shell(cwd, tmp_path)
    try:
        follow(page, shell, cwd)
    finally:
        shell.close()


# -- python blocks -------------------------------------------------------------------------------------------------------


def snippets(page: Page) -> Iterator[Block]:
    for block in page.blocks:
        if block.language == "python" and not block.mark.startswith(("file: ", "run", "not run: ")):
            yield block


def execute(page: Page) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the snippets of a page in one namespace; after each, its mark and the namespace."""
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in snippets(page):
        # Line numbers of a traceback are those of the page.
        exec(compile("\n" * block.line + block.text, page.path, "exec"), namespace)
        yield block.mark, namespace


@pytest.mark.parametrize("name", [name for name, page in READ.items() if any(True for _ in snippets(page))])
async def test_python_snippets_run_and_their_engines_conform(name: str) -> None:
    for mark, namespace in execute(READ[name]):
        kind, _, engine = mark.partition(": ")
        if kind == "conforms":
            await run_conformance(namespace[engine])


async def test_the_tests_that_the_cancellation_page_shows_pass() -> None:
    *_, (_, namespace) = execute(READ["cancellation.md"])
    tests = [value for key, value in namespace.items() if key.startswith("test_")]
    assert len(tests) == 2
    async with asyncio.TaskGroup() as group:
        for test in tests:
            group.create_task(test())


# -- make ----------------------------------------------------------------------------------------------------------------


def test_every_make_target_in_the_docs_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in READ.values():
        named = set(re.findall(r"`make ([a-z-]+)`", page.prose))
        named |= {word for block in page.blocks for word in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE)}
        assert named <= targets, page.name


def test_make_serve_is_dynamo_serve() -> None:
    """Which is what these tests run in its place."""
    assert re.search(r"^serve:.*\n\t@\$\(BIN\)/dynamo serve \$\(ARGS\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
