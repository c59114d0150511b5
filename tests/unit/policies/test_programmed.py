"""A policy in a file of the user: what it decides, and that nothing it does costs a request."""

from __future__ import annotations

import logging
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_query import KvQuery, RankInfo, RequestOrigin
from dynamo.placement.kv_state import KvChoice, KvRequest, KvState, RankMatch, RankState
from dynamo.placement.policies import kv_time
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.policies import Classified, PolicyCandidate, user_code
from dynamo.policies.programmed import FAILURES_IN_A_ROW, KINDS, NoWorkerLeft, ProgrammedPolicy
from dynamo.policies.records import MAX_DEFER_SECONDS, PolicyRequest
from dynamo.router.kv.explain import explain
from dynamo.router.kv.router import KvRouter

EXAMPLES = Path(__file__).parents[3] / "examples/policies"
BLOCK = 16


def state_of(*ranks: RankState, held: dict[int, int] | None = None, **request: Any) -> KvState:
    """A prompt of 160 tokens; `held`: blocks of it by position."""
    matches = {at: RankMatch(Overlap(blocks)) for at, blocks in (held or {}).items()}
    return KvState(BLOCK, KvRequest(160, 10, **request), ranks, matches)


def rank(worker_id: int, **load: Any) -> RankState:
    return RankState(WorkerRank(worker_id), **load)


def example(name: str, **parameters: object) -> ProgrammedPolicy:
    made = kv_policy(f"{EXAMPLES / name}", parameters)
    assert isinstance(made, ProgrammedPolicy)
    return made


def chosen(policy: ProgrammedPolicy, state: KvState, draw: float = 0.0) -> int:
    choice = policy.choose(state, draw)
    assert choice.rank == state.ranks[choice.position].rank
    return choice.rank.worker_id


# -- the examples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_has_at_most_fifteen_lines(path: Path) -> None:
    code = path.read_text().partition('"""\n')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


def test_lmetric_multiplies_new_tokens_by_the_batch() -> None:
    policy = example("lmetric.py:LMetric")
    assert chosen(policy, state_of(rank(1, requests=3), rank(2, requests=1))) == 2
    assert chosen(policy, state_of(rank(1, requests=3), rank(2, requests=1), held={0: 9})) == 1  # 16 * 4 < 160 * 2
    assert chosen(policy, state_of(rank(1, requests=3, prefill_tokens=64), rank(2, requests=1), held={0: 9})) == 1
    assert chosen(policy, state_of(rank(1, requests=3, prefill_tokens=65), rank(2, requests=1), held={0: 9})) == 2


def test_lpwl_counts_pending_and_uncached_tokens() -> None:
    policy = example("lpwl.py:LeastPrefillWork")
    assert chosen(policy, state_of(rank(1, prefill_tokens=100), rank(2), held={0: 7})) == 1
    assert chosen(policy, state_of(rank(1, prefill_tokens=113), rank(2), held={0: 7})) == 2


def test_a_session_stays_and_moves_only_when_its_worker_has_gone() -> None:
    policy = example("sticky.py:StickySessions")
    workers = [rank(number) for number in range(1, 9)]

    def of(session: str, ranks: list[RankState]) -> int:
        return chosen(policy, state_of(*ranks, origin=RequestOrigin(session_id=session)))

    before = {f"s{number}": of(f"s{number}", workers) for number in range(200)}
    after = {session: of(session, workers[1:]) for session in before}
    assert {before[session] for session in before if before[session] != after[session]} == {1}
    assert len(set(before.values())) == 8


def test_the_cheapest_worker_that_is_quick_enough_is_chosen() -> None:
    cheap = rank(1, taints=frozenset({"price=1"}), prefill_tokens=100_000)
    dear = rank(2, taints=frozenset({"price=4"}))
    assert chosen(example("hardware_cost.py:CheapestInTime"), state_of(cheap, dear)) == 2
    assert chosen(example("hardware_cost.py:CheapestInTime", first_token_ms=1e9), state_of(cheap, dear)) == 1


def test_tenants_are_kept_apart() -> None:
    policy = example("tenants.py:TenantIsolation")
    ranks = (rank(1, taints=frozenset({"tenant=red"})), rank(2), rank(3, requests=1))
    for draw in (0.0, 0.5, 0.99):
        assert chosen(policy, state_of(*ranks, origin=RequestOrigin(tenant="red")), draw) == 1
        assert chosen(policy, state_of(*ranks, origin=RequestOrigin(tenant="blue")), draw) != 1
        assert chosen(policy, state_of(*ranks), draw) != 1
    with pytest.raises(NoWorkerLeft):
        policy.choose(state_of(ranks[0], origin=RequestOrigin(tenant="blue")), 0.0)


