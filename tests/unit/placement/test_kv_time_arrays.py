"""Among very many ranks policies compute with arrays: the choices are those of their loops, to the last bit of the cost."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.gaps import Gaps
from dynamo.placement.kv_state import KvRequest, KvState, RankMatch, RankState, Records
from dynamo.placement.policies import kv_default, kv_time
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.policies.kv_time import TimeCost
from dynamo.placement.policies.kv_time_arrays import ARRAYS_FROM
from dynamo.placement.timing import RankTiming, TimeCurve
from support.properties import examples

BLOCK, NOW = 16, 1000.0
pytest.importorskip("numpy")


def rank(rng: random.Random, worker_id: int) -> RankState:
    """Any rank: idle, computing a pass, between two steps, full, without a report."""
    some: dict[str, Any] = {}
    if rng.random() < 0.4:
        some |= {"pass_started_at": NOW + rng.uniform(-0.3, 0.05), "pass_tokens": rng.randrange(12_000)}
    if rng.random() < 0.6:
        some["boundary_at"] = NOW - rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, 2)])
    if rng.random() < 0.5:
        some |= {"waiting_tokens": rng.randrange(30_000), "waiting_requests": rng.randrange(9)}
    if rng.random() < 0.7:
        total = rng.choice([64, 512, 4096])
        some |= {
            "total_kv_blocks": total,
            "held_blocks": rng.randrange(total + 1),
            "decode_blocks": float(rng.randrange(total)),
        }
    if rng.random() < 0.5:
        some["oldest_use_at"] = NOW - rng.choice([0.0, rng.uniform(0, 500)])
    if rng.random() < 0.5:
        some |= {"max_num_seqs": rng.randrange(1, 30), "max_num_batched_tokens": rng.choice([256, 2048, 8192])}
    requests = rng.randrange(20)
    timing = RankTiming(
        TimeCurve(rng.uniform(0, 30), rng.uniform(0.001, 0.1), rng.choice([0.0, 4e-7])), TimeCurve(6.0, 40.0)
    )
    return RankState(
        WorkerRank(worker_id), requests=requests, streams=rng.randrange(requests + 1),
        context_tokens=rng.randrange(100_000), timing=timing, **some,
    )  # fmt: skip


def state_of(rng: random.Random, ranks: tuple[RankState, ...]) -> KvState:
    tokens = rng.choice([0, 1, 15, 160, 3_000, 40_000])
    blocks = tokens // BLOCK
    matches = {}
    for at in rng.sample(range(len(ranks)), rng.choice([0, 3, 60])):
        overlap = Overlap(rng.randrange(blocks + 1), rng.randrange(3), rng.randrange(3))
        matches[at] = RankMatch(overlap, rng.randrange(blocks + 1), rng.randrange(blocks + 1))
    request = KvRequest(tokens, blocks, rng.choice([None, 0, 500]), tracks_prefill=rng.random() < 0.8)
    return KvState(BLOCK, request, ranks, matches, NOW)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_the_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    by_arrays, by_loop = TimeCost(), TimeCost()
    ranks = [rank(rng, number) for number in range(ARRAYS_FROM + rng.randrange(60))]
    ranks += [rank(random.Random(1), len(ranks) + number) for number in range(4)]  # four that are alike
    for _ in range(10):
        state, draw = state_of(rng, tuple(ranks)), rng.random()
        found = by_arrays.choose(state, draw)
        monkeypatch.setattr(kv_time, "ARRAYS_FROM", 10**9)
        assert found == by_loop.choose(state, draw)
        monkeypatch.undo()
        for at in rng.sample(range(len(ranks)), 5):
            ranks[at] = rank(rng, at)
    assert by_arrays._arrays is not None
    assert by_loop._arrays is None


class Course:
    """The records of a fleet as they change, and states of some or all of its ranks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.records: Records | None = None

    def state(self, step: str) -> KvState:
        """Return the next state: some ranks have changed, come, gone, or may not be chosen this time."""
        rng, before = self.rng, self.records
        if before is None or step == "others":
            kept = [] if before is None else [each for each in before if rng.random() < 0.8]
            new = [rank(rng, 1000 + rng.randrange(10**6)) for _ in range(ARRAYS_FROM + 9 - len(kept))]
            self.records = Records.after(None, sorted([*kept, *new], key=lambda each: each.rank), ())
        elif step != "some":
            changed = rng.sample(range(len(before)), {"none": 0, "few": 3, "many": 60}[step])
            states = list(before)
            for at in changed:
                states[at] = rank(rng, states[at].rank.worker_id)
            self.records = Records.after(before, states, changed)
        assert self.records is not None
        ranks: tuple[RankState, ...] = self.records
        if step == "some":  # of equal number as often as not
            gone = set(rng.sample(range(len(ranks)), rng.choice([1, 1, 2, 40])))
            ranks = tuple(each for at, each in enumerate(ranks) if at not in gone)
        return state_of(rng, ranks)

    def part(self, state: KvState) -> KvState:
        """Return the same state without some ranks, which policies may not choose this time."""
        assert isinstance(state.ranks, Records)
        length = len(state.ranks)
        gaps = Gaps(sorted(self.rng.sample(range(length), self.rng.choice([1, 3, length - 90, length - 1]))), length)
        matches = {gaps.place(at): match for at, match in state.matches.items() if gaps.place(at) >= 0}
        return msgspec.structs.replace(state, ranks=state.ranks.without(gaps), matches=matches)


STEPS = st.sampled_from(["none", "few", "few", "many", "some", "others"])


@pytest.mark.parametrize("policy", ["time", "default", "two-tier"])
@examples(20)
@given(st.integers(0, 10**6), st.lists(STEPS, min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_a_policy_that_has_seen_many_states_chooses_as_one_that_sees_its_first(
    policy: str, seed: int, steps: list[str], draw: float
) -> None:
    course, lasting = Course(seed), kv_policy(policy)
    for step in steps:
        state = course.state(step)
        if step != "some" and course.rng.random() < 0.6:
            state = course.part(state)
        found = lasting.choose(state, draw)
        whole = min(kv_policy(policy).choose(state, draw, with_terms=True).candidates, key=lambda each: each.total)
        assert found.cost == whole.total or policy == "two-tier"  # which goes by rules, and not by the lowest total
        assert found == kv_policy(policy).choose(msgspec.structs.replace(state, ranks=tuple(state.ranks)), draw)
        with pytest.MonkeyPatch.context() as patch:
            for module in (kv_time, kv_default):
                patch.setattr(module, "ARRAYS_FROM", 10**9)
            assert found == kv_policy(policy).choose(state, draw)


def test_equal_costs_are_drawn_evenly_and_without_numpy_the_loop_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = tuple(RankState(WorkerRank(number)) for number in range(ARRAYS_FROM))
    state, policy = KvState(BLOCK, KvRequest(64, 4), ranks, {}, NOW), TimeCost()
    drawn = [policy.choose(state, (number + 0.5) / ARRAYS_FROM).rank.worker_id for number in range(ARRAYS_FROM)]
    assert drawn == list(range(ARRAYS_FROM))
    monkeypatch.setattr(kv_time, "numpy", lambda: None)
    without = TimeCost()
    assert without.choose(state, 0.3) == policy.choose(state, 0.3)
    assert without._arrays is None
