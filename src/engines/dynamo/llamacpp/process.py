"""Starts and ends the process that holds llama.cpp."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dynamo.errors import EngineShutdown
from dynamo.llamacpp.connection import LlamaConnection, call_llama, open_llama
from dynamo.runtime.base.process_guard import private_directory

__all__ = ["LlamaProcess"]

logger = logging.getLogger(__name__)

END_SECONDS: Final = 2.0  # for the process to end by itself; then it is killed
SOCKET: Final = "llama.sock"


class LlamaProcess:
    """One running llama.cpp. It listens on a socket in a private directory, and wants a key besides."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Path | None = None
        self._key = secrets.token_hex(16)

    async def start(self, settings: Mapping[str, Any]) -> None:
        """Load the model. Raises EngineShutdown when that fails; llama.cpp's own lines are on standard error."""
        self._directory = private_directory("llama")
        began = time.perf_counter()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dynamo.llamacpp.server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        own = {"hostnames": [str(self._directory / SOCKET)], "api_keys": [self._key], "ui": False}
        self._process.stdin.write(json.dumps({**settings, **own}).encode() + b"\n")
        line = await self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"its process ended with status {await self._process.wait()}"}
        if "error" in answer:
            raise EngineShutdown(f"llama.cpp did not start: {answer['error']} (its own lines, above, say more)")
        logger.info("llama.cpp has loaded the model in %.1f s", time.perf_counter() - began)

    async def open(self, path: str, body: Any) -> LlamaConnection:
        """Begin a request. Raises EngineShutdown when llama.cpp is gone. The caller closes the connection."""
        connection = await open_llama(self._socket)
        connection.send("POST", path, self._key, body)
        return connection

    async def call(self, method: str, path: str) -> Any:
        """Return the answer to a plain question. Raises EngineShutdown when llama.cpp is gone."""
        return await call_llama(self._socket, method, path, self._key)

    @property
    def _socket(self) -> Path:
        if self._directory is None:
            raise EngineShutdown("llama.cpp is not running")
        return self._directory / SOCKET

    async def wait_ended(self) -> str:
        """Return how the process ended, once it has. Never returns for one that was not started."""
        if self._process is None:
            return str(await asyncio.get_running_loop().create_future())
        status = await self._process.wait()
        return f"the process of llama.cpp ended with status {status}"

    async def close(self) -> None:
        """End the process and remove its directory. Safe twice."""
        process, self._process = self._process, None
        directory, self._directory = self._directory, None
        if process is not None:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
