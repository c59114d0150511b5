"""Traces: what prompts share, drawn ones, the pooled cache."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.replay.generated import STAMPEDE, MooncakeShape, TraceShape, generate, generate_mooncake_like, stampede
from dynamo.replay.run import PooledCache
from dynamo.replay.trace import Stretch, StretchTree, TraceRequest, prompt_token_ids
from support.properties import examples


@examples(60)
@given(
    prompts=st.lists(
        st.lists(st.builds(Stretch, st.integers(-2, 2), st.integers(1, 40)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_the_blocks_of_a_prompt_are_those_of_its_token_ids(prompts: list[list[Stretch]], block_size: int) -> None:
    tree = StretchTree(block_size)
    for prompt in prompts:
        request = TraceRequest("r", 0.0, tuple(prompt), 1)
        ids = prompt_token_ids(request)
        assert len(ids) == request.prompt_tokens
        local = block_hashes(ids, block_size)
        assert tree.blocks(prompt) == (local, sequence_hashes(local))


def test_a_shorter_stretch_is_the_beginning_of_a_longer_one() -> None:
    long, short = (prompt_token_ids(TraceRequest("r", 0.0, (Stretch(7, tokens),), 1)).tolist() for tokens in (64, 20))
    assert long[:20] == short


def test_a_generated_trace_is_that_of_its_seed() -> None:
    shape = TraceShape(requests=120, prompt_tokens=512)
    assert generate(shape, 3) == generate(shape, 3)
    assert generate(shape, 3) != generate(shape, 4)


@pytest.mark.parametrize("tokens", [1024, 16384])
def test_a_generated_trace_has_the_rate_and_the_lengths_that_its_shape_names(tokens: int) -> None:
    shape = TraceShape(requests=1500, rate=20.0, prompt_tokens=tokens)
    trace = generate(shape, 0)
    assert len(trace.requests) == 1500
    assert [request.arrival_ms for request in trace.requests] == sorted(r.arrival_ms for r in trace.requests)
    assert trace.seconds == pytest.approx(1500 / 20.0, rel=0.15)
    assert trace.prompt_tokens / 1500 == pytest.approx(tokens, rel=0.25)
    assert sum(r.output_tokens for r in trace.requests) / 1500 == pytest.approx(64, rel=0.15)
    turns = sum(request.session_id is not None for request in trace.requests)
    assert turns / 1500 == pytest.approx(shape.chats, abs=0.12)


def test_each_turn_of_a_chat_begins_with_the_turn_before() -> None:
    trace = generate(TraceShape(requests=300, chats=1.0, documents=0.0, bursts=0.0), 1)
    before: dict[str, tuple[Stretch, ...]] = {}
    followed = 0
    for request in trace.requests:
        assert request.session_id is not None
        earlier = before.get(request.session_id)
        if earlier is not None:
            assert request.prompt[: len(earlier)] == earlier
            followed += 1
        before[request.session_id] = request.prompt
    assert followed > 100


def test_documents_are_asked_about_by_zipf() -> None:
    trace = generate(TraceShape(requests=2000, chats=0.0, documents=1.0, bursts=0.0, document_count=50), 2)
    asked: dict[Stretch, int] = {}
    for request in trace.requests:
        asked[request.prompt[1]] = asked.get(request.prompt[1], 0) + 1
    ordered = sorted(asked.values(), reverse=True)
    weights = [1 / place for place in range(1, 51)]
    assert ordered[0] / 2000 == pytest.approx(weights[0] / sum(weights), rel=0.2)
    assert ordered[9] / 2000 == pytest.approx(weights[9] / sum(weights), rel=0.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"rate": 0.0}, "rate"), ({"chats": 1.2}, "chats"), ({"requests": 0}, "requests"), ({"bursts": 0.9}, "together")],
)
def test_a_shape_that_cannot_be_drawn_is_an_error_that_names_its_member(change: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        generate(TraceShape(**change), 0)  # type: ignore[arg-type]


def test_a_mooncake_like_trace_has_whole_blocks_and_a_coarse_clock() -> None:
    trace = generate_mooncake_like(MooncakeShape(requests=400), 0)
    assert trace == generate_mooncake_like(MooncakeShape(requests=400), 0)
    assert all(stretch.tokens == 512 for request in trace.requests for stretch in request.prompt[:-1])
    assert {request.arrival_ms % 3000 for request in trace.requests} == {0.0}
    assert len({request.prompt[0].key for request in trace.requests}) == 1
    assert 6_000 < trace.prompt_tokens / 400 < 20_000


def test_a_stampede_arrives_in_the_middle_of_other_traffic() -> None:
    beside = generate(TraceShape(requests=50, prompt_tokens=256), 0)
    trace = stampede(16, 1024, 50.0, 0, beside=beside)
    crowd = [request for request in trace.requests if request.policy_class == STAMPEDE]
    assert len(crowd) == 16
    assert len(trace.requests) == 66
    assert crowd[-1].arrival_ms - crowd[0].arrival_ms <= 50.0
    assert len({request.prompt[0] for request in crowd}) == 1
    assert beside.requests[0].arrival_ms < crowd[0].arrival_ms < beside.requests[-1].arrival_ms


def test_the_pooled_cache_reuses_whole_leading_blocks_but_never_the_last_token() -> None:
    pooled = PooledCache(100, 4)
    assert pooled.serve([1, 2], 9, 1) == 0
    assert pooled.serve([1, 2], 8, 1) == 4  # the second block holds the last token
    assert pooled.serve([1, 2], 9, 1) == 8
    assert pooled.serve([1, 7], 9, 1) == 4
    assert pooled.hit_rate == pytest.approx(16 / 35)


def test_the_pooled_cache_evicts_the_end_of_a_prompt_first_and_the_least_recent_prompt_first() -> None:
    pooled = PooledCache(5, 4)
    pooled.serve([1, 2, 3], 12, 0)
    pooled.serve([4, 5, 6], 12, 0)  # evicts block 3
    assert pooled.serve([1, 2, 3], 13, 0) == 8


@examples(40)
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 30))
def test_a_larger_pooled_cache_never_reuses_less(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    small, large = PooledCache(capacity, 2), PooledCache(capacity + rng.randrange(30), 2)
    for _ in range(40):
        length = rng.randrange(1, 6)
        sequence = [rng.randrange(3) * 10 + place for place in range(length)]
        small.serve(sequence, 2 * length, 0)
        large.serve(sequence, 2 * length, 0)
    assert large.reused_tokens >= small.reused_tokens
