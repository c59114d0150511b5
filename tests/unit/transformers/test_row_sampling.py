"""How the next token of one request is drawn. Needs torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dynamo.contract.requests.generation import GenerationLimits, read_generation
from dynamo.transformers.row_sampling import RowSampler, RowSampling

torch = pytest.importorskip("torch")

LIMITS = GenerationLimits("transformers", 100, 6)
SCORES = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 0.5])


def sampling(*, ends: tuple[int, ...] = (0,), **members: Any) -> RowSampling:
    return RowSampling(read_generation({"token_ids": [3], **members}, LIMITS), ends)


def options(**values: Any) -> dict[str, Any]:
    return {"sampling_options": {"temperature": 0.0, **values}}


def extra(**values: Any) -> dict[str, Any]:
    return {**options(), "extra_args": {"sampling_options": values}}


def test_greedy_takes_the_best_and_reports_the_models_own_probability() -> None:
    row = sampling(**options(), output_options={"logprobs": 2})
    assert row.draw(SCORES) == 3
    ((own, best),) = row.logprobs
    expected = torch.log_softmax(SCORES, -1)
    assert own == pytest.approx(float(expected[3]))
    assert [token for token, _ in best] == [3, 2]


def test_penalties_biases_and_allowed_tokens_move_the_choice() -> None:
    assert sampling(**options(repetition_penalty=2.0)).draw(SCORES) == 2  # 3 is in the prompt
    row = sampling(**options(presence_penalty=1.5))
    assert [row.draw(SCORES), row.draw(SCORES)] == [3, 2]
    row = sampling(**options(frequency_penalty=0.7))
    assert [row.draw(SCORES) for _ in range(4)] == [3, 3, 2, 3]
    assert sampling(**extra(logit_bias={"3": -5.0})).draw(SCORES) == 2
    assert sampling(**extra(allowed_token_ids=[1, 4])).draw(SCORES) == 1


def test_an_end_token_waits_for_the_least_number_of_tokens() -> None:
    row = sampling(ends=(3,), **options(), stop_conditions={"min_tokens": 2})
    assert [row.draw(SCORES) for _ in range(3)] == [2, 2, 3]


def test_an_answer_cannot_end_in_thoughts_that_a_grammar_waits_for() -> None:
    asked = read_generation({"token_ids": [4], **options()}, LIMITS)
    assert RowSampling(asked, (3,), object(), (4, 5)).draw(SCORES) == 2
    assert RowSampling(asked, (3,), None, None).draw(SCORES) == 3


def test_a_seed_repeats_the_draws_and_a_copy_is_the_same_state() -> None:
    drawn = [
        [row.draw(SCORES) for _ in range(20)]
        for row in (sampling(sampling_options={"temperature": 2.0, "seed": 5}) for _ in range(2))
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1
    row = sampling()
    assert copy.deepcopy({"sampling": row})["sampling"] is row


@pytest.mark.parametrize("given", [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}])
def test_the_filters_of_chance_leave_the_best(given: dict[str, Any]) -> None:
    row = sampling(sampling_options={"temperature": 5.0, **given})
    assert {row.draw(SCORES) for _ in range(50)} == {3}


def test_a_row_that_fails_spares_the_others() -> None:
    class State:
        def __init__(self, row: RowSampling) -> None:
            self.state = self
            self.logit_processor_kwargs = {"sampling": row}

    broken, well = sampling(**options()), sampling(**options())
    broken.draw = None  # type: ignore[assignment]
    sampler = RowSampler()
    assert sampler.prepare_tensor_args([State(broken), State(well)]).shape == (2,)
    chosen = sampler(torch.stack([SCORES, SCORES]), None)
    assert chosen.argmax(-1).tolist() == [0, 3]
    assert isinstance(broken.failure, TypeError)
    assert well.failure is None
