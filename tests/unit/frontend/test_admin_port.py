"""Which port serves the admin routes, and how far a frontend is open when nobody chose an address."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect
from dynamo.frontend.args import parse_args
from dynamo.frontend.http.admin import ADMIN_CONNECTIONS, log_exposure
from dynamo.frontend.http.server import HttpServer, PortInUse, bind_admin
from dynamo.frontend.settings import FrontendSettings
from support.cases import each_case
from support.frontend_cluster import Cluster, cluster

CLUSTER = {"ETCD_ENDPOINTS": "http://etcd:2379"}


@asynccontextmanager
async def served(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, HttpServer]]:
    async with cluster(tmp_path, **{"http_host": "127.0.0.1", "http_port": 0, **settings}) as house:
        server = HttpServer(house.frontend)
        await server.start()
        try:
            yield house, server
        finally:
            await server.close()


async def ask(
    port: int | None, path: str, body: dict[str, Any] | None = None, *, host: str = "localhost", origin: str = ""
) -> tuple[int, Any]:
    raw = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(raw)}\r\n"
        head += f"origin: {origin}\r\n" if origin else ""
        writer.write(f"{head}connection: close\r\n\r\n".encode() + raw)
        answer = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    head_lines, _, content = answer.partition(b"\r\n\r\n")
    return int(head_lines.split()[1]), json.loads(content or b"null")


async def test_with_an_admin_port_the_admin_routes_are_there_and_nowhere_else(tmp_path: Path) -> None:
    async with served(tmp_path, admin_port=0) as (house, server):
        await house.worker()
        port = server.admin_port
        assert port not in (None, 0, server.port)
        body = {"model": "m", "active_decode_blocks_threshold": 0.5}
        for refused in (await ask(server.port, "/busy_threshold"), await ask(server.port, "/busy_threshold", body)):
            assert refused[0] == 404
            assert "--admin-port" in refused[1]["message"]
        assert await ask(server.admin_port, "/busy_threshold") == (200, {"thresholds": []})
        assert (await ask(server.admin_port, "/busy_threshold", body))[0] == 200
        assert (await ask(server.admin_port, "/busy_threshold"))[1]["thresholds"][0]["model"] == "m"
        assert (await ask(server.port, "/v1/models"))[0] == 200
        assert (await ask(server.admin_port, "/v1/models"))[0] == 404
    assert server.admin_port == port  # known after the end, too, as `port` is
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_without_an_admin_port_an_api_on_loopback_serves_the_admin_routes(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, server):
        assert server.admin_port is None
        assert (await ask(server.port, "/busy_threshold"))[0] == 200


@each_case("admin_port", [None, 0])
async def test_a_page_of_another_site_reaches_no_admin_route(tmp_path: Path, admin_port: int | None) -> None:
    async with served(tmp_path, admin_port=admin_port) as (_, server):
        port = server.port if admin_port is None else server.admin_port
        for way in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
            status, answer = await ask(port, "/busy_threshold", {"model": "m"}, **way)
            assert (status, "another site" in answer["message"]) == (403, True)
        assert (await ask(port, "/busy_threshold", origin="http://localhost"))[0] == 200


async def test_an_api_that_is_open_to_a_network_serves_no_admin_routes_and_names_the_setting(tmp_path: Path) -> None:
    async with served(tmp_path, http_host="0.0.0.0") as (_, server):
        status, answer = await ask(server.port, "/busy_threshold", {"model": "m"})
        assert status == 404
        assert "--admin-port" in answer["message"]
        assert "DYN_ADMIN_PORT" in answer["message"]


async def test_an_admin_listener_has_few_connections(tmp_path: Path) -> None:
    async with served(tmp_path, admin_port=0) as (_, server):
        held = [await asyncio.open_connection("127.0.0.1", server.admin_port) for _ in range(ADMIN_CONNECTIONS)]
        try:
            while len(server.admin_service.connections) < ADMIN_CONNECTIONS:
                await asyncio.sleep(0)
            status, answer = await ask(server.admin_port, "/busy_threshold")
            assert status == 503
            assert "admin listener" in answer["message"]
            assert (await ask(server.port, "/v1/models"))[0] == 200
        finally:
            for _, writer in held:
                writer.close()


def test_an_admin_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUse, match="--admin-port"):
            bind_admin(FrontendSettings(admin_port=taken.getsockname()[1]))


def test_an_admin_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(CannotConnect, match="DYN_ADMIN_HOST"):
        bind_admin(FrontendSettings(admin_port=0, admin_host="192.0.2.1"))


@each_case(
    ("argv", "env", "host"),
    [
        ([], {}, "127.0.0.1"),
        ([], CLUSTER, "0.0.0.0"),
        (["--discovery-backend", "file"], CLUSTER, "127.0.0.1"),
        (["--discovery-backend", "mem"], {}, "127.0.0.1"),
        (["--discovery-backend", "kubernetes"], {}, "0.0.0.0"),
        ([], {"DYN_DISCOVERY_BACKEND": "kubernetes"}, "0.0.0.0"),
        (["--http-host", "0.0.0.0"], {}, "0.0.0.0"),
        ([], {"DYN_HTTP_HOST": "0.0.0.0"}, "0.0.0.0"),
        ([], {"DYN_HTTP_HOST": "127.0.0.1", **CLUSTER}, "127.0.0.1"),
    ],
)
def test_with_discovery_of_one_machine_the_api_is_on_loopback(argv: list[str], env: dict[str, str], host: str) -> None:
    assert parse_args(argv, env).http_host == host


@pytest.mark.parametrize(
    ("argv", "env", "level", "words"),
    [
        ([], {}, logging.INFO, "--http-host 0.0.0.0"),
        ([], CLUSTER, logging.WARNING, "DYN_TLS_CERT_PATH"),
        (["--http-host", "0.0.0.0"], {"DYN_API_KEY": "a-key-of-twenty-bytes"}, logging.WARNING, "plain text"),
    ],
)
def test_how_far_a_frontend_is_open_is_logged_once(
    argv: list[str], env: dict[str, str], level: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log_exposure(parse_args(argv, env))
    assert [(record.levelno, words in record.getMessage()) for record in caplog.records] == [(level, True)]


def test_an_address_that_was_chosen_on_one_machine_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_exposure(parse_args(["--http-host", "0.0.0.0", "--admin-port", "0"], {}))
    assert not caplog.records


def test_an_admin_port_that_is_open_to_a_network_needs_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--admin-port", "0", "--admin-host", "0.0.0.0"], {})
    assert "--admin-keys" in capsys.readouterr().err


def test_an_admin_port_with_nothing_to_serve_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--admin-port", "0"], {"DYN_DISABLE_FRONTEND_ADMIN_API": "1"})
    assert "DYN_DISABLE_FRONTEND_ADMIN_API" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_args([], {"DYN_ADMIN_PORT": "70000"})
    assert "DYN_ADMIN_PORT: 70000 is not a port" in capsys.readouterr().err
