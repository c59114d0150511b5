"""Traces that are drawn after the statistics of published ones, and the highest load of a fleet."""

from __future__ import annotations

import pytest

from dynamo.errors import InvalidArgument
from dynamo.replay.capacity import highest_load
from dynamo.replay.mooncake import read_mooncake, write_mooncake
from dynamo.replay.published import BLOCK, GridShape, conversation, grid, synthetic
from dynamo.replay.trace import Stretch, Trace


def reuse(trace: Trace) -> float:
    """Return the share of the tokens in blocks that an endless cache holds."""
    seen: set[tuple[Stretch, ...]] = set()
    reused = 0
    for request in trace.requests:
        known = [prompt for end in range(len(request.prompt), 0, -1) if (prompt := request.prompt[:end]) in seen]
        reused += sum(stretch.tokens for stretch in known[0]) // BLOCK * BLOCK if known else 0
        seen.update(request.prompt[:end] for end in range(1, len(request.prompt) + 1))
    return reused / trace.prompt_tokens


def means(trace: Trace) -> tuple[float, float]:
    count = len(trace.requests)
    return trace.prompt_tokens / count, sum(request.output_tokens for request in trace.requests) / count


def test_the_drawn_conversations_have_the_published_statistics() -> None:
    trace = conversation(0)
    assert len(trace.requests) == 12_031
    assert means(trace) == (pytest.approx(12_035, rel=0.05), pytest.approx(343, rel=0.05))
    assert reuse(trace) == pytest.approx(0.40, abs=0.03)
    first = [request.arrival_ms for request in trace.requests if request.delay_ms is None]
    assert {at % 3000 for at in first} == {0.0}


def test_the_drawn_synthetic_trace_has_the_published_statistics() -> None:
    trace = synthetic(0)
    assert len(trace.requests) == 3_993
    assert means(trace) == (pytest.approx(15_325, rel=0.05), pytest.approx(149, rel=0.05))
    assert reuse(trace) == pytest.approx(0.66, abs=0.03)


def test_a_grid_has_its_groups_in_any_order() -> None:
    trace = grid(0)
    assert len(trace.requests) == 128 * 32
    prefixes = [request.prompt[0] for request in trace.requests]
    assert len(set(prefixes)) == 128
    assert len(set(prefixes[:200])) > 60


def test_the_turns_of_a_drawn_session_wait_for_the_answer_before_also_in_a_file() -> None:
    trace = conversation(3, 400)
    later = [request for request in trace.requests if request.delay_ms is not None]
    assert len(later) > 50
    read = read_mooncake(write_mooncake(trace, block_tokens=64), block_tokens=64)
    assert [each.delay_ms for each in read.requests] == [each.delay_ms for each in trace.requests]
    assert [each.session_id for each in read.requests] == [each.session_id for each in trace.requests]


def test_the_same_seed_draws_the_same_trace_and_another_one_another() -> None:
    assert conversation(1, 50) == conversation(1, 50) != conversation(2, 50)
    assert synthetic(1, 50) == synthetic(1, 50) != synthetic(2, 50)


def test_a_shape_that_cannot_be_drawn_is_named() -> None:
    with pytest.raises(InvalidArgument, match="rate must be above 0"):
        grid(0, shape=GridShape(rate=0.0))


def test_the_highest_load_is_found_between_one_that_holds_and_one_that_does_not() -> None:
    assert highest_load(lambda load: load <= 3.0, 0.5, 8.0, steps=8) == pytest.approx(3.0, rel=0.02)
    assert highest_load(lambda load: load <= 3.0, 4.0, 8.0, steps=8) == 0.0
    assert highest_load(lambda load: True, 0.5, 8.0, steps=8) == 8.0
    with pytest.raises(InvalidArgument, match="lower load"):
        highest_load(lambda load: True, 8.0, 0.5, steps=8)
