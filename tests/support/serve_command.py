"""`dynamo serve` as a real process, and what a test wants to know of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.patience import PATIENCE_SECONDS

GUIDE_ENGINE = '''
import argparse
import asyncio
import os
import subprocess
import sys

from dynamo.common.backend import EngineConfig, LLMEngine, WorkerConfig


class GuideEngine(LLMEngine):
    """As the guide writes it: its own flags, etcd as the default, and no idea of `dynamo serve`."""

    def __init__(self, model_name, helper, hang):
        self.model_name, self.helper, self.hang = model_name, helper, hang

    @classmethod
    async def from_args(cls, argv=None):
        parser = argparse.ArgumentParser()
        parser.add_argument("--model-name", default="guide-model")
        parser.add_argument("--discovery-backend", default="etcd")
        parser.add_argument("--helper", action="store_true")
        parser.add_argument("--hang", action="store_true")
        args = parser.parse_args(argv)
        config = WorkerConfig(
            namespace="guide", model_name=args.model_name, discovery_backend=args.discovery_backend,
            request_plane="tcp", event_plane="nats",
        )
        return cls(args.model_name, args.helper, args.hang), config

    async def start(self, worker_id):
        if self.helper:
            print("helper", subprocess.Popen(["sleep", "600"]).pid)
        # The next version of this code, by files in the working directory.
        if os.path.exists("broken"):
            raise RuntimeError("this version is broken")
        while os.path.exists("hold"):
            await asyncio.sleep(0.02)
        return EngineConfig(
            model=self.model_name, context_length=2048, kv_cache_block_size=64 if os.path.exists("other") else 16
        )

    async def generate(self, request, context):
        text = b"hello from the guide"
        for token in text[:-1]:
            yield {"token_ids": [token], "index": 0}
        yield {"token_ids": [text[-1]], "index": 0, "finish_reason": "stop"}

    async def cleanup(self):
        if self.hang:
            await asyncio.sleep(600)


not_an_engine = 7
'''


class ServeCommand:
    """A running command, its output in files. `patience` is in seconds, and a test's own to change."""

    patience = PATIENCE_SECONDS

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process = process
        self._out, self._err = out, err

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        ends_at = time.monotonic() + self.patience
        while not (found := condition()):
            assert time.monotonic() < ends_at, f"waited in vain for {what}\n{self.out}\n{self.err}"
            time.sleep(0.02)
        return found

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.out}\n{self.err}"
            return "Ctrl-C stops it" in self.out

        self.wait_for(ready, "Ready")

    def wait_ended(self) -> int:
        return self.process.wait(self.patience)

    def pid_of(self, name: str) -> int:
        """The newest process of that name, as the command printed it."""
        return int(re.findall(rf"^{name} +\(?(?:pid )?(\d+)", self.out, re.MULTILINE)[-1])

    @property
    def url(self) -> str:
        return re.findall(r"^frontend +\d+ +(http://\S+)", self.out, re.MULTILINE)[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def printed_curl(self) -> str:
        return re.findall(r"^  (curl .*)$", self.out, re.MULTILINE)[0]

    def ask_until_answered(self, model: str) -> str:
        """As `ask`, through the moment in which the store still names only a worker that died."""

        def answer() -> str | None:
            try:
                return self.ask(model)
            except AssertionError as refused:
                if str(refused).startswith("503"):
                    return None
                raise

        return str(self.wait_for(answer, "an answer"))

    def ask(self, model: str) -> str:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", body, {"Content-Type": "application/json", "Connection": "close"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as refusal:
            with refusal:
                raise AssertionError(f"{refusal.code}: {refusal.read()!r}\n{self.out}\n{self.err}") from None

    def metric(self, name: str) -> float:
        """The sum over one of the frontend's series."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))


@contextmanager
def serve_command(tmp_path: Path, *args: str, python: str = sys.executable, **env: str) -> Iterator[ServeCommand]:
    """`dynamo serve ARGS` in a directory with the guide's engine; killed with its children if a test leaves it."""
    (tmp_path / "guide_engine.py").write_text(GUIDE_ENGINE)
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    out, err = tmp_path / "out", tmp_path / "err"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "ETCD_", "NATS_"))}
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            [python, "-m", "dynamo.cli.main", "serve", *args],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            env={**kept, "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1", **env},
        )
        try:
            yield ServeCommand(process, out, err)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # its children end by themselves then
            process.wait()


def is_running(pid: int) -> bool:
    """Whether there is such a process and it is more than a zombie."""
    if Path("/proc/self/stat").exists():  # a slim image has no ps
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].strip()
        except (FileNotFoundError, ProcessLookupError):
            return False
    else:
        found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
        state = found.stdout.strip()
    return bool(state) and not state.startswith("Z")


def left_behind(tmp_path: Path) -> list[Path]:
    """What the command forgot in the directory for temporary files."""
    return sorted((tmp_path / "tmp").glob("dynamo-serve-*"))
