"""The OpenAPI document: its bounds are those of the rules, and its examples are requests that keep every rule."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from dynamo.protocol.messages import decode_messages, lower
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import parse_chat, parse_completion
from dynamo.protocol.openai.schema import BOUNDS, EXAMPLES, openapi_document
from dynamo.protocol.responses.lowering import decode_responses, validate_responses
from support.cases import each_case

SCHEMAS: Final = openapi_document()["components"]["schemas"]
NUMERIC: Final = sorted(name for name, bounds in BOUNDS.items() if bounds.keys() & {"minimum", "exclusiveMinimum"})


def bounds_of(request: str, member: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in SCHEMAS[request]["properties"][member]["anyOf"]:
        found |= one
    return found


@each_case("member", [name for name in NUMERIC if name not in ("best_of", "truncate_prompt_tokens")])
def test_a_number_inside_its_bounds_is_taken_and_one_outside_is_refused_by_name(member: str) -> None:
    bounds = bounds_of("ChatRequest", member)
    low: Any = bounds.get("minimum", bounds.get("exclusiveMinimum"))
    least = low if "minimum" in bounds else low + 0.5
    for value in (least, bounds["maximum"]):
        parse_chat(json.dumps({**EXAMPLES["ChatRequest"], member: value}).encode())
    outside = low - 1 if "minimum" in bounds else low
    for value in (outside, bounds["maximum"] + 1):
        with pytest.raises(RequestRejected) as caught:
            parse_chat(json.dumps({**EXAMPLES["ChatRequest"], member: value}).encode())
        assert caught.value.param == member


def test_bounds_stand_where_their_kind_of_value_does() -> None:
    assert bounds_of("ChatRequest", "stop")["maxItems"] == 32
    assert bounds_of("ChatRequest", "top_logprobs")["maximum"] == 20
    assert bounds_of("CompletionRequest", "max_tokens")["minimum"] == 0
    assert bounds_of("CompletionRequest", "suffix")["maxLength"] == 10_000


def test_examples_keep_every_rule() -> None:
    bodies = {name: json.dumps(example).encode() for name, example in EXAMPLES.items()}
    parse_chat(bodies["ChatRequest"])
    parse_completion(bodies["CompletionRequest"])
    validate_responses(decode_responses(bodies["ResponsesBody"]))
    lower(decode_messages(bodies["MessagesRequest"]))


def test_operations_show_the_example_of_their_request() -> None:
    paths = openapi_document()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["example"] == EXAMPLES["ChatRequest"]
