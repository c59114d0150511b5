"""The picker's gRPC service over real connections."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from dynamo.errors import CannotConnect
from dynamo.picker.choice import PickedWorker, Picker, Request
from dynamo.picker.exchange import DESTINATION, GatewayExchange
from dynamo.picker.grpc.calls import GrpcCall
from dynamo.picker.grpc.connection import PREFACE, frame
from dynamo.picker.grpc.hpack import write_headers
from dynamo.picker.server import EXT_PROC, HEALTH, PickerServer
from dynamo.picker.settings import PickerSettings
from dynamo.picker.wire import of_bytes, of_number
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.kv.settings import KvRouterSettings
from support.certificates import Authority
from support.frontend_cluster import Cluster, cluster
from support.gateway import NumberedAddresses, body_message, completion, read_answer, request_headers
from support.patience import PATIENCE_SECONDS

SERVING, NOT_SERVING, SERVICE_UNKNOWN = (of_number(1, status) for status in (1, 2, 3))


@asynccontextmanager
async def picker(
    tmp_path: Path, *, drain_seconds: float = 0.0, **kv: Any
) -> AsyncIterator[tuple[Cluster, PickerServer, grpc.aio.Channel]]:
    settings = KvRouterSettings(policy="default", **kv)
    async with cluster(tmp_path, router_mode="kv", kv_router=settings) as models:
        addresses = NumberedAddresses()
        made = Picker(models.frontend, addresses, seconds=PATIENCE_SECONDS)
        config = ModelRuntimeConfig(total_kv_blocks=1000, max_num_batched_tokens=64)
        worker = await models.worker(kv_cache_block_size=4, runtime_config=config)
        addresses.name(worker.endpoint.connection_id())
        async with (
            PickerServer(made, PickerSettings(host="127.0.0.1", port=0, drain_seconds=drain_seconds)) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            yield models, server, channel


def process(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall:
    return channel.stream_stream(f"/{EXT_PROC}/Process")()


async def check(channel: grpc.aio.Channel, service: str) -> bytes:
    answer: bytes = await channel.unary_unary(f"/{HEALTH}/Check")(of_bytes(1, service.encode()))
    return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def held(models: Cluster) -> int:
    return sum(model.admission.in_flight for model in models.frontend.models.served())


async def test_a_stream_is_answered_and_its_end_frees_what_it_held(tmp_path: Path) -> None:
    async with picker(tmp_path) as (models, server, channel):
        stream = process(channel)
        await choose(stream)
        assert held(models) == 1
        await stream.done_writing()  # as a gateway does whose client has gone
        assert await stream.read() is grpc.aio.EOF
        await until(lambda: held(models) == server.streams == 0)


async def test_nothing_of_a_call_is_left_to_the_collector(tmp_path: Path) -> None:
    """Hundreds of calls a second that are left to it hold up all others for some milliseconds each time that it comes."""
    async with picker(tmp_path) as (models, _, channel):
        gc.collect()
        gc.disable()
        try:
            for ends in (lambda stream: stream.done_writing(), None):
                stream = process(channel)
                await choose(stream)
                if ends is not None:
                    await ends(stream)
                else:
                    stream.cancel()
                await until(lambda: held(models) == 0)
            await until(lambda: not any(type(one) in (GrpcCall, GatewayExchange) for one in gc.get_objects()))
        finally:
            gc.enable()


async def test_a_refused_request_ends_its_stream(tmp_path: Path) -> None:
    async with picker(tmp_path) as (_, _server, channel):
        stream = process(channel)
        await stream.write(request_headers(modes=(2, 0)))
        await stream.write(body_message(4, b"{", is_last=True))
        assert read_answer(await stream.read()).kind == "request_headers"
        assert read_answer(await stream.read()).status == 400
        assert await stream.read() is grpc.aio.EOF


async def test_a_client_that_leaves_while_its_request_waits_in_the_queue_takes_no_worker(tmp_path: Path) -> None:
    async with picker(tmp_path, router_queue_threshold=0.1) as (models, server, channel):
        streams = [process(channel) for _ in range(2)]
        for token, stream in enumerate(streams, 1):
            await stream.write(request_headers())
            await stream.write(body_message(4, completion([token] * 64), is_last=True))
            if token == 1:
                assert read_answer(await stream.read()).destination
        (pool,) = models.frontend.models.pools()
        await until(lambda: pool.gate is not None and len(pool.gate) == 1)
        await streams[1].done_writing()
        await until(lambda: pool.gate is not None and len(pool.gate) == 0)
        await until(lambda: held(models) == 1)
        streams[0].cancel()
        await until(lambda: held(models) == server.streams == 0)


PROCESS = write_headers([
    (b":method", b"POST"), (b":path", f"/{EXT_PROC}/Process".encode()), (b"content-type", b"application/grpc"),
])  # fmt: skip


def messages(stream: int) -> bytes:
    sent = (request_headers(), body_message(4, completion([1, 2, 3, 4]), is_last=True))
    return b"".join(frame(0, 0, stream, b"\0" + len(each).to_bytes(4, "big") + each) for each in sent)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_choice_is_answered_before_the_next_one_of_the_same_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], None]
) -> None:
    async def see_both() -> None:
        async with picker(tmp_path) as (_, server, _):
            received, choices = bytearray(), 0

            async def choose(self: Picker, request: Request) -> PickedWorker:
                nonlocal choices
                choices += 1
                while choices == 2 and DESTINATION.encode() not in received:  # the loop does not turn meanwhile
                    received.extend(gateway.recv(65536))
                return await chosen(self, request)

            monkeypatch.setattr(Picker, "choose", choose)
            streams = (frame(1, 4, number, PROCESS) + messages(number) for number in (1, 3))
            with socket.create_connection(("127.0.0.1", server.port)) as gateway:
                gateway.settimeout(PATIENCE_SECONDS)
                gateway.sendall(PREFACE + frame(4, 0, 0) + b"".join(streams))
                await until(lambda: choices == 2 and DESTINATION.encode() in received)

    chosen = Picker.choose
    run(see_both())


async def test_a_stream_that_is_reset_with_its_body_takes_no_worker(tmp_path: Path) -> None:
    """The choice has a task by then, and the task has not begun."""
    async with picker(tmp_path) as (models, server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(PREFACE + frame(4, 0, 0) + frame(1, 4, 1, PROCESS) + messages(1) + frame(3, 0, 1, b"\0\0\0\x08"))
        writer.write(frame(6, 0, 0, b"8 bytes."))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while b"8 bytes." not in await reader.read(65536):
                pass
        await until(lambda: held(models) == server.streams == 0)
        writer.close()


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """Return the kind of a frame, its flags and its payload."""
    head = await reader.readexactly(9)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def test_answers_that_wait_for_the_peers_window_come_before_the_end_of_the_stream(tmp_path: Path) -> None:
    async with picker(tmp_path) as (models, server, _), asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(PREFACE + frame(4, 0, 0, b"\0\4\0\0\0\7") + frame(1, 4, 1, PROCESS) + messages(1))
        found = b""  # through a window of 7 bytes
        while len(found) < 7:
            kind, _, payload = await read_frame(reader)
            found += payload if kind == 0 else b""
        writer.write(frame(0, 1, 1) + frame(6, 0, 0, b"8 bytes."))  # the end of what the peer sends
        while (await read_frame(reader))[::2] != (6, b"8 bytes."):
            pass
        writer.write(frame(8, 0, 1, (1 << 20).to_bytes(4, "big")))
        flags = 0
        while not flags & 1:
            kind, flags, payload = await read_frame(reader)
            found += payload if kind == 0 else b""
        sizes = []
        while found:
            size = int.from_bytes(found[1:5], "big")
            sizes.append((size, len(found[5 : 5 + size])))
            found = found[5 + size :]
        assert len(sizes) == 2  # the choice, and the body
        assert all(announced == came for announced, came in sizes)
        await until(lambda: held(models) == server.streams == 0)
        writer.close()


async def test_what_is_no_message_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    async with picker(tmp_path) as (_, server, channel):
        for sent, how, code in (
            (b"\xff", None, "INVALID_ARGUMENT"),
            (b"a" * 999, grpc.Compression.Gzip, "UNIMPLEMENTED"),
        ):
            stream = channel.stream_stream(f"/{EXT_PROC}/Process")(compression=how)
            await stream.write(sent)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                assert await stream.read() is not grpc.aio.EOF
            assert raised.value.code().name == code
        await until(lambda: server.streams == 0)


async def test_health_is_that_of_the_models(tmp_path: Path) -> None:
    async with picker(tmp_path) as (models, _server, channel):
        for service in ("", "readiness", "liveness", EXT_PROC):
            assert await check(channel, service) == SERVING
        assert await check(channel, "other") == SERVICE_UNKNOWN
        listed: bytes = await channel.unary_unary(f"/{HEALTH}/List")(b"")
        assert all(name.encode() in listed for name in ("liveness", "readiness", EXT_PROC))
        watch = channel.unary_stream(f"/{HEALTH}/Watch")(b"")
        assert await watch.read() == SERVING
        await models.workers[0].stop()
        await models.gone("m")
        assert await watch.read() == NOT_SERVING
        assert await check(channel, "liveness") == SERVING
        watch.cancel()


async def test_a_picker_that_drains_still_chooses(tmp_path: Path) -> None:
    async with picker(tmp_path, drain_seconds=PATIENCE_SECONDS) as (models, server, channel):
        draining = asyncio.ensure_future(server.drain(0))
        await until(lambda: server.is_draining)
        assert [await check(channel, service) for service in ("liveness", EXT_PROC)] == [SERVING, NOT_SERVING]
        late = process(channel)
        await choose(late)
        draining.cancel()
        await late.done_writing()
        await until(lambda: held(models) == 0)


async def test_what_is_open_ends_before_a_picker_does(tmp_path: Path) -> None:
    async with picker(tmp_path) as (models, server, channel):
        stream = process(channel)
        await choose(stream)
        draining = asyncio.ensure_future(server.drain(PATIENCE_SECONDS))
        await until(lambda: server.is_draining)
        assert held(models) == 1
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await draining
        assert held(models) == 0


async def choose(stream: grpc.aio.StreamStreamCall) -> None:
    """Send a request, and read its worker and its body."""
    await stream.write(request_headers())
    await stream.write(body_message(4, completion([1, 2, 3, 4]), is_last=True))
    assert read_answer(await stream.read()).destination == "10.0.0.1:8000"
    assert read_answer(await stream.read()).is_last


async def test_tls_is_served_where_a_certificate_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    cert, key = map(Path, authority.issue("localhost"))
    trusted = grpc.ssl_channel_credentials(authority.ca.cert_pem.bytes())
    async with picker(tmp_path) as (models, _server, _channel):
        settings = PickerSettings(host="127.0.0.1", port=0, tls_cert_path=cert, tls_key_path=key)
        async with (
            PickerServer(Picker(models.frontend, NumberedAddresses()), settings) as server,
            grpc.aio.secure_channel(f"localhost:{server.port}", trusted) as channel,
        ):
            assert await check(channel, "readiness") == SERVING


async def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    async with picker(tmp_path) as (models, server, _channel):
        settings = PickerSettings(host="127.0.0.1", port=server.port)
        other = PickerServer(Picker(models.frontend, NumberedAddresses()), settings)
        with pytest.raises(CannotConnect, match="cannot listen on"):
            async with other:
                pass
