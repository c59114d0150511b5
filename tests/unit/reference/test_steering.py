"""What may come next while a grammar waits for the end of thoughts."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from dynamo.reference.guided import Guide
from dynamo.reference.steering import Markers, Steering, ThoughtState

BEGIN, END, STOP, SIZE = 7, 8, 2, 10


class OnlyFive:
    """A grammar that takes the token 5 and nothing else."""

    is_complete = False

    def allowed(self, ends: object) -> np.ndarray:
        mask = np.zeros(SIZE, np.bool_)
        mask[5] = True
        return mask

    def accept(self, token: int) -> None:
        assert token == 5


@pytest.mark.parametrize("prompt", [[BEGIN], []])
def test_an_answer_cannot_end_in_thoughts_that_a_grammar_waits_for(prompt: list[int]) -> None:
    thoughts = ThoughtState(Markers(BEGIN, END), prompt, budget=None)
    steering = Steering(cast(Guide, OnlyFive()), thoughts, awaits_thoughts=True)
    if not prompt:
        steering.accept(BEGIN)
    mask = steering.allowed([STOP, SIZE + 3], SIZE)
    assert mask is not None
    assert np.flatnonzero(~mask).tolist() == [STOP]
    steering.accept(END)
    mask = steering.allowed([STOP], SIZE)
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [5]


def test_thoughts_that_no_grammar_waits_for_may_end_the_answer() -> None:
    thoughts = ThoughtState(Markers(BEGIN, END), [BEGIN], budget=None)
    assert Steering(None, thoughts).allowed([STOP], SIZE) is None
