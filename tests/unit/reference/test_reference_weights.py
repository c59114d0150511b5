"""A model directory: every supported form is read to the same numbers, every broken one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.reference.config import RopeScaling, read_model_config
from dynamo.reference.loading import Options, load_core
from dynamo.reference.tensor_files import open_tensors
from dynamo.reference.weights import load_weights
from support.cases import each_case

Save = Callable[..., Path]
Tensors = Callable[..., dict[str, np.ndarray]]


@pytest.fixture
def llama(configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return dict(configs["llama"])


def head_of(directory: Path) -> np.ndarray:
    return load_weights(directory, read_model_config(directory)).head


def save_bf16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """The upper halves, under the format's own header."""
    halves = {name: (tensor.view(np.uint32) >> 16).astype(np.uint16) for name, tensor in tensors.items()}
    raw = save(halves)
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(b'"U16"', b'"BF16"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def test_bf16_and_f16_are_widened(tmp_path: Path, llama: dict[str, Any], save_model: Save, tensors_of: Tensors) -> None:
    tensors = tensors_of(llama)
    exact = head_of(save_model(tmp_path / "f32", llama))
    half = head_of(save_model(tmp_path / "f16", llama, {name: t.astype(np.float16) for name, t in tensors.items()}))
    brain = save_model(tmp_path / "bf16", llama)
    save_bf16(brain / "model.safetensors", tensors)
    assert half.dtype == head_of(brain).dtype == np.float32
    assert np.array_equal(half, exact.astype(np.float16))
    assert np.array_equal(head_of(brain), (exact.view(np.uint32) >> 16 << 16).view(np.float32))


def test_shards_are_read_through_their_index(
    tmp_path: Path, llama: dict[str, Any], save_model: Save, tensors_of: Tensors
) -> None:
    whole, sharded = save_model(tmp_path / "whole", llama), save_model(tmp_path / "sharded", llama)
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors_of(llama))
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in tensors_of(llama).items() if weight_map[n] == shard}, sharded / shard)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert np.array_equal(head_of(sharded), head_of(whole))
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(InvalidArgument, match=r"names model-1\.safetensors, which does not exist"):
        head_of(sharded)


def test_an_index_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(InvalidArgument, match="not a file beside it"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures must be one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures must be one of"),
        ({"hidden_act": "gelu"}, "hidden_act must be"),
        ({"use_sliding_window": True}, "use_sliding_window must be false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": "x"}, "vocab_size must be an integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type must be default, linear or llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a number"),
        ({"eos_token_id": 97}, "eos_token_id must be below vocab_size"),
        ({"eos_token_id": "x"}, "bos_token_id and eos_token_id must be integers"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_field(
    change: dict[str, Any], message: str, tmp_path: Path, llama: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**llama, **change}))
    with pytest.raises(InvalidArgument, match=rf"config\.json: {message}"):
        read_model_config(tmp_path)


def test_the_newer_place_of_rope_and_the_generation_config_are_read(tmp_path: Path, llama: dict[str, Any]) -> None:
    del llama["rope_theta"]
    llama["rope_parameters"] = {"rope_type": "linear", "factor": 3, "rope_theta": 77.0}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4], "bos_token_id": null}')
    config = read_model_config(tmp_path)
    assert (config.rope_theta, config.rope_scaling) == (77.0, RopeScaling("linear", 3.0))
    assert (config.eos_token_ids, config.bos_token_id) == ((3, 4), 1)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_missing_directory_config_or_model_is_named(tmp_path: Path, llama: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="there is no directory"):
        read_model_config(tmp_path / "none")
    with pytest.raises(InvalidArgument, match=r"has no config\.json; give the directory of a model"):
        read_model_config(tmp_path)
    with pytest.raises(InvalidArgument, match=r"neither model\.safetensors nor"):
        open_tensors(tmp_path)


def test_a_missing_or_misshapen_or_infinite_tensor_is_named(
    tmp_path: Path, llama: dict[str, Any], save_model: Save, tensors_of: Tensors
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = tensors_of(llama)
    for wrong, message in (
        (None, f"there is no tensor {name}"),
        (np.zeros((3, 2), np.float32), rf"{name} has the shape \[3, 2\]"),
        (np.full_like(tensors[name], np.nan), f"{name} holds values that are not finite"),
        (tensors[name].astype(np.float64), f"{name} is F64; supported are F32"),
    ):
        changed = {n: t for n, t in {**tensors, name: wrong}.items() if t is not None}
        directory = save_model(tmp_path, llama, changed)
        with pytest.raises(InvalidArgument, match=message):
            head_of(directory)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, llama: dict[str, Any], save_model: Save) -> None:
    directory = save_model(tmp_path, llama)
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 7, 8, 100, header_end - 1, header_end, header_end + 1, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(InvalidArgument, match=r"model\.safetensors"):
            head_of(directory)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
    ],
)
def test_a_broken_header_is_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(InvalidArgument, match=r"model\.safetensors"):
        open_tensors(tmp_path)


def test_too_little_memory_is_said_before_anything_is_read(models: dict[str, Path]) -> None:
    with pytest.raises(EngineShutdown, match=r"too little memory: the weights take .* --kv-cache-mb"):
        load_core(models["llama"], Options(), available_bytes=1000)


def test_a_context_that_the_cache_cannot_hold_is_refused_when_asked_for_and_cut_when_not(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture, tmp_path: Path, llama: dict[str, Any], save_model: Save
) -> None:
    directory = save_model(tmp_path, {**llama, "max_position_embeddings": 4096})
    with pytest.raises(InvalidArgument, match=r"--kv-cache-mb 2\b"):
        load_core(directory, Options(kv_cache_mb=1, context_length=4096))
    assert load_core(directory, Options(kv_cache_mb=2, context_length=4096)).limits.context_length == 4096
    core = load_core(directory, Options(kv_cache_mb=1))
    assert core.limits.context_length == core.pool.blocks * 16 < 4096
    assert "the context is cut from 4096" in caplog.text
    with pytest.raises(InvalidArgument, match="more than the model's 256"):
        load_core(models["llama"], Options(context_length=257))


@each_case("name", ["block_size", "kv_cache_mb", "context_length", "max_num_seqs"])
def test_options_name_the_flag_that_is_wrong(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--{name.replace('_', '-')} must be at least 1"):
        Options(**dict[str, Any]({name: 0}))
