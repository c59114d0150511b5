"""transformers behind the contract, over a manager that delivers recorded results as transformers' own does."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.contract.requests.generation import GenerationLimits
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.transformers.arguments import read_arguments
from dynamo.transformers.engine import UNSUPPORTED, TransformersEngine, _Grammars
from dynamo.transformers.loading import LoadedTransformers
from dynamo.transformers.row_sampling import RowSampling
from support.demo_model import FILES
from support.patience import PATIENCE_SECONDS


@dataclass
class Result:
    """The members of a `GenerationOutput` that the engine reads. `generated_tokens` holds all tokens so far."""

    request_id: str
    generated_tokens: list[int]
    finished: bool = False
    error: str | None = None

    def is_finished(self) -> bool:
        return self.finished


class Router:
    def __init__(self) -> None:
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.result_handlers: dict[str, Any] = {}


@dataclass
class Manager:
    """Delivers `tokens` to each request from a thread, in pieces of one, then keeps silent or finishes."""

    tokens: list[int]
    finishes: bool = True
    error: str | None = None
    accepts: bool = True
    added: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    output_router: Router = field(default_factory=Router)
    threads: list[threading.Thread] = field(default_factory=list)
    batch_processor: Any = field(
        default_factory=lambda: SimpleNamespace(cache=SimpleNamespace(use_prefix_sharing=True))
    )

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        self.output_router.result_handlers[request_id] = (callback, asyncio.get_running_loop())

    def add_request(self, prompt: list[int], *, request_id: str, sampling: RowSampling, **more: Any) -> str | None:
        self.added.append({"prompt": prompt, "sampling": sampling, **more})
        if not self.accepts:
            return None
        self.threads.append(threading.Thread(target=self._run, args=(request_id, sampling)))
        self.threads[-1].start()
        return request_id

    def _run(self, request_id: str, sampling: RowSampling) -> None:
        callback, loop = self.output_router.result_handlers[request_id]
        for count in range(1, len(self.tokens) + 1):
            sampling.logprobs.append((-0.5, [(7, -0.5), (8, -1.5)]))
            last = self.finishes and count == len(self.tokens)
            result = Result(request_id, self.tokens[:count], finished=last, error=self.error if last else None)
            loop.call_soon_threadsafe(callback, result)

    def cancel_request(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def engine_over(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> TransformersEngine:
    monkeypatch.setattr("dynamo.transformers.arguments.check_installed", lambda: None)
    arguments, _ = read_arguments(["--model", str(FILES)])
    engine = TransformersEngine(arguments)
    loaded = LoadedTransformers(manager, 100, 840, 32, 4, (2,))
    engine._loaded, engine._grammars = loaded, _Grammars(FILES, loaded)
    engine._limits = GenerationLimits("transformers", 100, 840, UNSUPPORTED)
    return engine


async def chunks(engine: TransformersEngine, context: Context | None = None, **members: Any) -> list[Any]:
    request: Any = {"token_ids": [1, 2, 3], **members}
    try:
        return [chunk async for chunk in engine.generate(request, context or Context())]
    finally:  # a thread that delivers would otherwise outlive the loop
        assert engine._loaded is not None
        for thread in engine._loaded.manager.threads:
            await asyncio.to_thread(thread.join)


async def test_results_that_grow_become_chunks_of_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager([33, 31, 2])
    found = await chunks(engine_over(manager, monkeypatch), eos_token_ids=[2], output_options={"logprobs": 1})
    assert [chunk["token_ids"] for chunk in found] == [[33], [31], [2]]
    assert found[0]["log_probs"] == [-0.5]
    assert found[0]["top_logprobs"][0][0] == {"rank": 1, "token_id": 7, "logprob": -0.5}
    assert found[-1]["finish_reason"] == "stop"
    assert found[-1]["completion_usage"]["total_tokens"] == 6
    assert (manager.added[0]["eos_token_id"], manager.added[0]["max_new_tokens"], manager.cancelled) == ([2], 97, [])


async def test_an_answer_without_an_end_token_ended_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await chunks(engine_over(Manager([33, 31]), monkeypatch), eos_token_ids=[2])
    assert found[-1]["finish_reason"] == "length"


async def test_a_stopped_request_is_cancelled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, context = Manager([33], finishes=False), Context()
    engine = engine_over(manager, monkeypatch)
    running = asyncio.ensure_future(chunks(engine, context))
    while not manager.added:
        await asyncio.sleep(0)
    context.stop_generating()
    found = await asyncio.wait_for(running, PATIENCE_SECONDS)
    assert found[-1]["finish_reason"] == "cancelled"
    assert len(manager.cancelled) == 1
    assert not manager.output_router.result_handlers


async def test_results_after_a_cancellation_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager([2])
    manager.output_router.output_queue.put("stray")
    await chunks(engine_over(manager, monkeypatch), eos_token_ids=[2])
    assert manager.output_router.output_queue.empty()


async def test_a_request_that_transformers_gives_up_may_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineShutdown, match="out of blocks"):
        await chunks(engine_over(Manager([33], error="out of blocks"), monkeypatch))
    with pytest.raises(EngineShutdown, match="does not take requests"):
        await chunks(engine_over(Manager([], accepts=False), monkeypatch))


async def test_a_token_that_cannot_be_drawn_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Manager):
        def _run(self, request_id: str, sampling: RowSampling) -> None:
            sampling.failure = InvalidArgument("guided_decoding cannot be followed")
            super()._run(request_id, sampling)

    with pytest.raises(InvalidArgument, match="cannot be followed"):
        await chunks(engine_over(Failing([33, 31], finishes=False), monkeypatch))


async def test_a_constraint_gets_a_matcher_and_the_models_end_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager([33, 2])
    engine = engine_over(manager, monkeypatch)
    await chunks(engine, sampling_options={"guided_decoding": {"choice": ["4"]}})
    assert manager.added[0]["eos_token_id"] == [2]
    with pytest.raises(InvalidArgument, match=r"guided_decoding\.regex"):
        await chunks(engine, sampling_options={"guided_decoding": {"regex": "(("}})


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(InvalidArgument, match=r"pip install 'torch.*transformers.*llguidance"):
        read_arguments(["--model", str(FILES)])


async def test_a_second_cache_salt_ends_the_sharing_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager([33, 2])
    cache = manager.batch_processor.cache
    engine = engine_over(manager, monkeypatch)
    for salt, shares in ((None, True), ("a", True), ("a", True), ("b", False), ("a", False)):
        await chunks(engine, routing={"cache_salt": salt})
        assert cache.use_prefix_sharing is shares, salt
