"""A pooling worker of vLLM through worker, router and frontend: the demonstration model's hidden states as vectors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from dynamo.errors import DynamoException
from dynamo.runtime.calls.context import Context
from support.demo_model import reference_vectors, sums
from support.ends import end_idle
from support.leftovers import errors_of, wait_empty
from support.patience import PATIENCE_SECONDS
from support.processes import until, wait
from support.vllm_cluster import MODEL, PYTHON, WHY_NOT, VllmCluster, serve

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason=WHY_NOT),
    pytest.mark.timeout(1200),
]
TEXTS = ["What is 27 + 15?", "The weather in Paris", "Write a poem."]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    with serve(tmp_path_factory.mktemp("embed")) as cluster:
        cluster.start("a", "--embedding-worker", DYN_HEALTH_CHECK_ENABLED="true", DYN_CANARY_WAIT_TIME="1")
        cluster.wait_serving()
        yield cluster


def vectors_of(served: VllmCluster, texts: Any, **more: Any) -> list[list[float]]:
    answer = served.client.embeddings.create(model=MODEL, input=texts, **more)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def product(one: list[float], other: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(one, other, strict=True))


def test_each_text_has_a_vector_of_length_1_however_it_is_sent(served: VllmCluster) -> None:
    together = vectors_of(served, TEXTS)
    assert [product(each, each) for each in together] == pytest.approx([1.0] * 3, abs=1e-5)
    for text, vector in zip(TEXTS, together, strict=True):
        for more in ({}, {"encoding_format": "float"}):  # without one the client asks for base64, and decodes it
            (alone,) = vectors_of(served, text, **more)
            assert alone == pytest.approx(vector, abs=1e-5)
    assert product(together[0], together[1]) < 0.999


async def test_vectors_are_those_of_the_reference_engine(served: VllmCluster) -> None:
    inputs = sums(20)
    found = await asyncio.to_thread(vectors_of, served, inputs)
    for one, other in zip(found, await reference_vectors(inputs), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_tokens_are_counted(served: VllmCluster) -> None:
    one, two = (served.client.embeddings.create(model=MODEL, input=TEXTS[:count]).usage for count in (1, 2))
    assert 0 < one.prompt_tokens < two.prompt_tokens == two.total_tokens


def test_a_mistake_is_a_400_and_there_is_no_chat(served: VllmCluster) -> None:
    with pytest.raises(BadRequestError, match="dimensions"):
        vectors_of(served, TEXTS, dimensions=8)  # the model is not of the kind that can be cut
    with pytest.raises(BadRequestError):
        vectors_of(served, "word " * 3000)
    with pytest.raises((BadRequestError, NotFoundError)):
        served.ask("What is 27 + 15?")


async def test_cancelled_requests_leave_the_engine_free(served: VllmCluster) -> None:
    async with served.straight() as client:

        async def one(number: int) -> None:
            context = Context()
            body = {"token_ids": [[10 + number % 400] * 500] * 32, "model": MODEL}
            asyncio.get_running_loop().call_later(0.005 * (number % 20), context.kill)
            with suppress(DynamoException):  # cut off, which is an end as well
                stream = await client.open(client.pick(context), body, context)
                try:
                    while await asyncio.wait_for(stream.next_batch(), PATIENCE_SECONDS):
                        pass
                finally:
                    stream.close()

        await asyncio.gather(*(one(number) for number in range(40)))
    worker = served.workers["a"]
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        await until(lambda name=name: worker.metric(name) == 0, lambda name=name: f"{name} to be 0")  # type: ignore[misc]
    assert not errors_of(worker.log)
    assert len(await asyncio.to_thread(vectors_of, served, TEXTS)) == 3


def test_the_canary_asks_for_a_vector(served: VllmCluster) -> None:
    worker = served.workers["a"]
    before = worker.metric("vllm:request_success_total")
    wait(lambda: worker.metric("vllm:request_success_total") > before, lambda: "a canary of an idle worker")
    assert not errors_of(worker.log)


def test_an_idle_worker_ends_within_three_seconds_and_leaves_nothing_behind(served: VllmCluster) -> None:
    (worker,) = served.workers.values()
    end_idle(worker, served.temporary)
    wait_empty(served.temporary)
