"""What an operator does with running workers of llama.cpp and transformers: one worker each, behind a frontend."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.numpy import save_file

from dynamo.reference.engine import ReferenceEngine
from dynamo.reference.tensor_files import read_tensors
from dynamo.runtime.calls.context import Context
from support.demo_model import FILES, sums
from support.engine_cluster import EngineCase, ServedEngine, served_engine, tokens_of
from support.patience import PATIENCE_SECONDS
from support.processes import wait

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

CASES: Final = (
    EngineCase("llamacpp", "DYNAMO_LLAMACPP_PYTHON", ("--set", "cache_ram_mib=0"), is_gguf=True, workers=("a",)),
    EngineCase(
        "transformers",
        "DYNAMO_TRANSFORMERS_PYTHON",
        ("--kv-cache-mb", "64"),
        {"OMP_NUM_THREADS": "1"},
        workers=("a",),
    ),
)
WORDS: Final = f"Sort {' '.join(str(number * 37 % 100) for number in range(60))}."


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    case: EngineCase = request.param
    if not case.python:
        pytest.skip(case.why_not)
    with served_engine(case, tmp_path_factory.mktemp(case.name)) as engine:
        yield engine


def post(served: ServedEngine, route: str, **members: Any) -> tuple[int, dict[str, Any]]:
    """Send a body to the worker's status server."""
    port = served.workers["a"].system_port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("POST", f"/engine/{route}", json.dumps(members), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def done(served: ServedEngine, route: str, **members: Any) -> dict[str, Any]:
    status, answer = post(served, route, **members)
    assert (status, answer["status"] in ("ok", "success")) == (200, True), answer
    return answer


def test_a_paused_worker_is_not_ready_and_its_streams_wait(served: ServedEngine) -> None:
    whole = served.long(400)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.long, 400)
        wait(lambda: served.workers["a"].metric("dynamo_component_inflight_requests") == 1, lambda: "a stream")
        done(served, "control/pause_generation")
        model = served.workers["a"].model
        wait(lambda: served.frontend.workers(model) == 0, lambda: "a worker that is not ready")
        status, body = served.frontend.get(f"/v1/models/{model}/ready")
        found = json.loads(body)
        assert found["reason"] == "no namespace has all required worker types live"
        assert [each["reason"] for each in found["namespaces"].values()] == ["missing worker types: aggregated"]
        assert status == 503
        done(served, "control/pause_generation")  # again: nothing happens
        assert not running.done()
        done(served, "control/resume_generation")
        wait(lambda: served.frontend.workers(model) == 1, lambda: "a worker that is ready")
        assert running.result(PATIENCE_SECONDS * 2) == whole


def test_a_cleared_cache_has_no_prompt_left(served: ServedEngine) -> None:
    def cached() -> int:
        details = served.ask(WORDS, max_tokens=2, temperature=0).usage.prompt_tokens_details
        return details.cached_tokens if details is not None else 0

    cached()
    counts = served.case.name == "llamacpp"  # transformers does not report what its cache held
    assert (cached() > 0) is counts
    answer = done(served, "control/clear_kv_blocks")
    assert answer == {"status": "success", "message": "KV cache cleared"}
    assert cached() == 0


def test_what_the_engine_cannot_do_is_refused_with_the_reason(served: ServedEngine) -> None:
    status, answer = post(served, "control/sleep")
    assert (status, answer["status"]) == (200, "error")
    assert "has no call that gives its memory back" in answer["message"]
    assert post(served, "update/load_lora", lora_name="x")[1]["status"] == "error"
    assert "unknown field 'mode'" in post(served, "control/pause_generation", mode="keep")[1]["message"]
    assert served.frontend.workers(served.workers["a"].model) == 1  # it was refused before anything was touched
    assert post(served, "control/nonsense")[0] == 404


async def test_new_weights_answer_as_the_reference_engine_with_them(served: ServedEngine, tmp_path: Path) -> None:
    if served.case.name == "llamacpp":
        assert "start a worker with the other file" in post(served, "update/update_weights_from_disk")[1]["message"]
        return
    other = tmp_path / "other"
    other.mkdir()
    for file in FILES.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (other / file.name).write_bytes(file.read_bytes())
    for file in FILES.glob("*.safetensors"):
        changed = {name: each * (1.5 if "down_proj" in name else 1.0) for name, each in read_tensors(file).items()}
        save_file(changed, other / file.name, metadata={"format": "pt"})
    before = await answers_of(served)
    answer = await asyncio.to_thread(done, served, "update/update_weights_from_disk", model_path=str(other))
    assert answer["model_path"] == str(other)
    assert await answers_of(served) == await reference_answers(other) != before
    _, refused = await asyncio.to_thread(post, served, "update/update_weights_from_disk", model_path=str(tmp_path))
    assert "config.json" in refused["message"]
    await asyncio.to_thread(done, served, "update/update_weights_from_disk", model_path=str(FILES))
    assert await answers_of(served) == before


def body(prompt: list[int]) -> Any:
    stops = {"max_tokens": 16, "ignore_eos": True}
    return {"token_ids": prompt, "stop_conditions": stops, "sampling_options": {"temperature": 0.0}}


async def answers_of(served: ServedEngine) -> list[list[int]]:
    async with served.straight() as client:
        return await asyncio.gather(*(tokens_of(client, body(prompt)) for prompt in sums(4)))


async def reference_answers(directory: Path) -> list[list[int]]:
    engine = ReferenceEngine(directory)
    await engine.start(0)
    try:
        found = []
        for prompt in sums(4):
            tokens: list[int] = []
            async for chunk in engine.generate(body(prompt), Context()):
                tokens += chunk["token_ids"]
            found.append(tokens)
        return found
    finally:
        await engine.cleanup()


def test_a_profile_is_written(served: ServedEngine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    if served.case.name == "llamacpp":
        assert "no profiler" in post(served, "control/start_profile")[1]["message"]
        return
    assert "path must be" in post(served, "control/stop_profile")[1]["message"]
    done(served, "control/start_profile")
    assert "already" in post(served, "control/start_profile")[1]["message"]
    served.ask("Count from 3 to 9.", temperature=0, max_tokens=8)
    done(served, "control/stop_profile", path=str(path))
    assert any("aten::" in event.get("name", "") for event in json.loads(path.read_bytes())["traceEvents"])


def test_a_paused_worker_ends_in_time(served: ServedEngine) -> None:
    done(served, "control/pause_generation")
    worker = served.workers["a"]
    worker.terminate()
    assert worker.exit_code() == 0
