"""A worker in Rust whose requests and events go over NATS, a real one."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest

from dynamo.errors import CannotConnect, Overloaded
from dynamo.runtime.base.settings import NatsSettings, RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.event_plane.envelope import decode_envelope
from dynamo.runtime.calls.nats_connection import NatsConnection
from dynamo.runtime.calls.request_plane.native.call_home import CallHomeListener
from dynamo.runtime.calls.request_plane.native.plane import NatsClient
from dynamo.runtime.calls.request_plane.native.stream import NativeStream
from support.http_client import ask
from support.native_caller import NativeCaller, two_part
from support.nats_server import NatsServer, nats_server, shared_nats
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, until, wait
from support.rust_worker import ENGINE, NEEDS_ENGINE, RustWorker, body
from support.streams import read_all

__all__ = ["shared_nats"]

pytestmark = NEEDS_ENGINE
MOCKER = str(Path(ENGINE).parent / "mocker")
FOREVER = 10**6
REQUESTS = ("--request-plane", "nats")


@pytest.fixture
def worker(tmp_path: Path, shared_nats: NatsServer) -> Iterator[RustWorker]:
    worker = RustWorker.start(tmp_path, *REQUESTS, NATS_SERVER=shared_nats.url)
    yield worker
    worker.close()


@asynccontextmanager
async def calling(url: str) -> AsyncIterator[tuple[NatsClient, NatsConnection]]:
    connection = NatsConnection(NatsSettings(servers=(url,)), wanted_by="the test")
    await connection.start()
    home = CallHomeListener(RequestPlaneSettings(response_host="127.0.0.1"))
    client = NatsClient(connection, home, request_timeout_seconds=5.0)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield client, connection
    finally:
        await client.close()
        await connection.close()


def tokens(items: list[Any]) -> list[int]:
    return [token for item in items for token in item.token_ids]


async def test_requests_arrive_as_messages_and_answers_leave_over_tcp(
    worker: RustWorker, shared_nats: NatsServer
) -> None:
    instance = worker.instance()
    assert list(instance.transport) == ["nats_tcp"]
    async with calling(shared_nats.url) as (client, _):
        streams = [await client.open(instance, body(200, 3000), Context()) for _ in range(20)]
        answers = await asyncio.gather(*map(read_all, streams))
        assert [tokens(items) for items in answers] == [list(range(1, 201))] * 20
        context = Context()
        stream = await client.open(instance, body(FOREVER), context)
        await stream.next_batch()
        context.stop_generating()
        assert (await read_all(stream))[-1].finish_reason == "cancelled"
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    assert worker.records() == []


async def test_a_message_is_answered_with_nothing_or_with_what_is_wrong_with_it(
    worker: RustWorker, shared_nats: NatsServer
) -> None:
    subject = worker.instance().transport["nats_tcp"]
    connection, caller = await nats.connect(shared_nats.url), NativeCaller("")
    await caller.listen()
    try:
        for wrong in (b"", b"\xff" * 40, two_part(b"{}")):
            reply = await connection.request(subject, wrong, timeout=PATIENCE_SECONDS)
            assert reply.data.startswith(b"Server unavailable: malformed request")
        payload, answer = caller.payload(body(3))
        headers = {"request-id": answer.request_id}
        reply = await connection.request(subject, payload, timeout=PATIENCE_SECONDS, headers=headers)
        assert reply.data == b""
        prologue, *_, final, sentinel = await answer.everything()
        assert (prologue, final, sentinel) == ({"error": None}, {"complete_final": True}, "sentinel")
    finally:
        await caller.close()
        await connection.close()


async def test_a_request_without_a_place_is_declined_where_its_answer_is_awaited(
    tmp_path: Path, shared_nats: NatsServer
) -> None:
    env: dict[str, Any] = {
        "DYN_ENGINE_REQUEST_LIMIT": "1",
        "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "0",
        "NATS_SERVER": shared_nats.url,
    }
    worker = RustWorker.start(tmp_path, *REQUESTS, **env)
    try:
        instance = worker.instance()
        async with calling(shared_nats.url) as (client, _):
            first = await client.open(instance, body(FOREVER), Context())
            await first.next_batch()
            with pytest.raises(Overloaded):
                await read_all(await client.open(instance, body(1), Context()))
            first.close()
    finally:
        worker.close()


async def open_when_back(client: NatsClient, worker: RustWorker) -> NativeStream:
    """A stream of the worker; the caller may be back before the worker."""
    while True:
        try:
            return await client.open(worker.instance(), body(2), Context())
        except CannotConnect:
            await asyncio.sleep(0.05)


async def test_streams_outlive_the_server_and_the_worker_is_back_with_it(tmp_path: Path) -> None:
    with nats_server() as broker:
        worker = RustWorker.start(tmp_path, *REQUESTS, NATS_SERVER=broker.url)
        try:
            instance = worker.instance()
            async with calling(broker.url) as (client, connection):
                context = Context()
                stream = await client.open(instance, body(FOREVER), context)
                broker.kill()
                worker.wait_log("lost connection to NATS")
                await stream.next_batch()
                context.stop_generating()
                assert (await read_all(stream))[-1].finish_reason == "cancelled"
                await until(lambda: not connection.is_connected, lambda: "the caller to notice")
                broker.start()
                worker.wait_log(r"NATS at \S+ is back")
                assert tokens(await read_all(await open_when_back(client, worker))) == [1, 2]
        finally:
            worker.close()


async def complete(frontend: Frontend, text: str) -> dict[str, Any]:
    request = json.dumps({"model": "m", "prompt": text, "max_tokens": 4}).encode()
    headers = {"x-dynamo-explain-routing": "1"}
    reply = await ask(frontend.port, "/v1/completions", request, headers=headers)
    assert reply.status == 200, frontend.log
    found: dict[str, Any] = reply.json()["nvext"]["routing"]["decode"]
    return found


async def test_a_prompt_goes_to_its_holder_and_a_late_router_asks_for_what_it_missed(
    tmp_path: Path, shared_nats: NatsServer
) -> None:
    env = {"DYN_REQUEST_PLANE": "nats", "DYN_EVENT_PLANE": "nats", "NATS_SERVER": shared_nats.url}
    text = "a prompt of more than a few blocks. " * 20
    with Cluster(tmp_path, **env) as cluster:
        router = ("--router-mode", "kv", "--router-policy", "default")
        early = cluster.frontend("early", *router)
        argv = [MOCKER, "--model-path", "m", "--discovery-backend", "file", "--block-size", "16", "--speedup-ratio=50"]
        holder = cluster.process("one", argv)
        early.wait_ready()
        wait(lambda: "m" in early.models(), lambda: early.log + holder.log)
        first = await complete(early, text)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await complete(early, text))["candidates"][0]["cached_blocks"]["device"] < 30:
                pass
        late = cluster.frontend("late", *router)
        late.wait_ready()
        wait(lambda: "m" in late.models(), lambda: late.log)
        # The blocks of the text were published before this router was there: each of its own prompts adds others.
        async with asyncio.timeout(PATIENCE_SECONDS):
            number = 0
            while (await complete(late, f"{text}{number}"))["candidates"][0]["cached_blocks"]["device"] < 30:
                number += 1
        assert (await complete(late, text))["worker_id"] == first["worker_id"]


async def test_load_reports_leave_as_messages_of_their_scope(tmp_path: Path, shared_nats: NatsServer) -> None:
    connection = await nats.connect(shared_nats.url)
    subscription = await connection.subscribe("namespace.events.component.backend.endpoint.generate.kv_metrics")
    await connection.flush()
    await connection.flush()
    flags = ("--event-plane", "nats", "--namespace", "events")
    worker = RustWorker.start(tmp_path, *flags, NATS_SERVER=shared_nats.url)
    try:
        message = await subscription.next_msg(timeout=PATIENCE_SECONDS)
        event = decode_envelope(message.data)
        assert (event.topic, event.sequence) == ("kv_metrics", 0)
        channel = next(name for name in worker.records() if name.startswith("v1/event_channels/"))
        transport = json.loads((worker.store / channel).read_text())["transport"]
        prefix = "namespace.events.component.backend.endpoint.generate"
        assert transport == {"kind": "Nats", "config": {"subject_prefix": prefix}}
        assert worker.instance().transport.keys() == {"tcp"}
    finally:
        worker.close()
        await connection.close()


@pytest.mark.parametrize(
    ("env", "status", "text"),
    [
        ({"NATS_AUTH_NKEY": "SUA"}, 2, "NATS_AUTH_NKEY is set, and the Rust SDK has no signatures"),
        ({"NATS_SERVER": "http://a"}, 2, "NATS_SERVER is not a list of nats://HOST:PORT"),
        ({"NATS_TLS_INSECURE": "1"}, 2, "NATS_TLS_INSECURE is set, and this program has no TLS"),
        ({"NATS_SERVER": "nats://127.0.0.1:1"}, 1, "NATS at nats://127.0.0.1:1 cannot be used"),
    ],
)
def test_a_nats_that_cannot_be_used_ends_the_start(tmp_path: Path, env: dict[str, Any], status: int, text: str) -> None:
    worker = RustWorker.start(tmp_path, *REQUESTS, **{"NATS_STARTUP_CONNECT_TIMEOUT_SECONDS": "0.2"} | env)
    try:
        assert worker.exit_code() == status
        assert text in worker.log.strip().splitlines()[-1]
        assert worker.records() == []
    finally:
        worker.close()


def test_a_user_that_the_server_does_not_know_is_refused_at_once(tmp_path: Path) -> None:
    with nats_server("--user", "known", "--pass", "secret") as broker:
        worker = RustWorker.start(
            tmp_path, *REQUESTS, NATS_SERVER=broker.url, NATS_STARTUP_CONNECT_TIMEOUT_SECONDS="60"
        )
        try:
            assert worker.exit_code() == 1
            assert "Authorization Violation" in worker.log.strip().splitlines()[-1]
        finally:
            worker.close()
        env: dict[str, Any] = {"NATS_AUTH_USERNAME": "known", "NATS_AUTH_PASSWORD": "secret"}
        worker = RustWorker.start(tmp_path, *REQUESTS, NATS_SERVER=broker.url, **env)
        try:
            worker.wait_log("Serving ")
        finally:
            worker.close()
