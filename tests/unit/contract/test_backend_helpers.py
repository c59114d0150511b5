import json
import logging
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.contract.chunks import CompletionUsage
from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.request_fields import agent_context_from_request, normalize_finish_reason, session_id_from_request
from dynamo.contract.requests.disaggregation import (
    enforce_prefill_max_tokens,
    extract_prefill_result,
    require_prefill_result,
)
from dynamo.contract.requests.dp_rank import forced_dp_rank, validate_global_dp_rank
from dynamo.contract.requests.logprobs import (
    build_sglang_logprob_kwargs,
    extract_from_completion_output,
    extract_from_sglang_meta,
    extract_prompt_logprobs_from_completion_output,
    extract_prompt_logprobs_from_sglang_meta,
    parse_logprob_options,
)
from dynamo.contract.requests.multimodal import (
    encoder_terminal_chunk,
    extract_multimodal_kwargs,
    require_encoder_result,
)
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.contract.requests.token_ids import normalize_request_token_ids, token_ids_len, token_ids_to_list
from support.cases import each_case

DECODE, AGG = DisaggregationMode.DECODE, DisaggregationMode.AGGREGATED

# -- data-parallel rank -----------------------------------------------------------------------------------------------


@each_case(
    ("request_", "rank"),
    [
        ({}, None),
        ({"routing": None}, None),
        ({"routing": {}}, None),
        ({"routing": {"dp_rank": None}}, None),
        ({"routing": {"dp_rank": 0}}, 0),
        ({"routing": {"dp_rank": "3"}}, 3),
    ],
)
def test_the_forced_rank_is_what_the_router_says(request_: dict[str, Any], rank: int | None) -> None:
    assert forced_dp_rank(request_) == rank


