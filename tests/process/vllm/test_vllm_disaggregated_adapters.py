"""Adapters where prefill and decode are two vLLMs: each half of a request uses the adapter, and so do the blocks."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from openai import APIStatusError

from dynamo.reference.engine import ReferenceEngine
from dynamo.reference.tensor_files import read_tensors
from dynamo.runtime.calls.context import Context
from support.adapters import write_adapter
from support.demo_model import FILES, chat_prompts, detokenized
from support.leftovers import errors_of
from support.processes import wait
from support.vllm_cluster import MODEL, PYTHON, WHY_NOT, VllmCluster, serve

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason=WHY_NOT),
    pytest.mark.timeout(1800),
]

QUESTIONS: Final = [
    f"Add {number} and {100 - number}, then sort 5 3 {number % 7} 9, then count to ten." for number in range(6)
]
TOKENS: Final = 24
EXTERNAL: Final = "vllm:external_prefix_cache_hits_total"
FLAGS: Final = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    tensors = {name: tensor for file in FILES.glob("*.safetensors") for name, tensor in read_tensors(file).items()}
    for name, rank, seed in (("one", 4, 1), ("two", 8, 2)):
        write_adapter(root / name, tensors, rank=rank, seed=seed, lora_alpha=4)
    return root


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    if subprocess.run([PYTHON, "-c", "import nixl._api"], capture_output=True).returncode:
        pytest.skip("NIXL is not installed beside vLLM (docs/engines.md)")
    with serve(tmp_path_factory.mktemp("both")) as cluster:
        for mode, kind, component in (
            ("prefill", "kv_producer", ("--component", "prefill")),
            ("decode", "kv_consumer", ()),
        ):
            transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": kind})
            own = ("--disaggregation-mode", mode, *component, "--kv-transfer-config", transfer)
            cluster.start(mode, *own, *FLAGS)
        cluster.wait_serving()
        yield cluster


def load(served: VllmCluster, worker: str, name: str, adapters: Path) -> None:
    body = {"lora_name": name, "lora_path": str(adapters / name)}
    loaded = served.post(worker, "/engine/update/load_lora", body)
    assert loaded["status"] == "ok", loaded


async def expected_of(adapters: Path, names: list[str]) -> list[str]:
    """What the reference engine answers to the questions, each to a model or an adapter."""
    engine = ReferenceEngine(FILES)
    await engine.start(0)
    try:
        for name in {*names} - {MODEL}:
            loaded = await engine.engine_update("load_lora", {"lora_name": name, "lora_path": str(adapters / name)})
            assert loaded["status"] == "ok", loaded
        found = []
        for prompt, name in zip(chat_prompts(*QUESTIONS), names, strict=True):
            body: dict[str, Any] = {
                "token_ids": prompt,
                "stop_conditions": {"max_tokens": TOKENS, "ignore_eos": True},
                "sampling_options": {"temperature": 0.0},
                "routing": {} if name == MODEL else {"lora_name": name},
            }
            tokens: list[int] = []
            async for chunk in engine.generate(body, Context()):  # type: ignore[arg-type]
                tokens += chunk["token_ids"]
            found.append(detokenized(tokens))
        return found
    finally:
        await engine.cleanup()


def answer(served: VllmCluster, name: str, question: str) -> str:
    more = {"ignore_eos": True, "nvext": {}}
    found = served.ask(question, model=name, temperature=0, max_tokens=TOKENS, extra_body=more)
    content: str = found.choices[0].message.content
    return content


async def test_both_halves_of_a_request_use_its_adapter(served: VllmCluster, adapters: Path) -> None:
    for worker in ("prefill", "decode"):
        load(served, worker, "one", adapters)
    wait(lambda: served.frontend.models() == {MODEL, "one"}, lambda: f"the adapter in {served.frontend.models()}")
    before = served.workers["decode"].metric(EXTERNAL)
    names = [MODEL, "one", MODEL, "one", "one", MODEL]
    found = await asyncio.gather(
        *(asyncio.to_thread(answer, served, name, text) for name, text in zip(names, QUESTIONS, strict=True))
    )
    assert found == await expected_of(adapters, names)
    assert found != await expected_of(adapters, [MODEL] * 6)
    assert served.workers["decode"].metric(EXTERNAL) - before > len(QUESTIONS) * 20


async def test_blocks_of_an_adapter_are_never_those_of_the_model(served: VllmCluster, adapters: Path) -> None:
    """The same prompt for both, one after the other: every prompt is in a cache by now."""
    for names in (["one"] * 6, [MODEL] * 6):
        found = [
            await asyncio.to_thread(answer, served, name, text) for name, text in zip(names, QUESTIONS, strict=True)
        ]
        assert found == await expected_of(adapters, names)


async def test_an_adapter_is_served_once_both_have_it(served: VllmCluster, adapters: Path) -> None:
    load(served, "decode", "two", adapters)
    log = "model two is served in namespace"
    wait(lambda: log in served.frontend.log, lambda: f"{log!r} in {served.frontend.log}")
    assert served.frontend.models() == {MODEL, "one"}
    with pytest.raises(APIStatusError) as caught:
        await asyncio.to_thread(answer, served, "two", QUESTIONS[0])
    assert caught.value.status_code in (404, 503)
    load(served, "prefill", "two", adapters)
    wait(lambda: "two" in served.frontend.models(), lambda: f"the adapter in {served.frontend.models()}")
    found = [await asyncio.to_thread(answer, served, "two", text) for text in QUESTIONS]
    assert found == await expected_of(adapters, ["two"] * 6)


def test_an_adapter_that_is_unloaded_is_gone_at_both(served: VllmCluster) -> None:
    for worker in ("prefill", "decode"):
        assert served.post(worker, "/engine/update/unload_lora", {"lora_name": "two"})["status"] == "ok"
    wait(lambda: "two" not in served.frontend.models(), lambda: f"its end in {served.frontend.models()}")

    def status() -> int:
        with pytest.raises(APIStatusError) as caught:
            answer(served, "two", QUESTIONS[0])
        return caught.value.status_code

    wait(lambda: status() == 404, lambda: "a 404")  # while one of the two is still there it is a 503
    for process in served.workers.values():
        assert not errors_of(process.log)
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        wait(lambda name=name: served.workers["prefill"].metric(name) == 0, lambda name=name: f"{name} to be 0")  # type: ignore[misc]
