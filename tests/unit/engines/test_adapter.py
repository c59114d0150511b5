"""What the engines of other projects share: the end of an answer, a cleanup during the start, requests of the wrong kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, GenerateChunk
from dynamo.engines.adapter import AdapterEngine
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.calls.context import Context
from support.cases import each_case


@dataclass
class Arguments:
    model: str = "m"
    served_name: str = "s"
    embeds: bool = False


class Answer:
    """Each output is one token; the token 9 is the last one, and 0 adds nothing."""

    def __init__(self) -> None:
        self.is_complete = False

    def chunk(self, output: int) -> GenerateChunk | None:
        self.is_complete = output == 9
        return {"token_ids": [output]} if output else None  # type: ignore[return-value]

    def cancelled(self) -> GenerateChunk:
        return {"token_ids": [], "finish_reason": "cancelled"}  # type: ignore[typeddict-item]


class Engine(AdapterEngine[Arguments]):
    engine_name = "Machine"
    reader = staticmethod(lambda argv: (Arguments(*argv), WorkerConfig("ns")))  # type: ignore[assignment]

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.loading, self.loaded, self.cleanups = asyncio.Event(), asyncio.Event(), 0

    async def start(self, worker_id: int) -> EngineConfig:
        self.loading.set()
        await self.loaded.wait()
        await self.check_wanted()
        return self.described(128, max_num_seqs=4)

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        self.check_task(embeds=False)
        async for chunk in self.answered(outputs(*request["token_ids"]), Answer(), context):
            yield chunk

    async def cleanup(self) -> None:
        self._was_cleaned_up = True
        self.cleanups += 1


async def outputs(*numbers: int) -> AsyncIterator[int]:
    for number in numbers:
        yield number


async def test_the_command_line_makes_the_engine_and_its_record() -> None:
    engine, _ = await Engine.from_args(["model", "name"])
    engine.loaded.set()
    config = await engine.start(1)
    assert (config.model, config.served_model_name, config.llm and config.llm.context_length) == ("model", "name", 128)
    assert config.runtime_data == {"media": []}


async def test_a_cleanup_during_the_start_ends_what_was_made_since() -> None:
    engine = Engine(Arguments())
    starting = asyncio.create_task(engine.start(1))
    await engine.loading.wait()
    await engine.cleanup()
    engine.loaded.set()
    with pytest.raises(EngineShutdown, match="cleaned up while it started"):
        await starting
    assert engine.cleanups == 2


@each_case(
    ("numbers", "tokens"),
    [((1, 0, 2, 9), [1, 2, 9]), ((9, 5), [9])],
    ids=["output_without_tokens", "outputs_after_the_last"],
)
async def test_an_answer_is_its_outputs_until_the_last(numbers: tuple[int, ...], tokens: list[int]) -> None:
    chunks = [chunk async for chunk in Engine(Arguments()).generate({"token_ids": numbers}, Context())]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == tokens


async def test_outputs_that_end_before_the_answer_are_an_error_of_the_engine() -> None:
    with pytest.raises(EngineShutdown, match="Machine ended an answer without its last output"):
        [chunk async for chunk in Engine(Arguments()).generate({"token_ids": (1, 2)}, Context())]


async def test_a_request_that_is_stopped_ends_as_cancelled() -> None:
    context, found = Context(), []
    async for chunk in Engine(Arguments()).generate({"token_ids": (1, 2, 9)}, context):
        found.append(chunk)
        context.stop_generating()
    assert found == [{"token_ids": [1]}, {"token_ids": [], "finish_reason": "cancelled"}]


@each_case(("embeds", "is_wrong"), [(False, "started with --embedding-worker"), (True, "generates nothing")])
async def test_a_request_of_the_other_kind_is_refused_and_the_probe_is_of_this_kind(
    embeds: bool, is_wrong: str
) -> None:
    engine = Engine(Arguments(embeds=embeds))
    engine.check_task(embeds=embeds)
    with pytest.raises(InvalidArgument, match=is_wrong):
        engine.check_task(embeds=not embeds)
    payload = await engine.health_check_payload()
    assert payload is not None
    assert ("stop_conditions" in payload) is not embeds