# -- what a policy may return ------------------------------------------------------------------------------------------


class ByMethods:
    def __init__(self, **methods: Any) -> None:
        for name, method in methods.items():
            setattr(self, name, method)


def made(**methods: Any) -> ProgrammedPolicy:
    return ProgrammedPolicy("test.py:Policy", ByMethods(**methods))


def test_pick_has_the_scores_and_the_last_word() -> None:
    seen: list[list[float]] = []

    def pick(request: PolicyRequest, candidates: list[PolicyCandidate], scores: list[float]) -> PolicyCandidate:
        seen.append(list(scores))
        return candidates[-1]

    policy = made(score=lambda request, candidate: candidate.requests, pick=pick)
    choice = policy.choose(state_of(rank(1), rank(2, requests=7)), 0.0)
    assert (choice.rank.worker_id, choice.cost, choice.reason, seen) == (2, 7.0, "picked", [[0, 7]])


def test_a_filter_alone_leaves_the_choice_to_time() -> None:
    policy = made(filter=lambda request, candidates: [each for each in candidates if each.worker_id != 1])
    state = state_of(rank(1), rank(2, waiting_tokens=50_000, waiting_requests=9), rank(3), held={0: 10, 1: 1})
    choice = policy.choose(state, 0.0, with_terms=True)
    assert (choice.rank.worker_id, choice.position, choice.policy) == (3, 2, "test.py:Policy")
    assert {each.rank.worker_id for each in choice.candidates} == {2, 3}
    assert explain(policy, state, choice)["worker_id"] == 3


@pytest.mark.timeout(60, method="thread")  # else the alarm is not the policy's
def test_no_alarm_ends_time_in_the_middle_of_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, view = list[bool](), kv_time.view_of
    monkeypatch.setattr(kv_time, "view_of", lambda *of: timed.append(user_code._LIMIT.is_inside) or view(*of))
    policy, state = made(filter=lambda request, candidates: candidates[1:]), state_of(rank(1), rank(2), rank(3))
    assert ([chosen(policy, state, draw) for draw in (0.1, 0.9)], timed) == ([2, 3], [False, False])


def test_equal_scores_are_drawn_evenly() -> None:
    policy = made(score=lambda request, candidate: 1)
    state = state_of(*(rank(number) for number in range(4)))
    assert [chosen(policy, state, draw / 4) for draw in range(4)] == [0, 1, 2, 3]


def test_the_record_of_a_candidate_has_what_it_holds_and_does() -> None:
    found: list[PolicyCandidate] = []
    policy = made(score=lambda request, candidate: found.append(candidate) or 0.0)
    match = RankMatch(Overlap(3, 2, 9), coming_blocks=5)
    ranks = (rank(1, requests=2, streams=1, prefill_tokens=33), rank(2))
    policy.choose(KvState(BLOCK, KvRequest(170, 10), ranks, {0: match}), 0.0)
    one, other = found
    assert (one.cached_tokens, one.host_tokens, one.disk_tokens, one.coming_tokens) == (48, 32, 90, 32)
    assert (one.requests, one.streams, one.pending_tokens, one.state) == (2, 1, 33, ranks[0])
    assert (other.cached_tokens, other.host_tokens, other.disk_tokens, other.coming_tokens) == (0, 0, 0, 0)
    assert one.prefill_ms(0) == ranks[0].timing.prefill.base
    assert one.step_ms > 0


# -- what it may do wrong ------------------------------------------------------------------------------------------------


