"""A worker of ours behind the real 1.6.1 frontend: file discovery, the native TCP wire.

`DYNAMO_NATIVE_PYTHON` names the python of an environment that holds ai-dynamo 1.6.1; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
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
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.calls.request_plane.listener import Listener
from dynamo.runtime.discovery import INSTANCES, MODEL_CARDS, FileDiscovery
from support.native_frontend import Frontend, Reply, native_frontend, why_not
from support.tiny_model import write_tiny_model

MODEL = "tiny-model"
ENDPOINT = ("interop", "backend", "generate")

Behaviour = Callable[[Any, Context, ResponseSink], Awaitable[None]]


REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.asyncio(loop_scope="module"),
]


class Cluster:
    """One real frontend, one worker of ours whose behaviour each test sets."""

    def __init__(self, frontend: Frontend, tokenizer: Tokenizer, listener: Listener) -> None:
        self.frontend, self.tokenizer, self.listener = frontend, tokenizer, listener
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

    async def chat(self, **options: Any) -> Reply:
        return await self.frontend.ask("/v1/chat/completions", chat_body(**options))

    async def chat_when_ready(self, **options: Any) -> Reply:
        return await self.frontend.ask_when_ready("/v1/chat/completions", chat_body(**options))


def chat_body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "count"}], "max_tokens": 64, **options}


def file_record(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"path": str(path), "checksum": f"blake3:{blake3(data).hexdigest()}", "size": len(data)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    root = tmp_path_factory.mktemp("native")
    store, model_dir = root / "store", write_tiny_model(root / "model")
    one_at_a_time = RequestPlaneSettings(engine_request_limit=1, engine_queue_limit=0)
    listener = Listener("127.0.0.1", settings=one_at_a_time)
    discovery = FileDiscovery(store)
    await listener.start()
    await discovery.start()
    try:
        async with native_frontend(root, store) as frontend:
            tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
            cluster = Cluster(frontend, tokenizer, listener)
            await publish(cluster, discovery, model_dir)
            await frontend.model_appears()
            yield cluster
    finally:
        await listener.close()
        await discovery.close()


async def publish(cluster: Cluster, discovery: FileDiscovery, model_dir: Path) -> None:
    """Write the two records by hand: the least that a 1.6.1 frontend serves."""
    namespace, component, endpoint = ENDPOINT
    instance_id = discovery.lease_id
    names = {"namespace": namespace, "component": component, "endpoint": endpoint, "instance_id": instance_id}
    card = {
        "display_name": MODEL,
        "slug": "tiny-model",
        "source_path": MODEL,
        "model_info": {"hf_config_json": file_record(model_dir / "config.json")},
        "tokenizer": {"hf_tokenizer_json": file_record(model_dir / "tokenizer.json")},
        "prompt_formatter": {"hf_tokenizer_config_json": file_record(model_dir / "tokenizer_config.json")},
        "context_length": 2048,
        "kv_cache_block_size": 16,
        "migration_limit": 0,
        "model_type": "Chat | Completions",
        "model_input": "Tokens",
    }
    cluster.path = f"{instance_id:x}/{'/'.join(ENDPOINT)}"
    cluster.listener.register(cluster.path, cluster.handle)
    key = f"{'/'.join(ENDPOINT)}/{instance_id:x}"
    instance = {"type": "Endpoint", **names, **cluster.listener.transport(cluster.path)}
    await discovery.put(f"{INSTANCES}/{key}", msgspec.json.encode(instance))
    model = {"type": "Model", **names, "card_json": card}
    await discovery.put(f"{MODEL_CARDS}/{key}", msgspec.json.encode(model))


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
    reader, writer = await cluster.frontend.send("/v1/chat/completions", chat_body(stream=stream))
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
