"""How inputs of many requests become batches, over a model that counts; and what a vector is made of, over torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from dynamo.contract.requests.pooling import Pooling
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.transformers.arguments import read_arguments
from dynamo.transformers.loading import LoadedEncoder
from dynamo.transformers.vectors import TransformersVectors, _Batches, pooled
from support.cases import each_case
from support.demo_model import FILES
from support.patience import PATIENCE_SECONDS


class Rows:
    """The states of a batch: of the input in `row` the tokens themselves."""

    def __init__(self, inputs: Sequence[Sequence[int]]) -> None:
        self.inputs = inputs

    def __getitem__(self, place: tuple[int, slice]) -> Sequence[int]:
        return self.inputs[place[0]][place[1]]


class Model:
    """Notes its batches. Each waits until `gate` is open."""

    def __init__(self) -> None:
        self.batches: list[list[Sequence[int]]] = []
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.failure: Exception | None = None

    def states(self, inputs: Sequence[Sequence[int]]) -> Rows:
        self.batches.append(list(inputs))
        self.begun.set()
        assert self.gate.wait(PATIENCE_SECONDS)
        if self.failure is not None:
            raise self.failure
        return Rows(inputs)


def doubled(states: Sequence[int]) -> list[int]:
    return [2 * each for each in states]


async def test_inputs_of_all_requests_share_batches_within_the_bounds() -> None:
    model = Model()
    batches = _Batches(model.states, max_inputs=3, max_tokens=8)
    first = batches.add([[1]], doubled)  # a batch of its own: nothing else is there when it begins
    await asyncio.to_thread(model.begun.wait, PATIENCE_SECONDS)
    later = batches.add([[2, 2], [3, 3, 3]], doubled) + batches.add([[4] * 4, [5] * 20, [6], [7], [8], [9]], doubled)
    model.gate.set()
    found = await asyncio.wait_for(asyncio.gather(*first, *later), PATIENCE_SECONDS)
    assert found == [[2], [4, 4], [6, 6, 6], [8] * 4, [10] * 20, [12], [14], [16], [18]]
    # Three inputs of at most 3 tokens would fit; with the one of 4 they are 12. What is longer than a batch is one by itself.
    assert [[len(ids) for ids in batch] for batch in model.batches] == [[1], [2, 3], [4], [20], [1, 1, 1], [1]]
    again = batches.add([[1]], doubled)  # after a pause
    assert await asyncio.wait_for(again[0], PATIENCE_SECONDS) == [2]
    await batches.close()


async def test_inputs_that_nobody_wants_any_more_are_not_computed() -> None:
    model = Model()
    batches = _Batches(model.states, max_inputs=8, max_tokens=100)
    running = batches.add([[1]], doubled)
    await asyncio.to_thread(model.begun.wait, PATIENCE_SECONDS)
    left, kept = batches.add([[2], [3]], doubled), batches.add([[4]], doubled)
    for each in (*running, *left):
        each.cancel()
    model.gate.set()
    assert await asyncio.wait_for(kept[0], PATIENCE_SECONDS) == [8]
    assert model.batches == [[[1]], [[4]]]
    await batches.close()


async def test_a_batch_that_fails_fails_its_own_inputs() -> None:
    model = Model()
    model.failure = RuntimeError("out of memory")
    model.gate.set()
    batches = _Batches(model.states, max_inputs=8, max_tokens=100)
    (failed,) = batches.add([[1]], doubled)
    with pytest.raises(RuntimeError, match="out of memory"):
        await asyncio.wait_for(failed, PATIENCE_SECONDS)
    model.failure = None
    (fine,) = batches.add([[2]], doubled)
    assert await asyncio.wait_for(fine, PATIENCE_SECONDS) == [4]
    await batches.close()


async def test_the_end_waits_for_the_batch_that_runs_and_refuses_the_rest() -> None:
    model = Model()
    batches = _Batches(model.states, max_inputs=1, max_tokens=100)
    waiting = batches.add([[1], [2]], doubled)
    await asyncio.to_thread(model.begun.wait, PATIENCE_SECONDS)
    closing = asyncio.ensure_future(batches.close())
    await asyncio.sleep(0)
    assert not closing.done()
    model.gate.set()
    await asyncio.wait_for(closing, PATIENCE_SECONDS)
    for each in waiting:
        with pytest.raises(EngineShutdown):
            each.result()
    with pytest.raises(EngineShutdown):
        batches.add([[3]], doubled)
    assert model.batches == [[[1]]]


# -- requests ---------------------------------------------------------------------------------------------------------


def serving(model: Any, **pooling: Any) -> TransformersVectors:
    loaded = LoadedEncoder(model.states, context_length=10, vocab_size=100, hidden_size=4, generates=True)
    return TransformersVectors(loaded, Pooling("last", dimensions=4, **pooling), max_inputs=8, max_tokens=64)


async def test_a_cancelled_request_ends_at_once() -> None:
    model, context = Model(), Context()
    vectors = serving(model)

    async def all_of() -> list[Any]:
        return [each async for each in vectors.vectors({"token_ids": [[1], [2]]}, context)]

    running = asyncio.ensure_future(all_of())
    await asyncio.to_thread(model.begun.wait, PATIENCE_SECONDS)
    context.stop_generating()
    assert await asyncio.wait_for(running, PATIENCE_SECONDS) == []
    model.gate.set()
    await vectors.close()


@each_case(
    "members, field",
    [
        ({"task": "classify"}, "task"),
        ({"dimensions": 2}, "dimensions"),
        ({"token_ids": [[1], [1] * 11]}, r"token_ids\[1\]"),
        ({"token_ids": [[100]]}, r"token_ids\[0\]"),
    ],
)
async def test_a_mistake_names_its_field(members: dict[str, Any], field: str) -> None:
    request: Any = {"token_ids": [[1, 2]], **members}
    with pytest.raises(InvalidArgument, match=field):
        [each async for each in serving(Model()).vectors(request, Context())]


def test_the_flag_makes_a_worker_for_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.transformers.arguments.check_installed", lambda: None)
    arguments, worker = read_arguments(["--model", str(FILES), "--embedding-worker", "--pooling", "cls"])
    assert (arguments.embeds, arguments.pooling, worker.endpoint_types) == (True, "cls", "embedding")


# -- over torch -------------------------------------------------------------------------------------------------------


def test_states_become_a_vector() -> None:
    torch = pytest.importorskip("torch")
    states = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0], [0.0, 5.0, 12.0]])
    assert pooled(states, mode="cls").tolist() == pytest.approx([0.6, 0.8, 0.0])
    assert pooled(states, mode="last").tolist() == pytest.approx([0.0, 5 / 13, 12 / 13])
    assert pooled(states, mode="mean", is_normal=False).tolist() == pytest.approx([1.0, 3.0, 14 / 3])
    assert pooled(states, mode="cls", dimensions=1).tolist() == [1.0]  # the cut vector has the length 1 as well
    assert pooled(states, mode="all", is_normal=False).tolist() == states.tolist()
