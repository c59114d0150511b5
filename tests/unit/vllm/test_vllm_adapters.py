"""LoRA adapters of vLLM: loads and unloads, capacities, and what requests that run keep."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.protocol.lora import lora_name_to_id
from dynamo.vllm.adapters import AdapterLimits, VllmAdapters, adapter_limits
from support.cases import each_case


class Engine:
    """What is left of vLLM: the numbers that it holds, and how often its cache was emptied."""

    def __init__(self, *, capacity: int = 2) -> None:
        self.held: list[int] = []
        self.cleared = 0
        self.fails = False
        limits = AdapterLimits(capacity, "--max-cpu-loras", 8)
        self.adapters = VllmAdapters(self, limits, self.clear, lambda *parts: parts)

    async def add_lora(self, request: tuple[str, int, str]) -> bool:
        if self.fails:
            raise RuntimeError("no such weights")
        self.held.append(request[1])
        return True

    async def remove_lora(self, number: int) -> bool:
        self.held.remove(number)
        return True

    async def clear(self) -> None:
        self.cleared += 1


class Place:
    """A serving endpoint with a base model."""

    def __init__(self) -> None:
        self.cards: dict[str | None, dict[str, Any]] = {None: {"display_name": "demo", "slug": "demo", "aliases": []}}

    async def published_model(self, suffix: str | None) -> dict[str, Any] | None:
        return self.cards.get(suffix)

    async def publish_model(self, record: dict[str, Any], suffix: str | None) -> None:
        self.cards[suffix] = record

    async def withdraw_model(self, suffix: str | None) -> None:
        self.cards.pop(suffix, None)


def write(directory: Path, rank: Any = 4, weights: bytes = b"x") -> str:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory)


async def test_an_adapter_is_a_model_until_it_is_unloaded(tmp_path: Path) -> None:
    engine: Any = Engine()
    place = Place()
    engine.adapters.endpoint = place
    path = write(tmp_path / "a")
    for _ in range(2):  # the second time nothing happens
        assert await engine.adapters.load_lora({"lora_name": "A", "lora_path": path}) == {
            "lora_name": "A", "lora_path": path, "rank": 4,
        }  # fmt: skip
    assert engine.held == [lora_name_to_id("A")]
    assert place.cards["a"] == {"display_name": "A", "slug": "a", "lora": {"name": "A"}}
    adapter = engine.adapters.of({"routing": {"lora_name": "A"}})
    assert adapter is engine.adapters.of({"model": "A"})
    with engine.adapters.used(adapter) as request:
        assert request == ("A", lora_name_to_id("A"), path)
    await engine.adapters.unload_lora({"lora_name": "A"})
    assert (engine.held, list(place.cards), engine.adapters.count) == ([], [None], 0)


@each_case("request_", [{}, {"model": "demo"}, {"routing": {"lora_name": ""}}, {"routing": None}])
def test_a_request_without_an_adapter_is_the_base_models(request_: dict[str, Any]) -> None:
    engine = Engine()
    assert engine.adapters.of(request_) is None
    with engine.adapters.used(None) as found:
        assert found is None


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    with pytest.raises(WorkerUnavailable, match=r"routing\.lora_name is 'A'"):
        Engine().adapters.of({"routing": {"lora_name": "A"}})


async def test_a_request_that_runs_keeps_its_adapter_and_its_place(tmp_path: Path) -> None:
    engine = Engine(capacity=1)
    path = write(tmp_path / "a")
    await engine.adapters.load_lora({"lora_name": "A", "lora_path": path})
    with engine.adapters.used(engine.adapters.of({"model": "A"})):
        await engine.adapters.unload_lora({"lora_name": "A"})
        assert engine.held == [lora_name_to_id("A")]
        with pytest.raises(InvalidArgument, match="1 requests still use it"):
            await engine.adapters.load_lora({"lora_name": "A", "lora_path": path})
        with pytest.raises(InvalidArgument, match="at most --max-cpu-loras 1"):
            await engine.adapters.load_lora({"lora_name": "B", "lora_path": path})
    await engine.adapters._background.wait()
    assert (engine.held, engine.adapters.count) == ([], 0)


async def test_other_weights_under_a_former_name_find_an_empty_cache(tmp_path: Path) -> None:
    engine = Engine()
    for directory, cleared in (("a", 0), ("a", 0), ("b", 1), ("b", 1)):
        await engine.adapters.load_lora({"lora_name": "A", "lora_path": write_once(tmp_path / directory)})
        assert engine.cleared == cleared
        await engine.adapters.unload_lora({"lora_name": "A"})


def write_once(directory: Path) -> str:
    return str(directory) if directory.exists() else write(directory)


async def test_a_name_that_cannot_be_published_is_not_loaded(tmp_path: Path) -> None:
    engine: Any = Engine()
    place = Place()
    engine.adapters.endpoint = place
    path = write(tmp_path / "a")
    with pytest.raises(InvalidArgument, match="too much like another model's name"):
        await engine.adapters.load_lora({"lora_name": "Demo", "lora_path": path})
    assert (engine.held, engine.adapters.count) == ([], 0)


async def test_what_vllm_refuses_is_not_loaded(tmp_path: Path) -> None:
    engine = Engine()
    engine.fails = True
    with pytest.raises(InvalidArgument, match="no such weights"):
        await engine.adapters.load_lora({"lora_name": "A", "lora_path": write(tmp_path / "a")})
    assert engine.adapters.count == 0


@each_case(
    "rank, named",
    [(0, "r must be a positive integer"), ("4", "r must be a positive integer"), (9, "--max-lora-rank 8")],
)
async def test_a_rank_that_does_not_fit_is_named(tmp_path: Path, rank: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        await Engine().adapters.load_lora({"lora_name": "A", "lora_path": write(tmp_path / "a", rank)})


async def test_another_directory_or_none_is_named(tmp_path: Path) -> None:
    engine = Engine()
    await engine.adapters.load_lora({"lora_name": "A", "lora_path": write(tmp_path / "a")})
    with pytest.raises(InvalidArgument, match="unload it first"):
        await engine.adapters.load_lora({"lora_name": "A", "lora_path": write(tmp_path / "b")})
    with pytest.raises(InvalidArgument, match=r"adapter_config\.json cannot be read"):
        await engine.adapters.load_lora({"lora_name": "B", "lora_path": str(tmp_path / "nowhere")})
    with pytest.raises(InvalidArgument, match="no such adapter is loaded"):
        await engine.adapters.unload_lora({"lora_name": "B"})


async def test_a_worker_without_adapters_names_the_flag(tmp_path: Path) -> None:
    engine = Engine()
    adapters = VllmAdapters(engine, None, engine.clear)
    with pytest.raises(InvalidArgument, match="--enable-lora"):
        await adapters.load_lora({"lora_name": "A", "lora_path": write(tmp_path / "a")})


def test_on_a_cpu_one_slot_stays_empty_and_is_not_counted() -> None:
    options = SimpleNamespace(max_loras=3, max_cpu_loras=8, max_lora_rank=16)
    assert adapter_limits(options, is_cpu=False) == AdapterLimits(8, "--max-cpu-loras", 16)
    assert adapter_limits(options, is_cpu=True) == AdapterLimits(2, "--max-loras", 16)
    assert adapter_limits(None, is_cpu=True) is None
