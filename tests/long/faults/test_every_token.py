"""R1: a worker is lost at every token of an answer, killed or sent home; the client must not notice."""

from __future__ import annotations

import os
import statistics
import string
import time
from pathlib import Path
from typing import Any

import pytest

from support.http_client import CHAT, Reply, ask, chat, script
from support.processes import Cluster, Worker
from support.scenario_table import record

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(1500),
]

ANSWER = string.ascii_letters + string.digits + "+-"  # 64 tokens, no two alike
PACE_SECONDS = 0.002
RESUMED_SECONDS = 1.0
MODEL = "mortal"


def choices_of(reply: Reply, is_streamed: bool) -> dict[int, tuple[str, str | None]]:
    """(text, finish reason) of each choice."""
    found: dict[int, tuple[str, str | None]] = {}
    for message in reply.events if is_streamed else [reply.json()]:
        for choice in message["choices"]:
            text, reason = found.get(choice["index"], ("", None))
            part = choice["delta" if is_streamed else "message"].get("content") or ""
            found[choice["index"]] = text + part, choice["finish_reason"] or reason
    return found


def _is_dying(worker: Worker) -> bool:
    return any(event["event"] == "die" for event in worker.events())


class Herd:
    """Three workers of one model, always: each that dies is replaced."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._started = 0
        self.living: list[Worker] = []
        self.everyone: list[Worker] = []

    def fill(self) -> None:
        """Return when three serve; one that is on its way out does not, however long it takes."""
        self.living = [worker for worker in self.living if not (worker.has_ended or _is_dying(worker))]
        fresh = []
        while len(self.living) < 3:
            self._started += 1
            fresh.append(self._cluster.worker(f"w{self._started}", MODEL))
            self.living.append(fresh[-1])
        for worker in fresh:
            worker.wait_ready()
        self.everyone += fresh

    def events(self, tag: str) -> list[dict[str, Any]]:
        """What all that ever lived wrote down, in time's order."""
        found = [event for worker in self.everyone for event in worker.events(tag)]
        return sorted(found, key=lambda event: float(event["at"]))


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "unary"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_worker_lost_at_any_token_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str, is_streamed: bool, n: int
) -> None:
    # Dead workers stay listed until their leases end; at one death a second that is more than a deployment has.
    with Cluster(tmp_path, DYN_MIGRATION_LIMIT="20") as cluster:
        frontend = cluster.frontend("frontend")
        herd = Herd(cluster)
        herd.fill()
        cluster.wait_ready(frontend, *herd.living)
        pauses: list[float] = []
        lost = doubled = 0
        began = time.monotonic()
        for index in range(len(ANSWER)):
            tag = f"{number}-{is_streamed}-{n}-{index}"
            steps = (["say", ANSWER[:index], PACE_SECONDS], ["die", number], ["say", ANSWER[index:], PACE_SECONDS])
            body = chat(MODEL, stream=is_streamed, n=n, max_tokens=len(ANSWER))
            reply = await ask(frontend.port, CHAT, body, headers=script(*steps, tag=tag))
            assert reply.status == 200, reply.body
            answers = choices_of(reply, is_streamed)
            assert sorted(answers) == list(range(n))
            for text, reason in answers.values():
                lost += len(set(ANSWER) - set(text))
                doubled += len(text) - len(set(text))
                assert (text, reason) == (ANSWER, "length"), (tag, text)
            events = herd.events(tag)
            (died,) = (event["at"] for event in events if event["event"] == "die")
            pauses += [event["at"] - died for event in events if event["event"] == "generate" and event["at"] > died]
            herd.fill()
        said = f"{number}, {'streamed' if is_streamed else 'unary'}, n={n}"
        record(
            f"R1 a worker lost at each token, {said}",
            sent=len(ANSWER),
            lost=lost,  # in tokens, and so at least as many as requests
            doubled=doubled,
            recovery_ms=[1e3 * pause for pause in pauses],
            note=f"{len(pauses)} answers went on elsewhere",
        )
        with capsys.disabled():
            resumed = ""
            if pauses:
                pauses.sort()
                p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
                resumed = f"; going on after {1e3 * statistics.median(pauses):.0f} ms (p50), {1e3 * p99:.0f} ms (p99)"
            print(
                f"\n  {said}: {len(ANSWER)} requests, {lost} tokens lost, {doubled} doubled, {len(pauses)} moves{resumed}; "
                f"{time.monotonic() - began:.0f} s",
                end="",
                flush=True,
            )
        assert max(pauses, default=0.0) < RESUMED_SECONDS
