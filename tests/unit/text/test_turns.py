"""Where texts of the system go for templates that have no place for them, and conversations that templates refuse."""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.text.template_probe import RoleForm
from dynamo.text.templates import ChatTemplate, TemplateRejected
from dynamo.text.turns import alternating, with_placed_systems

SHOWN: Final = "<{{ m.role }}>{{ m.content }}\n"
REFUSED: Final = "{{ raise_exception('order') }}"
ALTERNATES: Final = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}" + REFUSED + "{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}" + REFUSED + "{% endif %}" + SHOWN + "{% endfor %}"
)
TEMPLATES: Final = {
    "any role": "{% for m in messages %}" + SHOWN + "{% endfor %}",
    "system, user, assistant": "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    + SHOWN
    + "{% endif %}{% endfor %}",
    "one system, at the beginning": "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}" + SHOWN + "{% endfor %}",
    "the last system wins": "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endfor %}{{ ns.s }}\n"
    "{% for m in messages if m.role in ['user', 'assistant'] %}" + SHOWN + "{% endfor %}",
    "in turns": ALTERNATES,
    "no system, refused": "{% if messages[0].role == 'system' %}" + REFUSED + "{% endif %}" + ALTERNATES,
    "no system, left out": "{% for m in messages if m.role in ['user', 'assistant'] %}" + SHOWN + "{% endfor %}",
    "the developer leads": "{% if messages[0].role in ['system', 'developer'] %}# {{ messages[0].content }}\n{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}" + SHOWN + "{% endfor %}",
    "the developer anywhere": "{% for m in messages %}{% if m.role == 'developer' %}[{{ m.content }}]\n"
    "{% else %}" + SHOWN + "{% endif %}{% endfor %}",
    "needs tools": "{% if not tools %}" + REFUSED + "{% endif %}{% for m in messages %}"
    "{% if loop.index == 2 and m.role == 'system' %}" + REFUSED + "{% endif %}" + SHOWN + "{% endfor %}",
}
FORMS: Final = {
    "any role": RoleForm(),
    "system, user, assistant": RoleForm(),
    "one system, at the beginning": RoleForm(takes_several=False, takes_later=False),
    "the last system wins": RoleForm(takes_several=False, takes_later=False),
    "in turns": RoleForm(takes_several=False, takes_later=False),
    "no system, refused": RoleForm(knows_system=False, takes_several=False, takes_later=False),
    "no system, left out": RoleForm(knows_system=False, takes_several=False, takes_later=False),
    "the developer leads": RoleForm(knows_developer=True, takes_several=False, takes_later=False),
    "the developer anywhere": RoleForm(knows_developer=True),
    "needs tools": RoleForm(takes_several=False),
}
TOOLS: Final = [{"type": "function", "function": {"name": "f"}}]


def conversation(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"text{place}"} for place, role in enumerate(roles)]


@cache
def program(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name])


