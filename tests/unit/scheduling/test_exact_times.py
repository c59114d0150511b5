"""The exact cases that were observed on the native mocker: one rank, block 16, 4,096 blocks, speedup 1."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dynamo.mocker.timing import PolynomialTiming
from dynamo.scheduling import ScheduledRequest, SchedulerCore, SchedulerOptions, make_core
from support.virtual_engine import play

fresh = itertools.count()


def core(**options: Any) -> SchedulerCore:
    return make_core(SchedulerOptions(**{"num_gpu_blocks": 4096, "block_size": 16, **options}), PolynomialTiming())


def prompt(tokens: int, output: int = 4, *, same_as: int | None = None) -> ScheduledRequest:
    number = next(fresh) if same_as is None else same_as
    token_ids = [number * 100_000 + position for position in range(tokens)]
    return ScheduledRequest.of_tokens(f"r{next(fresh)}", token_ids, output, 16, itertools.repeat(7))


def near(milliseconds: float) -> object:
    return pytest.approx(milliseconds, abs=0.0006)


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_one_prompt_alone(backend: str) -> None:
    one = prompt(562)
    line = play(core(backend=backend), [(0, one)])
    assert line.ttft(one) == near(25.1675)
    assert line.gaps(one) == [near(6.2021), near(6.2029), near(6.2037)]
    assert line.tokens_at[one.request_id][-1] == near(43.776)


def test_two_prompts_in_one_batch() -> None:
    one, two = prompt(562), prompt(200)
    line = play(core(), [(0, one), (0, two)])
    assert line.ttft(one) == line.ttft(two) == near(28.316)


def test_a_prompt_that_comes_in_a_pass_waits_for_its_end() -> None:
    one, two = prompt(562, 40), prompt(800)
    line = play(core(), [(0, one), (40, two)])
    assert two.admitted_ms == near(43.776)
    assert line.ttft(two) == near(38.898)


def test_a_repeated_prompt_computes_its_last_block_again() -> None:
    one = prompt(560, same_as=5)
    two = prompt(560, same_as=5)
    line = play(core(), [(0, one), (200, two)])
    assert (one.cached_tokens, two.cached_tokens) == (0, 544)
    assert line.ttft(two) == near(16.744)


def test_a_long_prompt_takes_three_chunks() -> None:
    one = prompt(20_000, 1)
    line = play(core(), [(0, one)])
    assert (line.passes, line.ttft(one)) == (3, near(415.183))


def test_speedups_divide_and_slow_down() -> None:
    one = prompt(562)
    line = play(core(speedup_ratio=0.5, decode_speedup_ratio=2.0), [(0, one)])
    assert line.ttft(one) == near(50.335)
    assert line.gaps(one)[0] == near(6.202)


def test_a_speedup_of_zero_means_no_time_at_all() -> None:
    one = prompt(20_000, 50)
    assert set(play(core(speedup_ratio=0.0), [(3.0, one)]).tokens_at[one.request_id]) == {3.0}


def test_a_prefill_worker_pays_no_decode_and_a_decode_worker_no_prefill() -> None:
    first, second = prompt(562), prompt(562)
    prefill = play(core(role="prefill"), [(0, first)])
    assert prefill.tokens_at[first.request_id] == [near(25.1675)]
    decode = play(core(role="decode"), [(0, second)])
    assert decode.tokens_at[second.request_id] == [0.0, near(6.2021), near(12.405), near(18.609)]


def test_four_hundred_tokens_at_block_four_bring_a_hundred_and_one_events() -> None:
    one = ScheduledRequest.of_tokens("one", list(range(61)), 400, 4, itertools.repeat(7))
    line = play(core(block_size=4), [(0, one)])
    assert len(line.events) == 101
