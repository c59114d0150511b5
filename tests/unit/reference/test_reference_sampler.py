"""From logits to tokens: each option does what it says, and randomness has no memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dynamo.errors import InvalidArgument
from dynamo.reference.sampler import (
    Drawn,
    History,
    Sampling,
    Stop,
    bad_word_ends,
    draw,
    ending,
    log_softmax,
    uniform,
)
from support.cases import each_case

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))


def one(logits: np.ndarray = LOGITS, position: int = 0, choice: int = 0, **options: Any) -> Drawn:
    history = options.pop("history", History(frozenset()))
    banned = options.pop("banned", ())
    allowed = options.pop("allowed", None)
    sampling = Sampling(**{"seed": 1, **options})
    return draw(logits, sampling, choice=choice, position=position, history=history, banned=banned, allowed=allowed)


def support(count: int = 600, **options: Any) -> set[int]:
    return {one(position=position, **options).token for position in range(count)}


def test_temperature_zero_takes_the_most_likely_token_and_the_first_of_equals() -> None:
    assert one(temperature=0.0).token == 0
    assert one(np.zeros(4, np.float32), temperature=0.0).token == 0


def test_tokens_come_as_often_as_their_probability_says() -> None:
    drawn = Counter(one(position=position).token for position in range(4000))
    assert all(abs(drawn[token] / 4000 - share) < 0.03 for token, share in enumerate(np.exp(LOGITS)))


@each_case(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"min_p": 0.49}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"banned": [0, 1]}, {2, 3, 4}),
        ({"allowed_tokens": frozenset({1, 4})}, {1, 4}),
        ({"allowed": np.array([True, False, True, False, False])}, {0, 2}),
        ({"allowed": np.array([True, True, False, False, False]), "allowed_tokens": frozenset({1, 2})}, {1}),
        ({"bias": ((4, 100.0),)}, {4}),
        ({"bias": ((0, -100.0), (1, -100.0), (2, -100.0))}, {3, 4}),
        ({"temperature": 0.01}, {0}),
    ],
)
def test_a_limit_leaves_exactly_what_it_names(options: dict[str, Any], expected: set[int]) -> None:
    assert support(**options) == expected


@given(
    arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32)),
    st.floats(0, 5),
    st.floats(0.01, 1),
    st.integers(0, 50),
    st.floats(0, 1),
    st.integers(0, 2**63 - 1),
)
def test_whatever_the_options_the_token_exists_and_is_the_same_again(
    logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    before = logits.copy()
    token = one(logits, 3, **options).token
    assert 0 <= token < len(logits)
    assert token == one(logits, 3, **options).token
    assert np.array_equal(logits, before)
    if top_k:
        assert (logits > logits[token]).sum() < top_k


def test_a_tiny_temperature_leaves_the_most_likely_token() -> None:
    for temperature in (1e-3, 1e-30, 1e-300, 5e-324):
        assert one(np.array([1.0, 30.0, -30.0], np.float32), temperature=temperature).token == 1


def test_seed_choice_and_position_each_change_the_draw() -> None:
    points = {uniform(*key) for key in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (11, 0, 0), (1, 10, 0), (-1, 0, 0)]}
    assert len(points) == 7
    assert all(0 <= point < 1 for point in points)


def test_presence_and_frequency_look_at_what_was_generated_repetition_also_at_the_prompt() -> None:
    logits = np.array([2.0, 1.5, 1.0], np.float32)
    history = History(frozenset({1}), Counter({0: 3}))
    assert one(logits, temperature=0.0, presence_penalty=0.6, history=history).token == 1
    assert one(logits, temperature=0.0, presence_penalty=0.4, history=history).token == 0
    assert one(logits, temperature=0.0, frequency_penalty=0.2, history=history).token == 1
    assert one(logits, temperature=0.0, repetition_penalty=3.0, history=history).token == 2
    assert one(-logits, temperature=0.0, repetition_penalty=3.0, history=history).token == 2


def test_log_probabilities_are_the_models_own_whatever_was_done_to_choose() -> None:
    drawn = one(temperature=0.0, banned=[0], logprobs=2)
    assert drawn.token == 1
    assert drawn.logprob == pytest.approx(np.log(0.3))
    assert [token for token, _ in drawn.top] == [0, 1]
    assert one(logprobs=0).top == ()
    assert one().logprob is None
    assert np.exp(log_softmax(LOGITS)).sum() == pytest.approx(1)


STOP = Stop(max_tokens=5, min_tokens=2, eos=frozenset({1}), hidden=frozenset({2}), visible=frozenset({3}))


@each_case(
    ("token", "generated", "expected"),
    [
        (0, 1, (None, True)),
        (1, 2, (None, True)),  # two tokens are owed first
        (1, 3, ("eos", False)),
        (2, 3, ("stop", False)),
        (3, 3, ("stop", True)),
        (0, 5, ("length", True)),
        (1, 5, ("eos", False)),
    ],
)
def test_a_sequence_ends_for_the_right_reason(token: int, generated: int, expected: tuple[str | None, bool]) -> None:
    assert ending(token, generated, STOP) == expected


def test_when_everything_is_banned_the_request_is_wrong() -> None:
    with pytest.raises(InvalidArgument, match="no token is left for position 7"):
        one(position=7, banned=[0, 1], allowed_tokens=frozenset({0, 1}))


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
def test_a_bad_word_is_banned_exactly_where_it_would_be_completed(tokens: list[int], words: list[list[int]]) -> None:
    ends = set(bad_word_ends(words, tokens))
    for token in range(4):
        after = [*tokens, token]
        assert (token in ends) == any(after[-len(word) :] == word for word in words)


def test_the_tokens_asked_about_are_reported_with_their_rank() -> None:
    drawn = one(temperature=0.0, logprobs=1, logprob_tokens=(4, 0, 2))
    assert [token for token, _ in drawn.top] == [0]
    assert [(token, rank) for token, rank, _ in drawn.asked] == [(4, 5), (2, 3)]
    assert drawn.asked[1][2] == pytest.approx(np.log(0.2))
