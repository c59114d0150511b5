"""A worker in Rust (`make test-rust` builds it), called over its own wire and watched by its operator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from dynamo.errors import (
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    WorkerUnavailable,
)
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.event_plane.envelope import decode_parts, zmq_endpoint
from dynamo.runtime.calls.request_plane.base import INITIAL_CREDITS
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from dynamo.runtime.calls.request_plane.mux.frames import MAGIC, Kind, frame, pack
from dynamo.runtime.calls.request_plane.secret import SharedSecret
from dynamo.runtime.calls.request_plane.security import PlaneSecurity
from support.patience import PATIENCE_SECONDS
from support.processes import get
from support.rust_worker import NEEDS_ENGINE, RustWorker, body
from support.streams import read_all

pytestmark = NEEDS_ENGINE


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RustWorker]:
    worker = RustWorker.start(tmp_path)
    yield worker
    worker.close()


@pytest.fixture
async def client() -> AsyncIterator[MuxClient]:
    client = MuxClient()
    yield client
    await client.close()


async def test_its_records_are_named_by_their_key(worker: RustWorker) -> None:
    encoded = worker.instance().key.replace("/", "%2F")
    instances, models = [name for name in worker.records() if "event_channels" not in name]
    assert (instances, models) == (f"v1/instances/{encoded}", f"v1/mdc/{encoded}")
    card = json.loads((worker.store / "v1" / "mdc" / encoded).read_text())["card_json"]
    assert (card["display_name"], card["model_type"], card["worker_type"]) == (
        "sample-model",
        "Chat | Completions",
        "aggregated",
    )


async def test_it_serves_the_sample_behaviour(worker: RustWorker, client: MuxClient) -> None:
    items = await read_all(await client.open(worker.instance(), body(5), Context()))
    assert [i for item in items for i in item.token_ids] == [1, 2, 3, 4, 5]
    assert items[-1].finish_reason == "length"
    assert items[-1].extra == {"completion_usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}}


async def test_it_obeys_credits_and_large_bodies_over_many_streams(worker: RustWorker, client: MuxClient) -> None:
    count = INITIAL_CREDITS + 50
    instance = worker.instance()
    streams = [await client.open(instance, body(count if n == 0 else 20, 60_000), Context()) for n in range(20)]
    answers = await asyncio.gather(*map(read_all, streams))
    assert [sum(len(i.token_ids) for i in items) for items in answers] == [count] + [20] * 19


@pytest.mark.parametrize("kill", [False, True])
async def test_it_obeys_stop_and_kill(worker: RustWorker, client: MuxClient, kill: bool) -> None:
    context = Context()
    stream = await client.open(worker.instance(), body(10**6), context)
    await stream.next_batch()
    (context.kill if kill else context.stop_generating)()
    rest = await read_all(stream)
    assert (rest[-1].finish_reason == "cancelled") if not kill else rest == []


async def test_its_errors_are_typed(worker: RustWorker, client: MuxClient) -> None:
    instance = worker.instance()
    for wrong in ({"token_ids": ["a"]}, {"token_ids": None}, {}):
        with pytest.raises(InvalidArgument, match=r"token_ids|valid"):
            await read_all(await client.open(instance, wrong, Context()))
    with pytest.raises(InvalidArgument, match="DYN_TCP_MAX_DECODED_MB"):
        await read_all(await client.open(instance, {"token_ids": [], "extra_args": [[]] * 4_000_000}, Context()))
    elsewhere = msgspec.structs.replace(instance, transport={"tcp": instance.transport["tcp"] + "x"})
    with pytest.raises(WorkerUnavailable, match="unknown endpoint"):
        await read_all(await client.open(elsewhere, body(1), Context()))
    late = Context(deadline=asyncio.get_running_loop().time() + 0.05)
    with pytest.raises(ResponseTimeout):
        await read_all(await client.open(instance, body(10**6), late))


async def test_a_full_worker_declines_and_serves_its_queue_in_order(tmp_path: Path, client: MuxClient) -> None:
    worker = RustWorker.start(tmp_path, DYN_ENGINE_REQUEST_LIMIT="1", DYN_DYNAMO_REQUEST_QUEUE_LIMIT="1")
    try:
        instance = worker.instance()
        running = Context()
        first = await client.open(instance, body(10**6), running)
        await first.next_batch()
        second = asyncio.create_task(read_all(await client.open(instance, body(2), Context())))
        with pytest.raises(Overloaded):
            await read_all(await client.open(instance, body(1), Context()))
        running.stop_generating()
        assert (await read_all(first))[-1].finish_reason == "cancelled"
        assert (await second)[-1].finish_reason == "length"
    finally:
        worker.close()


async def test_it_leaves_politely(worker: RustWorker, client: MuxClient) -> None:
    stream = await client.open(worker.instance(), body(1000), Context())
    await stream.next_batch()
    worker.signal(signal.SIGTERM)
    items = await read_all(stream)
    assert items[-1].finish_reason == "length"
    assert await worker.ended() == 0
    assert worker.records() == []
    order = ["SIGTERM received", "Endpoint unregistered from discovery", "Engine cleanup complete"]
    places = [worker.log.index(line) for line in order]
    assert places == sorted(places)


async def test_what_does_not_end_in_time_is_cut(tmp_path: Path, client: MuxClient) -> None:
    worker = RustWorker.start(tmp_path, DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="6")
    try:
        stream = await client.open(worker.instance(), body(10**6), Context())
        await stream.next_batch()
        worker.signal(signal.SIGINT)
        with pytest.raises(EngineShutdown):
            await read_all(stream)
        assert await worker.ended() == 0
        assert "1 streams were still running and were cut" in worker.log
    finally:
        worker.close()


async def test_a_killed_worker_is_a_lost_connection(worker: RustWorker, client: MuxClient) -> None:
    stream = await client.open(worker.instance(), body(10**6), Context())
    await stream.next_batch()
    worker.kill()
    with pytest.raises(Disconnected):
        await read_all(stream)


async def test_probes_and_metrics(worker: RustWorker, client: MuxClient) -> None:
    await read_all(await client.open(worker.instance(), body(5), Context()))
    status, health = worker.get("/health")
    assert (status, json.loads(health)["endpoints"]) == (200, {"generate": "ready"})
    status, page = worker.get("/metrics")
    assert status == 200
    assert 'dynamo_component_requests_total{dynamo_namespace="dynamo",dynamo_component="backend"' in page
    assert worker.get("/nowhere") == (404, "Route not found")
    assert worker.get("/engine/control/sleep")[0] == 405  # an image of any page could be a GET
    assert worker.get("/engine/control/sleep", method="POST")[0] == 404


def test_an_admin_port_serves_controls_and_nothing_else_does(tmp_path: Path) -> None:
    worker = RustWorker.start(tmp_path, DYN_ADMIN_PORT="0", DYN_TCP_TLS_INSECURE="0")
    try:
        admin = int(worker.wait_log(r"engine routes on http://127\.0\.0\.1:(\d+)")[1])
        worker.wait_log("Serving ")
        status, text = worker.get("/engine/control/sleep")
        assert (status, "DYN_ADMIN_PORT" in text) == (404, True)
        assert get(admin, "/engine/control/sleep")[0] == 405
        there = get(admin, "/engine/control/sleep", method="POST")
        assert (there[0], b"Route /engine/control/sleep not found" in there[1]) == (404, True)
        assert get(admin, "/health") == (404, b"Route not found")
        assert worker.get("/health")[0] == 200
    finally:
        worker.close()


def test_an_admin_port_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = RustWorker.start(tmp_path, DYN_ADMIN_PORT=str(taken.getsockname()[1]))
        try:
            assert worker.exit_code() == 1
            assert "set DYN_ADMIN_PORT to a free port" in worker.log
        finally:
            worker.close()


async def test_its_load_reaches_subscribers(worker: RustWorker, client: MuxClient) -> None:
    """Over ZeroMQ's own library: the publisher in Rust speaks its wire without it."""
    instance = worker.instance()
    (channel,) = [name for name in worker.records() if name.startswith("v1/event_channels/")]
    record = (worker.store / channel).read_bytes()
    assert json.loads(record)["topic"] == "kv_metrics"
    endpoint = zmq_endpoint(record)
    assert endpoint is not None
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.HEARTBEAT_IVL, 50)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv_metrics")
        subscriber.connect(endpoint)

        async def report(wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    event = decode_parts(await subscriber.recv_multipart())
                    load = msgspec.msgpack.decode(event.payload)
                    assert set(load) == {
                        "worker_id",
                        "dp_rank",
                        "active_decode_blocks",
                        "active_prefill_tokens",
                        "kv_used_blocks",
                    }
                    assert load["worker_id"] == instance.instance_id
                    if wanted(load):
                        return load

        request = Context()
        stream = await client.open(instance, body(10**6, prompt=100), request)
        busy = await report(lambda load: load["active_decode_blocks"] > 8)  # 7 of the prompt, the others of the answer
        assert busy["active_prefill_tokens"] == 0
        request.kill()
        assert await read_all(stream) == []
        await report(lambda load: load["active_decode_blocks"] == 0)


async def test_the_health_check_sees_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    worker = RustWorker.start(
        tmp_path,
        delay="1000",
        DYN_HEALTH_CHECK_ENABLED="1",
        DYN_CANARY_WAIT_TIME="0.05",
        DYN_HEALTH_CHECK_REQUEST_TIMEOUT="0.1",
    )
    try:
        worker.wait_log("the health check had no answer within 0.1 s")
        while json.loads(worker.get("/health")[1]).get("reason") != "the health check failed":
            await asyncio.sleep(0.01)
        assert worker.get("/live")[0] == 503
    finally:
        worker.close()


async def test_the_shared_secret_is_asked_for(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of sixteen bytes and more\n")
    worker = RustWorker.start(tmp_path, DYN_TCP_SECRET_PATH=str(secret))
    try:
        instance = worker.instance()
        knowing, ignorant = MuxClient(security=PlaneSecurity(secret=SharedSecret(str(secret)))), MuxClient()
        try:
            assert (await read_all(await knowing.open(instance, body(2), Context())))[-1].finish_reason == "length"
            with pytest.raises(Exception, match=r"secret|lost|closed"):
                await read_all(await ignorant.open(instance, body(2), Context()))
        finally:
            await knowing.close()
            await ignorant.close()
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("flags", "env", "text"),
    [
        (["--discovery-backend", "kubernetes"], {}, "discovery_backend"),
        (["--request-plane", "mem"], {}, 'request_plane "mem" is not built into the Rust SDK: use tcp or nats'),
        (["--event-plane", "mem"], {}, 'event_plane "mem" is not built into the Rust SDK: use zmq or nats'),
        ([], {"DYN_TCP_TLS_CERT_PATH": "/tmp/cert"}, "DYN_TCP_TLS_CERT_PATH and DYN_TCP_TLS_KEY_PATH need each other"),
        ([], {"DYN_TCP_TLS_CA_CERT_PATH": "/tmp/ca"}, "build it with the crate dynamo-backend-tls"),
        ([], {"DYN_TCP_TLS_INSECURE": "1"}, "DYN_TCP_TLS_INSECURE"),
        ([], {"DYN_CHAOS": "/tmp/plan.toml"}, "DYN_CHAOS"),
        ([], {"OTEL_EXPORT_ENABLED": "1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "set it to http/protobuf"),
        ([], {"OTEL_EXPORT_ENABLED": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "https://c"}, "asks for TLS"),
        ([], {"DYN_ADMIN_PORT": "0", "DYN_SYSTEM_PORT": "-1"}, "DYN_SYSTEM_PORT"),
        (["--endpoint-types", "chats"], {}, "chats"),
        (["--model-name", "/no/such/model"], {}, "/no/such/model"),
        ([], {"DYN_TCP_SECRET_PATH": "/no/such/file"}, "DYN_TCP_SECRET_PATH"),
    ],
)
def test_what_it_cannot_do_ends_the_start_with_a_sentence(
    tmp_path: Path, flags: list[str], env: dict[str, Any], text: str
) -> None:
    worker = RustWorker.start(tmp_path, *flags, **env)
    try:
        assert worker.exit_code() == 2  # as a Python worker: another start meets the same mistake
        last = worker.log.strip().splitlines()[-1]
        assert last.startswith("Error: InvalidArgument: ")
        assert text in last
    finally:
        worker.close()


def test_log_lines_may_be_json(tmp_path: Path) -> None:
    worker = RustWorker.start(tmp_path, DYN_LOGGING_CONSOLE_FORMAT="jsonl", RUST_LOG="off")
    try:
        worker.wait_log("Serving ")
        lines = [json.loads(line) for line in worker.log.splitlines()]
        assert {"time", "level", "target", "message"} <= lines[0].keys()
    finally:
        worker.close()


async def test_fuzzed_frames_end_their_connection_and_nothing_else(worker: RustWorker, client: MuxClient) -> None:
    instance = worker.instance()
    address = worker.address()
    await read_all(await client.open(instance, body(1), Context()))
    before = worker.resident_bytes()
    chance = random.Random(14)
    hello = frame(Kind.HELLO, pack({"version": 1}))
    for round_number in range(300):
        kind, size = chance.randrange(0, 14), chance.choice([0, 1, 8, 100, 5000])
        payload = chance.randbytes(size)
        if chance.random() < 0.3:  # near to what is meant
            payload = pack([{"path": "p", "id": "r", "size": chance.randrange(2**33)}, None])
        announced = chance.choice([len(payload), len(payload) + 3, 2**32 - 1, 65_536])
        stranger = struct.pack(">IBBHI", announced, kind, chance.randrange(256), 0, chance.randrange(8)) + payload
        with (
            socket.create_connection(address, timeout=PATIENCE_SECONDS) as connection,
            contextlib.suppress(OSError),  # it may be closed before all was sent
        ):
            connection.sendall((MAGIC + hello if round_number % 3 else b"") + stranger)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                pass
    assert (await read_all(await client.open(instance, body(3), Context())))[-1].finish_reason == "length"
    assert "panicked" not in worker.log
    assert worker.resident_bytes() - before < 16 * 1024 * 1024
