"""One reader of a page: a shell with an environment, and the servers that the page starts."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from support.doc_pages import Page
from support.patience import PATIENCE_SECONDS

PORT = re.compile(r"\b8000\b")


class Shell:
    """One reader following one page: a working directory, an environment, and the servers left running."""

    patience_seconds = PATIENCE_SECONDS

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
            self._command(text),
            cwd=self._cwd,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=self.patience_seconds,
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
        ends_at = time.monotonic() + self.patience_seconds
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


def follow(page: Page, shell: Shell, cwd: Path) -> list[str]:
    """Do what a page says. Return the programs of other projects whose blocks were left out, as they are not installed here."""
    missing = []
    for block in page.blocks:
        where = f"{page.name}:{block.line}"
        kind, _, detail = block.mark.partition(": ")
        if kind.startswith("run with "):
            program = kind.removeprefix("run with ")
            if shutil.which(program) is None:
                missing.append(program)
                continue
            kind = "run"
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
                case "fresh":
                    pass  # test_fresh_clone.py
                case "not run":
                    assert detail, f"{where}: say why it is not run"
                case _:
                    raise AssertionError(f"{where}: a bash block needs a mark above it (run, start, not run)")
    return missing
