"""Engines that make embeddings through worker, router and frontend: the vectors are those of the reference engine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import pytest
from openai import BadRequestError, NotFoundError

from dynamo.errors import DynamoException
from dynamo.runtime.context import Context
from support.demo_model import chat_prompts, reference_vectors
from support.engine_cluster import MODEL, EngineCase, ServedEngine, served_engine
from support.leftovers import Belongings, errors_of, wait_empty
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

CASES: Final = (
    EngineCase("llamacpp", "DYNAMO_LLAMACPP_PYTHON", ("--embedding-worker",), is_gguf=True, workers=("a",)),
)
TEXTS: Final = ["What is 27 + 15?", "The weather in Paris", "Write a poem."]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    case: EngineCase = request.param
    if not case.python:
        pytest.skip(case.why_not)
    with served_engine(case, tmp_path_factory.mktemp(case.name)) as engine:
        yield engine


def vectors_of(served: ServedEngine, inputs: Any, **more: Any) -> list[list[float]]:
    answer = served.client.embeddings.create(model=MODEL, input=inputs, **more)
    return [item.embedding for item in answer.data]


async def test_vectors_are_those_of_the_reference_engine(served: ServedEngine) -> None:
    inputs = chat_prompts(*TEXTS, *(f"What is {number} + 3?" for number in range(20)))
    found = await asyncio.to_thread(vectors_of, served, inputs)
    for one, other in zip(found, await reference_vectors(inputs), strict=True):
        assert one == pytest.approx(other, abs=1e-3)  # llama.cpp keeps keys and values in 16 bits


def test_a_text_has_one_vector_of_length_1_however_it_is_sent(served: ServedEngine) -> None:
    together = vectors_of(served, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-5)
        for more in ({}, {"encoding_format": "float"}):  # without one the client asks for base64, and decodes it
            (alone,) = vectors_of(served, text, **more)
            assert alone == pytest.approx(vector, abs=1e-5)


def test_a_mistake_is_a_400_and_there_is_no_chat(served: ServedEngine) -> None:
    with pytest.raises(BadRequestError, match="dimensions"):
        vectors_of(served, TEXTS, dimensions=8)
    with pytest.raises(BadRequestError):
        vectors_of(served, "word " * 3000)
    with pytest.raises((BadRequestError, NotFoundError)):
        served.ask(TEXTS[0])


async def test_cancelled_requests_leave_the_engine_free(served: ServedEngine) -> None:
    async with served.straight() as client:

        async def one(number: int) -> None:
            context = Context()
            body = {"token_ids": [[10 + number % 400] * 200] * 32, "model": MODEL}
            asyncio.get_running_loop().call_later(0.005 * (number % 20), context.kill)
            with suppress(DynamoException):  # cut off, which is an end as well
                stream = await client.open(client.pick(context), body, context)
                try:
                    while await asyncio.wait_for(stream.next_batch(), PATIENCE_SECONDS):
                        pass
                finally:
                    stream.close()

        await asyncio.gather(*(one(number) for number in range(40)))
    (worker,) = served.workers.values()
    await worker.idle()
    assert not errors_of(worker.log)
    assert len(await asyncio.to_thread(vectors_of, served, TEXTS)) == 3


def test_an_idle_worker_ends_at_once_and_leaves_nothing_behind(served: ServedEngine) -> None:
    (worker,) = served.workers.values()
    belongings, began = Belongings(worker, served.temporary), time.monotonic()
    worker.terminate()
    assert worker.exit_code() == 0
    assert time.monotonic() - began < PROMPT_SECONDS  # 3 s on an idle machine; 19 with the interpreter's teardown
    belongings.wait_gone()
    wait_empty(served.temporary)
