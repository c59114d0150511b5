"""Clusters under seeded faults keep their promises; the same seed is the same run; a put-back bug is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.frontend.admission import model as model_admission
from dynamo.frontend.admission.model import ModelAdmission, Urgency
from dynamo.frontend.http import inference_route
from dynamo.frontend.pipeline.generation_call import StreamDelivery
from dynamo.runtime.calls.request_plane.memory import MemorySink
from dynamo.testing.simulation import ALL_KINDS, FaultKind, continuation, draw, run_scenario, shrink, simulate

SEEDS = 150
REPLAYED = range(700, 712)


def test_no_seed_breaks_a_promise() -> None:
    report = simulate(SEEDS)
    assert [failure.to_json() for failure in report.failures] == []
    assert report.runs == SEEDS
    assert set(report.faults) == set(ALL_KINDS)  # a kind that never happens proves nothing


def test_without_faults_every_request_is_answered_in_full() -> None:
    for seed in range(20):
        outcome = run_scenario(draw(seed, ()))
        limits = outcome.scenario.engine_slots, outcome.scenario.model_places, outcome.scenario.queue_age_seconds
        limited = any(limit is not None for limit in limits)
        assert set(outcome.statuses) <= ({200, 529} if limited else {200}), seed


def test_a_seed_is_a_run() -> None:
    assert [run_scenario(draw(seed)).digest for seed in REPLAYED] == [
        run_scenario(draw(seed)).digest for seed in REPLAYED
    ]


def test_a_seed_is_the_same_run_under_another_hash_seed() -> None:
    code = (
        "from dynamo.testing.simulation import draw, run_scenario\n"
        f"print(*(run_scenario(draw(seed)).digest for seed in range({REPLAYED.start}, {REPLAYED.stop})))"
    )
    here = [run_scenario(draw(seed)).digest for seed in REPLAYED]
    for hash_seed in ("1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert told.stdout.split() == here


def test_several_processes_tell_what_one_does() -> None:
    seeds = len(REPLAYED)
    told: list[str] = []
    alone = simulate(seeds, REPLAYED.start)
    shared = simulate(seeds, REPLAYED.start, jobs=2, on_outcome=lambda outcome: told.append(outcome.digest))
    assert shared.to_json() == alone.to_json()
    assert told == [run_scenario(draw(seed)).digest for seed in REPLAYED]


def test_a_trace_does_not_change_what_it_tells_of() -> None:
    told = run_scenario(draw(7), keep_trace=True)
    assert told.trace
    assert told.digest == run_scenario(draw(7)).digest


def test_another_seed_is_another_run() -> None:
    assert len({run_scenario(draw(seed)).digest for seed in range(10)}) == 10


def test_a_continuation_depends_on_everything_before_it() -> None:
    assert continuation([1, 2, 3], 8) == continuation([1, 2, 3], 16)[:8]
    assert continuation([1, 2, 3], 8) != continuation([1, 2, 4], 8)
    assert continuation([1, 2, 3], 8) != continuation([12, 3], 8)
    assert continuation([1, 2, 3], 8, seed=1) != continuation([1, 2, 3], 8, seed=2)
    said = continuation([1, 2, 3], 8)
    assert continuation([1, 2, 3, *said[:3]], 5) == said[3:]


# -- deliberate bugs -----------------------------------------------------------------------------------------------------


def lose_cancels(patch: pytest.MonkeyPatch) -> None:
    async def watch(self: Any, receive: Callable[[], Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    patch.setattr(inference_route, "watch_client", watch)


def count_credits_twice(patch: pytest.MonkeyPatch) -> None:
    grant = MemorySink.grant
    patch.setattr(MemorySink, "grant", lambda self, credits: grant(self, 2 * credits))


def send_a_token_twice(patch: pytest.MonkeyPatch) -> None:
    encode = StreamDelivery._encode

    def twice(self: Any, deltas: list[Any]) -> bytes:
        data = encode(self, deltas)
        return data + data if deltas[0].tokens == 1 and deltas[0].finish_reason is None else data

    patch.setattr(StreamDelivery, "_encode", twice)


def take_more_than_there_are_places(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelAdmission, "rejection_reason", lambda *_: None)


def refuse_while_there_is_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_admission, "_KEPT_FREE", {Urgency.LOW: 2, Urgency.NORMAL: 2})


@pytest.mark.parametrize(
    ("put_back", "kind"),
    [
        (lose_cancels, "cancel"),
        (count_credits_twice, "credit"),
        (send_a_token_twice, "token"),
        (take_more_than_there_are_places, "overload"),
        (refuse_while_there_is_room, "lost"),
    ],
    ids=[
        "a lost cancel",
        "a credit counted twice",
        "a token sent twice",
        "more requests than places",
        "a refusal while there is room",
    ],
)
def test_a_bug_that_is_put_back_is_found_within_200_runs(
    monkeypatch: pytest.MonkeyPatch, put_back: Callable[[pytest.MonkeyPatch], None], kind: str
) -> None:
    put_back(monkeypatch)
    report = simulate(200, max_failures=1)
    assert [finding.kind for failure in report.failures for finding in failure.outcome.findings][:1] == [kind]


def test_a_failing_seed_is_shrunk_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_cancels(monkeypatch)
    report = simulate(200, max_failures=1)
    (failure,) = report.failures
    assert [fault.kind for fault in failure.smallest.scenario.faults] == [FaultKind.VANISH]
    assert len(failure.smallest.scenario.requests) == 1
    assert shrink(failure.smallest).scenario == failure.smallest.scenario
