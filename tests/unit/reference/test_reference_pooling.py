"""Vectors of the reference engine: what its model computes for an input alone, whatever else runs and however it is cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.contract.conformance import mock_context
from dynamo.contract.requests.pooling import read_pooling
from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.config import read_model_config
from dynamo.reference.model import KvCache, Piece, TransformerModel, make_batch
from dynamo.reference.weights import load_weights
from dynamo.runtime.calls.context import Context
from support.adapters import write_adapter
from support.cases import each_case

SMALL = Options(block_size=4, kv_cache_mb=2, max_num_seqs=8, max_num_batched_tokens=16)
INPUTS = [np.random.default_rng(seed).integers(0, 96, 1 + 6 * seed).tolist() for seed in range(6)]

Array = np.ndarray[Any, Any]


@asynccontextmanager
async def running(directory: Path, options: Options = SMALL) -> AsyncIterator[ReferenceEngine]:
    engine = ReferenceEngine(directory, options)
    await engine.start(1)
    try:
        yield engine
    finally:
        await engine.cleanup()


async def embed(
    engine: ReferenceEngine, inputs: list[list[int]], context: Context | None = None, **more: Any
) -> list[Array]:
    request: Any = {"token_ids": inputs, **more}
    found: dict[int, Array] = {}
    async with aclosing(engine.embed(request, context or mock_context())) as stream:
        async for item in stream:
            assert item["index"] not in found
            found[item["index"]] = np.asarray(item["embedding"])
    return [found[index] for index in range(len(inputs))]


def hidden_states(directory: Path, tokens: list[int]) -> Array:
    config = read_model_config(directory)
    model = TransformerModel(config, load_weights(directory, config))
    blocks = -(-len(tokens) // 4)
    return model.forward(make_batch([Piece(tokens, 0, list(range(blocks)))], 4), KvCache(config, blocks, 4))


def unit(vector: Array) -> Array:
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)


POOLED: dict[str, Callable[[Array], Array]] = {
    "mean": lambda states: states.mean(axis=0),
    "last": lambda states: states[-1],
    "cls": lambda states: states[0],
}


@each_case("mode,normalize", [(mode, normalize) for mode in POOLED for normalize in (True, False)])
async def test_a_vector_is_that_of_the_input_alone(models: dict[str, Path], mode: str, normalize: bool) -> None:
    options = Options(4, 2, max_num_seqs=8, max_num_batched_tokens=16, pooling=mode, normalize=normalize)
    async with running(models["llama"], options) as engine:
        found = await embed(engine, INPUTS)
    for tokens, vector in zip(INPUTS, found, strict=True):
        wanted = POOLED[mode](hidden_states(models["llama"], tokens))
        assert np.abs(vector - (unit(wanted) if normalize else wanted)).max() < 1e-5


async def test_generation_beside_it_changes_neither(models: dict[str, Path]) -> None:
    request: Any = {
        "token_ids": [1, 2, 3],
        "stop_conditions": {"max_tokens": 20, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    }

    async def tokens(engine: ReferenceEngine) -> list[int]:
        async with aclosing(engine.generate(request, mock_context())) as stream:
            return [token async for chunk in stream for token in chunk["token_ids"]]

    async with running(models["llama"]) as engine:
        alone, vectors = await tokens(engine), await embed(engine, INPUTS)
        results: list[Any] = list(
            await asyncio.gather(*[tokens(engine) for _ in range(4)], *[embed(engine, INPUTS) for _ in range(4)])
        )
    assert results[:4] == [alone] * 4
    for each in results[4:]:
        assert max(np.abs(one - other).max() for one, other in zip(each, vectors, strict=True)) < 1e-5


async def test_more_inputs_than_the_cache_holds_are_computed_one_after_the_other(models: dict[str, Path]) -> None:
    tight = Options(block_size=4, kv_cache_mb=1, context_length=40, max_num_seqs=8, max_num_batched_tokens=16)
    inputs = [np.random.default_rng(seed).integers(0, 96, 40).tolist() for seed in range(30)]
    async with running(models["llama"], tight) as engine:
        found = await embed(engine, inputs)
    wanted = [unit(hidden_states(models["llama"], tokens).mean(axis=0)) for tokens in inputs]
    assert max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) < 1e-5


async def test_every_token_may_have_its_vector(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        found = await embed(engine, INPUTS, task="token_embed")
    for tokens, matrix in zip(INPUTS, found, strict=True):
        assert np.abs(matrix - unit(hidden_states(models["llama"], tokens))).max() < 1e-5


async def test_an_adapter_makes_vectors_of_its_own(
    models: dict[str, Path], configs: dict[str, dict[str, Any]], tensors_of: Callable[..., Any], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", tensors_of(configs["llama"]))
    async with running(models["llama"]) as engine:
        base = await embed(engine, INPUTS)
        body = {"lora_name": "mine", "lora_path": str(tmp_path / "adapter")}
        assert (await engine.engine_update("load_lora", body))["status"] != "error"
        adapted = await embed(engine, INPUTS, routing={"lora_name": "mine"})
        again = await embed(engine, INPUTS)
        with pytest.raises(WorkerUnavailable, match="other"):
            await embed(engine, INPUTS, routing={"lora_name": "other"})
    assert max(np.abs(a - b).max() for a, b in zip(base, again, strict=True)) < 1e-5
    assert min(np.abs(a - b).max() for a, b in zip(base, adapted, strict=True)) > 1e-3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shorter vectors": ({"dimensions": 8}, "dimensions"),
    "a task without a head": ({"task": "classify"}, "classification head"),
    "an unknown task": ({"task": "paint"}, "task"),
}


@each_case("more,named", list(REFUSED.values()), ids=list(REFUSED))
async def test_what_the_model_cannot_do_is_refused(models: dict[str, Path], more: dict[str, Any], named: str) -> None:
    async with running(models["llama"]) as engine:
        with pytest.raises(InvalidArgument, match=named):
            await embed(engine, [[1, 2]], **more)


@each_case("inputs", [[[1] * 5000], [[96_000]]])
async def test_an_input_the_model_cannot_take_is_named(models: dict[str, Path], inputs: list[list[int]]) -> None:
    async with running(models["llama"]) as engine:
        with pytest.raises(InvalidArgument, match=r"token_ids\[0\]"):
            await embed(engine, inputs)


async def test_a_stopped_request_frees_its_blocks(models: dict[str, Path]) -> None:
    async with running(models["llama"]) as engine:
        context = mock_context()
        context.stop_generating()
        stream = engine.embed({"token_ids": [[1] * 40] * 50}, context)
        assert [item async for item in stream] == []
        assert engine._steps is not None
        assert await engine._steps.ask(lambda core: core.pool.held) == 0
        assert len(await embed(engine, INPUTS)) == len(INPUTS)


@pytest.fixture
def shortens(models: dict[str, Path], tmp_path: Path) -> Path:
    """The model, declared as one whose vectors may be cut."""
    for file in models["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    return tmp_path


async def test_a_model_that_was_trained_for_it_shortens_and_normalises_again(shortens: Path) -> None:
    async with running(shortens) as engine:
        found = await embed(engine, [[1, 2, 3]], dimensions=8)
        with pytest.raises(InvalidArgument, match="8, 16"):
            await embed(engine, [[1, 2, 3]], dimensions=9)
    whole = hidden_states(shortens, [1, 2, 3]).mean(axis=0)
    assert np.abs(found[0] - unit(whole[:8])).max() < 1e-5


FILES: dict[str, tuple[dict[str, Any], list[str], tuple[str, bool]]] = {
    "mean, as it is": ({"pooling_mode_mean_tokens": True}, [], ("mean", False)),
    "last, of length 1": (
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
        ["sentence_transformers.models.Normalize"],
        ("last", True),
    ),
    "the first one": ({"pooling_mode_cls_token": True, "include_prompt": True}, [], ("cls", False)),
}


@each_case("config,more,wanted", list(FILES.values()), ids=list(FILES))
def test_the_files_of_sentence_transformers_say_how(
    shortens: Path, config: dict[str, Any], more: list[str], wanted: tuple[str, bool]
) -> None:
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", *more]
    modules = [
        {"idx": n, "type": kind, "path": "1_Pooling" if "Pooling" in kind else ""} for n, kind in enumerate(kinds)
    ]
    (shortens / "modules.json").write_text(json.dumps(modules))
    (shortens / "1_Pooling").mkdir(exist_ok=True)
    (shortens / "1_Pooling" / "config.json").write_text(json.dumps(config))
    pooling = read_pooling(shortens, read_model_config(shortens).hidden_size)
    assert (pooling.mode, pooling.normalize) == wanted
    assert read_pooling(shortens, read_model_config(shortens).hidden_size, mode="cls", normalize=True).mode == "cls"


def test_a_module_that_is_not_supported_is_named(shortens: Path) -> None:
    (shortens / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(InvalidArgument, match="Dense"):
        read_pooling(shortens, read_model_config(shortens).hidden_size)


@pytest.fixture
def classifier(
    models: dict[str, Path], save_model: Callable[..., Path], configs: Any, tensors_of: Any, tmp_path: Path
) -> Path:
    config = {
        **configs["llama"],
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "good", "1": "bad", "2": "ugly"},
    }
    tensors = {**tensors_of(configs["llama"])}
    tensors.pop("lm_head.weight", None)
    tensors["score.weight"] = np.random.default_rng(3).normal(size=(3, config["hidden_size"])).astype(np.float32)
    return save_model(tmp_path / "classifier", config, tensors)


async def test_a_classifier_judges_the_last_token(classifier: Path) -> None:
    config = read_model_config(classifier)
    head = load_weights(classifier, config).classes
    assert head is not None
    async with running(classifier) as engine:
        shares = await embed(engine, INPUTS, task="classify")
        logits = await embed(engine, INPUTS, task="classify", use_activation=False)
        with pytest.raises(InvalidArgument, match="3 classes"):
            await embed(engine, INPUTS, task="score")
        request: Any = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 1}}
        with pytest.raises(InvalidArgument, match="makes vectors"):
            await anext(engine.generate(request, mock_context()))
        assert engine._config is not None
        assert engine._config.runtime_data["labels"] == ["good", "bad", "ugly"]
    for tokens, share, logit in zip(INPUTS, shares, logits, strict=True):
        wanted = head @ hidden_states(classifier, tokens)[-1]
        assert np.abs(logit - wanted).max() < 5e-5  # values up to 4, summed in another order
        raised = np.exp(wanted - wanted.max())
        assert np.abs(share - raised / raised.sum()).max() < 1e-5
