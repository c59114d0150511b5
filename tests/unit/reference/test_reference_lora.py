"""LoRA adapters: an adapter answers as the model it amounts to, and only for those who asked for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.reference.config import read_model_config
from dynamo.reference.core import Core, Emission
from dynamo.reference.lora import load_adapter
from dynamo.reference.request import read_request
from support.adapters import ALL, write_adapter

CoreOf = Callable[..., Core]
PROMPTS = [np.random.default_rng(seed).integers(0, 96, 3 + 7 * seed).tolist() for seed in range(6)]


def request(tokens: list[int], lora_name: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "token_ids": tokens,
        "stop_conditions": {"max_tokens": 12, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "routing": {"lora_name": lora_name} if lora_name else {},
        **more,
    }


def answers(core: Core, bodies: list[dict[str, Any]]) -> list[list[int]]:
    jobs = [read_request(body, core.limits, adapters=core.adapters) for body in bodies]
    choices = [core.add(job)[0] for job in jobs]
    tokens: dict[Any, list[int]] = {choice: [] for choice in choices}
    while not core.is_idle:
        for emission in core.step():
            assert isinstance(emission, Emission)
            tokens[emission.choice].append(emission.drawn.token)
    assert core.pool.held == 0
    return [tokens[choice] for choice in choices]


@pytest.fixture
def merged_answers(
    save_model: Callable[..., Path], configs: dict[str, dict[str, Any]], tmp_path: Path
) -> Callable[..., list[list[int]]]:
    """What a model with an adapter merged into its weights answers."""
    from dynamo.reference.loading import Options, load_core

    def answer(name: str, tensors: dict[str, np.ndarray]) -> list[list[int]]:
        directory = save_model(tmp_path / f"merged-{name}", configs[name], tensors)
        return answers(load_core(directory, Options(block_size=4, kv_cache_mb=8)), [request(p) for p in PROMPTS])

    return answer


@pytest.mark.parametrize("name", ["llama", "llama-biased-linear", "qwen3"])
@pytest.mark.parametrize(
    ("parts", "options"),
    [(ALL, {}), (("q", "v"), {"rank": 8}), (("k", "up", "down"), {"use_rslora": True, "lora_alpha": 3})],
)
def test_an_adapter_answers_as_the_model_it_amounts_to(
    name: str,
    parts: tuple[str, ...],
    options: dict[str, Any],
    core_of: CoreOf,
    configs: dict[str, dict[str, Any]],
    tensors_of: Callable[..., dict[str, np.ndarray]],
    merged_answers: Callable[..., list[list[int]]],
    tmp_path: Path,
) -> None:
    merged = write_adapter(tmp_path / "adapter", tensors_of(configs[name]), parts=parts, **options)
    core = core_of(name)
    core.add_adapter(load_adapter("mine", tmp_path / "adapter", core.model.config))
    found = answers(core, [request(prompt, "mine") for prompt in PROMPTS])
    assert found == merged_answers(name, merged)
    assert found != answers(core_of(name), [request(prompt) for prompt in PROMPTS])


def test_a_step_serves_several_adapters_and_none_and_they_share_no_block(
    core_of: CoreOf,
    configs: dict[str, dict[str, Any]],
    tensors_of: Callable[..., dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    names = [None, "one", "two"]
    adapters = []
    for seed, name in enumerate(names[1:]):
        write_adapter(tmp_path / str(name), tensors_of(configs["llama"]), seed=seed)
        adapters.append((name, tmp_path / str(name)))

    def core() -> Core:
        built = core_of(step_tokens=24, sequences=24)
        for name, path in adapters:
            built.add_adapter(load_adapter(str(name), path, built.model.config))
        return built

    alone = [answers(core(), [request(prompt, name)])[0] for prompt in PROMPTS for name in names]
    assert len({tuple(alone[3 * number + kind]) for number in range(6) for kind in range(3)}) == 18
    shared = core()
    for _ in range(2):  # the second time most prompts are found in the cache, each under its adapter
        assert answers(shared, [request(prompt, name) for prompt in PROMPTS for name in names]) == alone
    assert shared.hit_rate is not None
    assert shared.hit_rate > 0.3


def test_another_adapter_of_the_same_name_finds_nothing_of_the_first(
    core_of: CoreOf,
    configs: dict[str, dict[str, Any]],
    tensors_of: Callable[..., dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    core, config = core_of(), configs["llama"]
    body = request(PROMPTS[5], "mine")
    said = []
    for seed in range(2):
        write_adapter(tmp_path / str(seed), tensors_of(config), seed=seed)
        core.add_adapter(load_adapter("mine", tmp_path / str(seed), core.model.config))
        said.append(answers(core, [body])[0])
    fresh = core_of()
    fresh.add_adapter(load_adapter("mine", tmp_path / "1", fresh.model.config))
    assert answers(fresh, [body])[0] == said[1] != said[0]


def test_a_stream_finishes_with_the_adapter_it_began_with_and_shares_nothing_more(
    core_of: CoreOf,
    configs: dict[str, dict[str, Any]],
    tensors_of: Callable[..., dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    core = core_of()
    write_adapter(tmp_path / "a", tensors_of(configs["llama"]))
    core.add_adapter(load_adapter("mine", tmp_path / "a", core.model.config))
    body = request(PROMPTS[3], "mine")
    (whole,) = answers(core, [body])
    job = read_request(body, core.limits, adapters=core.adapters)
    choice = core.add(job)[0]
    core.step()
    core.remove_adapter("mine")
    late = core.add(job)[0]  # read while the adapter was there
    tokens: dict[Any, list[int]] = {choice: [whole[0]], late: []}
    while not core.is_idle:
        for emission in core.step():
            assert isinstance(emission, Emission)
            tokens[emission.choice].append(emission.drawn.token)
    assert tokens == {choice: whole, late: whole}
    assert core.pool.clear() == 0


def test_a_request_names_its_adapter_by_route_or_by_model(
    core_of: CoreOf,
    tmp_path: Path,
    configs: dict[str, dict[str, Any]],
    tensors_of: Callable[..., dict[str, np.ndarray]],
) -> None:
    core = core_of()
    write_adapter(tmp_path / "a", tensors_of(configs["llama"]))
    core.add_adapter(load_adapter("mine", tmp_path / "a", core.model.config))
    routed, named = answers(core, [request(PROMPTS[1], "mine"), request(PROMPTS[1], model="mine")])
    assert routed == named
    with pytest.raises(WorkerUnavailable, match=r"routing\.lora_name is 'other'"):
        read_request(request([1], "other"), core.limits, adapters=core.adapters)


def broken(change: str, directory: Path, tensors: dict[str, np.ndarray]) -> None:
    write_adapter(directory, tensors)
    config = json.loads((directory / "adapter_config.json").read_text())
    match change:
        case "no file":
            (directory / "adapter_model.safetensors").unlink()
        case "no config":
            (directory / "adapter_config.json").unlink()
        case "rank":
            config["r"] = 0
        case "alpha":
            config["lora_alpha"] = "big"
        case "dora":
            config["use_dora"] = True
        case "pattern":
            config["alpha_pattern"] = {"q_proj": 3}
        case "shape":
            write_adapter(directory, {"model.layers.0.self_attn.q_proj.weight": np.zeros((8, 8), np.float32)})
        case "half":
            save_file(
                {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((4, 32), np.float32)},
                directory / "adapter_model.safetensors",
            )
        case "stray":
            save_file(
                {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 32), np.float32)},
                directory / "adapter_model.safetensors",
            )
        case "layer":
            write_adapter(directory, {"model.layers.7.self_attn.q_proj.weight": np.zeros((32, 32), np.float32)})
        case "nan":
            name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
            both = {
                name.format("A"): np.full((4, 32), np.nan, np.float32),
                name.format("B"): np.zeros((32, 4), np.float32),
            }
            save_file(both, directory / "adapter_model.safetensors")
    if change not in ("no config", "shape", "layer"):
        (directory / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no file", "there is no file .*adapter_model.safetensors"),
        ("no config", "adapter_config.json cannot be read"),
        ("rank", "r must be an integer"),
        ("alpha", "lora_alpha must be a number"),
        ("dora", "use_dora must be false"),
        ("pattern", "alpha_pattern must be"),
        ("shape", r"q_proj has the shapes \[4, 8\] and \[8, 4\], the model needs"),
        ("half", "only one of lora_A and lora_B"),
        ("stray", "there is no place for base_model.model.lm_head"),
        ("layer", "there is no place for .*layers.7"),
        ("nan", "not finite"),
    ],
)
def test_an_adapter_that_cannot_be_used_says_why(
    change: str,
    said: str,
    models: dict[str, Path],
    configs: dict[str, dict[str, Any]],
    tensors_of: Callable[..., dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    broken(change, tmp_path / "a", tensors_of(configs["llama"]))
    with pytest.raises(InvalidArgument, match=said):
        load_adapter("mine", tmp_path / "a", read_model_config(models["llama"]))
