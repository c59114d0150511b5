"""The frontend as a process and for a real client: its port, its signals, the openai package."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from dynamo.frontend.http.server import HttpServer
from support.frontend_cluster import Cluster, cluster, say
from support.patience import PATIENCE_SECONDS


@asynccontextmanager
async def served(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, HttpServer]]:
    async with cluster(tmp_path, http_host="127.0.0.1", http_port=0, **settings) as house:
        server = HttpServer(house.frontend)
        await server.start()
        try:
            yield house, server
        finally:
            await server.close()


async def test_the_openai_client_is_served_streaming_and_not(tmp_path: Path) -> None:
    async with served(tmp_path) as (house, server):
        await house.worker(say("hel", "lo"))
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hello", "stop")
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"
            assert [model.id async for model in client.models.list()] == ["m"]


async def frontend_process(tmp_path: Path, *arguments: str, **env: str) -> asyncio.subprocess.Process:
    base = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "ETCD_"))}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dynamo.frontend",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**base, "DYN_FILE_KV": str(tmp_path / "kv"), **env},
    )


async def test_a_taken_port_ends_the_process_with_that_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await frontend_process(tmp_path, "--discovery-backend", "file", "--http-port", str(port))
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().splitlines() == [
        f"Failed to start HTTP server: port {port} already in use. Use --http-port to specify a different port."
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    process = await frontend_process(
        tmp_path, "--discovery-backend", "file", "--http-host", "127.0.0.1", "--http-port", "0"
    )
    assert process.stderr is not None
    port = 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not port:
            line = (await process.stderr.readline()).decode()
            assert line, "the frontend ended at once"
            if "serving HTTP on" in line:
                port = int(line.strip().rsplit(":", 1)[1].split("\x1b")[0])
        with await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/health") as answer:
            assert answer.status == 200
        process.send_signal(number)
        await process.communicate()
    assert process.returncode == 0
