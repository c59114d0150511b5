"""Where the listeners of a process listen when nobody chose an address."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo.runtime import DistributedRuntime
from dynamo.runtime.base.addresses import bind_host, detect_host
from dynamo.runtime.base.settings import RuntimeSettings, discovery_store
from dynamo.runtime.discovery.base import Discovery
from dynamo.runtime.discovery.file import FileDiscovery
from support.cases import each_case


@each_case(
    ("store", "asked", "host"),
    [
        ("file", None, "127.0.0.1"),
        ("mem", None, "127.0.0.1"),
        ("etcd", None, "0.0.0.0"),
        ("kubernetes", None, "0.0.0.0"),
        ("file", "0.0.0.0", "0.0.0.0"),
        ("etcd", "10.0.0.5", "10.0.0.5"),
    ],
)
def test_a_listener_of_one_machine_listens_on_loopback(store: str, asked: str | None, host: str) -> None:
    assert bind_host(store, asked, "0.0.0.0") == host


@each_case(
    ("backend", "endpoints", "store"),
    [
        ("auto", None, "file"),
        ("auto", "http://e:2379", "etcd"),
        ("etcd", None, "file"),
        ("ETCD", "http://e:2379", "etcd"),
        ("file", "http://e:2379", "file"),
        ("kubernetes", None, "kubernetes"),
        ("mem", None, "mem"),
    ],
)
def test_a_backend_stands_for_a_store(backend: str, endpoints: str | None, store: str) -> None:
    assert discovery_store(backend, endpoints) == store


@pytest.fixture
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_TCP_RPC_HOST", "DYN_SYSTEM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DYN_SYSTEM_PORT", "0")


class OfACluster:
    """A store that is neither of files nor of this process."""

    def __init__(self, inner: Discovery) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def listening(runtime: DistributedRuntime) -> tuple[str, str]:
    """The addresses that the request plane and the status server of a runtime are bound to."""
    server = cast(Any, await runtime.plane_server())
    status = cast(Any, runtime.status_server)
    return server._server.sockets[0].getsockname()[0], status._open.service.sockets[0].getsockname()[0]


async def test_with_file_discovery_a_worker_listens_on_loopback_and_logs_how_to_open_it(
    tmp_path: Path, nothing_chosen: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with DistributedRuntime(
        asyncio.get_running_loop(), None, "tcp", discovery=FileDiscovery(tmp_path)
    ) as runtime:
        assert await listening(runtime) == ("127.0.0.1", "127.0.0.1")
        assert "DYN_TCP_RPC_HOST=0.0.0.0 opens" in caplog.text
        assert "DYN_SYSTEM_HOST=0.0.0.0 opens" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_address_that_was_chosen_is_the_one_that_is_bound(
    tmp_path: Path, nothing_chosen: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "0.0.0.0")
    monkeypatch.setenv("DYN_SYSTEM_HOST", "0.0.0.0")
    caplog.set_level(logging.INFO)
    async with DistributedRuntime(
        asyncio.get_running_loop(), None, "tcp", discovery=FileDiscovery(tmp_path)
    ) as runtime:
        assert await listening(runtime) == ("0.0.0.0", "0.0.0.0")
        assert "opens" not in caplog.text


async def test_in_a_cluster_a_worker_listens_as_the_native_one_and_warns_once_that_it_is_open(
    tmp_path: Path, nothing_chosen: None, caplog: pytest.LogCaptureFixture
) -> None:
    store = cast(Discovery, OfACluster(FileDiscovery(tmp_path)))
    settings = replace(RuntimeSettings.from_env(), discovery_backend="kubernetes")
    runtime = DistributedRuntime(asyncio.get_running_loop(), None, "tcp", discovery=store, settings=settings)
    async with runtime:
        assert await listening(runtime) == (detect_host(), "0.0.0.0")
        await runtime.plane_server()
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert "DYN_TCP_SECRET_PATH" in warnings[0]
