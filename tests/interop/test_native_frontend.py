"""A worker of ours behind the real 1.6.1 frontend: file discovery, the native TCP wire.

`DYNAMO_NATIVE_PYTHON` names the python of an environment that holds ai-dynamo 1.6.1; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from blake3 import blake3
from tokenizers import Tokenizer

from dynamo.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    RouterQueueLimitExceeded,
    SelectionServiceError,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
)
from dynamo.runtime.context import Context
from dynamo.runtime.discovery import INSTANCES, MODEL_CARDS, FileDiscovery
from dynamo.runtime.request_plane.base import ResponseSink
from dynamo.runtime.request_plane.listener import Listener
from dynamo.runtime.settings import RequestPlaneSettings
from support.tiny_model import write_tiny_model

NATIVE_PYTHON = os.environ.get("DYNAMO_NATIVE_PYTHON", "")
MODEL = "tiny-model"
ENDPOINT = ("interop", "backend", "generate")

Behaviour = Callable[[Any, Context, ResponseSink], Awaitable[None]]


def why_not() -> str:
    """Why these tests cannot run; empty when they can."""
    if not NATIVE_PYTHON:
        return "DYNAMO_NATIVE_PYTHON names no python with ai-dynamo 1.6.1"
    asked = "from importlib.metadata import version; print(version('ai-dynamo'))"
    try:
        found = subprocess.run([NATIVE_PYTHON, "-c", asked], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"DYNAMO_NATIVE_PYTHON={NATIVE_PYTHON} does not run: {error}"
    if found.stdout.strip() != "1.6.1":
        return f"DYNAMO_NATIVE_PYTHON={NATIVE_PYTHON} holds ai-dynamo {found.stdout.strip() or 'not at all'}, not 1.6.1"
    return ""


REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.asyncio(loop_scope="module"),
]


class Reply:
    """An HTTP answer read to its end."""

    def __init__(self, raw: bytes) -> None:
        head, _, body = raw.partition(b"\r\n\r\n")
        self.status = int(head.split(b" ", 2)[1])
        self.body = _dechunked(body) if b"transfer-encoding: chunked" in head.lower() else body

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in self.body.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def _dechunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole, body = whole + body[:length], body[length + 2 :]
    return whole


class Cluster:
    """One real frontend, one worker of ours whose behaviour each test sets."""

    def __init__(self, port: int, tokenizer: Tokenizer, listener: Listener) -> None:
        self.port, self.tokenizer, self.listener = port, tokenizer, listener
        self.path = ""
        self.behave: Behaviour = self.count
        self.seen: list[tuple[Any, Context]] = []

    async def handle(self, body: Any, context: Context, sink: ResponseSink) -> None:
        self.seen.append((body, context))
        await self.behave(body, context, sink)

    async def count(self, body: Any, context: Context, sink: ResponseSink) -> None:
        """One chunk per token of a fixed text, then a terminal chunk."""
        for token_id in self.tokenizer.encode("count from 0 to 9", add_special_tokens=False).ids:
            sink.send_tokens([token_id])
            await asyncio.sleep(0)
        sink.send_tokens([], 0, "stop")

    async def send(self, path: str, body: Any = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return reader, writer

    async def ask(self, path: str, body: Any = None) -> Reply:
        reader, writer = await self.send(path, body)
        raw = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return Reply(raw)

    async def chat(self, **options: Any) -> Reply:
        return await self.ask("/v1/chat/completions", chat_body(**options))

    async def chat_when_ready(self, **options: Any) -> Reply:
        """As `chat`, past the moment in which the frontend has no free instance: not yet seen, or just still busy."""
        for _ in range(100):
            reply = await self.chat(**options)
            if reply.status not in (404, 503, 529):
                break
            await asyncio.sleep(0.05)
        return reply


def chat_body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "count"}], "max_tokens": 64, **options}


def file_record(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"path": str(path), "checksum": f"blake3:{blake3(data).hexdigest()}", "size": len(data)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    root = tmp_path_factory.mktemp("native")
    store, model_dir, port = root / "store", write_tiny_model(root / "model"), free_port()
    one_at_a_time = RequestPlaneSettings(engine_request_limit=1, engine_queue_limit=0)
    listener = Listener("127.0.0.1", settings=one_at_a_time)
    await listener.start()
    cluster = Cluster(port, Tokenizer.from_file(str(model_dir / "tokenizer.json")), listener)
    discovery = FileDiscovery(store)
    await discovery.start()
    namespace, component, endpoint = ENDPOINT
    instance_id = discovery.lease_id
    path = cluster.path = f"{instance_id:x}/{'/'.join(ENDPOINT)}"
    listener.register(path, cluster.handle)
    key = f"{'/'.join(ENDPOINT)}/{instance_id:x}"
    names = {
        "namespace": namespace,
        "component": component,
        "endpoint": endpoint,
        "instance_id": instance_id,
    }
    card = {
        "display_name": MODEL,
        "slug": "tiny-model",
        "source_path": MODEL,
        "model_info": {"hf_config_json": file_record(model_dir / "config.json")},
        "tokenizer": {"hf_tokenizer_json": file_record(model_dir / "tokenizer.json")},
        "prompt_formatter": {"hf_tokenizer_config_json": file_record(model_dir / "tokenizer_config.json")},
        "gen_config": {"hf_generation_config_json": file_record(model_dir / "generation_config.json")},
        "context_length": 2048,
        "kv_cache_block_size": 16,
        "migration_limit": 0,
        "model_type": "Chat | Completions",
        "model_input": "Tokens",
        "worker_type": "aggregated",
        "runtime_config": {},
    }
    await discovery.put(
        f"{INSTANCES}/{key}", msgspec.json.encode({"type": "Endpoint", **names, **listener.transport(path)})
    )
    await discovery.put(f"{MODEL_CARDS}/{key}", msgspec.json.encode({"type": "Model", **names, "card_json": card}))
    environment = {
        **os.environ,
        "DYN_FILE_KV": str(store),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_RUNTIME_INHIBITED_DURATION_SECS": "0",  # else one engine error would close the model for 5 s
        "HF_HUB_OFFLINE": "1",
        "HOME": str(root),
    }
    log = (root / "frontend.log").open("wb")
    frontend = await asyncio.create_subprocess_exec(
        NATIVE_PYTHON,
        *("-m", "dynamo.frontend", "--discovery-backend", "file", "--http-port", str(port)),
        env=environment,
        stdout=log,
        stderr=log,
        cwd=root,
    )
    try:
        await _model_appears(cluster)
        yield cluster
    finally:
        with contextlib.suppress(ProcessLookupError):
            frontend.terminate()
        await frontend.wait()
        log.close()
        await listener.close()
        await discovery.close()


async def _model_appears(cluster: Cluster) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                if (await cluster.ask("/v1/models")).json()["data"]:
                    return
            await asyncio.sleep(0.1)


async def test_a_chat_answer_arrives_whole(cluster: Cluster) -> None:
    cluster.behave = cluster.count
    reply = await cluster.chat_when_ready()
    assert reply.status == 200, reply.body
    choice = reply.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("count from 0 to 9", "stop")
    body, context = cluster.seen[-1]
    assert cluster.tokenizer.decode(body["token_ids"], skip_special_tokens=False).endswith("count</s><|assistant|>")
    assert body["stop_conditions"]["max_tokens"] == 64
    assert context.id() == reply.json()["id"].removeprefix("chatcmpl-")
    print("\nUNARY", reply.body.decode())


async def test_a_chat_answer_is_streamed(cluster: Cluster) -> None:
    cluster.behave = cluster.count
    reply = await cluster.chat_when_ready(stream=True, stream_options={"include_usage": True})
    assert reply.status == 200, reply.body
    events = reply.events()
    texts = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    assert "".join(texts) == "count from 0 to 9"
    assert sum(map(bool, texts)) > 3
    usage = [e["usage"] for e in events if e.get("usage")][-1]
    assert usage["completion_tokens"] == len(
        cluster.tokenizer.encode("count from 0 to 9", add_special_tokens=False).ids
    )
    print("\nSTREAMED", reply.body.decode())


async def test_a_finished_answer_is_no_cancellation(cluster: Cluster) -> None:
    cluster.behave = cluster.count
    for stream in (False, True):
        assert (await cluster.chat_when_ready(stream=stream)).status == 200
        assert not cluster.seen[-1][1].is_stopped()


ERRORS: list[tuple[Exception, int, str]] = [
    (InvalidArgument("prompt too odd"), 400, "prompt too odd"),
    (Cancelled("nobody wants it"), 499, ""),
    (Unknown("a secret"), 500, ""),
    (DynamoException("a secret"), 500, ""),
    (RuntimeError("a secret"), 500, ""),
    (CannotConnect("kv store"), 503, ""),
    (Disconnected("peer"), 503, ""),
    (EngineShutdown("bye"), 503, ""),
    (StreamIncomplete("no end"), 503, ""),
    (WorkerUnavailable("not now"), 503, ""),
    (ConnectionTimeout("slow"), 504, ""),
    (ResponseTimeout("slow"), 504, ""),
    (Overloaded("full"), 529, ""),
    (RouterQueueLimitExceeded("bulk", "depth", 9, 8), 529, ""),
    (SelectionServiceError("lost", 502), 500, ""),
    (HttpError(418, "I am a teapot"), 418, ""),
    (HttpError(529, "full"), 529, ""),
    (HttpError(503, "a secret"), 503, ""),
    (HttpError(500, "a secret"), 500, ""),
]


@pytest.mark.parametrize(("error", "status", "text"), ERRORS, ids=[f"{type(e).__name__}-{s}" for e, s, _ in ERRORS])
async def test_an_engine_error_has_its_http_status(cluster: Cluster, error: Exception, status: int, text: str) -> None:
    async def fail(body: Any, context: Context, sink: ResponseSink) -> None:
        raise error

    cluster.behave = cluster.count
    assert (await cluster.chat_when_ready()).status == 200
    cluster.behave = fail
    reply = await cluster.chat()
    print("\nERROR", type(error).__name__, reply.status, reply.body.decode())
    assert reply.status == status, reply.body
    assert text in reply.body.decode()
    assert "secret" not in reply.body.decode()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_arrives_as_kill(cluster: Cluster, stream: bool) -> None:
    killed, started = asyncio.Event(), asyncio.Event()

    async def endless(body: Any, context: Context, sink: ResponseSink) -> None:
        token_id = cluster.tokenizer.encode("a", add_special_tokens=False).ids[0]
        sink.send_tokens([token_id])
        started.set()
        await context.async_killed_or_stopped()
        if not context.is_killed():
            context.on_cancel(lambda is_kill: killed.set() if is_kill else None)
            await killed.wait()
        killed.set()

    cluster.behave = cluster.count
    assert (await cluster.chat_when_ready()).status == 200
    cluster.behave = endless
    reader, writer = await cluster.send("/v1/chat/completions", chat_body(stream=stream))
    await asyncio.wait_for(started.wait(), 10)
    if stream:
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.transport.abort()
    await asyncio.wait_for(killed.wait(), 10)
    assert cluster.seen[-1][1].is_killed()


async def test_a_path_that_is_not_served_any_more_is_an_unavailability(cluster: Cluster) -> None:
    cluster.behave = cluster.count
    assert (await cluster.chat_when_ready()).status == 200
    cluster.listener.unregister(cluster.path)
    try:
        assert (await cluster.chat()).status == 503
    finally:
        cluster.listener.register(cluster.path, cluster.handle)
    assert (await cluster.chat_when_ready()).status == 200


async def test_a_full_worker_is_an_overload(cluster: Cluster) -> None:
    started, leave = asyncio.Event(), asyncio.Event()

    async def occupy(body: Any, context: Context, sink: ResponseSink) -> None:
        started.set()
        await leave.wait()
        await cluster.count(body, context, sink)

    cluster.behave = cluster.count
    assert (await cluster.chat_when_ready()).status == 200
    cluster.behave = occupy
    first = asyncio.create_task(cluster.chat())
    await asyncio.wait_for(started.wait(), 10)
    assert (await cluster.chat()).status == 529
    leave.set()
    assert (await first).status == 200
