from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.text import PLAIN_TEMPLATE, ChatTemplate, TemplateRejected
from support.cases import each_case

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **arguments: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **arguments)


def test_a_usual_template() -> None:
    source = (
        "{{ bos_token }}\n"
        "{% for message in messages %}\n"
        "    {% if message['role'] == 'function' %}\n"
        "        {% continue %}\n"
        "    {% endif %}\n"
        "{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    messages = [{"role": "function", "content": "x"}, {"role": "user", "content": " hi "}]
    assert render(source, messages) == "<s>\n<|user|>hi</s><|assistant|>"
    assert render(source, messages, add_generation_prompt=False) == "<s>\n<|user|>hi</s>"


@each_case(
    ("source", "expected"),
    [
        ("[{{ nothing }}]", "[]"),
        ("[{{ messages[0].nothing }}]", "[]"),
        ("{{ none }} {{ true }} {{ False }}", "None True False"),
        ("{{ documents is defined }}", "False"),
        ("{{ response_format is defined }} {{ tool_choice is defined }}", "False False"),
        ("{{ tools is none }}", "True"),
        ("{{ {'b': 1, 'a': '<é>'} | tojson }}", '{"b": 1, "a": "<é>"}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=true) }}", '{"a": "\\u00e9", "b": 1}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "10"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{{ ' x '.strip() }}{{ 'ab'.startswith('a') }}{{ 'a,b'.split(',')[-1] }}{{ 'a'.upper() }}", "xTruebA"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
        ("{{ [1, 2, 3][::-1] }} {{ [1, 2, 3][-1] }} {{ [1, 2, 3][1:] }}", "[3, 2, 1] 3 [2, 3]"),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{{ strftime_now is defined }}", "False"),
        ("{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}", "1"),
    ],
)
def test_the_environment_is_the_one_templates_are_written_for(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_clock_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


@each_case(
    ("content", "expected"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", "b"], "a\nb"),
        ("plain", "plain"),
        (None, ""),
        ([], ""),
    ],
)
def test_text_parts_are_joined_before_rendering(content: Any, expected: str) -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == expected


def test_mixed_parts_stay_a_list_and_the_request_is_not_changed() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]
    source = "{% for p in messages[0].content %}{{ p.type }},{% endfor %}"
    assert render(source, [{"role": "user", "content": parts}]) == "text,image_url,"
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert render("{{ messages[0].content }}", messages) == "a"
    assert messages[0]["content"] == [{"type": "text", "text": "a"}]


def test_any_variable_a_user_sends_is_just_a_variable() -> None:
    source = "{{ enable_thinking }} {{ tools }} {{ self is defined }} {{ messages | length }} {{ bos_token }}"
    variables = {"enable_thinking": False, "tools": "t", "self": 1, "messages": [], "bos_token": "b", "environment": 1}
    assert render(source, variables=variables) == "False t True 1 b"
    assert render("{{ a }}{{ b }}", a=1, b=2) == "12"


def test_tools_choose_their_own_template() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools: {{ tools | tojson }}"})
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=[tool]) == 'tools: [{"type": "function", "function": {"name": "f"}}]'


def test_named_templates_without_a_default_say_so() -> None:
    template = ChatTemplate({"rag": "x", "tool_use": "y"})
    with pytest.raises(TemplateRejected, match="rag, tool_use"):
        template.render(USER)
    assert ChatTemplate({"rag": "only"}).render(USER) == "only"
    with pytest.raises(InvalidArgument, match="empty"):
        ChatTemplate({})


@each_case(
    ("source", "detail"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + none }}", "TypeError"),
        ("{{ messages[9].content.strip() }}", "no element 9"),
        ("{{ nothing | tojson }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str, detail: str) -> None:
    with pytest.raises(TemplateRejected, match=r"^Invalid request: ") as caught:
        render(source)
    assert detail in caught.value.detail
    assert isinstance(caught.value, InvalidArgument)


def test_a_template_that_does_not_compile_names_the_line() -> None:
    with pytest.raises(InvalidArgument, match="line 2"):
        ChatTemplate("fine\n{% for %}")


SHOWS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_continuing_the_final_message_ends_the_prompt_inside_it() -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer is "}]
    assert render(SHOWS, messages, continue_final_message=True) == "<user>hi</>\n<assistant>The answer is "
    trims = SHOWS.replace("m.content", "m.content | trim")
    assert render(trims, messages, continue_final_message=True) == "<user>hi</>\n<assistant>The answer is"


@pytest.mark.parametrize("final", ["", None, "not shown"])
def test_a_final_message_that_cannot_be_continued_is_refused(final: Any) -> None:
    source = "{{ messages[0].content }}" if final == "not shown" else SHOWS
    with pytest.raises(TemplateRejected, match="continue_final_message"):
        render(source, [*USER, {"role": "assistant", "content": final}], continue_final_message=True)


def test_the_plain_template_writes_lines_and_opens_the_answer() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": None}]
    assert render(PLAIN_TEMPLATE, messages) == "system: Be brief.\nuser: hi\nassistant: \nassistant: "
    assert render(PLAIN_TEMPLATE, USER, add_generation_prompt=False) == "user: hi\n"
