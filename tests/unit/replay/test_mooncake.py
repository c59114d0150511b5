"""Traces as JSONL: what is read, what is refused, and that what was written is read again."""

from __future__ import annotations

import json

import pytest

from dynamo.replay.generated import TraceShape, generate
from dynamo.replay.mooncake import BadTraceLine, read_mooncake, write_mooncake
from dynamo.replay.trace import Stretch, StretchTree

GOOD = {"timestamp": 5, "input_length": 1200, "output_length": 7, "hash_ids": [3, 4, 9]}


def line(**members: object) -> str:
    return json.dumps({**GOOD, **members})


def test_a_line_of_the_published_format_is_a_request() -> None:
    (request,) = read_mooncake([line()]).requests
    assert request.arrival_ms == 5
    assert request.prompt == (Stretch(3, 512), Stretch(4, 512), Stretch(9, 176))
    assert request.output_tokens == 7


def test_the_other_names_of_members_are_read() -> None:
    (request,) = read_mooncake(
        [
            '{"created_time": 2.5, "input_tokens": 10, "output_tokens": 3, "hash_ids": [1], "request_id": 17,'
            ' "priority": 2, "policy_class": "batch", "output_token_ids": [5, 6, 7], "something": {"else": 1}}'
        ]
    ).requests
    assert (request.arrival_ms, request.prompt_tokens, request.output_tokens) == (2.5, 10, 3)
    assert (request.request_id, request.priority, request.policy_class) == ("17", 2, "batch")
    assert request.output_token_ids == (5, 6, 7)


def test_equal_ids_are_equal_blocks_and_requests_without_ids_share_nothing() -> None:
    lines = [line(), line(hash_ids=[3, 4, 8]), line(hash_ids=None), line(hash_ids=None)]
    blocks = [StretchTree(16).blocks(request.prompt).sequence for request in read_mooncake(lines).requests]
    shared = [a == b for a, b in zip(blocks[0], blocks[1], strict=True)]
    assert shared == [True] * 64 + [False] * 11
    assert not set(blocks[2]) & set(blocks[3])


def test_a_later_turn_waits_for_the_turn_before() -> None:
    turns = read_mooncake(
        [line(session_id="s"), '{"input_length": 5, "output_length": 1, "session_id": "s", "delay": 250}']
    ).requests
    assert sorted((turn.delay_ms or -1.0) for turn in turns) == [-1.0, 250.0]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("not json", "line"),
        ("[1]", "line"),
        (line(input_length="many"), "input_length"),
        (line(input_length=0), "input_length"),
        (line(output_length=None), "output_length"),
        (line(timestamp=-1), "timestamp"),
        (line(timestamp=None), "timestamp"),
        (line(hash_ids=[1, 2]), "hash_ids"),
        (line(hash_ids=[1, 2, "x"]), "hash_ids[2]"),
        (line(hash_ids=[1, -2, 3]), "hash_ids[1]"),
        (line(delay=5), "delay"),
        (line(output_token_ids=[1]), "output_token_ids"),
        (line(wait_for=["a"]), "wait_for"),
        (line(tool_events=[]), "tool_events"),
    ],
)
def test_a_bad_line_is_an_error_that_names_the_line_and_the_field(bad: str, field: str) -> None:
    with pytest.raises(BadTraceLine) as found:
        read_mooncake([line(), "", bad])
    assert (found.value.line, found.value.field) == (3, field)
    assert f"line 3: {field}: " in str(found.value)


def test_a_trace_without_requests_is_an_error() -> None:
    with pytest.raises(BadTraceLine, match="no request"):
        read_mooncake(["", "\n"])


def test_only_as_many_requests_are_read_as_asked_for() -> None:
    assert len(read_mooncake([line(), line(), "not json"], limit=2).requests) == 2


@pytest.mark.parametrize("block_tokens", [16, 512])
def test_what_was_written_is_read_again(block_tokens: int) -> None:
    trace = generate(TraceShape(requests=60, prompt_tokens=600), 5)
    again = read_mooncake(write_mooncake(trace, block_tokens=block_tokens), block_tokens=block_tokens)
    for before, after in zip(trace.requests, again.requests, strict=True):
        assert (before.arrival_ms, before.prompt_tokens, before.output_tokens) == (
            after.arrival_ms, after.prompt_tokens, after.output_tokens,
        )  # fmt: skip
    trees = StretchTree(block_tokens), StretchTree(block_tokens)
    shared = [
        [len(set(a) & set(b)) for a in found for b in found]
        for tree, each in zip(trees, (trace, again), strict=True)
        for found in [[tree.blocks(request.prompt).sequence for request in each.requests]]
    ]
    assert shared[0] == shared[1]
