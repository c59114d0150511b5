"""The account of each rank's load equals what a plain recount of the active requests gives, whatever is reported and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.rank_load import common_blocks
from support.properties import examples

A, B = WorkerRank(1, 0), WorkerRank(2, 1)
BLOCK = 16


def chain(*names: int) -> list[int]:
    """Return chained hashes: equal from the front as long as the names are."""
    value, found = 7, []
    for name in names:
        value = hash((value, name)) & (2**64 - 1)
        found.append(value)
    return found


def test_the_unfinished_last_block_is_in_no_account() -> None:
    load = ActiveLoad(BLOCK)
    load.add("r", A, chain(1, 2, 3, 4), prompt_tokens=69, cached_tokens=0, now=0.0)
    assert (load.decode_blocks(A), load.prefill_tokens(A), load.requests(A)) == (4, 69, 1)


def test_prefill_tokens_leave_with_the_first_token_and_blocks_with_the_end() -> None:
    load = ActiveLoad(BLOCK)
    load.add("r", A, chain(1, 2, 3, 4), prompt_tokens=69, cached_tokens=32, now=0.0)
    assert load.prefill_tokens(A) == 37
    load.prefill_completed("r", 1.0)
    load.prefill_completed("r", 2.0)
    assert (load.prefill_tokens(A), load.decode_blocks(A), load.requests(A)) == (0, 4, 1)
    load.free("r", 3.0)
    load.free("r", 4.0)
    load.prefill_completed("r", 5.0)
    load.output("r", 1)
    assert (load.prefill_tokens(A), load.decode_blocks(A), load.requests(A), len(load)) == (0, 0, 0, 0)


def test_a_long_prompt_that_comes_in_the_step_of_a_short_one_is_begun_with_it() -> None:
    load = ActiveLoad(BLOCK)
    load.add("stream", A, (), prompt_tokens=10, cached_tokens=0, now=0.0)
    load.prefill_completed("stream", 1.0)  # a step takes 6.05 ms from now on
    for name, tokens, now in (("short", 100, 1.001), ("long", 10_000, 1.006), ("late", 100, 1.007)):
        load.add(name, A, (), prompt_tokens=tokens, cached_tokens=0, now=now)
    load.prefill_completed("short", 1.2)
    assert dict(load.of(A).prefill_pass.running) == {"long": 10_100 - 8192, "late": 100}


def test_blocks_of_several_requests_count_once() -> None:
    load = ActiveLoad(BLOCK)
    load.add("r", A, chain(1, 2, 3), prompt_tokens=48, cached_tokens=0, now=0.0)
    assert load.of(A).active_blocks(chain(1, 2, 9, 9)) == 2
    load.add("s", A, chain(1, 2, 9, 9), prompt_tokens=64, cached_tokens=0, now=0.0)
    assert load.decode_blocks(A) == 5
    load.free("r", 1.0)
    assert load.decode_blocks(A) == 4
    assert load.of(B).active_blocks(chain(1, 2)) == 0


def test_adding_a_known_request_changes_nothing() -> None:
    load = ActiveLoad(BLOCK)
    assert load.add("r", A, chain(1), prompt_tokens=16, cached_tokens=0, now=0.0)
    assert not load.add("r", B, chain(1, 2), prompt_tokens=32, cached_tokens=0, now=0.0)
    assert (load.requests(A), load.requests(B), load.prefill_tokens(B)) == (1, 0, 0)


def test_a_late_end_of_an_earlier_attempt_leaves_the_newer_one_alone() -> None:
    load = ActiveLoad(BLOCK)
    load.add("r", A, chain(1), prompt_tokens=16, cached_tokens=0, now=0.0)
    load.forget(A.worker_id)
    load.add("r", B, chain(1), prompt_tokens=16, cached_tokens=0, now=1.0)
    assert load.free("r", 2.0, rank=A) is None
    assert load.requests(B) == 1
    assert load.free("r", 2.0, rank=B) is not None


def test_without_prefill_tracking_a_request_counts_blocks_only() -> None:
    load = ActiveLoad(BLOCK)
    load.add("r", A, chain(1, 2), prompt_tokens=32, cached_tokens=0, now=0.0, counts_prefill=False)
    assert (load.prefill_tokens(A), load.decode_blocks(A)) == (0, 2)


def test_output_takes_a_block_each_time_the_tokens_fill_one_more() -> None:
    load = ActiveLoad(BLOCK, tracks_output_blocks=True)
    load.add("r", A, chain(1, 2), prompt_tokens=40, cached_tokens=0, now=0.0)
    load.prefill_completed("r", 0.0)
    blocks = []
    for _ in range(4):
        load.output("r", 8)  # 48, 56, 64, 72 tokens in all
        blocks.append(load.decode_blocks(A))
    assert blocks == [2, 3, 3, 4]
    load.free("r", 1.0)
    assert load.decode_blocks(A) == 0


def test_with_an_expected_output_unshared_blocks_weigh_less_the_nearer_the_end() -> None:
    load = ActiveLoad(BLOCK, tracks_output_blocks=True)
    load.add("r", A, chain(1, 2, 3), prompt_tokens=48, cached_tokens=0, now=0.0, expected_output=64)
    load.add("s", A, chain(1), prompt_tokens=16, cached_tokens=0, now=0.0)
    load.output("r", 16)  # block 1 is shared; 2, 3 and the output block weigh 1 - 16/64
    assert load.decode_blocks(A) == pytest.approx(1 + 3 * 0.75)
    load.output("r", 48)
    assert load.decode_blocks(A) == pytest.approx(1)
    load.add("t", A, chain(1, 2), prompt_tokens=32, cached_tokens=0, now=0.0)
    assert load.decode_blocks(A) == pytest.approx(2)  # a block that is shared again counts in full
    load.free("r", 1.0)
    assert load.decode_blocks(A) == pytest.approx(2)


def test_what_is_never_freed_expires_unless_it_is_live() -> None:
    load = ActiveLoad(BLOCK, expiry_seconds=300.0)
    for name in ("lost", "live", "owned"):
        load.add(name, A, chain(1), prompt_tokens=16, cached_tokens=0, now=0.0, expires=name != "owned")
    load.add("young", A, chain(1), prompt_tokens=16, cached_tokens=0, now=200.0)
    assert load.expire(301.0, is_live=lambda request_id: request_id == "live") == ["lost"]
    assert load.requests(A) == 3


def test_requests_are_looked_through_at_most_every_thirty_seconds_when_one_is_added() -> None:
    load = ActiveLoad(BLOCK, expiry_seconds=10.0)
    load.add("first", A, chain(1), prompt_tokens=16, cached_tokens=0, now=0.0)
    load.add("second", A, chain(1), prompt_tokens=16, cached_tokens=0, now=29.0)
    assert load.requests(A) == 2
    load.add("third", A, chain(1), prompt_tokens=16, cached_tokens=0, now=30.0)
    assert load.requests(A) == 2


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6), st.integers(0, 7))
@examples(200)
def test_the_active_part_of_a_prompt_is_what_it_shares_with_the_active_one(
    active: list[int], asked: list[int], guess: int
) -> None:
    load = ActiveLoad(BLOCK)
    load.add("r", A, chain(*active), prompt_tokens=0, cached_tokens=0, now=0.0)
    shared = next((at for at, (a, b) in enumerate(zip(active, asked, strict=False)) if a != b), None)
    expected = min(len(active), len(asked)) if shared is None else shared
    assert load.of(A).active_blocks(chain(*asked), guess) == expected
    assert common_blocks(chain(*active), chain(*asked)) == expected


@dataclass
class Plain:
    """The same account, counted anew at each question."""

    requests: dict[str, Request] = field(default_factory=dict)

    def blocks(self, rank: WorkerRank) -> int:
        return len({block for each in self.requests.values() if each.rank == rank for block in each.sequence})

    def prefill(self, rank: WorkerRank) -> int:
        return sum(each.uncached for each in self.requests.values() if each.rank == rank and not each.streams)

    def context(self, rank: WorkerRank) -> int:
        return sum(each.context for each in self.requests.values() if each.rank == rank)


@dataclass
class Request:
    rank: WorkerRank
    sequence: list[int]
    uncached: int
    context: int
    streams: bool = False


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "first", "output", "free", "forget"]),
        st.sampled_from("rstuv"),
        st.sampled_from([A, B]),
        st.lists(st.integers(0, 1), max_size=5),
        st.integers(0, 40),
    ),
    max_size=40,
)


@given(STEPS)
@examples(200)
def test_the_account_is_what_a_recount_gives(steps: list[tuple[str, str, WorkerRank, list[int], int]]) -> None:
    load, plain = ActiveLoad(BLOCK), Plain()
    for now, (step, name, rank, names, cached) in enumerate(steps):
        tokens = BLOCK * len(names) + 5
        known = plain.requests.get(name)
        if step == "add":
            is_new = load.add(name, rank, chain(*names), prompt_tokens=tokens, cached_tokens=cached, now=now)
            assert is_new is (known is None)
            if known is None:
                plain.requests[name] = Request(rank, chain(*names), max(0, tokens - cached), tokens)
        elif step == "first":
            load.prefill_completed(name, now)
            if known is not None:
                known.streams = True
        elif step == "output":
            load.output(name, 3)
            if known is not None:
                known.context += 3
        elif step == "free":
            assert (load.free(name, now) is None) is (known is None)
            plain.requests.pop(name, None)
        else:
            load.forget(rank.worker_id)
            plain.requests = {each: r for each, r in plain.requests.items() if r.rank != rank}
        for each in (A, B):
            assert load.decode_blocks(each) == plain.blocks(each)
            assert load.prefill_tokens(each) == plain.prefill(each)
            assert load.requests(each) == sum(r.rank == each for r in plain.requests.values())
            account = load.of(each)
            assert account.clock.context_tokens == plain.context(each)
            assert account.clock.streams == sum(r.rank == each and r.streams for r in plain.requests.values())
            waiting = account.prefill_pass
            assert waiting.running_tokens == sum(waiting.running.values())
            assert waiting.waiting_tokens == sum(tokens for tokens, _ in waiting.waiting.values())
            assert bool(waiting.running) or not waiting.waiting
        heads: dict[int, Counter[WorkerRank]] = {}
        for request in plain.requests.values():
            if request.sequence:
                heads.setdefault(request.sequence[0], Counter())[request.rank] += 1
        assert load.heads == heads


class CountedBlocks(list[int]):
    """The blocks of a prompt, with a count of those that were read."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        self.read += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()

    def __reversed__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__reversed__()


