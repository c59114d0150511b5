"""A worker in Rust with TLS (the example of `rust/dynamo-backend-tls`): both wires, mutual TLS, and files that change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect, DynamoException
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from dynamo.runtime.calls.request_plane.security import PlaneSecurity
from support.certificates import Authority
from support.http_client import ask
from support.native_caller import native_caller
from support.nats_server import nats_server
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, until, wait
from support.rust_worker import TLS_ENGINE, RustWorker, body
from support.streams import read_all

pytestmark = pytest.mark.skipif(
    not TLS_ENGINE, reason="no Rust worker with TLS: `make test-rust` builds one where OpenSSL is (RUST_TLS_ENGINE)"
)


class Plane:
    """Certificates, and the settings of a worker and of its callers."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.cert, self.key = self.authority.issue("127.0.0.1")
        self.listens: dict[str, Any] = {
            "DYN_TCP_TLS_CERT_PATH": self.cert,
            "DYN_TCP_TLS_KEY_PATH": self.key,
            "DYN_TCP_TLS_CLIENT_CA_CERT_PATH": self.authority.path,
        }
        self.calls: dict[str, Any] = {
            "DYN_TCP_TLS_CA_CERT_PATH": self.authority.path,
            "DYN_TCP_TLS_CLIENT_CERT_PATH": self.cert,
            "DYN_TCP_TLS_CLIENT_KEY_PATH": self.key,
        }

    @property
    def everything(self) -> dict[str, Any]:
        return self.listens | self.calls

    @asynccontextmanager
    async def caller(self, **settings: Any) -> AsyncIterator[MuxClient]:
        """A caller with these settings; by default one that the worker knows."""
        known = {
            "tls_ca_cert_path": self.authority.path,
            "tls_client_cert_path": self.cert,
            "tls_client_key_path": self.key,
        }
        made = {name: value for name, value in (known | settings).items() if value is not None}
        client = MuxClient(security=PlaneSecurity.of(RequestPlaneSettings(**made)))
        try:
            yield client
        finally:
            await client.close()

    def context(self, side: ssl.Purpose) -> ssl.SSLContext:
        context = ssl.create_default_context(side, cafile=self.authority.path)
        context.load_cert_chain(self.cert, self.key)
        return context


@pytest.fixture
def plane(tmp_path: Path) -> Plane:
    return Plane(tmp_path / "certificates")


@pytest.fixture
def worker(tmp_path: Path, plane: Plane) -> Iterator[RustWorker]:
    worker = RustWorker.start(tmp_path, has_tls=True, **plane.everything)
    yield worker
    worker.close()


async def leave(worker: RustWorker) -> None:
    """End the worker. Connections over TLS end with a word of the peer, which the callers of a test must not miss."""
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_a_known_caller_is_served_and_others_are_not(worker: RustWorker, plane: Plane) -> None:
    instance = worker.instance()
    async with plane.caller() as known:
        streams = [await known.open(instance, body(300, 60_000), Context()) for _ in range(10)]
        answers = await asyncio.gather(*map(read_all, streams))
        assert [sum(len(item.token_ids) for item in items) for items in answers] == [300] * 10
        strangers = (
            {"tls_client_cert_path": None, "tls_client_key_path": None},  # shows nothing
            {"tls_ca_cert_path": None, "tls_client_cert_path": None, "tls_client_key_path": None},  # plain
            {"tls_server_name": "elsewhere"},  # asks for another name
        )
        for stranger in strangers:
            async with plane.caller(**stranger) as client:
                with pytest.raises((CannotConnect, DynamoException)):
                    await read_all(await client.open(instance, body(1), Context()))
        await until(lambda: worker.metric("dynamo_transport_tcp_errors_total") >= 2, lambda: "refusals")
        assert (await read_all(await known.open(instance, body(1), Context())))[-1].finish_reason == "length"
        await leave(worker)


async def test_native_callers_are_answered_over_tls(worker: RustWorker, plane: Plane) -> None:
    address, _, path = worker.instance().transport["tcp"].partition("/")
    calls, listens = plane.context(ssl.Purpose.SERVER_AUTH), plane.context(ssl.Purpose.CLIENT_AUTH)
    listens.verify_mode = ssl.CERT_REQUIRED
    async with native_caller(address, calls=calls, listens=listens) as caller:
        for _ in range(3):
            answer = await caller.call(path, body(400))
            items = [item["data"]["data"] for item in await answer.everything() if "data" in item]
            assert [token for item in items for token in item["token_ids"]] == list(range(1, 401))
    # A caller that listens without TLS gets no answer, and its request is killed.
    async with native_caller(address, calls=calls) as caller:
        await caller.call(path, body(10**6))
        worker.wait_log("cannot connect back to a caller")
        await until(lambda: worker.metric("dynamo_component_inflight_requests") == 0, lambda: "the kill")


