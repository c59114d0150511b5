"""The form of contents that a template reads, in the forms that families write."""

from __future__ import annotations

from typing import Any, Final

import pytest

from dynamo.text.template_probe import ContentForm
from dynamo.text.templates import ChatTemplate
from support.cases import each_case

# The first part decides about the colon; a text has no parts to walk through.
CAPITALISED: Final = (
    "{% for m in messages %}{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image' else ': ' }}"
    "{% for line in m.content %}{% if line.type == 'text' %}{{ line.text }}"
    "{% elif line.type == 'image' %}<image>{% endif %}{% endfor %}<end>\n{% endfor %}"
)
# Images first, then each text with a space behind it.
IMAGES_FIRST: Final = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role | upper }}: {% endif %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text + ' ' }}{% endfor %}{% endfor %}"
)
EITHER: Final = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
ONLY_FIRST_PART: Final = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content if m.content is string else m.content[0].text }}"
    "{% elif m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
TEXT: Final = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
AS_JSON: Final = "{% for m in messages %}{{ m.content if m.content is string else m.content | tojson }}{% endfor %}"
IN_TURNS: Final = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"

ALL: Final = frozenset({"user", "system", "assistant", "tool"})
TALKERS: Final = frozenset({"user", "assistant"})


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (CAPITALISED, ContentForm(ALL, ALL)),
        (IMAGES_FIRST, ContentForm(ALL, ALL)),
        (EITHER, ContentForm(ALL)),
        (ONLY_FIRST_PART, ContentForm(ALL - {"system"})),
        (IN_TURNS + EITHER, ContentForm(ALL - {"system"})),
        (TEXT, ContentForm()),
        (AS_JSON, ContentForm()),
        ("{{ raise_exception('never') }}", ContentForm()),
        ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", ContentForm(only_parts=ALL)),
    ],
)
def test_the_form_of_contents_is_found_by_examples(source: str, form: ContentForm) -> None:
    assert ChatTemplate(source).content_form == form


def texts(*given: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in given]


IMAGE: Final = {"type": "image"}


@each_case(
    ("source", "content", "expected"),
    [
        (CAPITALISED, "hi", "User: hi<end>\n"),
        (CAPITALISED, "", "User: <end>\n"),
        (CAPITALISED, None, "User: <end>\n"),
        (CAPITALISED, [IMAGE, *texts("a", "b")], "User:<image>ab<end>\n"),
        (IMAGES_FIRST, "hi", "USER: hi "),
        (IMAGES_FIRST, [*texts("a"), IMAGE, *texts("b")], "USER: <image>a b "),
        (EITHER, "hi", "<user>hi"),
        (EITHER, texts("a", "b"), "<user>ab"),
        (EITHER, ["a", "b"], "<user>ab"),
        (EITHER, [*texts("a"), {"type": "refusal", "refusal": "b"}], "<user>ab"),
        (TEXT, texts("a", "b"), "<user>a\nb"),
        (TEXT, ["a", "b"], "<user>a\nb"),
        (TEXT, [*texts("a"), {"type": "refusal", "refusal": "b"}], "<user>a\nb"),
        (TEXT, [IMAGE, *texts("a")], "<user>a"),
        (TEXT, [], "<user>"),
        (AS_JSON, texts("a", "b"), "a\nb"),
        (AS_JSON, [{"type": "of_the_application", "value": 1}], '[{"type": "of_the_application", "value": 1}]'),
        ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", texts("a", "b"), "a\nb"),
    ],
)
def test_a_template_gets_the_form_that_it_reads(source: str, content: Any, expected: str) -> None:
    message = {"role": "user", "content": content}
    assert ChatTemplate(source).render([message]) == expected
    assert message == {"role": "user", "content": content}


def test_each_role_has_a_form_of_its_own() -> None:
    messages: list[dict[str, Any]] = [
        {"role": role, "content": texts("a", "b")} for role in ("developer", "system", "user", "function")
    ]
    assert ChatTemplate(ONLY_FIRST_PART).render(messages) == "a\nba\nbabab"


def test_a_template_of_parts_shows_every_turn_whole() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "t"},
    ]
    shown = ChatTemplate(CAPITALISED).render(messages)
    assert shown == "System: s<end>\nSystem: d<end>\nUser: u<end>\nAssistant: <end>\nTool: t<end>\n"


def test_reasoning_stands_before_the_parts_of_a_text() -> None:
    turn = {"role": "assistant", "content": texts("4", "5"), "reasoning_content": "2 and 2"}
    block = "<think>\n2 and 2\n</think>\n\n"
    marks = ("<think>", "</think>")
    assert ChatTemplate(EITHER).render([turn], think_marks=marks) == f"<assistant>{block}45"
    assert ChatTemplate(CAPITALISED).render([turn], think_marks=marks) == f"Assistant: {block}45<end>\n"
    assert (
        ChatTemplate(CAPITALISED).render([{**turn, "content": "4"}], think_marks=marks) == f"Assistant: {block}4<end>\n"
    )


def test_the_answer_goes_on_from_the_last_part() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": texts("The answer", " is")},
    ]
    shown = ChatTemplate(CAPITALISED).render(messages, continue_final_message=True)
    assert shown == "User: u<end>\nAssistant: The answer is"


def test_each_named_template_has_its_own_form_of_contents() -> None:
    template = ChatTemplate({"default": TEXT, "tool_use": EITHER})
    message = {"role": "user", "content": texts("a", "b")}
    assert template.render([message]) == "<user>a\nb"
    assert template.render([message], tools=[{"type": "function", "function": {"name": "f"}}]) == "<user>ab"


def test_a_system_text_that_is_joined_to_parts_is_shown_once() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [IMAGE, *texts("a", "b")]},
    ]
    assert ChatTemplate(IN_TURNS + EITHER).render(messages) == "<user>s<image>ab"
