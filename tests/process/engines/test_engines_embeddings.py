"""Engines that make embeddings through worker, router and frontend: the vectors are those of the reference engine, and of plain
transformers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import pytest
from openai import BadRequestError, NotFoundError

from dynamo.errors import DynamoException
from dynamo.runtime.calls.context import Context
from support.demo_model import FILES, chat_prompts, reference_vectors
from support.ends import end_idle
from support.engine_cluster import MODEL, SGLANG, EngineCase, ServedEngine, served_engine
from support.leftovers import errors_of, wait_empty
from support.patience import PATIENCE_SECONDS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

FLAG: Final = ("--embedding-worker",)
CASES: Final = (
    EngineCase("llamacpp", "DYNAMO_LLAMACPP_PYTHON", FLAG, is_gguf=True, workers=("a",)),
    EngineCase("transformers", "DYNAMO_TRANSFORMERS_PYTHON", FLAG, {"OMP_NUM_THREADS": "1"}, workers=("a",)),
    replace(SGLANG, flags=(*SGLANG.flags, *FLAG), workers=("a",)),
)
CLOSE: Final = {
    "llamacpp": 1e-3
}  # llama.cpp keeps keys and values in 16 bits; the others compute as the reference does
PLAIN: Final = """
import json, sys, torch, transformers
model = transformers.AutoModel.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.inference_mode():
    states = [model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in json.load(sys.stdin)]
print(json.dumps([torch.nn.functional.normalize(state, dim=0).tolist() for state in states]))
"""
TEXTS: Final = ["What is 27 + 15?", "The weather in Paris", "Write a poem."]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    case: EngineCase = request.param
    if not case.python:
        pytest.skip(case.why_not)
    with served_engine(case, tmp_path_factory.mktemp(case.name)) as engine:
        yield engine


def plain_vectors(python: str, inputs: list[list[int]]) -> list[list[float]]:
    """The normalised state of the last token of each input, computed by transformers alone, one input at a time."""
    ended = subprocess.run([python, "-c", PLAIN, str(FILES)], input=json.dumps(inputs), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: list[list[float]] = json.loads(ended.stdout)
    return found


def vectors_of(served: ServedEngine, inputs: Any, **more: Any) -> list[list[float]]:
    answer = served.client.embeddings.create(model=MODEL, input=inputs, **more)
    return [item.embedding for item in answer.data]


async def test_vectors_are_those_of_the_reference_engine(served: ServedEngine) -> None:
    inputs = chat_prompts(*TEXTS, *(f"What is {number} + 3?" for number in range(20)))
    found = await asyncio.to_thread(vectors_of, served, inputs)
    for one, other in zip(found, await reference_vectors(inputs), strict=True):
        assert one == pytest.approx(other, abs=CLOSE.get(served.case.name, 1e-5))


async def test_vectors_are_those_of_plain_transformers(served: ServedEngine) -> None:
    python = os.environ.get("DYNAMO_TRANSFORMERS_PYTHON", "")
    if not python:
        pytest.skip("set DYNAMO_TRANSFORMERS_PYTHON to a Python that has transformers and torch (docs/engines.md)")
    inputs = chat_prompts(*TEXTS, *(f"Sort {' '.join(map(str, range(number)))}." for number in range(1, 40, 3)))
    found = await asyncio.to_thread(vectors_of, served, inputs)
    for one, other in zip(found, await asyncio.to_thread(plain_vectors, python, inputs), strict=True):
        assert one == pytest.approx(other, abs=CLOSE.get(served.case.name, 1e-5))


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


def test_an_idle_worker_ends_within_three_seconds_and_leaves_nothing_behind(served: ServedEngine) -> None:
    (worker,) = served.workers.values()
    end_idle(worker, served.temporary)
    wait_empty(served.temporary)
