"""An abort ends requests of every API, also of those whose answers are no tokens, and before a worker has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamo.frontend.base.offload import InlineOffload
from dynamo.protocol.model_types import ModelInput, ModelType
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.asgi_client import Exchange
from support.cases import each_case
from support.frontend_cluster import cluster
from support.inspecting import Lens
from support.patience import PATIENCE_SECONDS

CODE = "request_aborted"
RAW: dict[str, Any] = {"model_input": ModelInput.Text}
KINDS: dict[str, dict[str, Any]] = {
    "vectors": {"model_type": ModelType.Classify | ModelType.Pooling | ModelType.Rerank | ModelType.Embedding},
    "images": {"model_type": ModelType.Images, **RAW},
    "sounds": {"model_type": ModelType.Audios, **RAW},
    "videos": {"model_type": ModelType.Videos, **RAW},
    "texts": {"model_type": ModelType.Chat | ModelType.Completions, **RAW},
}


def by_status(answer: Exchange) -> None:
    assert answer.status == 499
    assert (answer.json["error"]["code"], answer.json["code"]) == (CODE, 499)


def by_event(answer: Exchange) -> None:
    assert answer.status == 200
    data = [block.rpartition("data: ")[2] for block in answer.events]
    last = json.loads(data[-2] if data[-1] == "[DONE]" else data[-1])
    assert CODE in json.dumps(last["error"])


class Case(NamedTuple):
    path: str
    kind: str
    body: Mapping[str, Any]
    ends: Callable[[Exchange], None] = by_status
    first: Any = None  # what the worker sends before it goes on silently


CHUNK = {
    "id": "x",
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}],
}
CASES = [
    Case("/v1/embeddings", "vectors", {"input": ["a", "b"]}),
    Case("/v1/classify", "vectors", {"input": "a"}),
    Case("/v1/pooling", "vectors", {"input": "a"}),
    Case("/v1/score", "vectors", {"text_1": "a", "text_2": "b"}),
    Case("/v1/rerank", "vectors", {"query": "a", "documents": ["a", "b"]}),
    Case("/v1/images/generations", "images", {"prompt": "a"}),
    Case("/v1/audio/speech", "sounds", {"input": "a", "response_format": "wav"}),
    Case("/v1/audio/speech", "sounds", {"input": "a", "response_format": "wav", "stream_format": "sse"}),
    Case("/v1/videos", "videos", {"prompt": "a"}),
    Case("/v1/chat/completions", "texts", {"messages": [{"role": "user", "content": "a"}]}),
    Case("/v1/chat/completions", "texts", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    Case(
        "/v1/chat/completions",
        "texts",
        {"messages": [{"role": "user", "content": "a"}], "stream": True},
        by_event,
        CHUNK,
    ),
]


@each_case("case", CASES, ids=lambda case: f"{case.path} {dict(case.body)}")
async def test_an_abort_ends_a_request_of_every_api(tmp_path: Path, case: Case) -> None:
    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        if case.first is not None:
            sink.send_object({"data": case.first})
        await context.async_killed_or_stopped()

    async with cluster(tmp_path) as house:
        worker = await house.worker(script, **KINDS[case.kind])
        lens = Lens(house)
        request = house.client.begin("POST", case.path, {"model": "m", **case.body}, headers={"x-request-id": "mine"})
        await asyncio.wait_for(worker.started.wait(), PATIENCE_SECONDS)
        if case.ends is by_event:
            await request.until(lambda each: b"hi" in each.body)
        assert (await lens.post("requests/mine/abort", {"reason": "x"})).status == 202
        case.ends(await request.done())
        await asyncio.wait_for(worker.killed.wait(), PATIENCE_SECONDS)
        row = (await lens.get("requests/mine"))["recent"]
        assert (row["outcome"], row["code"]) == ("aborted", CODE)
        assert (await lens.get("snapshot", views="streams"))["streams"] == []


async def test_an_abort_waits_for_no_work_of_the_frontend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt that is tokenised in a thread: its client is answered, and no worker gets the request."""
    async with cluster(tmp_path, inline=False) as house:
        worker = await house.worker()
        lens = Lens(house)
        begun, let_go = asyncio.Event(), asyncio.Event()
        preprocessor = house.frontend.pipeline.preprocessor

        class Slow(InlineOffload):
            async def __call__(self, work: Callable[[], Any]) -> Any:
                begun.set()
                await let_go.wait()
                return work()

        monkeypatch.setattr(preprocessor, "_offload", Slow())
        request = house.client.begin_chat("a " * 100_000, headers={"x-request-id": "mine"})
        await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
        assert (await lens.get("requests/mine"))["stream"]["phase"] in ("admitted", "preprocess")
        assert (await lens.post("requests/mine/abort", {"reason": "x"})).status == 202
        by_status(await request.done())
        let_go.set()
        assert worker.requests == []
