"""Requests for vectors at SGLang, without SGLang: what reaches its tokenizer manager, and what comes of its outputs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.sglang.engine import inputs_of, vector_of
from dynamo.sglang.engine_thread import EngineThread
from support.cases import each_case
from support.patience import PATIENCE_SECONDS


class Manager:
    """Answers as SGLang's tokenizer manager does: one output per input; with `silent` none until it is aborted."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.aborted: list[str] = []
        self.begun = asyncio.Event()

    async def generate_request(self, asked: Any, _request: None) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(asked)
        match asked.input_ids[0]:
            case 1:
                yield {"embedding": [0.6, 0.8], "meta_info": {"finish_reason": {"type": "length"}}}
            case 2:
                raise ValueError("does not support matryoshka representation")
            case 3:
                refused = {"type": "abort", "message": "too busy", "status_code": None}
                yield {"embedding": [], "meta_info": {"finish_reason": refused}}
            case 4:
                return
            case _:
                await asyncio.get_running_loop().create_future()

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


@pytest.fixture
async def thread(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineThread]:
    structures = ModuleType("sglang.srt.managers.io_struct")
    structures.EmbeddingReqInput = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, structures.__name__, structures)
    made = EngineThread()
    await made.start(lambda: SimpleNamespace(tokenizer_manager=Manager(), shutdown=lambda: None))
    yield made
    await made.close()


async def test_an_input_becomes_a_vector(thread: EngineThread) -> None:
    assert await vector_of(thread, Context(), [1, 5], None, "one") == [0.6, 0.8]
    (asked,) = thread.engine.tokenizer_manager.asked
    assert (asked.input_ids, asked.rid, asked.dimensions) == ([1, 5], "one", None)
    assert thread.engine.tokenizer_manager.aborted == []


@each_case(
    "first, dimensions, kind, words",
    [
        (2, 8, InvalidArgument, "dimensions: .*matryoshka"),
        (2, None, InvalidArgument, "^does not support"),
        (3, None, EngineShutdown, "too busy"),
        (4, None, EngineShutdown, "without its vector"),
    ],
)
async def test_what_sglang_does_not_do_is_an_error(
    thread: EngineThread, first: int, dimensions: int | None, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        await vector_of(thread, Context(), [first], dimensions, "r")


async def test_a_cancelled_input_is_aborted_at_sglang(thread: EngineThread) -> None:
    context, manager = Context(), thread.engine.tokenizer_manager
    running = asyncio.ensure_future(vector_of(thread, context, [9], None, "left"))
    while not manager.asked:
        await asyncio.sleep(0)
    context.stop_generating()
    assert await asyncio.wait_for(running, PATIENCE_SECONDS) is None
    while not manager.aborted:
        await asyncio.sleep(0)
    assert manager.aborted == ["left"]


@each_case(
    "members, field",
    [
        ({"task": "classify"}, "task"),
        ({"normalize": False}, "normalize"),
        ({"routing": {"lora_name": "a"}}, r"routing\.lora_name"),
        ({"token_ids": [[1] * 11]}, r"token_ids\[0\]"),
    ],
)
def test_a_mistake_names_its_field(members: dict[str, Any], field: str) -> None:
    request: Any = {"token_ids": [[1, 2]], **members}
    with pytest.raises(InvalidArgument, match=field):
        inputs_of(request, 10, 100)
    assert inputs_of({"token_ids": [[1, 2]]}, 10, 100) == [[1, 2]]
