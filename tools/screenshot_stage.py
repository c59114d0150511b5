"""What the pictures of docs/img are taken of: a served cluster of mock workers under a load that looks like a day's, or the demonstration model."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["Load", "Served", "served", "stage"]

READY_SECONDS: Final = 120
WARM_SECONDS: Final = 75  # until the curves have a shape
CLIENTS: Final = 56
MODEL: Final = "acme/assistant-8b"
SECOND_MODEL: Final = "acme/reader-70b"  # its prefill workers are missing
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
ENGINE: Final = ("--block-size", "16", "--num-gpu-blocks-override", "1600", "--max-num-seqs", "16")
KEYS: Final = ("web-chat", "search", "night-batch", "evaluation")


class Served:
    """A running `dynamo serve`: the address of its frontend, and a key that may do everything."""

    def __init__(self, folder: Path, arguments: list[str], key: str = "") -> None:
        self.folder = folder
        self._out = folder / "out"
        run_folder = folder / "run"
        run_folder.mkdir()
        self.environment = {
            **os.environ, "XDG_RUNTIME_DIR": str(run_folder), "HF_HUB_OFFLINE": "1", "DYN_HTTP_BODY_LIMIT_MB": "64",
        }  # fmt: skip
        if key:
            self.environment |= {"DYN_USAGE_DB": "usage.db", "DYN_BATCH_CONCURRENCY": "3"}
        self._others: list[subprocess.Popen[bytes]] = []
        self._process = self._begin("-m", "dynamo.cli.main", "serve", "--port", "0", *arguments, into=self._out)
        ends_at = time.monotonic() + READY_SECONDS
        while "Ctrl-C stops it" not in (text := self._out.read_text()):
            if self._process.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit(f"dynamo serve did not become ready:\n{text}")
            time.sleep(0.1)
        self.url = re.findall(r"serving HTTP on (\S+)", text)[0]
        access = next((run_folder / "dynamo").glob("inspect-*.json"), None)
        self.key = key or ("" if access is None else str(json.loads(access.read_text())["token"]))

    def _begin(self, *arguments: str, into: Path) -> subprocess.Popen[bytes]:
        with into.open("wb") as out:
            return subprocess.Popen(
                [sys.executable, *arguments], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env=self.environment,
            )  # fmt: skip

    def run_beside(self, *arguments: str) -> None:
        """Start another process of the cluster, which ends with it."""
        self.environment["DYN_FILE_KV"] = str(self.folder / "store")
        self.environment["DYN_DISCOVERY_BACKEND"] = "file"
        self._others.append(self._begin(*arguments, into=self.folder / f"out{len(self._others)}"))

    def lose_a_worker(self) -> None:
        """Kill a worker in the middle of its answers; they go on elsewhere, and another process takes its place."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for child in children:
            if "MockEngine" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)
                return
        raise SystemExit("no process of a worker was found")

    def post(self, path: str, body: Any, **headers: str) -> Iterator[bytes]:
        """Send a request; gives the lines of the answer as they come."""
        connection = self._connection(600)
        try:
            given = {"content-type": "application/json", "authorization": f"Bearer {self.key}", **headers}
            connection.request("POST", path, json.dumps(body), given)
            yield from connection.getresponse()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        connection = self._connection(60)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {self.key}"})
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        host, _, port = self.url.rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=seconds)

    def stalled_stream(self) -> str:
        """Return the address of a stream's page: of a stalled one, where there is one."""
        streams = self.get("/admin/v1/snapshot?views=streams&limit=1000")["streams"]
        found = next((one for one in streams if one["is_stalled"]), streams[0])
        return "streams/" + urllib.parse.quote(found["id"], safe="")

    def long_stream(self) -> str:
        """Return the address of a stream's page that still has most of its tokens to come."""
        streams = self.get("/admin/v1/snapshot?views=streams&limit=1000")["streams"]
        found = max(
            streams, key=lambda one: 0 if one["is_stalled"] else (one["max_tokens"] or 0) - one["output_tokens"]
        )
        return "streams/" + urllib.parse.quote(found["id"], safe="")

    def stop(self) -> None:
        for process in (*self._others, self._process):
            process.send_signal(signal.SIGTERM)
        for process in (*self._others, self._process):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def served(*arguments: str, names: tuple[str, ...] = ()) -> Iterator[tuple[Served, dict[str, str]]]:
    """A served system, and the keys of its users by name: those that are asked for."""
    with tempfile.TemporaryDirectory(prefix="screenshots-") as given:
        folder = Path(given)
        (folder / "chaos.toml").write_text(CHAOS)
        keys = {name: _new_key(folder, name) for name in names}
        admin = _new_key(folder, "ops", "--admin") if names else ""
        found = Served(folder, [*(("--keys", "keys.toml") if names else ()), *arguments], admin)
        try:
            yield found, keys
        finally:
            found.stop()


