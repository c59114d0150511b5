"""How templates take the arguments of earlier calls, in the forms that model families write."""

from __future__ import annotations

import pytest

from dynamo.text.template_probe import EFFORTS, ArgumentForm
from dynamo.text.templates import ChatTemplate


def program(shown: str, head: str = "") -> str:
    return (
        head + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% set f = call.function %}[" + shown + "]{% endfor %}{% endfor %}"
    )


OBJECTS = ArgumentForm()
ONLY_OBJECTS = ArgumentForm(takes_raw_text=False)
TEXT = ArgumentForm(as_objects=False)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (program("{{ f.arguments | tojson }}"), OBJECTS),
        (program("{% for k, v in f.arguments.items() %}{{ k }}={{ v }};{% endfor %}"), ONLY_OBJECTS),
        (program("{% for k, v in f.arguments|items %}{{ k }}={{ v }};{% endfor %}"), ONLY_OBJECTS),
        (program("{{ f.arguments if f.arguments is string else f.arguments | tojson }}"), OBJECTS),
        (program("{{ f.name + ' ' + f.arguments }}"), TEXT),
        (program("{{ f.name ~ f.arguments }}"), TEXT),
        (
            program(
                "{{ f.arguments | tojson }}",
                "{% if messages[-1].role == 'tool' %}{{ raise_exception('no answer') }}{% endif %}",
            ),
            OBJECTS,
        ),
        (program("{{ f.name }}"), OBJECTS),
        ("{{ messages[0].content }}", OBJECTS),
        ("{{ raise_exception('never') }}{# arguments #}", OBJECTS),
    ],
)
def test_the_form_of_arguments_is_found_by_an_example(source: str, form: ArgumentForm) -> None:
    assert ChatTemplate(source).argument_form(has_tools=False) == form


def test_each_named_template_has_its_own_form() -> None:
    sources = {"default": program("{{ '' + f.arguments }}"), "tool_use": program("{{ f.arguments | tojson }}")}
    template = ChatTemplate(sources)
    assert [template.argument_form(has_tools=has) for has in (False, True)] == [TEXT, OBJECTS]


WRITES_EFFORT = "Reasoning: {{ reasoning_effort | default('medium') }}"
REFUSES_EFFORT = (
    "{% if reasoning_effort is not defined %}no_think{% elif reasoning_effort not in ['low', 'high', 'no_think'] %}"
    "{{ raise_exception('which effort?') }}{% else %}{{ reasoning_effort }}{% endif %}"
)
COMPARES_EFFORT = "{{ 'think hard' if reasoning_effort == 'max' else 'think' }}"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (WRITES_EFFORT, ["low", "low", "low", "medium", "high", "high", "high"]),
        ("{# 'max' #}" + WRITES_EFFORT, ["low", "low", "low", "medium", "high", "max", "max"]),
        ("{{ reasoning_effort | capitalize }}", ["Low", "Low", "Low", "Medium", "High", "High", "High"]),
        (REFUSES_EFFORT, ["no_think", "low", "low", "high", "high", "high", "high"]),
        (
            "{% if reasoning_effort not in ['low', 'high'] %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}",
            ["low", "low", "low", "high", "high", "high", "high"],
        ),
        (COMPARES_EFFORT, [*["think"] * 6, "think hard"]),
        ("{% if thinking %}on{% endif %}", [""] * 7),
    ],
)
def test_an_effort_that_a_family_does_not_know_is_the_nearest_that_it_knows(source: str, shown: list[str]) -> None:
    template = ChatTemplate(source)
    found = [
        template.render([], variables={"reasoning_effort": effort}).removeprefix("Reasoning: ") for effort in EFFORTS
    ]
    assert found == shown


def test_an_effort_of_the_applications_own_is_given_as_it_is() -> None:
    template = ChatTemplate(WRITES_EFFORT)
    assert template.render([], variables={"reasoning_effort": "extreme"}) == "Reasoning: extreme"
    assert template.render([], variables={"reasoning_effort": 3}) == "Reasoning: 3"
    assert template.render([]) == "Reasoning: medium"
