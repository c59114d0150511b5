"""Unary answers, log probabilities, model lists and the OpenAPI document that describes them all."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import msgspec
import pytest

from dynamo.protocol.openai import (
    FinishedChoice,
    RequestRejected,
    chat_body,
    chat_logprobs,
    completion_body,
    completion_logprobs,
    openapi_document,
    openapi_json,
    parse_chat,
    parse_completion,
    shapes,
    token_logprobs,
    usage_json,
)
from dynamo.protocol.openai.responses import ChatLogprobPieces, plain_chat_body
from dynamo.protocol.openai.schema import Usage
from support.cases import each_case

USAGE = usage_json(3, 4, cached_tokens=1)
DOCUMENT = openapi_document()


def check_against(name: str, value: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_a_chat_answer_byte_for_byte() -> None:
    body = chat_body("chatcmpl-1", 17, "m", [FinishedChoice(0, "hello", "stop")], usage_json(3, 4))
    assert body == plain_chat_body("chatcmpl-1", 17, "m", "hello", "stop", usage_json(3, 4))
    assert body == (
        b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"content":"hello","refusal":null,"role":"assistant"},'
        b'"finish_reason":"stop","logprobs":null}],"created":17,"model":"m","object":"chat.completion",'
        b'"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}'
    )


def test_a_completion_answer_byte_for_byte() -> None:
    body = completion_body("cmpl-1", 17, "m", [FinishedChoice(1, "hello", "length")], usage_json(3, 4))
    assert body == (
        b'{"id":"cmpl-1","choices":[{"text":"hello","index":1,"logprobs":null,"finish_reason":"length"}],'
        b'"created":17,"model":"m","system_fingerprint":null,"object":"text_completion",'
        b'"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}'
    )


def items(**options: Any) -> list[Any]:
    tops: list[list[dict[str, Any]]] = [
        [{"rank": 2, "token_id": 9, "token": None, "logprob": -0.5}, {"rank": 1, "token_id": 5, "logprob": -0.1}],
        [],
    ]
    return token_logprobs([5, 6], [-0.1, -0.7], tops, lambda token_id: f"<{token_id}>", **options)


def test_answers_satisfy_the_openai_types_and_our_own_document() -> None:
    import openai.types.chat  # here: it takes a second, and only the worker that runs this pays
    import openai.types.completion

    chat = chat_body("i", 1, "m", [FinishedChoice(0, "x", "stop", chat_logprobs(items()))], USAGE, nvext=b'{"a":1}')
    check_against("ChatCompletion", json.loads(chat))
    parsed = openai.types.chat.ChatCompletion.model_validate_json(chat)
    assert parsed.choices[0].logprobs is not None
    assert parsed.usage is not None
    completion = completion_body("i", 1, "m", [FinishedChoice(0, "x", "stop", completion_logprobs(items()))], USAGE)
    check_against("Completion", json.loads(completion))
    openai.types.completion.Completion.model_validate_json(completion)


def test_optional_members_of_a_message() -> None:
    choice = FinishedChoice(0, None, "tool_calls", reasoning_content="hm", tool_calls=[{"id": "1"}])
    message = json.loads(chat_body("i", 1, "m", [choice], None, reasoning_field="reasoning"))["choices"][0]["message"]
    shared = {"content": None, "refusal": None, "role": "assistant"}
    assert message == {**shared, "tool_calls": [{"id": "1"}], "reasoning": "hm"}


@each_case("text", ["\ud800", "a\u2028b", 'q"\\\n', "🙂"])
def test_any_text_makes_valid_json(text: str) -> None:
    for body in (
        plain_chat_body("i", 1, text, text, "stop", None),
        chat_body("i", 1, text, [FinishedChoice(0, text, "stop")], None),
        completion_body("i", 1, text, [FinishedChoice(0, text, "stop")], None),
    ):
        assert json.loads(body)["model"] == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# -- log probabilities --------------------------------------------------------------------------------------------------


def test_missing_texts_are_filled_alternatives_ranked_and_the_chosen_token_always_listed() -> None:
    first, second = items()
    assert (first.token, first.logprob, first.token_id, first.bytes) == ("<5>", -0.1, 5, list(b"<5>"))
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("<5>", -0.1), ("<9>", -0.5)]
    assert [(top.token, top.logprob) for top in second.top_logprobs] == [("<6>", -0.7)]


def test_texts_and_bytes_of_the_backend_win() -> None:
    tops: list[list[dict[str, Any]]] = [[{"rank": 1, "token_id": 5, "token": "five", "logprob": -0.1, "bytes": [1, 2]}]]
    (item,) = token_logprobs([5], [-0.1], tops, str, token_bytes=lambda token_id: b"?")
    assert (item.token, item.bytes) == ("five", [1, 2])
    (item,) = token_logprobs([5], [-0.1], None, str, tokens=["said"], token_bytes=lambda token_id: b"\xf0\x9f")
    assert (item.token, item.bytes) == ("said", [0xF0, 0x9F])


def test_tokens_can_be_shown_as_ids() -> None:
    first, _ = items(as_token_ids=True)
    assert (first.token, [top.token for top in first.top_logprobs]) == ("token_id:5", ["token_id:5", "token_id:9"])


def test_a_chunk_without_probabilities_has_no_items() -> None:
    assert token_logprobs([5, 6], None, None, str) == []
    assert token_logprobs([], [], [], str) == []


def test_positions_a_backend_is_silent_about_are_left_out() -> None:
    assert [item.token_id for item in token_logprobs([5, 6], [-0.1], None, str)] == [5]
    tops = [[{"rank": 1, "token_id": 9, "logprob": -0.1}], [{"rank": 1, "token_id": 6, "logprob": -0.2}]]
    assert [item.logprob for item in token_logprobs([5, 6], None, tops, str)] == [-0.2]


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_what_json_cannot_carry_becomes_a_very_low_number(value: float) -> None:
    tops = [[{"rank": 1, "token_id": 9, "token": "a", "logprob": value}]]
    encoded = chat_logprobs(token_logprobs([5], [value], tops, str))
    content = json.loads(encoded)["content"][0]
    assert content["logprob"] == content["top_logprobs"][0]["logprob"] == -9999.0


@each_case("text", ["", " the", '"logprob":-0.5', "\u2028", "\ufffd", "\\", "é" * 40])
@each_case("logprob", [-0.5, 0.0, -1e-30, -17.25, -math.inf, math.nan, -0.1])
def test_the_short_way_of_one_log_probability_writes_what_the_long_one_does(text: str, logprob: float) -> None:
    raw = text.encode()
    pieces = ChatLogprobPieces(lambda _: text, lambda _: raw, size=100)
    for token_id in (7, 7, 2**32 - 1):  # twice from the table, once beyond its end
        items = token_logprobs(
            [token_id], [logprob], None, lambda _: text, token_bytes=lambda _: raw, has_alternatives=False
        )
        assert pieces.line(token_id, logprob) == chat_logprobs(items)
    assert list(pieces) == [7]


def test_completion_logprobs_count_characters_from_the_offset() -> None:
    assert json.loads(completion_logprobs(items(), text_offset=10)) == {
        "tokens": ["<5>", "<6>"],
        "token_logprobs": [-0.1, -0.7],
        "top_logprobs": [{"<5>": -0.1, "<9>": -0.5}, {"<6>": -0.7}],
        "text_offset": [10, 13],
    }


# -- usage and models ---------------------------------------------------------------------------------------------------


@each_case("cached", [None, 0, 5])
@each_case("reasoning", [None, 0, 5])
def test_usage_details_stand_only_when_known(cached: int | None, reasoning: int | None) -> None:
    usage = msgspec.json.decode(usage_json(3, 4, cached_tokens=cached, reasoning_tokens=reasoning), type=Usage)
    assert usage.total_tokens == 7
    assert (None if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens) == cached
    details = usage.completion_tokens_details
    assert (None if details is None else details.reasoning_tokens) == reasoning


# -- OpenAPI ------------------------------------------------------------------------------------------------------------


def test_every_reference_of_the_document_resolves_and_every_schema_is_valid() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    references: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                references.add(value["$ref"].removeprefix("#/components/schemas/"))
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(DOCUMENT)
    assert references <= set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_the_document_lists_the_routes_and_their_statuses() -> None:
    assert json.loads(openapi_json()) == DOCUMENT
    assert DOCUMENT["openapi"].startswith("3.1")
    assert set(DOCUMENT["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{id}",
        "/v1/models/{id}/ready",
        "/health",
        "/live",
        "/ready",
        "/metrics",
        "/openapi.json",
    }
    for path in ("/v1/chat/completions", "/v1/completions"):
        statuses = set(DOCUMENT["paths"][path]["post"]["responses"])
        assert statuses == {"200", "400", "404", "413", "415", "422", "431", "499", "500", "503", "504", "529"}


def test_every_request_field_is_documented() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for request in (shapes.ChatRequest, shapes.CompletionRequest):
        assert set(schemas[request.__name__]["properties"]) == set(request.__struct_fields__)
        assert schemas[request.__name__]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("ChatRequest", {"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": ["a"], "n": 2}),
        (
            "ChatRequest",
            {
                "model": "m",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "tool_choice": "auto",
                "thinking": {"type": "adaptive"},
            },
        ),
        ("CompletionRequest", {"model": "m", "prompt": [[1], [2]], "logprobs": 5}),
    ],
)
def test_documented_requests_are_accepted(name: str, body: dict[str, Any]) -> None:
    check_against(name, body)
    encoded = json.dumps(body).encode()
    (parse_completion if name == "CompletionRequest" else parse_chat)(encoded)


def test_an_error_body_is_documented() -> None:
    with pytest.raises(RequestRejected) as caught:
        parse_chat(b"{}")
    check_against("ErrorBody", json.loads(caught.value.body()))
