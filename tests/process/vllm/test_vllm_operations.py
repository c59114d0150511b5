"""What an operator does with a running vLLM: adapters, weights, profiles. One worker, which serves all tests of this file."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from dynamo.errors import WorkerUnavailable
from dynamo.reference.engine import ReferenceEngine
from dynamo.reference.tensor_files import read_tensors
from dynamo.runtime.calls.context import Context
from support.adapters import write_adapter
from support.cases import each_case
from support.demo_model import FILES, sums
from support.processes import wait
from support.vllm_cluster import MODEL, PYTHON, WHY_NOT, VllmCluster, serve, tokens_of

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason=WHY_NOT),
    pytest.mark.timeout(1200),
]

PROMPTS = sums(6)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, profiles: Path) -> Iterator[VllmCluster]:
    flags = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    profiler = f'{{"profiler": "torch", "torch_profiler_dir": "{profiles}"}}'
    canary = {"DYN_HEALTH_CHECK_ENABLED": "true", "DYN_CANARY_WAIT_TIME": "1"}
    with serve(tmp_path_factory.mktemp("operations")) as cluster:
        cluster.start("a", *flags, "--profiler-config", profiler, **canary)
        cluster.wait_serving()
        yield cluster


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of adapters: one, two, wide."""
    root = tmp_path_factory.mktemp("adapters")
    tensors = {name: tensor for file in FILES.glob("*.safetensors") for name, tensor in read_tensors(file).items()}
    for name, rank, seed in (("one", 4, 1), ("two", 8, 2), ("wide", 16, 3)):
        write_adapter(root / name, tensors, rank=rank, seed=seed, lora_alpha=4)
    return root