def rendered(name: str, *roles: str) -> str:
    return program(name).render(conversation(*roles), tools=TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_shows_is_found_by_examples(name: str) -> None:
    assert program(name).role_form(has_tools=True) == FORMS[name]


@given(
    name=st.sampled_from(list(TEMPLATES)),
    first=st.lists(st.sampled_from(["system", "developer"]), max_size=3),
    rest=st.lists(st.sampled_from(["system", "developer", "user", "assistant"]), max_size=6),
)
def test_no_text_is_refused_or_lost(name: str, first: list[str], rest: list[str]) -> None:
    roles = [*first, "user", *rest]
    shown = rendered(name, *roles)
    assert sorted(re.findall(r"text\d+", shown)) == sorted(f"text{place}" for place in range(len(roles)))


@pytest.mark.parametrize(
    ("name", "roles", "prompt"),
    [
        ("any role", "system system user system", "<system>text0 <system>text1 <user>text2 <system>text3"),
        ("any role", "developer user developer", "<system>text0 <user>text1 <system>text2"),
        ("in turns", "system developer user", "<system>text0  text1 <user>text2"),
        ("in turns", "system user assistant system", "<system>text0 <user>text1 <assistant>text2 <user>text3"),
        (
            "in turns",
            "system user assistant system user",
            "<system>text0  text3 <user>text1 <assistant>text2 <user>text4",
        ),
        (
            "in turns",
            "user system user assistant user",
            "<system>text1 <user>text0  text2 <assistant>text3 <user>text4",
        ),
        ("in turns", "user developer", "<system>text1 <user>text0"),
        ("one system, at the beginning", "user system user", "text1 <user>text0 <user>text2"),
        ("the last system wins", "system user system user", "text0  text2 <user>text1 <user>text3"),
        ("no system, refused", "user system assistant user", "<user>text1  text0 <assistant>text2 <user>text3"),
        (
            "no system, left out",
            "system user assistant system user",
            "<user>text0  text3  text1 <assistant>text2 <user>text4",
        ),
        ("the developer leads", "user developer system", "# text1  text2 <user>text0"),
        ("needs tools", "system system user system user", "<system>text0  text1 <user>text2 <system>text3 <user>text4"),
        ("no system, refused", "system user", "<user>text0  text1"),
        ("no system, left out", "developer system user user", "<user>text0  text1  text2 <user>text3"),
        ("no system, left out", "system assistant user", "<user>text0 <assistant>text1 <user>text2"),
        ("the developer leads", "system developer user", "# text0  text1 <user>text2"),
        ("the developer anywhere", "system developer user", "<system>text0 [text1] <user>text2"),
    ],
)
def test_where_a_text_of_the_system_goes(name: str, roles: str, prompt: str) -> None:
    assert rendered(name, *roles.split()).replace("\n", " ").strip() == prompt


def test_what_a_template_accepts_is_given_as_it_was_sent() -> None:
    messages = conversation("system", "system", "user", "system")
    assert with_placed_systems(messages, RoleForm()) == messages
    plain = conversation("user", "assistant")
    assert with_placed_systems(plain, RoleForm(knows_system=False)) is plain


def test_an_image_stays_in_its_place() -> None:
    image = {"type": "image"}
    parts = [{"type": "text", "text": "a"}, image]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    (found,) = with_placed_systems(messages, RoleForm(knows_system=False))
    assert found["content"] == [{"type": "text", "text": "s\n\na"}, image]
    (found,) = alternating([messages[1], {"role": "user", "content": "b"}])
    assert found["content"] == [*parts, {"type": "text", "text": "b"}]
    assert parts == [{"type": "text", "text": "a"}, image]


def test_a_conversation_that_is_refused_either_way_has_the_first_refusal() -> None:
    template = ChatTemplate("{{ raise_exception('of ' ~ messages | length) }}")
    with pytest.raises(TemplateRejected, match="of 2"):
        template.render(conversation("user", "user"))


def test_the_answer_goes_on_from_a_text_that_was_joined() -> None:
    template = ChatTemplate(ALTERNATES)
    shown = template.render(conversation("user", "assistant", "assistant"), continue_final_message=True)
    assert shown == "<user>text0\n<assistant>text1\n\ntext2"


def call(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "so", "tool_calls": [{"id": one} for one in ids]}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_a_conversation_that_was_refused_alternates_and_answers_every_call() -> None:
    system, user, later = ({"role": role, "content": role} for role in ("system", "user", "system"))
    found = alternating([system, user, user, call("t1", "t2"), later, result("t2", "r"), user])
    assert [(one["role"], one.get("tool_call_id"), one["content"]) for one in found] == [
        ("system", None, "system\n\nsystem"),
        ("user", None, "user\n\nuser"),
        ("assistant", None, "so"),
        ("tool", "t2", "r"),
        ("tool", "t1", ""),
        ("user", None, "user"),
    ]


ROLES = st.sampled_from(
    [
        {"role": "user", "content": "u1"},
        {"role": "user", "content": "u2"},
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "t1"}]},
        result("t1", "r"),
    ]
)


@given(st.lists(ROLES, max_size=8))
def test_alternating_keeps_every_text_and_leaves_no_neighbours_of_one_role(messages: list[dict[str, Any]]) -> None:
    found = alternating(messages)
    roles = [message["role"] for message in found]
    assert all(a != b or a == "tool" for a, b in itertools.pairwise(roles))
    assert "system" not in roles[1:]
    texts = "\n\n".join(message["content"] for message in found if message["content"])
    ends = messages[-1:] if [one["role"] for one in messages[-2:]] == ["assistant", "system"] else []
    moved = [one for one in messages[: len(messages) - len(ends)] if one["role"] == "system"]
    ordered = [*moved, *(one for one in messages if one["role"] != "system"), *ends]
    assert texts.split("\n\n") == "\n\n".join(one["content"] for one in ordered if one["content"]).split("\n\n")
