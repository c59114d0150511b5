"""SmolLM2 behind two workers, one of which is killed at every tenth token of an answer: the client reads what it always reads."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from dynamo.runtime.base.process_guard import descendants
from support.engine_cluster import MODEL, EngineCase, ServedEngine, served_engine
from support.processes import Worker
from support.real_models import CONTEXT, LLAMA, bare_llama

pytestmark = [pytest.mark.models, pytest.mark.timeout(1800)]

TOKENS: Final = 60
STEP: Final = 10
COUNTING: Final = "One, two, three, four. The same in figures: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
SURE: Final = 1.0  # a worker that goes on computes the answer so far as a prompt, with sums in another order
BUSY: Final = "dynamo_component_inflight_requests"


@dataclass(frozen=True)
class RealCase(EngineCase):
    """llama.cpp with a file."""

    file: Path = Path()

    def arguments(self, directory: Path) -> list[str]:
        threads = ("--threads", "1", "--context-length", str(CONTEXT))
        return ["--model", str(self.file), "--slots", "1", *threads]


@pytest.fixture(scope="module")
def cluster(smollm2: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    case = RealCase("llamacpp", LLAMA, is_gguf=True, core="llamacpp.server", file=smollm2[1])
    with served_engine(case, tmp_path_factory.mktemp("killed")) as engine:
        yield engine


def streamed(cluster: ServedEngine, at: int = 0, part: str = "") -> tuple[str, str, int]:
    """The text, the finish reason and the tokens of an answer; at its token `at` a part of what computes it is killed."""
    events = cluster.client.completions.create(
        model=MODEL,
        prompt=COUNTING,
        stream=True,
        max_tokens=TOKENS,
        temperature=0,
        stream_options={"include_usage": True},
    )
    text, reason, counted, pieces = "", "", 0, 0
    for event in events:
        for choice in event.choices:
            pieces += bool(choice.text)
            text += choice.text
            reason = choice.finish_reason or reason
        if event.usage:
            counted = event.usage.completion_tokens
        if at and pieces == at:
            kill(cluster, part)
            at = 0
    assert not at, f"the answer ended before its token {at}"
    return text, reason, counted


def kill(cluster: ServedEngine, part: str) -> None:
    """Kill the worker that has the request, or its llama.cpp."""
    ((name, worker),) = [each for each in cluster.workers.items() if each[1].metric(BUSY)]
    del cluster.workers[name]
    os.kill(worker.pid if part == "worker" else core_of(worker, cluster.case.core), signal.SIGKILL)


def core_of(worker: Worker, title: str) -> int:
    (core,) = [
        number
        for number in descendants(worker.pid)
        if title.encode() in Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ")
    ]
    return core


@pytest.fixture(scope="module")
def expected(smollm2: tuple[str, Path]) -> tuple[str, str, int]:
    """What llama.cpp's own server answers. It must be sure of every token."""
    with bare_llama(*smollm2, 1) as bare:
        body = {"prompt": COUNTING, "max_tokens": TOKENS, "temperature": 0.0, "logprobs": 2}
        (choice,) = asyncio.run(bare.reply("/v1/completions", body)).json()["choices"]
    tops = [[each["logprob"] for each in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
    assert min(first - second for first, second in tops) > SURE
    return choice["text"], choice["finish_reason"], len(tops)


def test_the_answer_is_that_of_llama_cpp(cluster: ServedEngine, expected: tuple[str, str, int]) -> None:
    assert streamed(cluster) == expected
    assert expected[1:] == ("length", TOKENS)


@pytest.mark.parametrize("part", ["worker", "engine"])
def test_a_worker_killed_at_every_tenth_token_costs_nothing(
    cluster: ServedEngine, expected: tuple[str, str, int], part: str
) -> None:
    for at in range(STEP, TOKENS, STEP):
        if len(cluster.workers) < 2:
            cluster.add_worker(f"{part}-{at}")
        assert streamed(cluster, at, part) == expected, f"killed at token {at}"
        assert len(cluster.workers) == 1
