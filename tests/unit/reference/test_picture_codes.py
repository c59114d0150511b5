"""A model that has learned to see: images become codes of its own, and text without one stays what it was, bit for bit."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dynamo.contract.chunks import GenerateChunk
from dynamo.contract.conformance import mock_context
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import InvalidArgument
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.config import read_model_config
from dynamo.reference.encoder import ReferenceEncoder
from dynamo.reference.loading import load_core
from dynamo.reference.media import MediaOptions
from dynamo.reference.model import KvCache, Piece, make_batch
from dynamo.reference.picture_codes import CODES, FILE, SHAPES, SIDE, PictureCodes, scaled
from dynamo.reference.vision import IMAGE_TOKENS
from support.cases import each_case
from support.pictures import plain_png, png, quarters_png
from support.reference_models import CONFIGS, write_model

IMAGE_TOKEN = 2
VOCABULARY = 97
SMALL = Options(block_size=4, kv_cache_mb=2, max_num_seqs=4, max_num_batched_tokens=32)
PICTURE = quarters_png([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)])
OTHER = quarters_png([(0, 0, 0), (250, 240, 10), (90, 0, 200), (20, 70, 20)])
ALIKE = (plain_png((200, 0, 0), 8), plain_png((200, 0, 0), 24, 24))  # other contents, the same when they are scaled


def write_seeing(directory: Path, *, tied: bool = False, **changes: Any) -> Path:
    """A random model with a random vision; `changes`: tensors of its file, None to leave one out."""
    config = {**CONFIGS["qwen3"], "tie_word_embeddings": tied, "image_token_id": IMAGE_TOKEN}
    config["vision_config"] = {"model_type": "picture_codes", "first_token_id": VOCABULARY}
    write_model(directory, config)
    random = np.random.default_rng(5)
    tensors = {name: random.normal(0, 0.15, shape) for name, shape in SHAPES.items()}
    tensors["embeddings.weight"] = random.normal(0, 1, (IMAGE_TOKENS * CODES, 32))
    for layer in range(3):
        for part, outward in (("self_attn.q", 64), ("mlp.up", 48)):
            name = f"base_model.model.model.layers.{layer}.{part}_proj.lora_"
            tensors[f"{name}A.weight"] = random.normal(0, 0.3, (3, 32))
            tensors[f"{name}B.weight"] = random.normal(0, 0.3, (outward, 3))
    tensors |= changes
    save_file({k: v.astype(np.float32) for k, v in tensors.items() if v is not None}, directory / FILE)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def sight(model: Path) -> PictureCodes:
    found = read_model_config(model).vision
    assert isinstance(found, PictureCodes)
    return found


# -- from an image to codes ----------------------------------------------------------------------------------------------


def test_each_of_the_sixteen_tokens_has_codes_of_its_own(sight: PictureCodes) -> None:
    tokens = sight.tokens(PICTURE)
    assert [(token - VOCABULARY) // CODES for token in tokens] == list(range(IMAGE_TOKENS))
    assert sight.tokens(PICTURE) == tokens != sight.tokens(OTHER)


def test_the_network_computes_what_it_says(sight: PictureCodes) -> None:
    """A plain sum over every window, in place of the matrix products."""
    image = scaled(np.random.default_rng(2).integers(0, 256, (70, 50, 3), dtype=np.uint8))
    x, sums = image.astype(float) / 255 - 0.5, []
    for number in range(4):
        weight, bias = (sight.weights[f"convolutions.{number}.{part}"] for part in ("weight", "bias"))
        side = len(x) // 2
        framed = np.pad(x, ((1, 1), (1, 1), (0, 0)))
        x = np.array(
            [
                [np.einsum("ohwc,hwc->o", weight, framed[2 * r : 2 * r + 3, 2 * c : 2 * c + 3]) for c in range(side)]
                for r in range(side)
            ]
        )
        x = np.maximum(x + bias, 0)
        sums.append(x.sum(axis=(0, 1)) / side)
    hidden = sight.weights["hidden.weight"] @ np.concatenate((x.ravel(), *sums[:3])) + sight.weights["hidden.bias"]
    wanted = sight.weights["codes.weight"] @ np.maximum(hidden, 0) + sight.weights["codes.bias"]
    np.testing.assert_allclose(sight.scores(image), wanted, atol=1e-4)


@each_case(("width", "height"), [(1, 1), (1, 300), (7, 3), (64, 64), (65, 63), (640, 480), (2000, 9), (131, 517)])
def test_an_image_of_any_size_is_scaled_whole(width: int, height: int) -> None:
    pixels = np.full((height, width, 3), 40, np.uint8)
    pixels[: max(height // 2, 1)] = 200
    found = scaled(pixels)
    assert found.shape == (SIDE, SIDE, 3)
    assert found.min() >= 39
    assert found.max() <= 201
    if min(width, height) >= 9 and max(width, height) / min(width, height) < 5:
        middle = found[:, SIDE // 2, 0]
        high = round(SIDE * height / max(width, height))
        top = (SIDE - high) // 2
        np.testing.assert_allclose(middle[top + 1 : top + high // 2 - 1], 200, atol=0.5)
        np.testing.assert_allclose(middle[top + high // 2 + 2 : top + high - 2], 40, atol=0.5)


def test_a_smaller_and_a_larger_copy_of_an_image_are_scaled_to_the_same() -> None:
    small = np.random.default_rng(3).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    large = small.repeat(4, axis=0).repeat(4, axis=1)
    np.testing.assert_allclose(scaled(small), scaled(large), atol=1e-3)


# -- from codes to an answer ---------------------------------------------------------------------------------------------


def states(model: Path, tokens: list[int], pictured: int | None) -> np.ndarray:
    core = load_core(model, SMALL)
    sight = None if pictured is None else core.model.weights.sight
    piece = Piece(tokens, 0, list(range(16)), None, sight, pictured or 0)
    return core.model.forward(make_batch([piece], 4), KvCache(core.model.config, 16, 4))


def test_text_is_computed_as_by_a_model_without_eyes_and_so_is_what_stands_before_a_picture(
    tmp_path: Path,
) -> None:
    model, blind = (write_seeing(tmp_path / name, tied=True) for name in ("seeing", "blind"))
    config = json.loads((blind / "config.json").read_text())
    del config["vision_config"], config["image_token_id"]
    (blind / "config.json").write_text(json.dumps(config))
    text = list(range(5, 25))
    assert (states(model, text, None) == states(blind, text, None)).all()
    seen = states(model, [*text, VOCABULARY + 3, 7, 8], 20)
    np.testing.assert_allclose(seen[:20], states(blind, text, None), atol=1e-5)
    core, other = load_core(model, SMALL), load_core(blind, SMALL)
    assert core.model.weights.head.shape == other.model.weights.head.shape
    assert core.model.weights.sight is not None
    assert other.model.weights.sight is None


def body(*pictures: bytes, tokens: list[int] | None = None, **more: Any) -> Any:
    urls = [{"Url": f"data:image/png;base64,{base64.b64encode(each).decode()}"} for each in pictures]
    return {
        "token_ids": tokens or [5, 9, 11, 12, *[IMAGE_TOKEN] * len(pictures), 6, 7, 8],
        "stop_conditions": {"max_tokens": 8, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "multi_modal_data": {"image_url": urls} if urls else None,
        **more,
    }


async def collect(engine: ReferenceEngine, request: Any) -> list[GenerateChunk]:
    async with aclosing(engine.generate(request, mock_context())) as stream:
        return [chunk async for chunk in stream]


def said(chunks: list[GenerateChunk]) -> list[int]:
    return [token for each in chunks for token in each["token_ids"]]


def cached(chunks: list[GenerateChunk]) -> int:
    return int((chunks[-1]["completion_usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))


@asynccontextmanager
async def running(model: Path, **options: Any) -> AsyncIterator[ReferenceEngine]:
    engine = ReferenceEngine(model, SMALL, **options)
    await engine.start(1)
    try:
        yield engine
    finally:
        await engine.cleanup()


async def test_an_answer_depends_on_the_picture_and_pieces_of_a_prompt_change_nothing(model: Path) -> None:
    async with running(model) as engine:
        alone = [said(await collect(engine, body(each))) for each in (PICTURE, OTHER)]
        assert alone[0] != alone[1]
        together = await asyncio.gather(
            *[collect(engine, body(each)) for each in (PICTURE, OTHER)], collect(engine, body())
        )
        assert [said(each) for each in together[:2]] == alone
        long = [*range(5, 40), IMAGE_TOKEN, *range(5, 40)]  # computed in three steps
        piecewise = said(await collect(engine, body(PICTURE, tokens=long)))
    engine = ReferenceEngine(model, Options(block_size=4, kv_cache_mb=2, max_num_seqs=4, max_num_batched_tokens=200))
    await engine.start(1)
    assert said(await collect(engine, body(PICTURE, tokens=long))) == piecewise
    await engine.cleanup()


async def test_what_stands_before_a_picture_is_shared_with_text_and_pictures_that_look_alike_share_nothing(
    model: Path, sight: PictureCodes
) -> None:
    assert sight.tokens(ALIKE[0]) == sight.tokens(ALIKE[1])
    async with running(model) as engine:
        assert cached(await collect(engine, body(tokens=[5, 9, 11, 12, 6, 7]))) == 0
        first = await collect(engine, body(ALIKE[0]))
        assert cached(first) == 4
        second = await collect(engine, body(ALIKE[1]))
        assert cached(second) == 4
        assert said(second) == said(first)
        assert cached(await collect(engine, body(ALIKE[0]))) == 20


async def test_roles_say_what_one_worker_says_and_keep_pictures_apart(model: Path) -> None:
    async with (
        running(model) as whole,
        running(model, mode=DisaggregationMode.PREFILL, media=MediaOptions(mode=DisaggregationMode.PREFILL, route_to_encoder=True)) as prefill,
        running(model, mode=DisaggregationMode.DECODE) as decode,
    ):  # fmt: skip
        encoder = ReferenceEncoder(model, MediaOptions(mode=DisaggregationMode.ENCODE))
        await encoder.start(1)
        for number, picture in enumerate((PICTURE, OTHER, *ALIKE)):
            request = body(picture)
            async with aclosing(encoder.generate(request, mock_context())) as stream:
                (last,) = [chunk async for chunk in stream]
            first = await collect(prefill, {**request, "encoder_result": last["encoder_result"]})
            result = {"disaggregated_params": first[-1]["disaggregated_params"]}
            answer = await collect(decode, {**request, "multi_modal_data": None, "prefill_result": result})
            assert said(answer) == said(await collect(whole, request))
            assert cached(answer) == (4 if number else 0)
        await encoder.cleanup()


async def test_penalties_and_log_probabilities_know_of_words_only(model: Path) -> None:
    options = {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
    async with running(model) as engine:
        assert len(said(await collect(engine, body(PICTURE, sampling_options=options)))) == 8
        with pytest.raises(InvalidArgument, match="prompt_logprobs"):
            await collect(engine, body(PICTURE, output_options={"prompt_logprobs": 1}))
        with pytest.raises(InvalidArgument, match="0 to 352"):
            await collect(engine, body(tokens=[5, VOCABULARY + IMAGE_TOKENS * CODES]))
        assert len(said(await collect(engine, body(tokens=[5, IMAGE_TOKEN, 6])))) == 8


@each_case(
    ("changes", "wrong"),
    [
        ({"codes.bias": None}, "codes.bias is missing"),
        ({"hidden.bias": np.zeros(5)}, r"hidden.bias has the shape \[5\]"),
        ({"embeddings.weight": np.zeros((3, 32))}, "embeddings.weight must have the shape"),
        ({"stray": np.zeros((3, 32))}, "there is no place for stray"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_the_name_of_the_tensor(
    tmp_path: Path, changes: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(InvalidArgument, match=wrong):
        load_core(write_seeing(tmp_path / "model", **changes), SMALL)


def test_the_codes_stand_behind_the_vocabulary(model: Path, tmp_path: Path) -> None:
    assert read_model_config(model).known_tokens == VOCABULARY + IMAGE_TOKENS * CODES
    directory = write_seeing(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    for wrong in ({"image_token_id": -1}, {"vision_config": {"model_type": "picture_codes", "first_token_id": 33}}):
        (directory / "config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(InvalidArgument, match=r"image_token_id|first_token_id"):
            read_model_config(directory)


async def test_weights_with_another_vision_are_another_model(model: Path, tmp_path: Path) -> None:
    other = write_seeing(tmp_path / "other", **dict[str, Any]({"codes.bias": np.ones(IMAGE_TOKENS * CODES)}))
    async with running(model) as engine:
        answer = await engine.engine_update("update_weights_from_disk", {"model_path": str(other)})
    assert answer["status"] == "error"
    assert "vision differ" in str(answer)


def test_the_same_pixels_in_another_file_are_the_same_codes(sight: PictureCodes) -> None:
    pixels = [[(200, 10, 10)] * 8 for _ in range(8)]
    assert sight.tokens(png(pixels)) == sight.tokens(plain_png((200, 10, 10)))
