"""The API at a Unix socket, beside its port."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect
from dynamo.frontend.args import parse_args
from dynamo.frontend.http.server import HttpServer
from dynamo.runtime.base.addresses import UnixListener
from support.frontend_cluster import Cluster, cluster, say

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True})
LEAVE_IT_BEHIND = "import os, socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1]); os._exit(0)"


@asynccontextmanager
async def served(tmp_path: Path, path: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, HttpServer]]:
    async with cluster(tmp_path, **{"http_host": "127.0.0.1", "http_port": 0, "uds": str(path), **settings}) as house:
        server = HttpServer(house.frontend)
        try:
            await server.start()
            yield house, server
        finally:
            await server.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "api.sock"


def is_there(path: Path) -> bool:
    return path.exists()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def text(path: Path) -> str:
    return path.read_text()


def leave_one(path: Path) -> None:
    """Have a process end without its socket taken away."""
    subprocess.run([sys.executable, "-c", LEAVE_IT_BEHIND, str(path)], check=True)


def replace(path: Path) -> None:
    path.unlink()
    path.write_text("another's")


async def curl(*arguments: str) -> bytes:
    command = shutil.which("curl") or "curl"
    process = await asyncio.create_subprocess_exec(command, "-sS", "-N", *arguments, stdout=subprocess.PIPE)
    found, _ = await process.communicate()
    assert process.returncode == 0
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_curl_gets_the_same_from_the_socket_and_from_the_port(tmp_path: Path, path: Path) -> None:
    async with served(tmp_path, path) as (house, server):
        await house.worker(say("hel", "lo"))
        assert mode(path) == 0o600
        ways = (
            ["--unix-socket", str(path), "http://localhost/v1/models"],
            [f"http://127.0.0.1:{server.port}/v1/models"],
        )
        one, other = [json.loads(await curl(*way)) for way in ways]
        assert one == other
        json_body = ["-H", "content-type: application/json", "-d", CHAT]
        events = await curl("--unix-socket", str(path), *json_body, "http://localhost/v1/chat/completions")
        assert b'"content":"hel"' in events
        assert events.endswith(b"data: [DONE]\n\n")
    assert not is_there(path)


async def test_without_a_port_there_is_the_socket_alone(tmp_path: Path, path: Path) -> None:
    async with served(tmp_path, path, http_port=None, http_host="0.0.0.0") as (house, server):
        await house.worker(say("hello"))
        assert server.port == 0
        (listened_at,) = server.service.sockets
        assert listened_at.family == socket.AF_UNIX
        assert json.loads(await curl("--unix-socket", str(path), "http://localhost/v1/models"))["data"][0]["id"] == "m"
        # As on loopback: admin routes are here, and a name that was made to lead here is refused.
        assert await curl("--unix-socket", str(path), "http://localhost/busy_threshold") != b""
        assert b"another site" in await curl("--unix-socket", str(path), "http://evil.example/v1/models")
    assert not is_there(path)


def test_without_a_port_there_has_to_be_a_socket(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_args(["--http-port", "OFF", "--uds", "s"], {}).http_port is None
    assert parse_args(["--uds", "s"], {"DYN_HTTP_PORT": "off"}).http_port is None
    with pytest.raises(SystemExit):
        parse_args(["--http-port", "off"], {})
    assert "--http-port off leaves no way to the API: add --uds PATH" in capsys.readouterr().err


async def test_what_a_dead_process_left_is_replaced(tmp_path: Path, path: Path) -> None:
    leave_one(path)
    assert is_there(path)
    async with served(tmp_path, path):
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        await writer.wait_closed()
    assert not is_there(path)


async def test_the_socket_of_a_live_process_is_refused_and_stays(tmp_path: Path, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(CannotConnect, match=r"^--uds .*api\.sock: another process listens there$"):
            async with served(tmp_path, path):
                raise AssertionError("it was served")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


async def test_a_file_that_is_no_socket_is_refused_and_stays(tmp_path: Path, path: Path) -> None:
    with path.open("x") as file:
        file.write("notes")
    with pytest.raises(CannotConnect, match="there is a file that is not a socket"):
        async with served(tmp_path, path):
            raise AssertionError("it was served")
    assert text(path) == "notes"


async def test_a_path_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    for given, reason in ((tmp_path / "none" / "s", "No such file or directory"), (tmp_path / ("x" * 200), "too long")):
        with pytest.raises(CannotConnect, match=reason):
            async with served(tmp_path, given):
                raise AssertionError("it was served")


async def test_a_socket_that_another_process_has_replaced_stays(tmp_path: Path, path: Path) -> None:
    async with served(tmp_path, path):
        replace(path)
    assert text(path) == "another's"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--tls-cert-path", "c", "--tls-key-path", "k"], "--uds is served without TLS"),
        (["--http-port", "of"], "--http-port: 'of' is neither off nor an integer from 0 to 65535"),
    ],
)
def test_what_a_socket_does_not_go_with_is_named(
    more: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.frontend.args._check_files", lambda _: None)
    monkeypatch.setattr("dynamo.frontend.args._check_tls", lambda _: None)
    with pytest.raises(SystemExit):
        parse_args(["--uds", "s", *more], {})
    assert reason in capsys.readouterr().err


def test_a_path_that_is_too_long_is_refused_with_the_limit(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    reason = rf"--uds \S+: too long for a Unix socket: the path has {len(str(path))} bytes, and may have 10[37]"
    with pytest.raises(CannotConnect, match=reason):
        UnixListener(str(path))
