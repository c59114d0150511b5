"""A token request in typed values: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.requests.generation import (
    FEATURES,
    GenerationLimits,
    GenerationRequest,
    read_generation,
    read_generation_defaults,
)
from dynamo.errors import InvalidArgument
from support.cases import each_case

LIMITS = GenerationLimits("test", context_length=100, vocab_size=50)


def read(limits: GenerationLimits = LIMITS, **members: Any) -> GenerationRequest:
    return read_generation({"token_ids": [1, 2, 3], **members}, limits)


def test_an_empty_request_has_neutral_values_and_the_whole_context() -> None:
    found = read()
    assert (found.prompt, found.max_tokens, found.temperature, found.top_k, found.seed) == ([1, 2, 3], 97, 1.0, 0, None)
    assert (found.stop_token_ids, found.constraint, found.logprobs, found.ignore_eos) == ((), None, None, False)


def test_the_models_options_hold_where_a_request_has_none() -> None:
    limits = GenerationLimits("test", 100, 50, defaults={"temperature": 0.0, "top_k": 20})
    assert (read(limits).temperature, read(limits).top_k) == (0.0, 20)
    assert read(limits, sampling_options={"temperature": 0.5, "top_k": -1}).temperature == 0.5
    assert read(limits, sampling_options={"top_k": -1}).top_k == 0


def test_what_ends_an_answer_is_one_list_without_ids_that_never_come() -> None:
    stops = {"stop_token_ids": [7], "stop_token_ids_hidden": [2, 99], "max_tokens": 5}
    found = read(stop_conditions=stops, eos_token_ids=[2, 0])
    assert (found.stop_token_ids, found.max_tokens) == ((7, 2, 0), 5)
    assert read(stop_conditions={"ignore_eos": True}, eos_token_ids=[2]).stop_token_ids == ()


@each_case(
    "members, named",
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1] * 100}, "100 tokens"),
        ({"token_ids": [50]}, "token_ids holds 50"),
        ({"multi_modal_data": {"image": [{}]}}, "multi_modal_data"),
        ({"sampling_options": {"temperature": "hot"}}, "temperature"),
        ({"sampling_options": {"temperature": float("nan")}}, "temperature"),
        ({"sampling_options": {"top_k": 1.5}}, "top_k"),
        ({"sampling_options": {"n": 2}}, "n must be 1"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": []}, "sampling_options"),
        ({"stop_conditions": {"max_tokens": -1}}, "max_tokens"),
        ({"stop_conditions": {"max_tokens": 3, "min_tokens": 5}}, "min_tokens is 5"),
        ({"stop_conditions": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
        ({"eos_token_ids": 2}, "eos_token_ids"),
        ({"output_options": {"logprobs": 21}}, "logprobs"),
        ({"extra_args": {"sampling_options": {"logit_bias": {"50": 1}}}}, "logit_bias"),
        ({"extra_args": {"sampling_options": {"logit_bias": {"1": 101}}}}, "logit_bias"),
        ({"extra_args": {"sampling_options": {"allowed_token_ids": []}}}, "allowed_token_ids"),
        ({"extra_args": {"sampling_options": {"bad_words_token_ids": [[1]]}}}, "bad_words_token_ids"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "choice": ["b"]}}}, "regex and choice"),
        ({"sampling_options": {"guided_decoding": {"regex": 4}}}, "regex must be a string"),
        ({"sampling_options": {"guided_decoding": {"choice": "yes"}}}, "choice must be a list"),
        ({"sampling_options": {"guided_decoding": {"json": "{"}}}, "json is not JSON"),
        ({"sampling_options": {"guided_decoding": {"regex": "(" * 600}}}, "regex nests"),
    ],
)
def test_a_mistake_is_named(members: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        read_generation({"token_ids": [1], **members}, LIMITS)


@each_case(
    "members, named",
    [
        ({"stop_conditions": {"min_tokens": 3}}, "min_tokens"),
        ({"stop_conditions": {"stop_token_ids": [3]}}, "stop_token_ids"),
        ({"stop_conditions": {"ignore_eos": True}}, "ignore_eos"),
        ({"sampling_options": {"top_p": 0.5}}, "top_p"),
        ({"sampling_options": {"presence_penalty": 0.5}}, "presence_penalty"),
        ({"sampling_options": {"seed": 0}}, "seed"),
        ({"extra_args": {"sampling_options": {"logit_bias": {"1": 1}}}}, "logit_bias"),
        ({"output_options": {"logprobs": 0}}, "logprobs"),
        ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"routing": {"lora_name": "a"}}, "lora_name"),
        ({"routing": {"cache_salt": "a"}}, "cache_salt"),
        ({"sampling_options": {"guided_decoding": {"regex": "a"}}}, "guided_decoding.regex"),
    ],
)
def test_what_an_engine_has_not_is_refused_by_name(members: dict[str, Any], named: str) -> None:
    limits = GenerationLimits("test", 100, 50, unsupported=FEATURES)
    with pytest.raises(InvalidArgument, match=rf"{named}.*not built for test"):
        read_generation({"token_ids": [1], **members}, limits)


def test_neutral_values_ask_for_nothing() -> None:
    limits = GenerationLimits("test", 100, 50, unsupported=FEATURES)
    sampling = {"top_p": 1.0, "top_k": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "seed": None, "n": 1}
    stops = {"min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "stop_token_ids_hidden": [2]}
    assert read(limits, sampling_options=sampling, stop_conditions=stops).stop_token_ids == (2,)


def test_a_constraint_waits_for_thoughts_that_have_not_ended() -> None:
    guided: dict[str, Any] = {"sampling_options": {"guided_decoding": {"choice": ["a"]}}, "require_reasoning": True}
    assert read(**guided).constraint.after_reasoning  # type: ignore[union-attr]
    ended = read(**guided, extra_args={"reasoning_ended": True}).constraint
    assert ended is not None
    assert (ended.kind, ended.value, ended.after_reasoning) == ("choice", ("a",), False)


def test_generation_config_says_how_a_model_is_sampled(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 2}))
    assert read_generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "do_sample": False}))
    assert read_generation_defaults(tmp_path) == {"temperature": 0.0}
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(InvalidArgument, match=r"generation_config\.json"):
        read_generation_defaults(tmp_path)
