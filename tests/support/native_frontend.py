"""The real 1.6.1 frontend as a process, and just enough HTTP to talk to it.

`DYNAMO_NATIVE_PYTHON` names the python of an environment that holds ai-dynamo 1.6.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

NATIVE_PYTHON = os.environ.get("DYNAMO_NATIVE_PYTHON", "")


def why_not() -> str:
    """Why these tests cannot run; empty when they can."""
    if not NATIVE_PYTHON:
        return "DYNAMO_NATIVE_PYTHON names no python with ai-dynamo 1.6.1"
    asked = "from importlib.metadata import version; print(version('ai-dynamo'))"
    try:
        found = subprocess.run([NATIVE_PYTHON, "-c", asked], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"DYNAMO_NATIVE_PYTHON={NATIVE_PYTHON} does not run: {error}"
    if found.stdout.strip() != "1.6.1":
        return f"DYNAMO_NATIVE_PYTHON={NATIVE_PYTHON} holds ai-dynamo {found.stdout.strip() or 'not at all'}, not 1.6.1"
    return ""


class Reply:
    """An HTTP answer read to its end."""

    def __init__(self, raw: bytes) -> None:
        head, _, body = raw.partition(b"\r\n\r\n")
        self.status = int(head.split(b" ", 2)[1])
        self.body = _dechunked(body) if b"transfer-encoding: chunked" in head.lower() else body

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in self.body.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def _dechunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole, body = whole + body[:length], body[length + 2 :]
    return whole


class Frontend:
    """One real frontend."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def send(self, path: str, body: Any = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request (GET without a body) and leave the answer to the caller."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return reader, writer

    async def ask(self, path: str, body: Any = None) -> Reply:
        """One request and its whole answer."""
        reader, writer = await self.send(path, body)
        try:
            return Reply(await asyncio.wait_for(reader.read(), 20))
        finally:
            writer.close()

    async def ask_when_ready(self, path: str, body: Any) -> Reply:
        """As `ask`, past the moment in which the frontend has no free instance: not yet seen, or just still busy."""
        for _ in range(100):
            reply = await self.ask(path, body)
            if reply.status not in (404, 503, 529):
                break
            await asyncio.sleep(0.05)
        return reply

    async def model_appears(self) -> None:
        """Return when `/v1/models` lists one."""
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(OSError):
                    if (await self.ask("/v1/models")).json()["data"]:
                        return
                await asyncio.sleep(0.1)


def environment(root: Path, store: Path, **more: str) -> dict[str, str]:
    """The environment of every process of one test cluster: nothing of this one's settings, everything below `root`."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "PYTHON"))},
        "TMPDIR": str(root),  # the native processes leave their logging configuration there
        "DYN_FILE_KV": str(store),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_RUNTIME_INHIBITED_DURATION_SECS": "0",  # else one engine error would close the model for 5 s
        "HF_HUB_OFFLINE": "1",
        "HOME": str(root),
        **more,
    }


@asynccontextmanager
async def process(argv: Sequence[str], log: Path, env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program with its output in `log`; its last lines are printed, for a test that fails."""
    with log.open("wb") as out:
        started = await asyncio.create_subprocess_exec(*argv, env=env, stdout=out, stderr=out, cwd=log.parent)
        try:
            yield started
        finally:
            if started.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    started.terminate()
            try:
                await asyncio.wait_for(started.wait(), 10)
            except TimeoutError:
                started.kill()
                await started.wait()
            show_end(log)


def show_end(log: Path) -> None:
    """Print the last lines of a log; pytest shows them when the test failed."""
    print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def frontend_process(python: str, root: Path, env: dict[str, str], *options: str) -> AsyncIterator[Frontend]:
    """Run `python -m dynamo.frontend` of either system; its log is `root`/frontend.log."""
    port = free_port()
    argv = [python, "-m", "dynamo.frontend", "--http-port", str(port), *options]
    async with process(argv, root / "frontend.log", env):
        yield Frontend(port)


@asynccontextmanager
async def native_frontend(root: Path, store: Path) -> AsyncIterator[Frontend]:
    """Run `python -m dynamo.frontend` of the native environment over the file store."""
    env = environment(root, store)
    async with frontend_process(NATIVE_PYTHON, root, env, "--discovery-backend", "file") as frontend:
        yield frontend
