"""What the next worker is sent: the prompt with the answer so far behind it, and what is left of the limits."""

from __future__ import annotations

from typing import Any

from dynamo.router.dispatch.migration import continued


def test_what_was_generated_counts_against_both_limits_and_stands_behind_the_prompt() -> None:
    body: Any = {
        "model": "m",
        "stop_conditions": {"max_tokens": 10, "min_tokens": 2, "stop": ["x"]},
        "token_ids": [1, 2],
    }
    assert continued(body, [1, 2], [7, 8, 9]) == {
        "model": "m",
        "stop_conditions": {"max_tokens": 7, "min_tokens": 0, "stop": ["x"]},
        "token_ids": [1, 2, 7, 8, 9],
    }
    assert body["stop_conditions"]["max_tokens"] == 10


def test_no_limit_stays_no_limit() -> None:
    assert continued({"stop_conditions": None}, [1], [2]) == {"stop_conditions": {}, "token_ids": [1, 2]}
