"""Requests for vectors at the worker: one object in the native shape, and every breach of `embed` by its name."""

from __future__ import annotations

import asyncio
import base64
import struct
from array import array
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pytest

from dynamo.contract.config import WorkerConfig
from dynamo.contract.embedding import Embedding, EmbedRequest, embedding
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, final_chunk
from dynamo.errors import InvalidArgument, Unknown
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.worker.embedding import EmbedServing, offers_embeddings
from dynamo.worker.serving import TokenServing
from dynamo.worker.worker import Worker
from support.cases import each_case

Script = Callable[[EmbedRequest, Context], AsyncGenerator[Any, None]]


class Plain(LLMEngine):
    """An engine that generates one token, and embeds nothing."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        yield final_chunk("stop", [7])

    async def cleanup(self) -> None: ...


class Embedder(Plain):
    def __init__(self, script: Script) -> None:
        self.script, self.is_closed = script, False

    async def embed(self, request: EmbedRequest, context: Context) -> AsyncGenerator[Embedding, None]:
        try:
            async for item in self.script(request, context):
                yield item
        finally:
            self.is_closed = True


class ListedSink:
    """Keeps what it is sent."""

    request_bytes = response_bytes = 0

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self.ended = False

    def send_object(self, envelope: dict[str, Any]) -> None:
        self.objects.append(envelope["data"])

    def send_tokens(self, ids: list[int], index: int = 0, reason: Any = None, extra: Any = None) -> None:
        self.tokens += ids

    def send_token(self, token_id: int) -> bool:
        self.tokens.append(token_id)
        return True

    def has_credit(self) -> bool:
        return True

    def end(self, error: BaseException | None = None) -> None:
        if not self.ended:
            self.ended, self.error = True, error


def yields(*items: Any) -> Script:
    async def script(request: EmbedRequest, context: Context) -> AsyncGenerator[Any, None]:
        for item in items:
            yield item

    return script


async def serve(script: Script, body: Any, context: Context | None = None) -> tuple[ListedSink, Embedder]:
    sink, engine = ListedSink(), Embedder(script)
    handler = EmbedServing(engine, TokenServing(engine).handle, served_name="m")
    taken: ResponseSink = sink  # type: ignore[assignment]  # what of one is used
    await handler.handle(body, context or Context("r"), taken)
    return sink, engine


VECTORS: dict[str, Any] = {
    "a list": [1.0, -2.5],
    "bytes": struct.pack("<2f", 1.0, -2.5),
    "an array": array("f", [1.0, -2.5]),
    "float64": np.array([1.0, -2.5]),
    "float32": np.array([1.0, -2.5], np.float32),
    "integers and floats": [1, -2.5],
}


@each_case("vector", list(VECTORS.values()), ids=list(VECTORS))
async def test_every_form_of_a_vector_is_the_same_on_the_wire(vector: Any) -> None:
    sink, engine = await serve(yields(embedding(0, vector)), {"token_ids": [[1, 2, 3]]})
    assert sink.error is None
    (answer,) = sink.objects
    assert struct.unpack("<2f", base64.b64decode(answer["embeddings"][0])) == (1.0, -2.5)
    assert (answer["prompt_tokens"], answer["total_tokens"], answer["model"]) == (3, 3, "m")
    assert engine.is_closed


async def test_results_are_put_in_the_order_of_the_inputs() -> None:
    sink, _ = await serve(yields(embedding(1, [2.0]), embedding(0, [1.0])), {"token_ids": [[1], [2]]})
    found = [struct.unpack("<f", base64.b64decode(value))[0] for value in sink.objects[0]["embeddings"]]
    assert found == [1.0, 2.0]


async def test_a_vector_for_each_token_carries_its_shape() -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(3, 2)
    sink, _ = await serve(yields(embedding(0, matrix)), {"token_ids": [[1, 2, 3]]})
    assert sink.objects[0]["shapes"] == [[3, 2]]


async def test_other_requests_are_generated_as_before() -> None:
    sink, _ = await serve(yields(), {"token_ids": [1, 2]})
    assert (sink.tokens, sink.objects, sink.error) == ([7], [], None)


BREACHES: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "one of two": (embedding(0, [1.0]),),
    "the same twice": (embedding(0, [1.0]), embedding(0, [1.0])),
    "an index too far": (embedding(2, [1.0]),),
    "no index": ({"embedding": [1.0]},),
    "no object": ([1.0],),
    "text": (embedding(0, ["a"]), embedding(1, [1.0])),
    "no number": (embedding(0, [float("nan")]), embedding(1, [1.0])),
    "an infinite one": (embedding(0, [float("inf"), float("-inf")]), embedding(1, [1.0])),
    "an empty one": (embedding(0, []), embedding(1, [1.0])),
    "odd bytes": (embedding(0, b"abc"), embedding(1, [1.0])),
    "another shape": (embedding(0, [1.0], (2, 1)), embedding(1, [1.0])),
}


@each_case("items", list(BREACHES.values()), ids=list(BREACHES))
async def test_a_breach_of_embed_is_named(items: tuple[Any, ...]) -> None:
    sink, engine = await serve(yields(*items), {"token_ids": [[1], [2]]})
    assert isinstance(sink.error, Unknown)
    assert "embed" in str(sink.error)
    assert sink.objects == []
    assert engine.is_closed


@each_case("inputs", [[[1], []], [[1], ["a"]], [[1], 2], [[-1]], [[1]] * 2049])
async def test_a_malformed_request_is_the_callers_fault(inputs: Any) -> None:
    sink, _ = await serve(yields(), {"token_ids": inputs})
    assert isinstance(sink.error, InvalidArgument)
    assert "token_ids" in str(sink.error)


async def test_a_killed_request_closes_the_generator() -> None:
    begun = asyncio.Event()

    async def hold(request: EmbedRequest, context: Context) -> AsyncGenerator[Any, None]:
        begun.set()
        await context.async_killed_or_stopped()
        return
        yield

    context = Context("r")
    task = asyncio.ensure_future(serve(hold, {"token_ids": [[1]]}, context))
    await begun.wait()
    context.kill()
    sink, engine = await task
    assert sink.objects == []
    assert engine.is_closed


async def test_only_an_engine_that_overrides_embed_may_serve_vectors() -> None:
    assert not offers_embeddings(Plain())
    assert offers_embeddings(Embedder(yields()))
    config = WorkerConfig(namespace="ns", endpoint_types="chat,embeddings")
    with pytest.raises(InvalidArgument, match=r"embed\(\)"):
        await Worker(Plain(), config, embedded=True).run()
