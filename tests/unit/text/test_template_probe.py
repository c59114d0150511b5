"""How templates take the arguments of earlier calls, in the forms that model families write."""

from __future__ import annotations

import pytest

from dynamo.text.template_probe import ArgumentForm
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
