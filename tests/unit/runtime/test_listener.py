"""One port for both wires: who speaks what is decided by the first bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.runtime.base.addresses import detect_host
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, RequestPlaneServer, ResponseSink
from dynamo.runtime.calls.request_plane.listener import Listener, detect_device_type
from dynamo.runtime.calls.request_plane.mux import MAGIC, MuxClient
from dynamo.runtime.calls.request_plane.mux.client import MuxConnection
from support.cases import each_case
from support.native_caller import native_caller
from support.patience import PATIENCE_SECONDS

PATH = "1f/ns/c/e"


async def count(body: Any, context: Context, sink: ResponseSink) -> None:
    for n in range(body["n"]):
        sink.send_tokens([n])
    sink.send_tokens([], 0, "stop")


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[Listener]:
    listener = Listener("127.0.0.1", settings=RequestPlaneSettings(**settings))
    await listener.start()
    listener.register(PATH, count)
    try:
        yield listener
    finally:
        await listener.close()


def instance_of(listener: Listener, path: str = PATH) -> Instance:
    record: dict[str, Any] = dict(listener.transport(path))
    return Instance(namespace="ns", component="c", endpoint="e", instance_id=31, **record)


async def mux_tokens(client: MuxClient, listener: Listener, n: int) -> list[int]:
    stream = await client.open(instance_of(listener), {"n": n}, Context())
    tokens: list[int] = []
    try:
        while batch := await stream.next_batch():
            for item in batch:
                tokens.extend(item.token_ids)
    finally:
        stream.close()
    return tokens


async def test_one_port_serves_both_wires_from_one_core() -> None:
    async with listening() as listener, native_caller(listener.address) as caller:
        server: RequestPlaneServer = listener
        assert server is listener
        client = MuxClient()
        try:
            assert await mux_tokens(client, listener, 3) == [0, 1, 2]
            answer = await caller.call(PATH, {"n": 1})
            assert (await answer.everything())[-1] == "sentinel"
            assert await mux_tokens(client, listener, 2) == [0, 1]
            assert listener.connections == 2
        finally:
            await client.close()


@each_case("cut", range(1, len(MAGIC) + 1))
async def test_the_magic_may_arrive_in_pieces(cut: int) -> None:
    async with listening() as listener:
        host, _, port = listener.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(MAGIC[:cut])
        await writer.drain()
        await asyncio.sleep(0.001)
        writer.write(MAGIC[cut:] + b"\x00" * 64)  # mux answers a bad HELLO in its own words
        answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
        assert b"Read error" not in answer
        assert answer
        writer.close()


async def test_what_only_begins_like_the_magic_is_native() -> None:
    async with listening(max_message_bytes=70_000) as listener:
        host, _, port = listener.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        path_bytes = int.from_bytes(MAGIC[:2], "big")
        # A path that long is legal, if absurd; the rest of the frame is over the limit, which the native wire says so.
        writer.write(MAGIC[:2] + b"p" * path_bytes + b"\x00\x00" + b"\xff\xff\xff\xff")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
        assert answer[4:].startswith(b"Read error: message of")
        writer.close()


@each_case("body", [b"", b"\xa2\xff\xfe", b"\xc1", b"\x91" * 30_000], ids=["empty", "text", "c1", "deep"])
async def test_a_mux_body_that_cannot_be_read_is_that_requests_error_and_no_others(body: bytes) -> None:
    async with listening() as listener:
        host, _, port = listener.address.rpartition(":")
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: MuxConnection(listener.address, on_lost=lambda _: None), host, int(port)
        )
        broken = connection.open(PATH, body, Context())
        good = connection.open(PATH, b"\x81\xa1n\x01", Context())
        with pytest.raises(InvalidArgument, match="not msgpack"):
            await broken.next_batch()
        assert (await good.next_batch())[0].token_ids == [0]
        transport.abort()


async def test_a_silent_connection_is_dropped() -> None:
    async with listening(handshake_timeout_seconds=0.01) as listener:
        host, _, port = listener.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(MAGIC[:3])
        with contextlib.suppress(ConnectionError):  # a reset is as good as an orderly end
            assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""
        writer.close()
        assert listener.connections == 0


async def test_the_record_says_how_to_reach_a_path() -> None:
    async with listening() as listener:
        record = listener.transport("an/opaque/path")
        assert record["transport"] == {"tcp": f"{listener.address}/an/opaque/path"}
        assert (record["request_plane_codec"], record["mux"]) == ("msgpack", 1)
        assert record["device_type"] in ("cuda", "cpu")
        assert instance_of(listener).mux == 1


async def test_before_start_there_is_no_address() -> None:
    listener = Listener("127.0.0.1", settings=RequestPlaneSettings())
    with pytest.raises(RuntimeError, match="start"):
        listener.transport(PATH)
    await listener.close()


async def test_start_and_close_are_idempotent() -> None:
    listener = Listener("127.0.0.1", settings=RequestPlaneSettings())
    await listener.start()
    address = listener.address
    await listener.start()
    assert listener.address == address
    await listener.close()
    await listener.close()


async def test_host_and_port_come_from_the_settings() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    listener = Listener(settings=RequestPlaneSettings(rpc_host="127.0.0.1", rpc_port=port))
    await listener.start()
    assert listener.address == f"127.0.0.1:{port}"
    taken = Listener(settings=RequestPlaneSettings(rpc_host="127.0.0.1", rpc_port=port))
    with pytest.raises(CannotConnect, match=f"127.0.0.1:{port}.*DYN_TCP_RPC_PORT"):
        await taken.start()
    await listener.close()


async def test_all_interfaces_are_bound_but_a_real_address_is_advertised() -> None:
    listener = Listener("0.0.0.0", settings=RequestPlaneSettings())
    await listener.start()
    host = listener.address.rpartition(":")[0]
    assert host == detect_host()
    assert host != "0.0.0.0"
    await listener.close()


async def test_a_certificate_without_its_key_is_refused_rather_than_ignored() -> None:
    listener = Listener("127.0.0.1", settings=RequestPlaneSettings(tls_cert_path="/cert.pem"))
    with pytest.raises(InvalidArgument, match="DYN_TCP_TLS_CERT_PATH"):
        await listener.start()


async def test_an_ipv6_address_is_bracketed() -> None:
    listener = Listener("::1", settings=RequestPlaneSettings())
    try:
        await listener.start()
    except CannotConnect:
        pytest.skip("this machine has no IPv6 loopback")
    assert listener.address.startswith("[::1]:")
    listener.register(PATH, count)
    client = MuxClient()
    assert await mux_tokens(client, listener, 1) == [0]
    await client.close()
    await listener.close()


def test_the_detected_host_is_one_that_can_be_bound() -> None:
    host = detect_host()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))


def test_without_any_route_the_loopback_is_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoute:
        def __init__(self, *_: Any) -> None:
            raise OSError("network is unreachable")

    monkeypatch.setattr(socket, "socket", NoRoute)
    assert detect_host() == "127.0.0.1"


@each_case(
    ("env", "device"),
    [
        ({}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "none"}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "void"}, "cpu"),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, "cuda"),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, "cuda"),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, "cpu"),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, "cpu"),
    ],
)
def test_the_device_type_follows_what_the_environment_hides(env: dict[str, str], device: str) -> None:
    assert detect_device_type(env) == device