def body(prompt: list[int], lora_name: str | None = None) -> dict[str, Any]:
    return {
        "token_ids": prompt,
        "stop_conditions": {"max_tokens": 24, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "routing": {"lora_name": lora_name} if lora_name else {},
    }


async def expected_of(adapters: Path, names: list[str | None]) -> list[list[int]]:
    """What the reference engine answers to the prompts, with an adapter or none for each."""
    engine = ReferenceEngine(FILES)
    await engine.start(0)
    try:
        for adapter in {name for name in names if name}:
            loaded = await engine.engine_update(
                "load_lora", {"lora_name": adapter, "lora_path": str(adapters / adapter)}
            )
            assert loaded["status"] == "ok", loaded
        found = []
        for prompt, name in zip(PROMPTS, names, strict=True):
            tokens: list[int] = []
            async for chunk in engine.generate(body(prompt, name), Context()):  # type: ignore[arg-type]
                tokens += chunk["token_ids"]
            found.append(tokens)
        return found
    finally:
        await engine.cleanup()


async def answers_of(served: VllmCluster, names: list[str | None]) -> list[list[int]]:
    async with served.straight() as client:
        bodies = [body(prompt, name) for prompt, name in zip(PROMPTS, names, strict=True)]
        return await asyncio.gather(*(tokens_of(client, each) for each in bodies))


def update(served: VllmCluster, name: str, **members: Any) -> dict[str, Any]:
    return served.post("a", f"/engine/update/{name}", members)


async def test_requests_with_different_adapters_and_none_answer_as_the_reference_engine(
    served: VllmCluster, adapters: Path
) -> None:
    for name in ("one", "two"):
        loaded = update(served, "load_lora", lora_name=name, lora_path=str(adapters / name))
        assert loaded["status"] == "ok", loaded
    wait(lambda: served.frontend.models() == {MODEL, "one", "two"}, lambda: f"both in {served.frontend.models()}")
    names: list[str | None] = [None, "one", "two", "one", None, "two"]
    found = await answers_of(served, names)
    assert found == await expected_of(adapters, names)
    assert found != await answers_of(served, [None] * 6)
    listed = update(served, "list_loras")
    assert ([entry["lora_name"] for entry in listed["loras"]], listed["count"]) == (["one", "two"], 2)


def test_a_client_asks_for_an_adapter_by_its_model_name(served: VllmCluster) -> None:
    plain, adapted = (
        served.ask("What is 27 + 15?", model=name, max_tokens=24, extra_body={"ignore_eos": True}).choices[0].message
        for name in (MODEL, "one")
    )
    assert plain.content != adapted.content


@each_case(
    "members, named",
    [
        ({"lora_name": "three", "lora_path": "one"}, "at most --max-loras 2"),
        ({"lora_name": "one", "lora_path": "two"}, "unload it first"),
        ({"lora_name": "three"}, "lora_path must be"),
        ({"lora_name": "three", "lora_paths": "one"}, "unknown field 'lora_paths'"),
    ],
)
def test_a_load_that_cannot_be_is_refused_by_name(
    served: VllmCluster, adapters: Path, members: dict[str, Any], named: str
) -> None:
    if "lora_path" in members:
        members = members | {"lora_path": str(adapters / members["lora_path"])}
    answer = update(served, "load_lora", **members)
    assert answer["status"] == "error"
    assert named in answer["message"]


async def test_an_adapter_that_is_not_there_is_never_the_base_model(served: VllmCluster, adapters: Path) -> None:
    async with served.straight() as client:
        with pytest.raises(WorkerUnavailable, match=r"routing\.lora_name is 'three'"):  # another worker may have it
            await tokens_of(client, body(PROMPTS[0], "three"))
        long = body(PROMPTS[0], "two") | {"stop_conditions": {"max_tokens": 1500, "ignore_eos": True}}
        running = asyncio.create_task(tokens_of(client, long))
        wait_running = served.workers["a"].metric
        while wait_running("vllm:num_requests_running") == 0:
            await asyncio.sleep(0.01)
        assert update(served, "unload_lora", lora_name="two")["status"] == "ok"
        with pytest.raises(WorkerUnavailable, match="no such adapter is loaded"):
            await tokens_of(client, body(PROMPTS[0], "two"))
        assert len(await running) == 1500  # what ran finishes with it
        wide = {"lora_name": "wide", "lora_path": str(adapters / "wide")}  # its turn comes once the other one is gone
        wait(
            lambda: "--max-lora-rank 8" in update(served, "load_lora", **wide)["message"],
            lambda: "the adapter that was unloaded to be gone",
        )
        broken = shutil.copytree(adapters / "one", adapters / "broken")
        (broken / "adapter_model.safetensors").write_bytes(b"nothing")
        refused = update(served, "load_lora", lora_name="broken", lora_path=str(broken))
        assert "vLLM refuses the adapter" in refused["message"]
        # Other weights under a name that was used: nothing of the former is left in the cache.
        again = update(served, "load_lora", lora_name="two", lora_path=str(adapters / "one"))
        assert again["status"] == "ok", again
    two_is_one: list[str | None] = ["two"] * 6
    assert await answers_of(served, two_is_one) == await answers_of(served, ["one"] * 6)
    for name in ("one", "two"):
        assert update(served, "unload_lora", lora_name=name)["status"] == "ok"
    wait(lambda: served.frontend.models() == {MODEL}, lambda: f"one in {served.frontend.models()}")


def altered(target: Path, change: Callable[[str, Any], Any]) -> Path:
    """A copy of the demonstration model with other tensors."""
    shutil.copytree(FILES, target)
    for file in target.glob("*.safetensors"):
        save_file({name: change(name, tensor) for name, tensor in read_tensors(file).items()}, file)
    return target


async def test_weights_from_disk_answer_and_the_former_ones_again(served: VllmCluster, tmp_path: Path) -> None:
    before = await answers_of(served, [None] * 6)
    other = altered(tmp_path / "other", lambda name, tensor: tensor * 0.3 if "mlp" in name else tensor)
    running = asyncio.create_task(answers_of(served, [None] * 6))
    updated = await asyncio.to_thread(update, served, "update_weights_from_disk", model_path=str(other))
    assert updated["status"] == "ok", updated
    assert all(len(tokens) == 24 for tokens in await running)
    engine = ReferenceEngine(other)
    await engine.start(0)
    expected: list[list[int]] = []
    for prompt in PROMPTS:
        expected.append([])
        async for chunk in engine.generate(body(prompt), Context()):  # type: ignore[arg-type]
            expected[-1] += chunk["token_ids"]
    await engine.cleanup()
    assert await answers_of(served, [None] * 6) == expected != before
    narrow = altered(tmp_path / "narrow", lambda name, tensor: tensor[..., :-1] if "down" in name else tensor)
    refused = update(served, "update_weights_from_disk", model_path=str(narrow))
    assert (refused["status"], "has the shape" in refused["message"]) == ("error", True)
    assert update(served, "update_weights_from_disk", model_path=str(FILES))["status"] == "ok"
    assert await answers_of(served, [None] * 6) == before


def test_a_profile_is_written(served: VllmCluster, profiles: Path) -> None:
    assert served.post("a", "/engine/control/start_profile", {})["status"] == "ok"
    assert served.ask("What is 27 + 15?").choices[0].message.content == "42"
    assert served.post("a", "/engine/control/stop_profile", {})["status"] == "ok"
    wait(lambda: any(profiles.iterdir()), lambda: f"a file in {profiles}")


def test_the_canary_asks_the_engine(served: VllmCluster) -> None:
    worker = served.workers["a"]
    before = worker.metric("vllm:request_success_total")
    wait(lambda: worker.metric("vllm:request_success_total") > before, lambda: "a canary of an idle worker")
