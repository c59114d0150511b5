"""From a request to the worker's fields, the template's input and the effect of headers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    RequestRejected,
    apply_headers,
    parse_chat,
    parse_completion,
    raw_prompt,
    template_tools,
    template_variables,
    thinking_mode,
    to_worker_fields,
)
from dynamo.protocol.openai.headers import MAX_AGENT_BYTES, MAX_AGENT_HEADER_BYTES, MAX_AGENT_HEADERS
from dynamo.protocol.openai.requests import input_trigger
from support.cases import each_case

STOP_KEYS = [
    "max_tokens",
    "stop",
    "stop_token_ids",
    "stop_token_ids_visible",
    "stop_token_ids_hidden",
    "min_tokens",
    "ignore_eos",
    "max_thinking_tokens",
]
SAMPLING_KEYS = [
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "use_beam_search",
    "length_penalty",
    "seed",
    "include_stop_str_in_output",
    "guided_decoding",
]
OUTPUT_KEYS = ["logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"]


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


# -- worker fields ------------------------------------------------------------------------------------------------------


def written(request: ChatRequest | CompletionRequest, **facts: Any) -> dict[str, Any]:
    """Return the request as a worker gets it, without a prompt."""
    return dict(to_worker_fields(request, **facts).for_prompt([]))


@pytest.mark.parametrize("request_", [chat(), completion()])
def test_every_member_of_the_option_groups_is_present_and_none_when_unset(
    request_: ChatRequest | CompletionRequest,
) -> None:
    fields = written(request_)
    assert fields["stop_conditions"] == dict.fromkeys(STOP_KEYS)
    assert fields["sampling_options"] == dict.fromkeys(SAMPLING_KEYS)
    assert fields["output_options"] == dict.fromkeys(OUTPUT_KEYS)
    assert fields["routing"] == {}
    assert fields["annotations"] == []
    assert fields["extra_args"] is None


def test_plain_options_travel_under_their_names() -> None:
    given_ = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "n": 3,
        "seed": -(2**63),
        "include_stop_str_in_output": True,
    }
    sampling = written(chat(**given_))["sampling_options"]
    assert {name: sampling[name] for name in given_} == given_
    fields = written(chat(max_tokens=5, min_tokens=2, stop="x", stop_token_ids=[7], thinking_token_budget=9))
    assert fields["stop_conditions"] == {
        **dict.fromkeys(STOP_KEYS),
        "max_tokens": 5,
        "min_tokens": 2,
        "stop": ["x"],
        "stop_token_ids": [7],
        "max_thinking_tokens": 9,
    }


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=3).output_limit == 3
    assert written(chat(max_tokens=5, max_completion_tokens=3))["stop_conditions"]["max_tokens"] == 3


def test_top_k_zero_means_all() -> None:
    assert written(chat(top_k=0))["sampling_options"]["top_k"] == -1


def test_a_list_of_ints_as_stop_is_stop_token_ids() -> None:
    stops = written(chat(stop=[1, 2], stop_token_ids=[3]))["stop_conditions"]
    assert (stops["stop"], stops["stop_token_ids"]) == (None, [1, 2, 3])


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_is_none(stop: Any) -> None:
    assert written(chat(stop=stop))["stop_conditions"]["stop"] is None


@each_case(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_chat_logprobs_alone_asks_for_no_alternatives(fields: dict[str, Any], expected: int | None) -> None:
    assert written(chat(**fields))["output_options"]["logprobs"] == expected


def test_completion_options() -> None:
    fields = written(completion(logprobs=3, echo=True, best_of=2, suffix="end"))
    assert fields["output_options"]["logprobs"] == 3
    assert fields["output_options"]["prompt_logprobs"] == 3
    assert fields["sampling_options"]["best_of"] == 2
    assert fields["extra_args"] == {"sampling_options": {"suffix": "end"}}
    assert written(completion(echo=True, prompt_logprobs=4))["output_options"]["prompt_logprobs"] == 4
    assert written(completion(echo=True))["output_options"]["prompt_logprobs"] is None
    assert written(completion(echo=True, max_tokens=0))["stop_conditions"]["max_tokens"] == 1


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@each_case(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, {"json": SCHEMA}),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "a"}], "triggers": ["a"]}},
            {"structural_tag": {"structures": [{"begin": "a"}], "triggers": ["a"]}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": "{}"}, {"json": "{}"}),
        ({"guided_json": {}}, {"json": {}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_choice": []}, None),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"guided_whitespace_pattern": " *"}, {"whitespace_pattern": " *"}),
        (
            {"guided_whitespace_pattern": " *", "response_format": {"type": "json_object"}},
            {"json": {"type": "object"}, "whitespace_pattern": " *"},
        ),
        ({"guided_whitespace_pattern": "", "guided_json": SCHEMA}, {"json": SCHEMA, "whitespace_pattern": ""}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, {"regex": "a"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"structural_tag": {"type": "x"}}}, {"structural_tag": {"type": "x"}}),
        ({"guided_regex": "a", "guided_decoding_backend": "x"}, {"regex": "a", "backend": "x"}),
        ({"guided_decoding_backend": "x"}, None),
    ],
)
def test_guided_decoding(fields: dict[str, Any], expected: Any) -> None:
    assert written(chat(**fields))["sampling_options"]["guided_decoding"] == expected


def test_greedy_sampling_drops_temperature_and_top_p() -> None:
    sampling = written(chat(temperature=1, top_p=0.5, nvext={"greed_sampling": True}))["sampling_options"]
    assert (sampling["temperature"], sampling["top_p"]) == (None, None)


def test_routing_carries_pins_hints_and_the_cache_salt() -> None:
    nvext = {
        "backend_instance_id": 2**64 - 1,
        "prefill_worker_id": 2,
        "decode_worker_id": 3,
        "dp_rank": 0,
        "prefill_dp_rank": 1,
        "agent_hints": {"priority": 4, "strict_priority": 5, "osl": 6},
        "routing_constraints": {"required_taints": ["a"]},
        "cache_salt": "inner",
        "max_thinking_tokens": 8,
        "request_timestamp_ms": 1.5,
        "router": {"ttft_target": 2.0},
        "slo_ttft_ms": 9,
        "metadata_upload": {"url": "u"},
        "extra_fields": ["timing"],
    }
    fields = written(chat(nvext=nvext, cache_salt="outer"))
    assert fields["routing"] == {
        "backend_instance_id": 2**64 - 1,
        "prefill_worker_id": 2,
        "decode_worker_id": 3,
        "dp_rank": 0,
        "prefill_dp_rank": 1,
        "expected_output_tokens": 6,
        "priority": 4,
        "priority_jump": 4.0,
        "strict_priority": 5,
        "slo_ttft_ms": 9,
        "routing_constraints": {"required_taints": ["a"], "preferred_taints": {}},
        "cache_salt": "inner",
    }
    assert fields["stop_conditions"]["max_thinking_tokens"] == 8
    assert fields["request_timestamp_ms"] == 1.5
    assert fields["router"] == {"ttft_target": 2.0, "itl_target": None}
    assert fields["extra_args"] == {
        "nvext": {"extra_fields": ["timing"], "metadata_upload": {"url": "u"}, "cache_salt": "inner"}
    }


def test_a_negative_priority_never_jumps_the_queue() -> None:
    routing = written(chat(nvext={"agent_hints": {"priority": -3}}))["routing"]
    assert routing == {"priority": -3, "priority_jump": 0.0}


def test_an_empty_cache_salt_is_absent() -> None:
    assert chat(nvext={"cache_salt": ""}, cache_salt="outer").effective_cache_salt == "outer"
    assert chat(cache_salt="").effective_cache_salt is None


def test_passthrough_parameters_reach_the_worker() -> None:
    extra = written(
        chat(
            logit_bias={"5": 1},
            detokenize=False,
            allowed_token_ids=[1],
            bad_words_token_ids=[[2]],
            logprob_token_ids=[3],
        )
    )["extra_args"]
    assert extra == {
        "sampling_options": {
            "logit_bias": {"5": 1.0},
            "detokenize": False,
            "allowed_token_ids": [1],
            "bad_words_token_ids": [[2]],
            "logprob_token_ids": [3],
        }
    }


def test_the_worker_sees_all_annotations_but_internal_ones() -> None:
    annotations = [
        "request_id",
        "token_ids",
        "formatted_prompt",
        "query_instance_id:",
        "x-bypass-remote-prefill",
        "x-bypass-remote-prefill:1",
        "llm_metrics",
        "mine",
        "key:value",
    ]
    request = chat(nvext={"annotations": annotations})
    assert written(request)["annotations"] == [*annotations[:3], "mine", "key:value"]
    assert request.annotations == annotations


def test_eos_ids_become_hidden_stops() -> None:
    fields = written(chat(stop="x"), eos_token_ids=[2, 3])
    assert fields["eos_token_ids"] == [2, 3]
    assert fields["stop_conditions"]["stop_token_ids_hidden"] == [2, 3]
    assert fields["stop_conditions"]["stop"] == ["x"]
    assert written(chat())["stop_conditions"]["stop_token_ids_hidden"] is None


def test_ignore_eos_clears_every_stop_list() -> None:
    fields = written(chat(ignore_eos=True, stop="x", stop_token_ids=[1]), eos_token_ids=[2])
    stops = fields["stop_conditions"]
    assert fields["eos_token_ids"] == []
    assert [stops[name] for name in STOP_KEYS if name.startswith("stop")] == [None] * 4
    assert stops["ignore_eos"] is True


def test_worker_fields_are_the_callers_own() -> None:
    request = chat(stop_token_ids=[1])
    written(request)["stop_conditions"]["stop_token_ids"].append(2)
    assert request.stop_token_ids == [1]


@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.floats(0, 2))
def test_worker_fields_always_fit_the_wire(worker: int, seed: int, temperature: float) -> None:
    request = chat(nvext={"backend_instance_id": worker}, seed=seed, temperature=temperature)
    fields = written(request)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields)) == fields


# -- prompts ------------------------------------------------------------------------------------------------------------


@each_case(
    ("prompt", "expected"),
    [("a", ["a"]), (["a"], ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_every_prompt_form_is_a_list_of_texts_or_ids(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts() == expected


def test_token_data_replaces_the_prompt() -> None:
    assert completion(nvext={"token_data": [5]}).prompts() == [[5]]
    assert completion(prompt="", nvext={"token_data": [5]}).prompts() == [[5]]
    assert chat(nvext={"token_data": [5]}).token_data == [5]
    assert chat(nvext={"token_data": []}).token_data is None


def test_prompt_embeds_stand_in_for_the_prompt() -> None:
    request = completion(prompt="", prompt_embeds="A" * 400)
    assert request.prompts() == [[]]
    assert written(request)["prompt_embeds"] == "A" * 400


def test_a_batch_of_exactly_the_limit_is_allowed() -> None:
    assert len(completion(prompt=["a"] * 64, n=2).prompts()) == 64


def test_usage_options() -> None:
    plain = chat(stream=True)
    assert (plain.is_streaming, plain.include_usage, plain.continuous_usage) == (True, False, False)
    asked = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (asked.include_usage, asked.continuous_usage) == (True, True)


# -- templates ----------------------------------------------------------------------------------------------------------


def test_tools_are_left_out_when_tool_choice_is_none() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert template_tools(chat(tools=tools)) == tools
    assert template_tools(chat(tools=tools, tool_choice="auto")) == tools
    assert template_tools(chat(tools=tools, tool_choice="none")) is None
    assert template_tools(chat(tools=tools, tool_choice="none"), exclude_when_none=False) == tools
    assert template_tools(chat(tools=[])) is None


def test_a_raw_prompt_is_the_text_of_the_messages() -> None:
    assert raw_prompt(chat()) is None
    assert raw_prompt(chat(nvext={"use_raw_prompt": True})) == "hi"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert raw_prompt(chat(messages=messages, nvext={"use_raw_prompt": True})) == "s\na\nb"


ON = {"thinking": True, "enable_thinking": True, "thinking_mode": "enabled"}
OFF = {"thinking": False, "enable_thinking": False, "thinking_mode": "disabled"}


@each_case(
    ("fields", "default", "expected"),
    [
        ({}, None, {}),
        ({}, "enabled", ON),
        ({"thinking": True}, None, ON),
        ({"thinking": False}, "enabled", OFF),
        ({"thinking": {"type": "enabled"}}, None, ON),
        ({"thinking": {"type": "disabled"}}, None, OFF),
        ({"thinking": {"type": "adaptive"}}, None, {"thinking_mode": "adaptive"}),
        (
            {"thinking": {"type": "adaptive"}, "chat_template_args": {"thinking": True, "x": 1}},
            None,
            {"thinking_mode": "adaptive", "x": 1},
        ),
        ({"chat_template_args": {"enable_thinking": False}}, "enabled", OFF),
        ({"chat_template_kwargs": {"thinking": True}}, None, ON),
        ({"chat_template_args": {"thinking_mode": "disabled"}}, None, OFF),
        ({"reasoning_effort": "none"}, None, {**OFF, "reasoning_effort": "none"}),
        ({"reasoning_effort": "low"}, "disabled", {**ON, "reasoning_effort": "low"}),
        ({"thinking": False, "reasoning_effort": "high"}, None, {**OFF, "reasoning_effort": "high"}),
        ({"chat_template_args": {"x": 1}}, None, {"x": 1}),
    ],
)
def test_reasoning_controls_are_made_consistent(
    fields: dict[str, Any], default: str | None, expected: dict[str, Any]
) -> None:
    request = chat(**fields)
    before = msgspec.json.encode(request)
    assert template_variables(request, thinking_mode(request, default=default)) == expected
    assert msgspec.json.encode(request) == before


# -- headers ------------------------------------------------------------------------------------------------------------


def test_a_request_without_headers_of_ours_is_untouched() -> None:
    request = chat()
    effects = apply_headers(request, {"host": "x", "user-agent": "y"})
    assert request.nvext is None
    assert (effects.request_id, effects.metadata, effects.agent_context, effects.warnings) == (None, {}, None, [])


def test_headers_beat_the_body() -> None:
    request = chat(nvext={"backend_instance_id": 1, "dp_rank": 1, "cache_salt": "a", "agent_hints": {"priority": 1}})
    apply_headers(
        request,
        {
            "x-dynamo-worker-instance-id": "7",
            "x-dynamo-prefill-instance-id": "8",
            "x-dynamo-dp-rank": "2",
            "x-dynamo-prefill-dp-rank": "3",
            "x-dynamo-request-priority": "-4",
            "x-dynamo-request-strict-priority": "5",
            "x-dynamo-slo-ttft-ms": "250",
            "x-tenant-id": "t",
        },
    )
    assert written(request)["routing"] == {
        "backend_instance_id": 7,
        "decode_worker_id": 7,
        "prefill_worker_id": 8,
        "dp_rank": 2,
        "prefill_dp_rank": 3,
        "priority": -4,
        "priority_jump": 0.0,
        "strict_priority": 5,
        "slo_ttft_ms": 250,
        "cache_salt": "t",
    }


@each_case(
    ("alias", "member"),
    [
        ("x-worker-instance-id", "backend_instance_id"),
        ("x-prefill-instance-id", "prefill_worker_id"),
        ("x-dp-rank", "dp_rank"),
        ("x-data-parallel-rank", "dp_rank"),
        ("x-prefill-dp-rank", "prefill_dp_rank"),
    ],
)
def test_aliases_work_and_lose_to_the_canonical_name(alias: str, member: str) -> None:
    request = chat()
    apply_headers(request, {alias: "3"})
    assert getattr(request.nvext, member) == 3
    canonical = {
        "backend_instance_id": "x-dynamo-worker-instance-id",
        "prefill_worker_id": "x-dynamo-prefill-instance-id",
        "dp_rank": "x-dynamo-dp-rank",
        "prefill_dp_rank": "x-dynamo-prefill-dp-rank",
    }[member]
    for order in ([(alias, "3"), (canonical, "4")], [(canonical, "4"), (alias, "3")]):
        apply_headers(request, order)
        assert getattr(request.nvext, member) == 4


def test_the_largest_rank_means_not_set() -> None:
    request = chat(nvext={"dp_rank": 1, "prefill_dp_rank": 1})
    apply_headers(request, {"x-dp-rank": str(2**32 - 1), "x-prefill-dp-rank": str(2**32 - 1)})
    assert request.nvext is not None
    assert (request.nvext.dp_rank, request.nvext.prefill_dp_rank) == (None, None)


@each_case("value", ["", "abc", "-1", "1.5", "4294967296", "9" * 5000, "²", "٣", "1_0"])
def test_a_rank_that_is_no_number_in_range_is_a_400(value: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        apply_headers(chat(), {"x-dynamo-dp-rank": value})
    assert caught.value.status == 400
    assert caught.value.param == "x-dynamo-dp-rank"


def test_an_empty_tenant_leaves_the_bodys_salt() -> None:
    request = chat(cache_salt="body")
    apply_headers(request, {"x-tenant-id": ""})
    assert request.effective_cache_salt == "body"


def test_request_ids() -> None:
    assert apply_headers(chat(), {"x-request-id": "free text"}).request_id == "free text"
    known = "123e4567-e89b-12d3-a456-426614174000"
    assert apply_headers(chat(), {"x-dynamo-request-id": known}).request_id == known
    bad = apply_headers(chat(), {"x-dynamo-request-id": "nope"})
    assert bad.request_id is None
    assert len(bad.warnings) == 1


def test_metadata_first_wins_and_credentials_are_dropped() -> None:
    effects = apply_headers(
        chat(),
        [
            ("x-dynamo-meta-team", "a"),
            ("x-dynamo-meta-team", "b"),
            ("x-dynamo-meta-authorization", "secret"),
            ("x-dynamo-meta-token", "Bearer secret"),
            ("x-dynamo-meta-", "nameless"),
            ("x-dynamo-meta-policy-class", "gold"),
        ],
    )
    assert effects.metadata == {"team": "a", "policy-class": "gold"}
    assert effects.policy_class == "gold"
    assert apply_headers(chat(), {"x-mine-a": "1"}, metadata_prefix="x-mine-").metadata == {"a": "1"}


@pytest.mark.parametrize(
    "headers", [{f"x-dynamo-meta-{index}": "v" for index in range(65)}, {"x-dynamo-meta-a": "v" * 65536}]
)
def test_too_much_metadata_is_a_431(headers: dict[str, str]) -> None:
    with pytest.raises(RequestRejected) as caught:
        apply_headers(chat(), headers)
    assert caught.value.status == 431


def test_metadata_up_to_the_limits_is_kept() -> None:
    effects = apply_headers(chat(), {f"x-dynamo-meta-{index}": "v" for index in range(64)})
    assert len(effects.metadata) == 64


def test_sessions() -> None:
    effects = apply_headers(
        chat(), {"x-dynamo-session-id": " s ", "x-parent-session-id": "p", "x-dynamo-session-final": "true"}
    )
    assert effects.agent_context == {"session_id": "s", "parent_session_id": "p", "session_final": True}
    assert apply_headers(chat(), {"x-session-id": "s"}).agent_context == {"session_id": "s"}
    coder = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "p"}
    assert apply_headers(chat(), coder).agent_context == {"session_id": "s", "agent_id": "a", "parent_agent_id": "p"}


def test_what_coding_agents_say_of_themselves_is_kept_within_bounds() -> None:
    given = {"x-session-id": "s", "thread-id": "t", "x-openai-subagent": "review", "x-agent-id": "no", "x-app": "cli"}
    kept = apply_headers(chat(), {**given, "x-codex-window": "1"}).agent_headers
    assert kept == {"x-session-id": ["s"], "thread-id": ["t"], "x-openai-subagent": ["review"], "x-codex-window": ["1"]}
    twice = apply_headers(chat(), [("x-codex-a", "1"), ("x-codex-a", "2"), ("x-codex-token", "Bearer k")])
    assert twice.agent_headers == {"x-codex-a": ["1", "2"]}
    many = apply_headers(chat(), {f"x-codex-{number}": "1" for number in range(80)}).agent_headers
    assert len(many) == MAX_AGENT_HEADERS
    for size, count in ((MAX_AGENT_HEADER_BYTES, 1), (MAX_AGENT_HEADER_BYTES + 1, 0)):
        assert len(apply_headers(chat(), {"x-codex-a": "x" * size}).agent_headers) == count
    large = apply_headers(chat(), {f"x-codex-{number:02}": "1" * 1000 for number in range(40)}).agent_headers
    assert sum(len(name) + len(value) for name, (value,) in large.items()) <= MAX_AGENT_BYTES
    assert len(large) == 32


@each_case(
    ("messages", "trigger"),
    [
        ([{"role": "user", "content": "a"}], "user_message"),
        ([{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "x", "content": "b"}], "tool_result"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "other"),
        ([{"role": "system", "content": "a"}], "other"),
    ],
)
def test_the_last_message_triggered_the_request(messages: list[dict[str, Any]], trigger: str) -> None:
    assert input_trigger(chat(messages=messages)) == trigger
    assert input_trigger(completion()) == "other"


@each_case(
    ("fields", "routing"),
    [
        ({"priority": 3}, {"priority": 3, "priority_jump": 3.0}),
        ({"priority": -3, "nvext": {}}, {"priority": -3, "priority_jump": 0.0}),
        ({"priority": 3, "nvext": {"agent_hints": {"osl": 9}}}, {"priority": 3, "priority_jump": 3.0}),
        ({"priority": 3, "nvext": {"agent_hints": {"priority": 5}}}, {"priority": 5, "priority_jump": 5.0}),
        ({"priority": 3, "nvext": {"agent_hints": {"latency_sensitivity": 9}}}, {"priority": 3, "priority_jump": 3.0}),
    ],
)
def test_a_top_level_priority_is_that_of_nvext(fields: dict[str, Any], routing: dict[str, Any]) -> None:
    found = written(chat(**fields))["routing"]
    found.pop("expected_output_tokens", None)
    assert found == routing


def test_verbosity_and_documents_are_variables_of_the_template() -> None:
    variables = template_variables(chat(verbosity="high", documents=[{"text": "x"}]))
    assert variables == {"verbosity": "high", "documents": [{"text": "x"}]}
    assert template_variables(chat(verbosity="high", chat_template_args={"verbosity": "own"})) == {"verbosity": "own"}


def test_the_engine_is_told_of_salts_of_client_tokens_and_of_media_options() -> None:
    fields = written(chat(cache_salt="s", media_io_kwargs={"video": {"fps": 1}}))
    assert fields["extra_args"] == {"nvext": {"cache_salt": "s"}}
    assert fields["media_io_kwargs"] == {"video": {"fps": 1}}
    assert fields["routing"]["cache_salt"] == "s"
    fields = written(chat(nvext={"token_data": [1], "cache_salt": "t"}, cache_salt="s"))
    assert fields["extra_args"] == {"nvext": {"token_in": True, "cache_salt": "t"}}
    assert "media_io_kwargs" not in fields


def test_disabled_nvext_drops_the_body_part_and_the_routing_headers_with_a_warning() -> None:
    request = chat(nvext={"dp_rank": 1})
    effects = apply_headers(
        request, {"x-dp-rank": "5", "x-request-id": "r", "x-dynamo-meta-a": "1"}, nvext_enabled=False
    )
    assert request.nvext is None
    assert len(effects.warnings) == 2
    assert (effects.request_id, effects.metadata) == ("r", {"a": "1"})
