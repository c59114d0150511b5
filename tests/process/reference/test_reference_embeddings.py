"""The same weights in `transformers`, pooled as `sentence-transformers` does it: the vectors and classes are the same.

Optional (`make test-engines`): it needs the `engines` extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.contract.conformance import mock_context
from dynamo.reference import Options, ReferenceEngine

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

TOLERANCE = 1e-5  # of vectors of length 1
INPUTS = [np.random.default_rng(seed).integers(0, 211, 1 + 9 * seed).tolist() for seed in range(8)]
FAMILIES = ("Llama", "Qwen2", "Qwen3")


@pytest.fixture(scope="module")
def libraries() -> Iterator[tuple[Any, Any]]:
    torch = pytest.importorskip("torch", reason="needs the `engines` extra: torch")
    transformers = pytest.importorskip("transformers", reason="needs the `engines` extra: transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch, transformers
    torch.set_num_threads(threads)


def theirs(libraries: tuple[Any, Any], family: str, kind: str, directory: Path, **more: Any) -> Any:
    """A random model of theirs, written where we can read it."""
    torch, transformers = libraries
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=211, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, **more,
    )  # fmt: skip
    model = getattr(transformers, f"{family}{kind}")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(directory)
    return model


async def ours(directory: Path, task: str, **options: Any) -> list[np.ndarray[Any, Any]]:
    engine = ReferenceEngine(directory, Options(block_size=8, kv_cache_mb=4, max_num_batched_tokens=64, **options))
    await engine.start(1)
    found: dict[int, np.ndarray[Any, Any]] = {}
    try:
        request: Any = {"token_ids": INPUTS, "task": task}
        async with aclosing(engine.embed(request, mock_context())) as stream:
            async for item in stream:
                found[item["index"]] = np.asarray(item["embedding"])
    finally:
        await engine.cleanup()
    return [found[index] for index in range(len(INPUTS))]


def pooled(torch: Any, model: Any, mode: str) -> list[np.ndarray[Any, Any]]:
    """As `sentence-transformers` does it: a padded batch, the mask, the pooling, `normalize`."""
    longest = max(map(len, INPUTS))
    ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in INPUTS])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in INPUTS])
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        if mode == "mean":
            weights = mask.unsqueeze(-1).float()
            vectors = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        elif mode == "last":
            vectors = states[torch.arange(len(INPUTS)), mask.sum(1) - 1]
        else:
            vectors = states[:, 0]
        return list(torch.nn.functional.normalize(vectors, p=2, dim=1).numpy())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["Model", "ForCausalLM"])
async def test_vectors_are_those_of_transformers(
    family: str, kind: str, libraries: tuple[Any, Any], tmp_path: Path
) -> None:
    torch, _ = libraries
    model = theirs(libraries, family, kind, tmp_path)
    base = model if kind == "Model" else model.model
    for mode in ("mean", "last", "cls"):
        found = await ours(tmp_path, "embed", pooling=mode)
        worst = max(np.abs(a - b).max() for a, b in zip(found, pooled(torch, base, mode), strict=True))
        print(f"{family}{kind} {mode}: off by {worst:.1e}")
        assert worst < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("labels", [1, 5])
async def test_classes_are_those_of_transformers(
    family: str, labels: int, libraries: tuple[Any, Any], tmp_path: Path
) -> None:
    torch, _ = libraries
    model = theirs(libraries, family, "ForSequenceClassification", tmp_path, num_labels=labels)
    found = await ours(tmp_path, "classify")
    with torch.no_grad():
        for tokens, shares in zip(INPUTS, found, strict=True):
            logits = model(input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens))).logits[0]
            wanted = torch.sigmoid(logits) if labels == 1 else torch.softmax(logits, -1)
            assert np.abs(shares - wanted.numpy()).max() < TOLERANCE
