"""Policies in files of the user, over real processes: they decide, fail, hold back and shadow; no request is lost."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo.cli import explain, replay_policy
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery, RankInfo, RequestOrigin
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.policies.placement import ProgrammedPlacement
from dynamo.router.kv.decisions import DecisionHeader, DecisionLog
from dynamo.router.kv.router import KvRouter
from dynamo.runtime.observe.metrics import MetricsRegistry
from support.http_client import ask
from support.processes import Cluster, Frontend, wait

EXAMPLES = Path(__file__).parents[3] / "examples/policies"
LMETRIC, STICKY = f"{EXAMPLES}/lmetric.py:LMetric", f"{EXAMPLES}/sticky.py:StickySessions"
HELD_SECONDS = 1.0

POLICY = """
from dynamo.policies import Classified

class Mixed:
    def classify(self, request, candidates):
        first = min(each.worker_id for each in candidates)
        if request.session_id == "held":
            return Classified(defer_seconds=%s, worker_id=first)
        if request.session_id == "broken":
            return Classified(worker_id="none")

    def score(self, request, candidate):
        if request.session_id == "stall":
            while True:
                pass
        if request.session_id == "raise":
            raise RuntimeError("on purpose")
        if request.session_id == "nan":
            return float("nan")
        return candidate.requests

    def filter(self, request, candidates):
        return [] if request.session_id == "nobody" else candidates
"""


async def complete(frontend: Frontend, session: str, text: str = "a prompt") -> Any:
    headers = {"x-dynamo-explain-routing": "1", "x-dynamo-session-id": session}
    body = {"model": "m", "prompt": text, "max_tokens": 4}
    return await ask(frontend.port, "/v1/completions", json.dumps(body).encode(), headers=headers)


def counted(frontend: Frontend, name: str) -> dict[str, float]:
    _, text = frontend.get("/metrics")
    return {
        next(label for key, label in sample.labels.items() if key in ("kind", "outcome")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    }


def ready(frontend: Frontend, workers: int) -> bool:
    status, body = frontend.get("/v1/models/m/ready")
    if status != 200:
        return False
    namespaces = json.loads(body)["namespaces"].values()
    return workers == sum(role["workers"] for each in namespaces for role in each["worker_types"].values())


def start(cluster: Cluster, tmp_path: Path, *flags: str) -> Frontend:
    mode = ("--router-mode", "kv", "--router-decisions", str(tmp_path / "decisions.jsonl"))
    frontend = cluster.frontend("frontend", *mode, *flags)
    engine = ["--block-size", "16", "--speedup-ratio", "50"]
    argv = [sys.executable, "-m", "dynamo.mocker", "--discovery-backend", "file", "--model-path", "m", *engine]
    for name in ("one", "two"):
        cluster.process(name, argv)
    frontend.wait_ready()
    wait(lambda: ready(frontend, 2), lambda: frontend.log)
    return frontend


async def test_a_policy_of_the_user_decides_and_its_failures_cost_no_request(tmp_path: Path) -> None:
    path = tmp_path / "policy.py"
    path.write_text(POLICY % HELD_SECONDS)
    with Cluster(tmp_path) as cluster:
        frontend = start(cluster, tmp_path, "--router-policy", f"{path}:Mixed", "--shadow-policy", LMETRIC)
        replies = [await complete(frontend, session) for session in ("", "raise", "nan", "stall", "broken", "")]
        assert [reply.status for reply in replies] == [200] * 6
        placed = [reply.json()["nvext"]["routing"]["decode"] for reply in replies]
        name = f"{path}:Mixed"
        assert [each["policy"] for each in placed] == [name, *[f"time (for {name})"] * 3, name, name]
        began = time.monotonic()
        held, other = await asyncio.gather(complete(frontend, "held"), complete(frontend, ""))
        took = time.monotonic() - began
        assert (held.status, other.status, took >= HELD_SECONDS) == (200, 200, True)
        assert held.json()["nvext"]["routing"]["decode"]["reason"] == "suggested"
        refused = await complete(frontend, "nobody")
        assert (refused.status, "retry-after" in refused.headers) == (529, True)
        failures = counted(frontend, "dynamo_component_router_policy_failures_total")
        failures.pop("slow", None)  # on a busy machine
        assert failures == {"raised": 1, "invalid": 2, "stalled": 1}
        shadows = counted(frontend, "dynamo_component_router_shadow_decisions_total")
        assert sum(shadows.values()) == 8
        assert "took more than 50 ms" in frontend.log
        frontend.terminate()


def test_a_policy_that_cannot_be_made_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text("class Mixed:\n    def score(self, candidate): ...\n")
    with Cluster(tmp_path) as cluster:
        argv = [sys.executable, "-m", "dynamo.frontend", "--discovery-backend", "file", "--router-mode", "kv"]
        process = cluster.process(
            "frontend", [*argv, "--http-port", "0", "--router-policy", f"{tmp_path}/policy.py:Mixed"]
        )
        assert process.exit_code() != 0
        assert "score must take 2 arguments besides self" in process.log
        assert "Traceback" not in process.log


async def test_ten_thousand_shadow_decisions_are_those_of_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, rng = tmp_path / "decisions.jsonl", random.Random(7)
    router = KvRouter(block_size=16, policy=kv_policy(LMETRIC), rng=rng)
    log = DecisionLog(str(file), DecisionHeader(LMETRIC, shadow=STICKY), limit_bytes=1 << 30)
    placement = ProgrammedPlacement(router, MetricsRegistry(), kv_policy(STICKY), rng=rng, decisions=log)
    ranks = {WorkerRank(number): RankInfo() for number in range(4)}
    placement.read_ranks = lambda: ranks
    placement.is_stale = True
    for number in range(10_000):
        tokens = rng.randrange(16, 4_000)
        query = KvQuery(
            sequence=range(number * 1000, number * 1000 + tokens // 16),
            prompt_tokens=tokens,
            origin=RequestOrigin(session_id=f"s{rng.randrange(50)}"),
        )
        selection = placement.select(query, float(number))
        router.book(str(number), selection, float(number))
        log.record(str(number), "m", selection)
        if number >= 20:
            router.free(str(number - 20), float(number))
    log.close()
    assert explain.main([str(file), "--json"]) == 0
    found = SimpleNamespace(**json.loads(capsys.readouterr().out))
    assert (found.decisions, found.equal, found.shadowed, found.shadow_equal) == (10_000,) * 4
    assert 0 < found.shadow_other < 10_000
    assert replay_policy.main([str(file), "--json", "--policy", "time", "--policy", STICKY]) == 0
    recorded, by_time, sticky = json.loads(capsys.readouterr().out)
    assert recorded["same_percent"] == 100
    assert sticky["same_percent"] == pytest.approx(100 - found.shadow_other / 100)
    assert by_time["first_token_mean_ms"] <= recorded["first_token_mean_ms"]
