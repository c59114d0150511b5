"""`LLMUnaryClient` and `UnaryChatModel`: a program between a frontend and a worker, over real planes in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import dynamo._core
import dynamo.bindings
from dynamo.llm import LLMUnaryClient, UnaryChatModel, with_engine_data
from dynamo.runtime import Context, DistributedRuntime
from support.cases import each_case
from support.frontend_cluster import cluster, memory_runtime, say
from support.patience import PATIENCE_SECONDS
from support.tiny_model import write_tiny_model

LAST = {"token_ids": [3], "index": 0, "finish_reason": "stop", "completion_usage": {"completion_tokens": 3}}


async def answered(chunks: list[Any], request: dict[str, Any]) -> dict[str, Any]:
    """What a client makes of the chunks of a worker."""

    async def generate(_request: object, _context: Context) -> AsyncIterator[Any]:
        for chunk in chunks:
            yield chunk

    async with memory_runtime() as runtime:
        serving = asyncio.create_task(runtime.endpoint("ns.backend.generate").serve_endpoint(generate))
        async with asyncio.timeout(PATIENCE_SECONDS):
            client = await LLMUnaryClient.connect(runtime, "ns.backend.generate")
            try:
                return await client.complete(request, context=Context())
            finally:
                runtime.shutdown()
                await serving


async def test_the_tokens_of_all_chunks_are_in_the_last_one() -> None:
    request = {"token_ids": [1], "sampling_options": {"n": 1, "temperature": 0.0}, "output_options": {"logprobs": None}}
    chunks = [{"token_ids": [1], "log_probs": None}, {"token_ids": [2], "index": 0, "text": None}, LAST]
    assert await answered(chunks, request) == {**LAST, "token_ids": [1, 2, 3]}
    texts = [{"token_ids": [1], "text": "a"}, {**LAST, "text": "b"}]
    assert (await answered(texts, {}))["text"] == "ab"


@each_case(
    ("chunks", "request_", "message"),
    [
        ([LAST], {"sampling_options": {"n": 2}}, "supports only n=1"),
        ([LAST], {"output_options": {"logprobs": 0}}, "does not support logprobs"),
        ([LAST], {"output_options": {"prompt_logprobs": 1}}, "does not support logprobs"),
        ([{**LAST, "log_probs": [-1.0]}], {}, "^LLM endpoint returned unsupported logprobs$"),
        ([{**LAST, "index": 1}], {}, "^LLM endpoint returned more than one choice$"),
        ([{"token_ids": [1]}], {}, "^LLM endpoint returned no finish_reason$"),
        ([{"text": "a"}], {}, "an item that is not a chunk of tokens"),
        (["text"], {}, "an item that is not a chunk of tokens"),
    ],
)
def test_an_answer_that_is_not_one_chunk_is_refused(chunks: list[Any], request_: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        asyncio.run(answered(chunks, request_))


async def test_a_program_answers_for_a_model_with_what_a_worker_generated(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def serve(runtime: DistributedRuntime, model: UnaryChatModel) -> None:
        client = await LLMUnaryClient.connect(runtime, "ns.backend.generate")

        async def answer(request: dict[str, Any], *, context: Context) -> dict[str, Any]:
            seen.append((request["model"], context.id()))
            return with_engine_data(await client.complete(request, context=context), {"checked": True})

        await model.serve(runtime, answer)

    async with cluster(tmp_path) as made, memory_runtime() as runtime:
        worker = await made.worker(say("he", "llo"), model="plain")
        directory = write_tiny_model(tmp_path / "model")
        serving = asyncio.create_task(serve(runtime, UnaryChatModel(str(directory), "checker", "checked")))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await made.frontend.models.wait_for(lambda: bool(made.frontend.models.serving("checked")))
            reply = await made.client.chat("hi", model="checked", max_tokens=8, nvext={"extra_fields": ["engine_data"]})
            assert reply.status == 200
            assert reply.json["usage"]["completion_tokens"] == 5
            assert len(worker.requests) == 1
            assert [name for name, _ in seen] == ["checked"]
            runtime.shutdown()
            await serving
            await made.gone("checked")


def test_the_names_of_the_native_module_are_there() -> None:
    for name in ("LLMUnaryClient", "UnaryChatModel", "RuntimeMetrics"):
        assert name in dynamo._core.__all__
        assert callable(getattr(dynamo._core, name))


async def test_the_metrics_of_an_endpoint_are_runtime_metrics() -> None:
    async with memory_runtime() as runtime:
        assert isinstance(runtime.endpoint("a.b.c").metrics, dynamo.bindings.RuntimeMetrics)
