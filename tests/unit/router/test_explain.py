"""A decision explained to a reader who knows neither router nor policy."""

from __future__ import annotations

import pytest

from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_query import RankExclusion, Trust
from dynamo.placement.kv_state import KvRequest, KvState, RankMatch, RankState
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.router.kv.explain import ExplainedChoice, explain

A, B = WorkerRank(0xA), WorkerRank(0xB, 1)


def state(*, matches: dict[int, RankMatch] | None = None, alone: bool = False, **request: object) -> KvState:
    ranks = (RankState(A), RankState(B, decode_blocks=2.0, requests=2, trust=Trust.NONE))
    asked = KvRequest(70, 4, **request)  # type: ignore[arg-type]
    excluded = (RankExclusion(B, "taints"),) if alone else ()
    return KvState(16, asked, ranks[:1] if alone else ranks, matches or {}, 0.0, excluded)


def told(of: KvState, policy: str = "default", draw: float = 0.0, **parameters: float) -> ExplainedChoice:
    chooser = kv_policy(policy, parameters)
    return explain(chooser, of, chooser.choose(of, draw))


def test_the_words_for_each_way_to_a_worker() -> None:
    summaries = [
        told(state(matches={0: RankMatch(Overlap(3))}))["summary"],
        told(state(matches={1: RankMatch(Overlap(4, 1))}))["summary"],
        told(state(alone=True))["summary"],
        told(state(alone=True, is_pinned=True))["summary"],
        told(KvState(16, KvRequest(70, 4), (RankState(A), RankState(B))), draw=0.9)["summary"],
        told(state(), draw=0.999, router_temperature=5.0)["summary"],
        told(state(matches={1: RankMatch(Overlap(4))}), "two-tier", balance_abs_threshold=9)["summary"],
        told(state(), "time")["summary"],
    ]
    assert summaries[:7] == [
        "Chose worker a because serving there costs least: 5.4 blocks. It has 48 of the prompt's 70 tokens in its KV cache. "
        "Worker b rank 1, the next best, has 0 of them and would cost 10.4 blocks; the two differ most in `device_overlap`.",
        "Chose worker b rank 1 because serving there costs least: 6.0 blocks. It has 70 of the prompt's 70 tokens in its KV cache. "
        "Worker a, the next best, has 0 of them and would cost 8.4 blocks; the two differ most in `device_overlap`.",
        "Chose worker a because no other worker may serve the request. It has 0 of the prompt's 70 tokens in its KV cache.",
        "Chose worker a because the request names it. It has 0 of the prompt's 70 tokens in its KV cache.",
        "Chose worker b rank 1 because serving there costs least: 8.4 blocks, the same for 2 workers, of which one was drawn. It "
        "has 0 of the prompt's 70 tokens in its KV cache.",
        "Chose worker b rank 1 by chance, which prefers cheaper workers (the router's temperature is above 0): 10.4 blocks. It has "
        "0 of the prompt's 70 tokens in its KV cache. Worker a, a cheaper one, has 0 of them and would cost 8.4 blocks; the two "
        "differ most in `active_blocks`.",
        "Chose worker b rank 1 because it holds the longest part of the prompt: 2.0 requests. It has 64 of the prompt's 70 tokens "
        "in its KV cache. Worker a, a cheaper one, has 0 of them and would cost 0.0 requests.",
    ]
    assert summaries[7].startswith("Chose worker a because serving there costs least: ")


@pytest.mark.parametrize("policy", ["default", "time", "two-tier"])
def test_every_word_has_a_meaning(policy: str) -> None:
    found = told(state(matches={0: RankMatch(Overlap(1, 1, 1))}, has_preferences=True), policy)
    words = {found["unit"], found["reason"], "exact", "none"}
    words |= {name for each in found["candidates"] for name, value in each["terms"].items() if value}
    assert words <= found["meanings"].keys()
    assert [each["worker"] for each in found["candidates"]] == [
        f"{each['worker_id']:x}" for each in found["candidates"]
    ]
    assert told(state(alone=True), policy)["meanings"]["taints"].startswith("the worker lacks a taint")
