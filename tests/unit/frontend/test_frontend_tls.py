from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.args import parse_args
from dynamo.frontend.http.server import HttpServer
from dynamo.runtime.base import tls as tls_module
from dynamo.runtime.base.settings import RequestPlaneSettings
from support.certificates import Authority
from support.frontend_cluster import Cluster, cluster, say
from support.patience import PATIENCE_SECONDS

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@asynccontextmanager
async def https(tmp_path: Path, authority: Authority, **settings: Any) -> AsyncIterator[tuple[Cluster, HttpServer]]:
    cert, key = authority.issue()
    settings |= {"tls_cert_path": cert, "tls_key_path": key}
    async with cluster(tmp_path, http_host="127.0.0.1", http_port=0, **settings) as house:
        server = HttpServer(house.frontend)
        await server.start()
        try:
            yield house, server
        finally:
            await server.close()


async def ask(port: int, context: ssl.SSLContext) -> tuple[bytes, int]:
    """The answer to one request, and the serial number of the certificate that was shown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        serial = int(writer.get_extra_info("ssl_object").getpeercert()["serialNumber"], 16)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}"
        writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + BODY)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await reader.read(), serial
    finally:
        writer.close()


async def test_https_serves_and_takes_a_new_certificate_without_a_restart(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "LOOK_SECONDS", 0.0)
    context = ssl.create_default_context(cafile=authority.path)
    async with https(tmp_path, authority) as (house, server):
        await house.worker(say("hel", "lo"))
        answer, old = await ask(server.port, context)
        assert b"hello" in answer
        settings = house.frontend.settings
        assert settings.tls_cert_path is not None
        assert settings.tls_key_path is not None
        authority.issue_to(settings.tls_cert_path, settings.tls_key_path)
        answer, new = await ask(server.port, context)
        assert b"hello" in answer
        assert new != old


async def test_a_client_without_the_certificate_that_is_asked_for_is_not_heard(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=authority.path)
    async with https(tmp_path, authority, tls_client_ca_cert_path=authority.path) as (house, server):
        await house.worker(say("hello"))
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            answer, _ = await ask(server.port, context)
            assert answer == b""  # closed without a word is as good
        assert "--tls-client-ca-cert-path" in caplog.text
        assert house.metric("dynamo_frontend_refusals_total", limit="handshake") == 1
        context.load_cert_chain(*authority.issue("client"))
        answer, _ = await ask(server.port, context)
        assert b"hello" in answer


async def test_connections_that_never_shake_hands_are_few_and_end(tmp_path: Path, authority: Authority) -> None:
    limits = {"max_tls_handshakes": 2, "tls_handshake_timeout_seconds": 0.3}
    async with https(tmp_path, authority, **limits) as (house, server):
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_SECONDS):
            for reader, writer in silent:
                assert await reader.read() == b""
                writer.close()
        assert house.metric("dynamo_frontend_refusals_total", limit="handshakes") == 1
        assert house.metric("dynamo_frontend_refusals_total", limit="handshake_time") == 2


def test_flags_of_the_request_plane_are_handed_to_the_runtime() -> None:
    runtime = parse_args(["--tcp-tls-ca-cert-path", "/ca", "--tcp-tls-client-cert-path", "/c"], env={}).runtime
    assert runtime.requests == RequestPlaneSettings(tls_ca_cert_path="/ca", tls_client_cert_path="/c")
    assert parse_args(["--nats-tls-insecure"], env={}).runtime.nats.tls_insecure
    assert not parse_args(["--no-nats-tls-insecure"], env={"NATS_TLS_INSECURE": "1"}).runtime.nats.tls_insecure