async def test_files_that_change_serve_the_next_connection(worker: RustWorker, plane: Plane, tmp_path: Path) -> None:
    instance = worker.instance()
    async with asyncio.timeout(PATIENCE_SECONDS), plane.caller() as early:
        await read_all(await early.open(instance, body(1), Context()))
        plane.authority.spoil(plane.cert)
        cert, key = plane.authority.issue("127.0.0.1")
        shown = {"tls_client_cert_path": cert, "tls_client_key_path": key}
        while "cannot be used; the old ones stay in service" not in worker.log:  # connections look once a second
            async with plane.caller(**shown) as client:
                await read_all(await client.open(instance, body(1), Context()))
        later = Authority(tmp_path / "later")
        later.issue_to(plane.cert, plane.key, "127.0.0.1")
        while "have changed; new connections use them" not in worker.log:
            async with plane.caller(**shown) as client:
                with contextlib.suppress(CannotConnect):  # it does not know the new authority
                    await read_all(await client.open(instance, body(1), Context()))
        async with plane.caller(**shown | {"tls_ca_cert_path": later.path}) as client:
            await read_all(await client.open(instance, body(1), Context()))
        await read_all(await early.open(instance, body(1), Context()))  # what is open stays
        await leave(worker)


@pytest.mark.parametrize("name", ["DYN_TCP_TLS_CERT_PATH", "DYN_TCP_TLS_CA_CERT_PATH"])
def test_a_file_that_cannot_be_used_ends_the_start(tmp_path: Path, plane: Plane, name: str) -> None:
    worker = RustWorker.start(tmp_path, has_tls=True, **plane.everything | {name: "/nowhere"})
    try:
        assert worker.exit_code() == 2
        assert f"{name}: cannot read /nowhere" in worker.log
    finally:
        worker.close()


async def test_nats_is_reached_over_mutual_tls(tmp_path: Path, plane: Plane) -> None:
    authority = plane.authority.path
    tls = ("--tls", "--tlscert", plane.cert, "--tlskey", plane.key, "--tlscacert", authority, "--tlsverify")
    env: dict[str, Any] = {"NATS_TLS_CA_CERT_PATH": authority, "NATS_STARTUP_CONNECT_TIMEOUT_SECONDS": "0.5"}
    shown = {"NATS_TLS_CLIENT_CERT_PATH": plane.cert, "NATS_TLS_CLIENT_KEY_PATH": plane.key}
    with nats_server(*tls) as broker:
        flags = ("--request-plane", "nats")
        plain = RustWorker.start(tmp_path, *flags, NATS_SERVER=broker.url)
        try:
            assert plain.exit_code() == 1
            assert "it requires TLS: set NATS_TLS_CA_CERT_PATH" in plain.log
        finally:
            plain.close()
        stranger = RustWorker.start(tmp_path, *flags, has_tls=True, NATS_SERVER=broker.url, **env)
        try:
            assert stranger.exit_code() == 1
            assert f"NATS at {broker.url} cannot be used" in stranger.log
        finally:
            stranger.close()
        env["NATS_STARTUP_CONNECT_TIMEOUT_SECONDS"] = "60"
        worker = RustWorker.start(tmp_path, *flags, has_tls=True, NATS_SERVER=broker.url, **env | shown)
        try:
            assert "nats_tcp" in worker.instance().transport
            await leave(worker)
        finally:
            worker.close()


async def test_a_cluster_serves_with_mutual_tls_and_the_secret(tmp_path: Path, plane: Plane) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length\n")
    env = plane.everything | {"DYN_TCP_SECRET_PATH": str(secret), "DYN_DISCOVERY_BACKEND": "file"}
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend", **env)
        worker = cluster.process("worker", [TLS_ENGINE, "--model-name", "m"], **env)
        frontend.wait_ready()
        wait(lambda: "m" in frontend.models(), lambda: worker.log + frontend.log)
        request = json.dumps({"model": "m", "prompt": "a", "max_tokens": 5}).encode()
        reply = await ask(frontend.port, "/v1/completions", request)
        assert reply.status == 200, frontend.log
        assert "anybody who reaches this worker" not in worker.log
