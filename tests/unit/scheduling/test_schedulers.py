"""What every scheduler keeps to, and what each does in its own way."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.mocker.timing import FixedTiming
from dynamo.scheduling import (
    BlockRun,
    EvictedBlocks,
    RankGroup,
    ScheduledRequest,
    SchedulerCore,
    SchedulerOptions,
    SglangOptions,
    make_core,
    pass_duration,
)
from support.properties import examples
from support.virtual_engine import play

fresh = itertools.count()


def core(**options: Any) -> SchedulerCore:
    return make_core(SchedulerOptions(**{"num_gpu_blocks": 8, "block_size": 4, **options}), FixedTiming(10.0, 1.0))


def request(tokens: int, output: int, *, start: int = 0) -> ScheduledRequest:
    name = f"r{next(fresh)}"
    return ScheduledRequest.of_tokens(name, range(start, start + tokens), output, 4, itertools.count(1000))


backends = st.sampled_from(["vllm", "sglang", "trtllm"])
loads = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2), st.sampled_from([0, 0, 0, 3])
    ),
    min_size=1,
    max_size=25,
)


@given(
    backends,
    loads,
    st.booleans(),
    st.sampled_from(["lifo", "fifo"]),
    st.sampled_from(["fifo", "lpm"]),
    st.booleans(),
    st.sampled_from([(), (0.9, 0.5)]),
)
@examples(150, deadline=None)
def test_every_request_ends_with_all_its_tokens_and_no_block_is_lost(
    backend: str,
    load: list[tuple[int, int, int, int, int]],
    chunked: bool,
    preemption_mode: str,
    schedule_policy: str,
    caching: bool,
    accept_rates: tuple[float, ...],
) -> None:
    one = core(
        backend=backend,
        num_gpu_blocks=9,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        enable_chunked_prefill=chunked or backend == "sglang",
        enable_prefix_caching=caching,
        preemption_mode=preemption_mode,
        accept_rates=accept_rates,
        sglang=SglangOptions(schedule_policy=schedule_policy, chunked_prefill_size=8, max_prefill_tokens=12),
    )
    held: set[int] = set()
    cancels: dict[int, list[ScheduledRequest]] = {}
    everything, arrivals = [], []
    for number, (at, tokens, output, family, cancel_after) in enumerate(load):
        made = request(tokens, output, start=family * 1000)
        everything.append(made)
        arrivals.append((at, made))
        if cancel_after:
            cancels.setdefault(number + cancel_after, []).append(made)
    arrivals.sort(key=lambda entry: entry[0])
    sent: dict[str, int] = {}
    for number in range(5000):
        while arrivals and arrivals[0][0] <= number:
            one.submit(arrivals.pop(0)[1], number)
        plan = one.begin_pass(number)
        for gone in cancels.pop(number, ()):  # in the middle of a pass, or between two
            one.cancel(gone)
        if plan is None:
            if not arrivals:
                break
            continue
        assert len(one.running) <= 4
        result = one.end_pass()
        for event in result.events:
            if isinstance(event, EvictedBlocks):
                assert held >= set(event.identities)
                held -= set(event.identities)
            else:
                assert event.begin == 0 or event.parent in held
                assert not held & set(event.identities)
                held |= set(event.identities)
        for emitted in result.emitted:
            sent[emitted.request_id] = sent.get(emitted.request_id, 0) + emitted.burst
        for finished in result.finished:
            assert sent[finished.request_id] == finished.max_output == finished.generated
        assert one.pool.used + one.pool.available == one.pool.blocks
    assert not one.has_work
    assert one.pool.available == one.pool.blocks
    assert len(held) == one.pool.cached
    assert all(made.is_over or made.last == 0 for made in everything)


def test_a_prompt_as_large_as_the_cache_or_the_model_is_rejected() -> None:
    for backend in ("vllm", "sglang", "trtllm"):
        fits, fills = request(31, 4), request(32, 4)
        assert play(core(backend=backend), [(0, fits), (0, fills)]).rejected == [fills.request_id]
        assert fits.generated == 1
    short, long = request(15, 9), request(16, 1)
    assert play(core(max_model_len=16), [(0, short), (0, long)]).rejected == [long.request_id]
    assert short.generated == 1


def test_the_head_of_the_queue_holds_up_all_behind_it() -> None:
    one = core()
    for made in (request(20, 8), large := request(24, 2, start=100), small := request(4, 2, start=200)):
        one.submit(made, 0)
    one.begin_pass(0)
    assert list(one.waiting) == [large, small]


@pytest.mark.parametrize(("mode", "victim"), [("lifo", 1), ("fifo", 0)])
def test_without_blocks_one_running_request_is_preempted(mode: str, victim: int) -> None:
    one = core(num_gpu_blocks=5, preemption_mode=mode)
    both = [request(8, 5), request(8, 5, start=100)]
    line = play(one, [(0, both[0]), (0, both[1])])
    assert one.preemptions == 1
    assert [made.preemptions for made in both] == [int(victim == 0), int(victim == 1)]
    assert all(made.generated == 5 for made in both)
    assert line.finished == [both[1 - victim].request_id, both[victim].request_id]


def test_trtllm_admits_only_what_runs_to_its_end() -> None:
    one = core(backend="trtllm", num_gpu_blocks=5)
    both = [request(8, 5), request(8, 5, start=100)]
    line = play(one, [(0, both[0]), (0, both[1])])
    assert one.preemptions == 0
    assert both[1].admitted_ms == line.tokens_at[both[0].request_id][-1]


def test_trtllm_computes_nothing_of_a_prompt_that_is_cached_in_whole_blocks() -> None:
    first, second = request(8, 1), request(8, 1)
    line = play(core(backend="trtllm"), [(0, first), (50, second)])
    assert second.cached_tokens == 8
    assert line.ttft(second) == 0


def test_sglang_retracts_the_request_with_the_fewest_tokens() -> None:
    one = core(backend="sglang", num_gpu_blocks=6, sglang=SglangOptions(clip_max_new_tokens=1))
    older, younger = request(8, 9), request(8, 9, start=100)
    play(one, [(0, older), (10, younger)])
    assert (older.preemptions, younger.preemptions) == (0, 1)
    assert older.generated == younger.generated == 9


def test_sglang_lpm_takes_the_longest_cached_prefix_first() -> None:
    one = core(backend="sglang", num_gpu_blocks=64, sglang=SglangOptions(schedule_policy="lpm"), max_num_seqs=1)
    first = request(40, 1)
    stranger, relative = request(20, 1, start=5000), request(40, 1)
    line = play(one, [(0, first), (1, stranger), (2, relative)])
    assert line.finished == [made.request_id for made in (first, relative, stranger)]


def test_without_prefix_caching_nothing_is_kept_and_nothing_is_told() -> None:
    one = core(enable_prefix_caching=False)
    line = play(one, [(0, request(8, 2)), (50, again := request(8, 2))])
    assert (line.events, again.cached_tokens, one.pool.cached) == ([], 0, 0)


def test_blocks_have_the_names_that_a_router_computes() -> None:
    made = request(6, 7)
    line = play(core(), [(0, made)])
    tokens = [*range(6), *range(1000, 1006)]  # the last token is not computed
    content = block_hashes(tokens, 4)
    runs = [event for event in line.events if isinstance(event, BlockRun)]
    assert [name for run in runs for name in run.identities] == sequence_hashes(content)
    assert [own for run in runs for own in run.content] == content
    assert [run.parent for run in runs] == [None, *sequence_hashes(content)[:2]]


def test_drafts_are_accepted_until_the_first_refusal() -> None:
    one = core(accept_rates=(1.0, 0.0, 1.0), num_gpu_blocks=64)
    made = request(5, 8)
    line = play(one, [(0, made)])
    bursts = [len(list(group)) for _, group in itertools.groupby(line.tokens_at[made.request_id])]
    assert bursts == [1, 2, 2, 2, 1]


def test_speculation_reuses_one_block_less() -> None:
    for rates, cached in (((), 12), ((0.5,), 8)):
        again = request(16, 1)
        play(core(accept_rates=rates), [(0, request(16, 1)), (50, again)])
        assert again.cached_tokens == cached


def test_a_request_without_tokens_needs_only_names() -> None:
    chance = random.Random(3)
    names = [chance.getrandbits(64) for _ in range(3)]
    first = ScheduledRequest("a", 13, 8, identities=list(names), content=[1, 2, 3])
    again = ScheduledRequest("b", 13, 8, identities=list(names), content=[1, 2, 3])
    play(core(num_gpu_blocks=32), [(0, first), (100, again)])
    assert again.cached_tokens == 12
    assert len(first.identities) == 5


def test_ranks_take_their_passes_in_step() -> None:
    group = RankGroup([core(), core()])
    slow, fast = request(8, 2), request(8, 2, start=100)
    group.cores[0].submit(slow, 0)
    assert pass_duration(group.begin_pass(0)) == 10
    group.end_pass()
    group.cores[1].submit(fast, 10)
    assert pass_duration(group.begin_pass(10)) == 10  # rank 0 decodes in 1 ms and waits
    results = group.end_pass()
    assert [rank for rank, _ in results] == [0, 1]
    assert results[0][1].finished == [slow]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"backend": "tgi"}, "backend"),
        ({"block_size": 1}, "block_size"),
        ({"backend": "sglang", "block_size": 0}, "block_size"),
        ({"speedup_ratio": -1.0}, "speedup_ratio"),
        ({"decode_speedup_ratio": float("nan")}, "decode_speedup_ratio"),
        ({"accept_rates": (1.5,)}, r"accept_rates\[0\]"),
        ({"accept_rates": (0.5,), "decode_speedup_ratio": 2.0}, "decode_speedup_ratio"),
        ({"backend": "sglang", "enable_chunked_prefill": False}, "enable_chunked_prefill"),
        ({"backend": "trtllm", "role": "decode"}, "trtllm"),
        ({"preemption_mode": "random"}, "preemption_mode"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        SchedulerOptions(**options)