def endless(*_: object) -> float:
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "raises": ({"score": lambda r, c: 1 / 0}, "raised"),
    "returns NaN": ({"score": lambda r, c: float("nan")}, "invalid"),
    "returns infinity": ({"score": lambda r, c: float("inf")}, "invalid"),
    "returns None": ({"score": lambda r, c: None}, "invalid"),
    "returns a text": ({"score": lambda r, c: "3"}, "invalid"),
    "filters to a number": ({"filter": lambda r, c: 3}, "invalid"),
    "filters to ids": ({"filter": lambda r, c: [each.worker_id for each in c]}, "invalid"),
    "picks None": ({"pick": lambda r, c, s: None}, "invalid"),
    "picks a copy": ({"pick": lambda r, c, s: type(c[0])(*(getattr(c[0], n) for n in c[0].__struct_fields__))}, "invalid"),
    "exits": ({"score": lambda r, c: c.nothing}, "raised"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_whatever_a_policy_does_the_request_is_served(case: str, caplog: pytest.LogCaptureFixture) -> None:
    methods, kind = WRONG[case]
    policy, state = made(**methods), state_of(rank(1, waiting_tokens=9_000), rank(2), held={1: 4})
    with caplog.at_level(logging.ERROR):
        choice = policy.choose(state, 0.0)
    expected: KvChoice = kv_policy("time").choose(state, 0.0)
    assert (choice.rank, choice.cost, choice.policy) == (expected.rank, expected.cost, "time (for test.py:Policy)")
    assert policy.health.count == dict.fromkeys(KINDS, 0) | {kind: 1}
    assert "test.py:Policy" in caplog.text


@pytest.mark.timeout(60, method="thread")  # the signal of the other method is the one under test
@pytest.mark.parametrize("act", [endless, lambda *_: time.sleep(60)])
def test_a_policy_that_stalls_is_interrupted(act: Callable[..., float]) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # as other code may leave it
    policy, state = made(score=act), state_of(rank(1), rank(2, waiting_tokens=9_000))
    assert policy.choose(state, 0.0).policy == "time (for test.py:Policy)"
    assert policy.health.count["stalled"] == 1
    policy.choose(state, 0.0)
    assert policy.choose(state, 0.0).rank.worker_id == 1
    assert (policy.health.count["stalled"], policy.health.count["resting"]) == (2, 1)


def test_a_large_sum_of_finite_scores_is_no_failure() -> None:
    policy = made(score=lambda request, candidate: 1e308 + candidate.worker_id)
    assert chosen(policy, state_of(rank(3), rank(2))) in {2, 3}
    assert not any(policy.health.count.values())


def test_a_policy_that_fails_in_a_row_is_left_alone_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, fails = [100.0], [True]
    monkeypatch.setattr("dynamo.policies.programmed.monotonic", lambda: now[0])
    calls: list[int] = []

    def score(request: PolicyRequest, candidate: PolicyCandidate) -> float:
        calls.append(candidate.worker_id)
        if fails[0]:
            raise KeyError("none")
        return -candidate.worker_id

    policy, state = made(score=score), state_of(rank(1), rank(2))
    kinds: list[str] = []
    policy.report_to(kinds.append)
    for _ in range(FAILURES_IN_A_ROW + 5):
        policy.choose(state, 0.0)
    assert kinds == ["raised"] * FAILURES_IN_A_ROW + ["resting"] * 5
    assert len(calls) == FAILURES_IN_A_ROW
    now[0] += 11
    policy.choose(state, 0.0)
    policy.choose(state, 0.0)
    assert kinds[-2:] == ["raised", "resting"]
    now[0], fails[0] = now[0] + 11, False
    assert [policy.choose(state, 0.0).rank.worker_id for _ in range(3)] == [2, 2, 2]


def test_a_policy_that_is_slow_in_a_row_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dynamo.policies.programmed.thread_time", lambda: now[0])

    def score(request: PolicyRequest, candidate: PolicyCandidate) -> float:
        now[0] += 0.004
        return -candidate.worker_id

    policy, state = made(score=score), state_of(rank(1), rank(2))
    chosen_by = [policy.choose(state, 0.0).policy for _ in range(FAILURES_IN_A_ROW + 1)]
    assert chosen_by == ["test.py:Policy"] * FAILURES_IN_A_ROW + ["time (for test.py:Policy)"]
    assert (policy.health.count["slow"], policy.health.count["resting"]) == (FAILURES_IN_A_ROW, 1)


# -- classify ------------------------------------------------------------------------------------------------------------

REQUEST = PolicyRequest(prompt_tokens=160, block_size=BLOCK)


def test_classify_is_checked_and_bounded() -> None:
    assert made(classify=lambda r, c: None).classify(REQUEST, []) is None
    given = Classified(defer_seconds=1e9, priority=3.0, due_ms=500.0, worker_id=7)
    found = made(classify=lambda r, c: given).classify(REQUEST, [rank(1)])
    assert found == Classified(defer_seconds=MAX_DEFER_SECONDS, priority=3.0, due_ms=500.0, worker_id=7)
    members: tuple[dict[str, Any], ...] = (
        {"defer_seconds": -1}, {"priority": float("nan")}, {"due_ms": 0}, {"due_ms": float("inf")}, {"defer_seconds": "1"}, {"worker_id": "1"},
    )  # fmt: skip
    for wrong in (3, *(Classified(**each) for each in members)):
        policy = made(classify=lambda r, c, wrong=wrong: wrong)
        assert policy.classify(REQUEST, []) is None
        assert policy.health_of_classify.count["invalid"] == 1


@pytest.mark.parametrize("failing", ["score", "classify"])
def test_a_method_that_works_does_not_hide_one_that_fails(failing: str) -> None:
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise KeyError("none")

    methods: dict[str, Any] = {"score": lambda r, c: 0.0, "classify": lambda r, c: None} | {failing: fail}
    policy, state = made(**methods), state_of(rank(1), rank(2))
    kinds: list[str] = []
    policy.report_to(kinds.append)
    for _ in range(3 * FAILURES_IN_A_ROW):
        policy.classify(REQUEST, state.ranks)
        policy.choose(state, 0.0)
    assert len(calls) == FAILURES_IN_A_ROW
    assert kinds == ["raised"] * FAILURES_IN_A_ROW + ["resting"] * 2 * FAILURES_IN_A_ROW


def test_a_suggested_worker_is_chosen_where_it_may_serve() -> None:
    policy = made(score=lambda request, candidate: candidate.worker_id)
    state = state_of(rank(1), rank(2), rank(3), origin=RequestOrigin(suggested_worker_id=3))
    assert policy.choose(state, 0.0).reason == "suggested"
    assert chosen(policy, state) == 3
    assert chosen(policy, state_of(rank(1), rank(2), origin=RequestOrigin(suggested_worker_id=3))) == 1


# -- where it comes from --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text", "said"), [
    ("p.py:", "", "write FILE.py:CLASS"),
    ("nowhere.py:P", None, "no such file"),
    ("p.py:P", "x = 1", "has no class P"),
    ("p.py:P", "def P(): ...", "has no class P"),
    ("p.py:P", "class P: pass", "has none of the methods filter, score, pick, classify"),
    ("p.py:P", "class P:\n  def score(self, candidate): return 1", "score must take 2 arguments"),
    ("p.py:P", "class P:\n  async def score(self, r, c): return 1", "must not be async"),
    ("p.py:P", "class P:\n  score = 3", "score is not a method"),
    ("p.py:P", "class P:\n  def __init__(self): raise KeyError(3)\n  def score(self, r, c): return 1", "KeyError"),
    ("p.py:P", "import nothing_of_this_name", "ModuleNotFoundError"),
    ("p.py:P", "class P\n", "SyntaxError"),
    ("no.such.module:P", None, "ModuleNotFoundError"),
])  # fmt: skip
def test_what_is_wrong_with_a_policy_is_said_at_the_start(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "p.py").write_text(text)
    given = name if name.startswith("no.such") else str(tmp_path / name)
    with pytest.raises(InvalidArgument, match=said.replace(".", r"\.")):
        kv_policy(given)


