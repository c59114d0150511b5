"""Replays over prefill and decode workers: exact times, what neither role does to the other, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dynamo.errors import InvalidArgument
from dynamo.mocker.timing import PolynomialTiming
from dynamo.replay.modes import frontend_of
from dynamo.replay.run import run_replay
from dynamo.replay.setup import ReplaySetup
from dynamo.replay.split import SplitSetup, run_split
from dynamo.replay.trace import Stretch, Trace, TraceRequest
from dynamo.scheduling import SchedulerOptions

OPTIONS = SchedulerOptions(num_gpu_blocks=4096, block_size=16)
SETUP = ReplaySetup(block_size=16)
TIMING = PolynomialTiming()


def trace(*requests: tuple[float, int, int]) -> Trace:
    """Make a trace of (arrival in ms, prompt tokens, output tokens)."""
    return Trace(
        "hand-made",
        [
            TraceRequest(f"r{number}", at, (Stretch(number, tokens),), output)
            for number, (at, tokens, output) in enumerate(requests)
        ],
    )


def decode_ms(*contexts: int) -> float:
    return TIMING.decode_ms(sum(contexts), sum(contexts) // len(contexts), OPTIONS.capacity_tokens)


def test_a_lone_request_takes_its_prompt_its_way_and_then_its_steps() -> None:
    found = run_split(trace((5.0, 562, 3)), SplitSetup(1, 1, 0.5), SETUP, OPTIONS, mode="round-robin")
    (request,) = found.requests
    begun = TIMING.prefill_ms(1, 562, 0) + 281
    assert request.ttft_ms == pytest.approx(begun, abs=1e-3)
    assert request.e2e_latency_ms == pytest.approx(begun + decode_ms(563) + decode_ms(564), abs=1e-3)
    assert found.latencies["ttft"].mean == pytest.approx(begun, abs=1e-3)
    assert (found.finished, found.output_tokens, found.input_tokens) == (1, 3, 562)
    assert found.worker_requests == [1, 1]


def test_an_answer_of_one_token_never_reaches_a_decode_worker() -> None:
    found = run_split(trace((0, 100, 1), (0.5, 100, 2)), SplitSetup(1, 1), SETUP, OPTIONS, mode="round-robin")
    assert found.worker_requests == [2, 1]
    assert [request.output_tokens for request in found.requests] == [1, 2]
    assert found.requests[0].ttft_ms == pytest.approx(TIMING.prefill_ms(1, 100, 0), abs=1e-3)
    only = run_split(trace((0, 100, 1)), SplitSetup(1, 1), SETUP, OPTIONS, mode="round-robin")
    assert (only.finished, only.worker_requests) == (1, [1])


def test_prompts_do_not_make_answers_wait() -> None:
    given = trace((0, 64, 40), *((20.0 + 60 * number, 3000, 2) for number in range(4)))
    alike = run_replay(given, SETUP.__class__(workers=1, block_size=16), OPTIONS,
        frontend_of("round-robin", OPTIONS), mode="round-robin")  # fmt: skip
    split = run_split(given, SplitSetup(1, 1), SETUP, OPTIONS, mode="round-robin")
    assert alike.latencies["itl"].max > TIMING.prefill_ms(1, 3000, 0)
    assert split.latencies["itl"].max < 20


def test_a_shared_prefix_is_computed_once_by_the_prefill_worker() -> None:
    prompts = [(Stretch(-1, 320), Stretch(number, 32)) for number in range(3)]
    given = Trace("shared", [TraceRequest(f"r{n}", 1000.0 * n, prompt, 4) for n, prompt in enumerate(prompts)])
    found = run_split(given, SplitSetup(2, 1), SETUP, OPTIONS, mode="kv")
    assert [request.reused_input_tokens for request in found.requests] == [0, 320, 320]
    assert found.committed_prefill_tokens == 3 * 352 - 640


def test_the_rate_counts_once() -> None:
    given = trace(*((100.0 * number, 500, 5) for number in range(10)))
    whole = run_split(given, SplitSetup(1, 1), SETUP, OPTIONS, mode="round-robin")
    fast = run_split(
        given, SplitSetup(1, 1), msgspec.structs.replace(SETUP, arrival_speedup_ratio=2.0), OPTIONS, mode="round-robin"
    )
    assert [request.arrival_ms for request in fast.requests] == [50.0 * number for number in range(10)]
    assert fast.duration_ms == pytest.approx(whole.duration_ms - 450, abs=5)


def test_a_prompt_that_no_worker_can_hold_is_rejected_and_counted() -> None:
    small = replace(OPTIONS, num_gpu_blocks=8)
    found = run_split(trace((0, 4000, 5), (1, 50, 5)), SplitSetup(1, 1), SETUP, small, mode="round-robin")
    assert [request.status for request in found.requests] == ["rejected", "finished"]


def test_turns_that_wait_for_an_answer_and_closed_loops_are_refused() -> None:
    turn = TraceRequest("t", 0.0, (Stretch(1, 10),), 2, session_id="s", delay_ms=5.0)
    with pytest.raises(InvalidArgument, match=r"request t waits .* \(delay\)"):
        run_split(Trace("turns", [turn]), SplitSetup(1, 1), SETUP, OPTIONS, mode="round-robin")
    closed = msgspec.structs.replace(SETUP, concurrency=2)
    with pytest.raises(InvalidArgument, match="concurrency"):
        run_split(trace((0, 10, 2)), SplitSetup(1, 1), closed, OPTIONS, mode="round-robin")
