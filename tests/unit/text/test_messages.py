from __future__ import annotations

from typing import Any

import pytest

from dynamo.text import ChatTemplate
from support.cases import each_case

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
# Writes the calls of a message only where its content is null.
NULL_MEANS_CALLS = (
    "{% for m in messages %}{% if m['content'] is none %}[{{ m.tool_calls[0].function.name }}]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
KNOWS_REASONING = (
    "{% for m in messages %}{% if m.reasoning_content is string %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% endfor %}"
)
THINK = ("<think>", "</think>")
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source).render(messages, **options)


@each_case("content", [{"content": None}, {}])
@each_case(
    ("source", "expected"),
    [
        (CHATML, "<assistant></>"),
        (CHATML.replace("m.content", "m.content | trim"), "<assistant></>"),
        (CHATML.replace("m.content", "'say ' + m.content"), "<assistant>say </>"),
        (NULL_MEANS_CALLS, "[f]"),
    ],
)
def test_a_null_content_prints_nothing(source: str, expected: str, content: dict[str, Any]) -> None:
    assert render(source, {"role": "assistant", "tool_calls": CALLS, **content}) == expected


@pytest.mark.parametrize("nothing", [None, []])
def test_optional_members_that_are_null_are_absent(nothing: Any) -> None:
    source = "{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c }}{% endfor %}!"
    source += "{% endif %}{{ m.content }}{% endfor %}"
    assert render(source, {"role": "assistant", "content": "hi", "tool_calls": nothing, "name": None}) == "hi"


@pytest.mark.parametrize("member", ["reasoning_content", "reasoning"])
def test_reasoning_of_earlier_turns_is_kept_by_a_template_that_does_not_know_it(member: str) -> None:
    turn = {"role": "assistant", "content": "4", member: "2 and 2"}
    block = "<think>\n2 and 2\n</think>\n\n"
    assert render(CHATML, turn, think_marks=THINK) == f"<assistant>{block}4</>"
    assert render(CHATML, {**turn, "content": None}, think_marks=THINK) == f"<assistant>{block}</>"
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "5"}]
    assert render(CHATML, {**turn, "content": parts}, think_marks=THINK) == f"<assistant>{block}4\n5</>"
    assert render(CHATML, turn) == "<assistant>4</>"  # a model without reasoning has no form for it


@pytest.mark.parametrize("member", ["reasoning_content", "reasoning"])
def test_reasoning_goes_where_the_template_reads_it(member: str) -> None:
    turn = {"role": "assistant", "content": "4", member: "2 and 2"}
    assert render(KNOWS_REASONING, turn, think_marks=THINK) == "(2 and 2)4"
    thinking = KNOWS_REASONING.replace("m.reasoning_content", "m['thinking']")
    assert render(thinking, turn, think_marks=THINK) == "(2 and 2)4"
    assert render(thinking, {**turn, "thinking": "own"}, think_marks=THINK) == "(own)4"


def test_reasoning_costs_no_tool_call() -> None:
    turn = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": CALLS}
    assert render(NULL_MEANS_CALLS, turn, think_marks=THINK) == "[f]"


def test_the_clients_messages_are_not_changed() -> None:
    turn = {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None}
    before = dict(turn)
    render(CHATML, turn, think_marks=THINK)
    assert turn == before