def test_parameters_reach_the_constructor(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("class P:\n  def __init__(self, weight): self.weight = weight\n  def score(self, r, c): return self.weight * c.requests")  # fmt: skip
    policy = kv_policy(f"{tmp_path}/p.py:P", {"weight": -1})
    assert policy.choose(state_of(rank(1), rank(2, requests=3)), 0.0).rank.worker_id == 2
    with pytest.raises(InvalidArgument, match="P\\(\\): TypeError"):
        kv_policy(f"{tmp_path}/p.py:P", {"wait": -1})


def test_a_router_decides_by_it_and_the_record_gives_the_same_again() -> None:
    router = KvRouter(block_size=BLOCK, policy=example("lmetric.py:LMetric"), rng=random.Random(5))
    router.set_ranks({WorkerRank(number): RankInfo(taints=frozenset({"gpu=a"})) for number in range(5)})
    policy = example("lmetric.py:LMetric")
    for number in range(50):
        query = KvQuery(token_ids=list(range(number, number + 100)), origin=RequestOrigin(session_id=f"s{number}"))
        selection = router.select(query, float(number))
        router.book(f"r{number}", selection, float(number))
        again = policy.choose(KvState.from_json(selection.state.to_json()), selection.choice.draw)
        assert (again.rank, again.cost, again.tied) == (selection.rank, selection.choice.cost, selection.choice.tied)
    assert {load.active_requests for load in router.potential_loads(KvQuery(token_ids=[1]), 50.0)} == {10}