@each_case(
    ("rank", "start", "size", "expected", "warned"),
    [
        (None, 0, 4, None, False),
        (0, 0, 1, None, False),
        (7, 0, 1, None, False),
        (2, 2, 2, 2, False),
        (3, 2, 2, 3, False),
        (4, 2, 2, None, True),
        (1, 2, 2, None, True),
    ],
)
def test_a_rank_elsewhere_is_ignored_with_a_warning(
    rank: int | None, start: int, size: int, expected: int | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert validate_global_dp_rank(rank, start, size, "my engine") == expected
    assert ("my engine" in caplog.text and f"outside [{start}, {start + size})" in caplog.text) is warned


# -- disaggregation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [{}, {"stop_conditions": None}, {"stop_conditions": {"max_tokens": 9}}])
def test_prefill_makes_one_token_in_place(section: dict[str, Any]) -> None:
    request = {"token_ids": [1], **section}
    assert enforce_prefill_max_tokens(request) is request
    assert request["stop_conditions"] == {"max_tokens": 1}


def test_other_stop_conditions_stay() -> None:
    request = {"stop_conditions": {"max_tokens": 9, "stop": ["x"]}}
    assert enforce_prefill_max_tokens(request)["stop_conditions"] == {"max_tokens": 1, "stop": ["x"]}


def test_decode_gets_the_handoff_itself() -> None:
    result = {"disaggregated_params": {"handle": 1}}
    request = {"prefill_result": result}
    assert extract_prefill_result(request) is result
    assert require_prefill_result(request, DECODE) is result


@pytest.mark.parametrize("request_", [{}, {"prefill_result": None}, {"prefill_result": [1]}])
def test_decode_without_a_handoff_is_refused(request_: dict[str, Any]) -> None:
    assert extract_prefill_result(request_) is None
    with pytest.raises(ValueError, match=r"decode.*prefill_result"):
        require_prefill_result(request_, DECODE)


# -- multimodal -------------------------------------------------------------------------------------------------------


@each_case(
    ("request_", "expected"),
    [
        ({}, None),
        ({"multi_modal_data": None, "mm_processor_kwargs": None}, None),
        ({"multi_modal_data": {}}, {"multi_modal_data": {}}),
        ({"multi_modal_data": {"image": [1]}, "mm_processor_kwargs": None}, {"multi_modal_data": {"image": [1]}}),
        ({"mm_processor_kwargs": {"a": 1}, "token_ids": [1]}, {"mm_processor_kwargs": {"a": 1}}),
    ],
)
def test_multimodal_members_that_are_none_are_absent_and_empty_ones_stay(
    request_: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert extract_multimodal_kwargs(request_) == expected


def test_the_encoders_result_passes_unwrapped_and_by_identity() -> None:
    result = {"handle": "x"}
    terminal = encoder_terminal_chunk(result)
    assert terminal == {"token_ids": [], "index": 0, "finish_reason": "stop", "encoder_result": result}
    assert terminal["encoder_result"] is result
    assert require_encoder_result({"encoder_result": terminal["encoder_result"]}, AGG) is result
    counts: CompletionUsage = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
    assert encoder_terminal_chunk(result, completion_usage=counts)["completion_usage"] == counts


def test_a_missing_encoder_result_names_the_role() -> None:
    with pytest.raises(ValueError, match="agg worker received request with no encoder_result"):
        require_encoder_result({}, AGG)


@each_case("value", [[1], "x", 3, True])
def test_an_encoder_result_that_is_no_object_is_refused_on_both_sides(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a JSON object"):
        require_encoder_result({"encoder_result": value}, AGG)
    with pytest.raises(TypeError, match="dict"):
        encoder_terminal_chunk(value)


# -- agent context ----------------------------------------------------------------------------------------------------


@each_case(
    ("request_", "session"),
    [
        ({}, None),
        ({"agent_context": None}, None),
        ({"agent_context": "x"}, None),
        ({"agent_context": {}}, None),
        ({"agent_context": {"session_id": "  s1 "}}, "s1"),
        ({"agent_context": {"session_id": "  "}}, None),
        ({"agent_context": {"session_id": 7}}, None),
    ],
)
def test_a_session_is_text_without_blanks(request_: dict[str, Any], session: str | None) -> None:
    assert session_id_from_request(request_) == session
    context = request_.get("agent_context")
    assert agent_context_from_request(request_) == (context if isinstance(context, dict) else None)


# -- logprobs: what was asked for -------------------------------------------------------------------------------------


@each_case(
    ("options", "expected"),
    [
        ({}, (None, None)),
        ({"logprobs": None, "prompt_logprobs": ""}, (None, None)),
        ({"logprobs": 0}, (0, None)),
        ({"logprobs": 3, "prompt_logprobs": 1}, (3, 1)),
        ({"logprobs": "2"}, (2, None)),
    ],
)
def test_logprob_options_are_counts_or_off(options: dict[str, Any], expected: tuple[int | None, int | None]) -> None:
    assert parse_logprob_options(options) == expected


@each_case("value", ["many", -1, 1.5, True, [1]])
@each_case("name", ["logprobs", "prompt_logprobs"])
def test_a_senseless_count_is_off_with_a_warning(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_logprob_options({name: value}) == (None, None)
    assert name in caplog.text


@each_case(
    ("options", "expected"),
    [
        ({}, {}),
        ({"logprobs": 0}, {"return_logprob": True, "top_logprobs_num": 0}),
        ({"logprobs": 3}, {"return_logprob": True, "top_logprobs_num": 3}),
        ({"prompt_logprobs": 2}, {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
        (
            {"logprobs": 1, "prompt_logprobs": 4},
            {"return_logprob": True, "top_logprobs_num": 4, "logprob_start_len": 0},
        ),
    ],
)
def test_sglang_is_asked_for_no_more_than_was_wanted(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert build_sglang_logprob_kwargs(options) == expected


# -- logprobs: vLLM and TensorRT-LLM ----------------------------------------------------------------------------------


def entry(logprob: float, rank: int | None = None, text: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank, decoded_token=text)


def output(token_ids: Any, logprobs: Any, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(token_ids=token_ids, logprobs=logprobs, **more)


class Untouchable:
    def __getitem__(self, key: object) -> object:
        raise AssertionError("token ids must not be copied when there are no logprobs")


@pytest.mark.parametrize("nothing", [None, []])
def test_without_logprobs_the_token_ids_are_not_even_looked_at(nothing: Any) -> None:
    assert extract_from_completion_output(output(Untouchable(), nothing), 0) == (None, None)


def test_only_the_new_positions_count() -> None:
    source = output([5, 6, 7], [{5: entry(-0.5)}, {6: entry(-0.6, 1, "six"), 9: entry(-0.9, 2)}, {7: entry(-0.7, 1)}])
    log_probs, top = extract_from_completion_output(source, 1)
    assert log_probs == [-0.6, -0.7]
    assert top == [
        [
            {"rank": 1, "token_id": 6, "token": "six", "logprob": -0.6},
            {"rank": 2, "token_id": 9, "token": None, "logprob": -0.9},
        ],
        [{"rank": 1, "token_id": 7, "token": None, "logprob": -0.7}],
    ]
    assert extract_from_completion_output(source, 3) == (None, None)


def test_plain_floats_have_no_alternatives() -> None:
    assert extract_from_completion_output(output([1, 2, 3], [-0.1, -0.2, -0.3, -0.4]), 1) == ([-0.2, -0.3], None)


@each_case(
    "positions",
    [
        [{5: entry(-1)}, None],
        [{5: entry(-1)}, {9: entry(-1)}],
        [{5: entry(-1)}, {}],
        [{5: entry(-1)}],
        [-0.5, None],
    ],
)
def test_one_position_without_an_answer_silences_the_chunk(positions: list[Any]) -> None:
    assert extract_from_completion_output(output([5, 6], positions), 0) == (None, None)


def test_the_first_alternative_may_stand_in_for_a_missing_choice() -> None:
    source = output([6], [{9: entry(-0.9), 8: entry(-0.8)}])
    log_probs, top = extract_from_completion_output(source, 0, fallback_to_first_on_missing=True)
    assert log_probs == [-0.9]
    assert top is not None
    assert [found["token_id"] for found in top[0]] == [9, 8]
    assert [found["rank"] for found in top[0]] == [0, 0]


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        if ids == [9]:
            raise RuntimeError("unknown token")
        return f"<{ids[0]}>"


def test_text_comes_from_the_tokenizer_and_a_failing_one_costs_only_the_text() -> None:
    source = output([6], [{6: entry(-0.6), 9: entry(-0.9)}])
    _, top = extract_from_completion_output(source, 0, Tokenizer(), include_bytes=True)
    assert top == [
        [
            {"rank": 0, "token_id": 6, "token": "<6>", "logprob": -0.6, "bytes": [60, 54, 62]},
            {"rank": 0, "token_id": 9, "token": None, "logprob": -0.9},
        ]
    ]


def test_prompt_logprobs_are_keyed_by_text_and_keep_the_first_none() -> None:
    source = output([], [], prompt_logprobs=[None, {5: entry(-0.5, 1, "five"), 6: entry(-0.6)}])
    assert extract_prompt_logprobs_from_completion_output(source) == [
        None,
        {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "five"}, "6": {"logprob": -0.6}},
    ]
    assert extract_prompt_logprobs_from_completion_output(output([], [])) is None
    assert extract_prompt_logprobs_from_completion_output(output([], [], prompt_logprobs=[])) is None


# -- logprobs: SGLang -------------------------------------------------------------------------------------------------


def test_sglang_tuples_become_chosen_and_ranked_alternatives() -> None:
    meta = {
        "output_token_logprobs": [(-0.1, 5, "a"), (-0.2, 6, None)],
        "output_top_logprobs": [[(-0.1, 5, "a"), (-0.3, 7, "b")], None],
    }
    assert extract_from_sglang_meta(meta) == (
        [-0.1, -0.2],
        [
            [
                {"rank": 1, "token_id": 5, "token": "a", "logprob": -0.1},
                {"rank": 2, "token_id": 7, "token": "b", "logprob": -0.3},
            ],
            [],
        ],
    )
    _, renamed = extract_from_sglang_meta(meta, return_tokens_as_token_ids=True)
    assert renamed is not None
    assert [found["token"] for found in renamed[0]] == ["token_id:5", "token_id:7"]
    assert extract_from_sglang_meta({}) == (None, None)
    assert extract_from_sglang_meta({"output_token_logprobs": [(-0.1, 5, None)]}) == ([-0.1], None)


def test_sglang_prompt_logprobs_keep_the_first_none() -> None:
    meta = {
        "input_token_logprobs": [(None, 1, None), (-0.5, 5, "five")],
        "input_top_logprobs": [None, [(-0.4, 4, "four"), (-0.5, 5, "five")]],
    }
    assert extract_prompt_logprobs_from_sglang_meta(meta) == [
        None,
        {
            "4": {"logprob": -0.4, "decoded_token": "four"},
            "5": {"logprob": -0.5, "decoded_token": "five"},
        },
    ]
    del meta["input_top_logprobs"]
    assert extract_prompt_logprobs_from_sglang_meta(meta) == [None, {"5": {"logprob": -0.5, "decoded_token": "five"}}]
    assert extract_prompt_logprobs_from_sglang_meta({}) is None


# -- small conversions ------------------------------------------------------------------------------------------------


@each_case(
    ("said", "meant"),
    [("abort", "cancelled"), ("abort:client", "cancelled"), ("aborted", "cancelled"), ("stop", "stop"), ("", "")],
)
def test_any_abort_is_a_cancellation(said: str, meant: str) -> None:
    assert normalize_finish_reason(said) == meant


class Model:
    def model_dump(self) -> dict[str, int]:
        return {"a": 1}


@each_case(("tag", "expected"), [(None, None), ('{"x":1}', '{"x":1}'), ({"a": 1}, {"a": 1}), (Model(), {"a": 1})])
def test_a_structural_tag_becomes_text(tag: Any, expected: Any) -> None:
    found = serialize_structural_tag(tag)
    assert found == expected if not isinstance(expected, dict) else json.loads(found or "") == expected


class Array:
    def __init__(self, values: list[int]) -> None:
        self._values = values

    def tolist(self) -> list[int]:
        return self._values

    def __len__(self) -> int:
        return len(self._values)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_every_form_of_token_ids_becomes_the_same_list(values: list[int]) -> None:
    packed = b"".join(value.to_bytes(4, "little") for value in values)
    wide = memoryview(array("Q", values)) if values else memoryview(b"")
    for form in (values, tuple(values), packed, bytearray(packed), memoryview(packed), Array(values), wide):
        assert token_ids_to_list(form) == values
        assert token_ids_len(form) == len(values)
        request = {"token_ids": form, "model": "m"}
        assert normalize_request_token_ids(request) is request
        assert request == {"token_ids": values, "model": "m"}


def test_a_list_is_not_copied() -> None:
    values = [1, 2]
    assert token_ids_to_list(values) is values


def test_a_torn_buffer_and_a_number_are_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        token_ids_to_list(b"12345")
    with pytest.raises(ValueError, match="5 bytes"):
        token_ids_len(b"12345")
    with pytest.raises(TypeError, match="int"):
        token_ids_to_list(3)
