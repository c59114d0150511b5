"""The reference engine behind a frontend, as processes: grammars, adapters and sleep, as clients and operators see them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from support.adapters import write_adapter
from support.http_client import COMPLETIONS, DONE, Reply, ask, exchange
from support.processes import Cluster, Frontend, Worker, until
from support.random_schemas import random_choices, random_grammar, random_regex, random_schema

MODEL = "spoken"


class Served:
    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster, self._directory = cluster, directory
        self.workers = [self.worker(f"worker-{number}") for number in range(2)]
        self.frontend: Frontend = cluster.frontend("frontend")
        cluster.wait_ready(self.frontend, *self.workers)

    def worker(self, name: str) -> Worker:
        return self._cluster.reference(name, MODEL, self._directory, "--kv-cache-mb", "8", DYN_LORA_ENABLED="1")

    async def complete(self, **more: Any) -> Reply:
        return await ask(self.frontend.port, COMPLETIONS, completion(**more))


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [10, 11, 12], "max_tokens": 30, "temperature": 2, "seed": 7, **more}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, speaking_model: Path) -> Iterator[Served]:
    with Cluster(tmp_path_factory.mktemp("served")) as cluster:
        yield Served(cluster, speaking_model)


def check_json(schema: dict[str, Any], text: str) -> None:
    jsonschema.validate(json.loads(text), schema)


def check_whole(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


def constraints() -> list[tuple[dict[str, Any], Callable[[str], object]]]:
    """(fields of the request, what checks the answer)."""
    rng = random.Random(11)
    found: list[tuple[dict[str, Any], Callable[[str], object]]] = []
    for _ in range(6):
        schema, choices, pattern = random_schema(rng), random_choices(rng), random_regex(rng)
        grammar, language = random_grammar(rng)
        found += [
            ({"guided_json": schema}, partial(check_json, schema)),
            ({"guided_choice": choices}, choices.index),
            ({"guided_regex": pattern}, partial(check_whole, pattern)),
            ({"guided_grammar": grammar}, partial(check_whole, language)),
        ]
    return found


async def test_guided_answers_have_their_form_streamed_and_not(served: Served) -> None:
    async def one(fields: dict[str, Any], check: Callable[[str], object]) -> None:
        long = {**fields, "max_tokens": 900}
        whole, streamed = await asyncio.gather(served.complete(**long), served.complete(**long, stream=True))
        assert (whole.status, streamed.status) == (200, 200)
        assert whole.text == streamed.text
        check(whole.text)

    await asyncio.gather(*(one(fields, check) for fields, check in constraints()))


async def test_a_grammar_that_is_wrong_is_the_clients_fault_and_named(served: Served) -> None:
    reply = await served.complete(guided_regex="a(")
    assert (reply.status, "guided_decoding.regex cannot be compiled" in reply.json()["message"]) == (400, True)


async def test_an_adapter_is_a_model_while_it_is_loaded(
    served: Served, speaking_model: Path, tensors_of: Callable[..., Any], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "poet", tensors_of(json.loads((speaking_model / "config.json").read_text())))
    port = served.workers[0].system_port
    plain = (await served.complete()).text
    loaded = await ask(port, "/v1/loras", {"lora_name": "poet", "lora_path": str(tmp_path / "poet")})
    assert loaded.json()["status"] == "ok"
    await until(lambda: "poet" in served.frontend.models())
    said = await served.complete(model="poet")
    assert (said.status, said.text != plain) == (200, True)
    assert (await served.complete()).text == plain
    assert (await ask(port, "/v1/loras/poet", method="DELETE")).json()["status"] == "ok"
    await until(lambda: "poet" not in served.frontend.models())


async def test_a_worker_that_sleeps_is_left_alone_until_it_wakes(served: Served) -> None:
    asleep, awake = served.workers
    plain = (await served.complete()).text
    assert (await ask(asleep.system_port, "/engine/control/sleep", {"level": 2})).json()["is_sleeping"] is True
    await until(lambda: served.frontend.workers(MODEL) == 1)
    before = awake.metric("dynamo_component_requests_total")
    assert [(await served.complete()).text for _ in range(4)] == [plain] * 4
    assert awake.metric("dynamo_component_requests_total") - before == 4
    assert (await ask(asleep.system_port, "/engine/control/wake_up", {})).json()["is_sleeping"] is False
    await until(lambda: served.frontend.workers(MODEL) == 2)
    assert [(await served.complete()).text for _ in range(4)] == [plain] * 4


async def test_a_guided_stream_whose_worker_is_killed_goes_on_inside_its_grammar(served: Served) -> None:
    asked = {"guided_regex": "([a-z]{3}-){150}end", "stream": True, "max_tokens": 900}
    whole = (await served.complete(**asked)).text
    assert re.fullmatch("([a-z]{3}-){150}end", whole)
    extra = {"nvext": {"extra_fields": ["worker_id"]}}
    async with exchange(served.frontend.port, COMPLETIONS, completion(**asked, **extra)) as opened:
        assert await opened.head() == 200
        events = [await opened.event()]
        busy = [worker for worker in served.workers if worker.metric("dynamo_component_inflight_requests") > 0]
        for worker in busy:
            worker.kill()
        while events[-1] != DONE:
            events.append(await opened.event())
    assert "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"]) == whole
    assert len(busy) == 1  # the last test here: one worker is gone