def test_an_output_block_costs_the_same_for_a_prompt_of_any_length() -> None:
    load = ActiveLoad(BLOCK, tracks_output_blocks=True)
    sequence = CountedBlocks(chain(*range(1000)))
    load.add("r", A, sequence, prompt_tokens=16_000, cached_tokens=0, now=0.0, expected_output=1600)
    load.output("r", BLOCK)
    before = sequence.read
    for _ in range(99):
        load.output("r", BLOCK)
    assert load.decode_blocks(A) == pytest.approx(0)
    assert sequence.read - before <= 300


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 12)), max_size=40))
@examples(100)
def test_blocks_weigh_what_a_recount_gives(steps: list[tuple[int, int, int]]) -> None:
    """The weights of a request are set with each of its output blocks, and a block that gets a second holder counts in full."""
    load = ActiveLoad(BLOCK)
    weights: dict[int, float] = {}
    held: dict[str, list[int]] = {}
    serial = 0
    for kind, number, size in steps:
        name = f"r{number}"
        if kind == 0 and name not in held:
            held[name] = chain(*[min(each, 3 + number) for each in range(size)])
            load.add(name, A, list(held[name]), prompt_tokens=16 * size, cached_tokens=0, now=0.0)
            for block in held[name]:
                weights.pop(block, None)
        elif kind == 1 and name in held:
            load.free(name, 1.0)
            gone = held.pop(name)
            for block in gone:
                if not any(block in blocks for blocks in held.values()):
                    weights.pop(block, None)
        elif name in held:
            weight = size / 12
            load.output_block(name, weight)
            serial += 1
            held[name].append(-serial)
            for block in reversed(held[name]):
                if sum(block in blocks for blocks in held.values()) > 1:
                    break
                weights[block] = weight
        distinct = {block for blocks in held.values() for block in blocks}
        expected = sum(weights.get(block, 1.0) for block in distinct)
        assert load.decode_blocks(A) == pytest.approx(expected, abs=1e-9)