def _new_key(folder: Path, name: str, *more: str) -> str:
    command = [sys.executable, "-m", "dynamo.cli.main", "keys", "create", "--name", name, *more]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


class Load:
    """Clients that send request after request until they are told to stop."""

    def __init__(self, server: Served, keys: dict[str, str]) -> None:
        self._server, self._keys = server, list(keys.values())
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._look, daemon=True),
            *(threading.Thread(target=self._client, args=(number,), daemon=True) for number in range(CLIENTS)),
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # the threads end with the server

    def _look(self) -> None:
        """Look at the system all the time: decisions, and what workers report, are kept while somebody does."""
        while not self._stop.wait(2):
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._server.get("/admin/v1/snapshot?views=fleet,routing")

    def _client(self, number: int) -> None:
        chance = random.Random(number)
        time.sleep(chance.random() * 3)
        while not self._stop.is_set():
            headers = {"authorization": f"Bearer {self._keys[number % len(self._keys)]}"}
            if number == 7:
                headers["x-dynamo-meta-tag"] = "stall"
            elif chance.random() < 0.04:
                headers["x-dynamo-meta-tag"] = "fail"
            with contextlib.suppress(OSError, http.client.HTTPException):  # the server stops before the clients
                for _ in self._server.post("/v1/chat/completions", _body(number, chance), **headers):
                    if self._stop.is_set():
                        return


def _body(number: int, chance: random.Random) -> dict[str, Any]:
    user = "What is new? " * chance.randrange(1, 60)
    if chance.random() < 0.01:
        user = "Everything, please. " * 40_000  # longer than the model takes
    return {
        "model": MODEL if chance.random() > 0.01 else "acme/unknown", "stream": chance.random() < 0.9,
        "max_tokens": chance.choice([60, 120, 400, 1200]) if number != 7 else 4000, "temperature": 0.7, "top_p": 0.95,
        "messages": [{"role": "system", "content": chance.choice(SYSTEM_PROMPTS)}, {"role": "user", "content": user}],
    }  # fmt: skip


@contextlib.contextmanager
def stage() -> Iterator[Served]:
    """The cluster under load: curves have a shape, one worker was lost, one is quarantined, one drains, a stream stalls."""
    arguments = [
        "--engine", "dynamo.mocker.engine:MockEngine", "--workers", str(WORKERS), "--router-mode", "kv", "--store", "store",
        "--files-dir", "files", "--chaos", "chaos.toml", "--allow-chaos", "--", "--model-path", MODEL, *ENGINE,
    ]  # fmt: skip
    with served(*arguments, names=KEYS) as (server, keys), Load(server, keys):
        server.run_beside(
            "-m", "dynamo.mocker", "--model-path", SECOND_MODEL, "--disaggregation-mode", "decode", *ENGINE
        )
        for name, lines in (("small", 40), ("large", 4000)):
            _begin_batch(server, name, lines)
        time.sleep(WARM_SECONDS / 2)
        server.lose_a_worker()
        time.sleep(WARM_SECONDS / 2)
        _operate(server)
        time.sleep(10)
        yield server


def _begin_batch(server: Served, name: str, lines: int) -> None:
    line = {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "Name a colour."}]}
    path = server.folder / f"{name}.jsonl"
    path.write_text(
        "".join(
            json.dumps({"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": line}) + "\n"
            for n in range(lines)
        )
    )
    command = ["-m", "dynamo.cli.main", "batch", "run", path.name, "-o", f"{name}.out", "--quiet"]
    server.run_beside(*command, "--url", f"http://{server.url}", "--api-key", server.key)


def _operate(server: Served) -> None:
    """Do to the cluster what an operator does."""
    rows = server.get("/admin/v1/snapshot?views=workers")["workers"]
    workers = sorted((row["id"] for row in rows if MODEL in row["models"]), key=str)
    for worker, action, reason in ((workers[1], "quarantine", "slow disk"), (workers[4], "drain", "new kernel")):
        body = {"reason": reason, **({"seconds": 3600} if action == "quarantine" else {})}
        for _ in server.post(f"/admin/v1/workers/{worker}/{action}", body):
            pass
    for _ in server.post(
        f"/admin/v1/requests/{server.stalled_stream()[8:]}/abort", {"reason": "asked for by its team"}
    ):
        pass
