"""Adapters as models: loaded at every worker through the frontend, and never answered by other weights."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from support.adapters import write_adapter
from support.http_client import COMPLETIONS, ask
from support.processes import Cluster, Frontend, Worker, wait

MODEL = "spoken"
ADAPTERS = ("poet", "clerk")
ROUNDS = 100  # of unloading and loading one of them
BODY = {"prompt": [10, 11, 12, 13], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Served:
    """Two workers of one model, and two adapters in the directory `root`."""

    def __init__(self, cluster: Cluster, directory: Path, root: Path) -> None:
        self._cluster, self._directory = cluster, directory
        tensors = load_file(directory / "model.safetensors")
        for seed, name in enumerate(ADAPTERS, 1):
            write_adapter(root / name, tensors, seed=seed, lora_alpha=32)
        self.sources = {name: f"file://{root / name}" for name in ADAPTERS}
        self.workers = [self.worker(f"worker-{number}") for number in range(2)]
        self.frontend: Frontend = cluster.frontend("frontend")
        cluster.wait_ready(self.frontend, *self.workers)

    def worker(self, name: str, *flags: str, model: str = MODEL) -> Worker:
        own = ("--kv-cache-mb", "8", *flags)
        return self._cluster.reference(name, model, self._directory, *own, DYN_LORA_ENABLED="1")

    async def text(self, model: str) -> tuple[int, str]:
        reply = await ask(self.frontend.port, COMPLETIONS, {**BODY, "model": model})
        return reply.status, reply.json()["choices"][0]["text"] if reply.status == 200 else ""

    async def load(self, name: str) -> Any:
        body = {"base_model": MODEL, "lora_name": name, "source": {"uri": self.sources[name]}}
        return (await ask(self.frontend.port, "/v1/loras", body)).json()

    async def unload(self, name: str) -> Any:
        return (await ask(self.frontend.port, f"/v1/loras/{name}", method="DELETE")).json()

    def wait_loaded(self, name: str, workers: int) -> None:
        def look() -> bool:
            listed = json.loads(self.frontend.get("/v1/loras")[1])["loras"]
            found: list[Any] = next((entry["workers"] for entry in listed if entry["lora_name"] == name), [])
            return len(found) == workers and name in self.frontend.models()

        wait(look, lambda: f"{workers} workers with {name}; log:\n{self.frontend.log[-2000:]}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, speaking_model: Path) -> Iterator[Served]:
    with Cluster(tmp_path_factory.mktemp("adapters")) as cluster:
        yield Served(cluster, speaking_model, tmp_path_factory.mktemp("lora"))


@pytest.mark.timeout(300)
async def test_no_answer_is_from_other_weights_while_adapters_come_and_go(served: Served) -> None:
    for name in ADAPTERS:
        answer = await served.load(name)
        assert answer["status"] == "success", answer
        assert len(answer["workers"]) == 2
        served.wait_loaded(name, 2)
    names = (MODEL, *ADAPTERS)
    expected = {name: (await served.text(name))[1] for name in names}
    assert len(set(expected.values())) == 3

    counts: Counter[tuple[str, int]] = Counter()
    is_over = False

    async def client(name: str) -> None:
        while not is_over:
            status, text = await served.text(name)
            counts[name, status] += 1
            assert status in (200, 404, 503), (name, status)
            assert status != 200 or text == expected[name], (name, text)

    async def operator() -> None:
        nonlocal is_over
        try:
            for number in range(ROUNDS):
                name = ADAPTERS[number % 2]
                assert (await served.unload(name))["status"] == "success"
                assert (await served.load(name))["status"] == "success"
                while (await served.text(name))[0] != 200:  # until the frontend has seen its card
                    pass
        finally:
            is_over = True

    async with asyncio.TaskGroup() as group:
        group.create_task(operator())
        for name in names:
            for _ in range(2):
                group.create_task(client(name))
    print(dict(counts))
    assert counts[MODEL, 404] == counts[MODEL, 503] == 0
    assert all(counts[name, 200] >= ROUNDS for name in names)
    for name in ADAPTERS:
        served.wait_loaded(name, 2)
        assert (await served.text(name)) == (200, expected[name])


async def test_an_adapter_is_listed_with_its_parent(served: Served) -> None:
    await served.load("poet")
    served.wait_loaded("poet", 2)
    models = {entry["id"]: entry for entry in (await ask(served.frontend.port, "/v1/models")).json()["data"]}
    assert (models["poet"]["parent"], models["poet"]["root"]) == (MODEL, MODEL)
    assert "parent" not in models[MODEL]
    listed = (await ask(served.frontend.port, "/v1/loras")).json()
    poet = next(entry for entry in listed["loras"] if entry["lora_name"] == "poet")
    assert (poet["base_model"], poet["source"], len(poet["workers"])) == (MODEL, served.sources["poet"], 2)


async def test_what_cannot_be_is_refused(served: Served) -> None:
    port = served.frontend.port
    for body, status in (
        ({"base_model": "nobody", "lora_name": "x", "source": "file:///x"}, 404),
        ({"base_model": MODEL, "lora_name": MODEL, "source": "file:///x"}, 409),
        ({"base_model": MODEL, "lora_name": "x"}, 400),
        ({"base_model": MODEL, "lora_name": "x", "source": "file:///x", "more": 1}, 400),
        ({"base_model": MODEL, "lora_name": "", "source": "file:///x"}, 400),
    ):
        assert (await ask(port, "/v1/loras", body)).status == status, body
    broken = await ask(port, "/v1/loras", {"base_model": MODEL, "lora_name": "x", "source": "file:///nowhere"})
    assert (broken.status, broken.json()["status"]) == (502, "error")
    assert "adapter_config.json" in broken.json()["message"]
    await served.unload("x")
    gone = await ask(port, "/v1/loras/x", method="DELETE")
    assert (gone.status, gone.json()["status"]) == (404, "error")
    assert (await served.text("x"))[0] == 404


async def test_an_adapter_of_the_flag_is_there_from_the_start(served: Served) -> None:
    await served.load("poet")
    served.wait_loaded("poet", 2)
    path = served.sources["poet"].removeprefix("file://")
    worker = served.worker("flagged", "--lora", f"bard={path}", model="flagged")
    worker.wait_ready()
    wait(lambda: {"flagged", "bard"} <= served.frontend.models(), lambda: worker.log[-2000:])
    assert (await served.text("bard")) == (await served.text("poet"))
    assert (await served.text("flagged")) == (await served.text(MODEL))


async def test_a_flag_that_cannot_be_kept_ends_the_start_and_says_why(served: Served, tmp_path: Path) -> None:
    worker = served.worker("wrong", "--lora", f"bard={tmp_path}", model="wrong")
    wait(lambda: worker.has_ended, lambda: worker.log[-2000:])
    assert worker.exit_code() == 2
    assert "--lora bard" in worker.log


@pytest.mark.timeout(120)
async def test_a_worker_that_comes_later_gets_the_adapters(served: Served) -> None:
    await served.load("clerk")
    served.wait_loaded("clerk", 2)
    expected = (await served.text("clerk"))[1]
    served.workers[0].kill()
    served.workers.append(served.worker("worker-later"))
    served.workers[-1].wait_ready()
    wait(lambda: "which came later" in served.frontend.log, lambda: served.frontend.log[-2000:])
    served.workers[1].kill()  # now only the later one can answer
    for _ in range(20):
        status, text = await served.text("clerk")
        assert status in (200, 503)
        assert status != 200 or text == expected
    assert (await served.text("clerk")) == (200, expected)
