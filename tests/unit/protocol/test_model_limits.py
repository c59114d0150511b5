from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo.frontend.models.model_limits import check_ranks, check_token_ids
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import parse_chat, parse_completion
from dynamo.protocol.openai.strict_schema import strictness_fault
from support.cases import each_case

SIZE = 100


def completion(**fields: Any) -> Any:
    return parse_completion(msgspec.json.encode({"model": "m", "prompt": "x", **fields}))


@each_case(
    ("field", "fields"),
    [
        ("prompt", {"prompt": [1, SIZE]}),
        ("prompt[1]", {"prompt": [[1], [2, SIZE]]}),
        ("nvext.token_data", {"nvext": {"token_data": [SIZE]}}),
        ("stop", {"stop": [SIZE]}),
        ("stop_token_ids", {"stop_token_ids": [1, SIZE]}),
        ("allowed_token_ids", {"allowed_token_ids": [SIZE]}),
        ("logprob_token_ids", {"logprob_token_ids": [SIZE]}),
        ("bad_words_token_ids", {"bad_words_token_ids": [[1], [SIZE]]}),
        ("logit_bias", {"logit_bias": {"1": 1, str(SIZE): 1}}),
    ],
)
def test_a_token_id_beyond_the_vocabulary_is_refused_by_its_field(field: str, fields: dict[str, Any]) -> None:
    check_token_ids(completion(**fields), SIZE + 1)
    with pytest.raises(RequestRejected, match=f"the token id {SIZE}, but this model's ids end at {SIZE - 1}") as caught:
        check_token_ids(completion(**fields), SIZE)
    assert (caught.value.status, caught.value.param) == (400, field)
    assert field in caught.value.message


@pytest.mark.parametrize("prompt", ["text", ["text", "more"]])
def test_text_has_no_ids_to_check(prompt: Any) -> None:
    check_token_ids(completion(prompt=prompt), 1)


@each_case(("rank", "fits"), [(None, True), (0, True), (1, True), (2, False), (4, True), (2**32 - 2, False)])
def test_a_rank_that_no_worker_has_is_refused(rank: int | None, fits: bool) -> None:
    request = completion(nvext={"dp_rank": rank})
    if fits:
        check_ranks(request, [range(2), range(4, 6)])
    else:
        with pytest.raises(RequestRejected, match=f"nvext.dp_rank {rank} does not exist.*0 to 1, 4 to 5") as caught:
            check_ranks(request, [range(2), range(4, 6)])
        assert caught.value.param == "nvext.dp_rank"


@pytest.mark.parametrize(("rank", "fits"), [(None, True), (3, True), (4, False)])
def test_a_prefill_rank_that_no_prefill_worker_has_is_refused(rank: int | None, fits: bool) -> None:
    request = completion(nvext={"prefill_dp_rank": rank})
    check_ranks(request, [range(2)])  # no prefill worker: nothing looks at it
    if fits:
        check_ranks(request, [range(2)], [range(4)])
    else:
        with pytest.raises(RequestRejected, match=r"nvext.prefill_dp_rank 4 does not exist.*0 to 3") as caught:
            check_ranks(request, [range(2)], [range(4)])
        assert caught.value.param == "nvext.prefill_dp_rank"


CLOSED = {"type": "object", "additionalProperties": False}
STRICT = {**CLOSED, "properties": {"a": {"type": "string"}}, "required": ["a"]}


@each_case(
    ("schema", "fault"),
    [
        (STRICT, None),
        ({**CLOSED, "properties": {}}, None),
        ({"type": "object"}, "`additionalProperties` must be false"),
        ({"type": "object", "properties": {}, "additionalProperties": True}, "`additionalProperties` must be false"),
        ({**STRICT, "required": []}, "`required` must name every property, and lacks `a`"),
        ({**STRICT, "properties": {"a": {"type": "object"}}}, "`additionalProperties` must be false at `properties.a`"),
        ({**STRICT, "properties": {"a": {"type": "array", "items": STRICT}}}, None),
        (
            {**STRICT, "properties": {"a": {"anyOf": [STRICT, {**STRICT, "required": ["b"]}]}}},
            "`required` must name every property, and lacks `a` at `properties.a.anyOf.1`",
        ),
        ({**STRICT, "$defs": {"p": {"properties": {}}}}, "`additionalProperties` must be false at `$defs.p`"),
        ({**CLOSED, "properties": {"a": {"enum": [{"type": "object"}]}}, "required": ["a"]}, None),  # a value
        ({**CLOSED, "properties": {"type": {"const": "object"}}, "required": ["type"]}, None),  # a property's name
    ],
)
def test_what_is_not_strict_about_a_schema(schema: dict[str, Any], fault: str | None) -> None:
    assert strictness_fault(schema) == fault
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    if fault is None:
        parse_chat(msgspec.json.encode(body))
        return
    with pytest.raises(RequestRejected, match="Function 'f' is strict, but its parameters are not") as caught:
        parse_chat(msgspec.json.encode(body))
    assert caught.value.param == "tools[0].function.parameters"
    assert fault in caught.value.message
    tool["function"]["strict"] = False
    parse_chat(msgspec.json.encode(body))
