"""The page on cancellation names the call by which each engine ends a request, as the engine's source has it."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from dynamo.contract.engine import LLMEngine
from support.doc_pages import code, rows

ENGINES = {
    "vLLM": ("dynamo.vllm.engine", "VllmEngine", "engine"),
    "SGLang": ("dynamo.sglang.engine", "SglangEngine", "engine"),
    "TensorRT-LLM": ("dynamo.trtllm.engine", "TrtllmEngine", "engine"),
    "transformers": ("dynamo.transformers.engine", "TransformersEngine", "engine"),
    "llama.cpp": ("dynamo.llamacpp.engine", "LlamaCppEngine", "slots"),
}
"""Module, class, and the module of the same folder that makes the call."""

CALLS = {row[0]: row for row in rows("cancellation.md", "Engine", "Overrides `abort`")}


def test_every_engine_has_its_call_and_what_it_does_then() -> None:
    assert list(CALLS) == list(ENGINES)
    assert [row[0] for row in rows("cancellation.md", "Engine", "What it does then")] == list(ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_the_call_is_that_of_the_source(name: str) -> None:
    module_name, class_name, caller = ENGINES[name]
    engine = getattr(importlib.import_module(module_name), class_name)
    assert CALLS[name][1] == ("yes" if engine.abort is not LLMEngine.abort else "no")
    source = Path(inspect.getfile(engine)).with_name(f"{caller}.py").read_text()
    (call,) = code(CALLS[name][2])
    assert call in source
    assert '-{next(self._numbers)}"' in source or name in ("TensorRT-LLM", "llama.cpp")  # they return an object to end
