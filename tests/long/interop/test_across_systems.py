"""A real 1.6.1 worker behind our frontend, and our worker behind a real 1.6.1 frontend, over TCP and over NATS."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from support.interop_cluster import IN_RUST, Cluster, chat_body, interop_cluster
from support.interop_engine import FOREVER, SENTENCE, SILENT
from support.native_frontend import why_not

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.asyncio(loop_scope="module"),
]

STATUSES = {
    101: (400, "prompt too odd"),
    102: (499, ""),
    103: (500, ""),
    104: (500, ""),
    105: (503, ""),
    106: (503, ""),
    107: (503, ""),
    108: (503, ""),
    109: (503, ""),
    110: (504, ""),
    111: (418, ""),
    112: (503, ""),
    113: (400, ""),
    114: (429, ""),
    115: (404, ""),
    116: (422, ""),
    117: (529, ""),
}
"""What a client gets for what the engine raises when it is asked for so many tokens."""


DIFFERENT = {
    ("native", 109): (500, ""),  # a 1.6.1 worker sends WorkerUnavailable as Backend.Unknown
    ("ours", 116): (400, ""),  # a 1.6.1 frontend answers 400 to most 4xx
    ("ours", 113): (500, ""),  # a ValueError of an engine is the engine's mistake, as the guide says
}
"""The same by the worker's system, where it is another one. A worker in Rust is one of ours."""

CLUSTERS = [
    *itertools.product([("ours", "native"), ("native", "ours")], ["tcp", "nats"]),
    pytest.param((("native", "rust"), "tcp"), marks=IN_RUST),
]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=CLUSTERS,
    ids=lambda param: f"{param[0][1]}-worker-{param[1]}",
)
async def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    (frontend, worker), plane = request.param
    root = tmp_path_factory.mktemp("across")
    async with interop_cluster(root, frontend=frontend, workers=[worker], plane=plane) as opened:
        yield opened


async def test_a_chat_answer_arrives_whole_with_its_usage(cluster: Cluster) -> None:
    reply = await cluster.chat()
    assert reply.status == 200, reply.body
    choice = reply.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (SENTENCE, "stop")
    usage = reply.json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] > 5


async def test_a_chat_answer_is_streamed_with_its_usage(cluster: Cluster) -> None:
    reply = await cluster.chat(stream=True, stream_options={"include_usage": True})
    events = reply.events()
    texts = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(texts) == SENTENCE
    assert [event["usage"]["total_tokens"] > 6 for event in events if event.get("usage")] == [True]


async def test_curl_and_the_openai_client_get_their_answers(cluster: Cluster) -> None:
    url = f"http://127.0.0.1:{cluster.frontend.port}/v1"
    arguments = ["curl", "-sN", f"{url}/chat/completions", "-H", "content-type: application/json"]
    curl = await asyncio.create_subprocess_exec(
        *arguments, "-d", json.dumps(chat_body(stream=True)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(curl.communicate(), 20)
    lines = [line for line in output.decode().split("\n") if line.startswith("data: ")]
    texts = [json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert ("".join(texts), lines[-1]) == (SENTENCE, "data: [DONE]")

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "count"}]
        answer = await client.chat.completions.create(model="tiny-model", messages=messages, max_tokens=64)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (SENTENCE, "stop")
        stream = await client.chat.completions.create(model="tiny-model", messages=messages, max_tokens=64, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == SENTENCE
        with pytest.raises(openai.BadRequestError, match="prompt too odd"):
            await client.chat.completions.create(model="tiny-model", messages=messages, max_tokens=101)


async def test_a_completion_arrives_once_for_each_choice(cluster: Cluster) -> None:
    choices = 2 if cluster.workers[0].system == "native" else 1  # 1.6.1 leaves n to the engine, and ours says one thing
    body = {"model": "tiny-model", "prompt": "count", "max_tokens": 64, "n": choices}
    reply = await cluster.frontend.ask("/v1/completions", body)
    assert [choice["text"] for choice in reply.json()["choices"]] == [SENTENCE] * choices


@pytest.mark.parametrize("limit", sorted(STATUSES))
async def test_an_engine_error_has_its_status(cluster: Cluster, limit: int) -> None:
    system = "native" if cluster.workers[0].system == "native" else "ours"
    status, text = DIFFERENT.get((system, limit), STATUSES[limit])
    await cluster.ready()
    reply = await cluster.chat(max_tokens=limit)
    assert reply.status == status, reply.body
    assert text in reply.body.decode()
    assert "secret" not in reply.body.decode()


async def aborted(cluster: Cluster) -> None:
    """Return when the engine was told to abort, once. Its generator may be left to the collector: 1.6.1 does not close it."""
    worker = cluster.workers[0]
    async with asyncio.timeout(10):
        while "abort" not in worker.lines():
            await asyncio.sleep(0.02)
    await cluster.ready()
    assert worker.lines().count("abort") == 1


@pytest.mark.parametrize("limit", [FOREVER, SILENT])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_the_engine_once(cluster: Cluster, stream: bool, limit: int) -> None:
    worker = cluster.workers[0]
    worker.forget()
    body = chat_body(stream=stream, max_tokens=limit)
    reader, writer = await cluster.frontend.send("/v1/chat/completions", body)
    await worker.wrote("request")
    if stream and limit == FOREVER:
        await asyncio.wait_for(reader.readuntil(b"data: "), 10)
    writer.transport.abort()
    await aborted(cluster)


async def test_a_prompt_of_32000_tokens_arrives(cluster: Cluster) -> None:
    reply = await cluster.frontend.ask(
        "/v1/completions", {"model": "tiny-model", "prompt": [5] * 32_000, "max_tokens": 9}
    )
    assert reply.status == 200, reply.body
    assert reply.json()["usage"]["prompt_tokens"] == 32_000


async def test_an_answer_that_is_stopped_by_a_string_ends_the_request_at_the_worker(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    worker.forget()
    reply = await cluster.chat(stop=["to"], max_tokens=FOREVER)
    assert reply.json()["choices"][0]["message"]["content"] == SENTENCE.partition("to")[0]
    await aborted(cluster)


async def test_sigterm_ends_the_worker_and_the_model_disappears(cluster: Cluster) -> None:
    cluster.workers[0].process.terminate()
    assert await asyncio.wait_for(cluster.workers[0].process.wait(), 20) == 0
    async with asyncio.timeout(10):
        while (await cluster.frontend.ask("/v1/models")).json()["data"]:
            await asyncio.sleep(0.05)
