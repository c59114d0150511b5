"""Chat templates render byte for byte as `transformers` renders them. Optional (`make test-engines`)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from dynamo.text import ChatTemplate, TemplateRejected
from support.cases import each_case
from support.demo_model import FILES
from support.template_families import CONVERSATIONS, FAMILIES, TOOLS, source, with_ids

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs the `engines` extra: transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(FILES / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )


def theirs(tokenizer: Any, text: str, messages: Any, tools: Any, *, prompt: bool, **variables: Any) -> str:
    rendered = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=text, tokenize=False, add_generation_prompt=prompt, **variables
    )
    assert isinstance(rendered, str)
    return rendered


def ours(text: str, messages: Any, tools: Any, *, prompt: bool, **variables: Any) -> str:
    template = ChatTemplate(text, bos_token="<s>", eos_token="</s>", now=datetime.now)
    return template.render(messages, tools=tools, add_generation_prompt=prompt, variables=variables)


def assert_equal(tokenizer: Any, text: str, messages: Any, tools: Any, *, prompt: bool, **variables: Any) -> None:
    while True:
        day = datetime.now().date()
        found = theirs(tokenizer, text, messages, tools, prompt=prompt, **variables)
        made = ours(text, messages, tools, prompt=prompt, **variables)
        if day == datetime.now().date():  # templates write the date
            break
    assert made.encode() == found.encode()


@pytest.mark.parametrize("name", [*FAMILIES, "demonstration model"])
def test_a_familys_template_renders_the_same_bytes(tokenizer: Any, name: str) -> None:
    text = source(name) if name in FAMILIES else (FILES / "chat_template.jinja").read_text(encoding="utf-8")
    rendered = set()
    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            for prompt in (False, True):
                for variables in ({}, {"thinking": True, "enable_thinking": True}, {"enable_thinking": False}):
                    given = with_ids(messages, name)
                    assert_equal(tokenizer, text, given, tools, prompt=prompt, **variables)
                    rendered.add(ours(text, given, tools, prompt=prompt, **variables))
    assert len(rendered) > len(CONVERSATIONS)


MESSAGES = [{"role": "user", "content": "größe <b> & \"q\" 'a' 👩‍🚀"}, {"role": "assistant", "content": " b\n"}]


@each_case(
    "text",
    [
        "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ tools | tojson(sort_keys=true) }}",
        "{{ messages | tojson(ensure_ascii=true) }}{{ messages | tojson(separators=(',', ':')) }}",
        "{{ 1.5e300 | tojson }}{{ none | tojson }}{{ true | tojson }}{{ (1, 2) | tojson }}{{ {1: 2} | tojson }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ loop.index }}{{ m.role }}{% endfor %}",
        "{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m['content'] }}{% endgeneration %}{% endfor %}",
        "{{ strftime_now('%Y') | length }}{{ strftime_now is defined }}",
        "  {% if true %}  \n  a\n  {%- endif %}\n\t{% if false %}x{% endif %}\n b {{- ' c ' -}}  d\n",
        "{# a #}\n{%+ if true %} a{% endif %}\n{% raw %}{{ x }}{% endraw %}\n",
        "{% set ns = namespace(a=[]) %}{% for m in messages %}{% set ns.a = ns.a + [m.role] %}{% endfor %}{{ ns.a }}",
        "{% macro f(a, b='x') %}{{ a }}-{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(2) %}!{% endcall %}",
        "{{ messages[0].missing }}|{{ messages[0].missing is defined }}|{{ missing is defined }}|{{ messages[-1:] }}",
        "{{ 'a,b'.split(',') }}{{ {'a': 1}.items() | list }}{{ 'x' ~ 1 ~ none }}{{ [1, 2] | map('string') | join('+') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | map(attribute='role') | list }}",
        "{{ 'it''s' if false else '<&>' | e }}{{ '<&>' }}{{ '%s and %d' % ('a', 2) }}{{ 'a%sb' | format('c') }}",
        "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ add_generation_prompt }}{{ 7 // 2 }}{{ 7 / 2 }}{{ -7 % 3 }}",
        "{{ '  a b ' | trim }}{{ 'a b' | title | replace('A', 'x') }}{{ 'abc'[::-1] }}{{ [3, 1, 2] | sort | first }}",
        "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1, 'a': 2} | items | list }}{{ 'ÄÖ'.lower() }}{{ 'a\\nb'.splitlines() }}",
        "{% for a, b in [(1, 2), (3, 4)] recursive %}{{ a }}{{ b }}{% else %}none{% endfor %}{{ range(3) | list }}",
    ],
)
def test_what_templates_use_of_jinja_renders_the_same_bytes(tokenizer: Any, text: str) -> None:
    for tools in (None, TOOLS):
        for prompt in (False, True):
            assert_equal(tokenizer, text, MESSAGES, tools, prompt=prompt)


@each_case(
    "text",
    [
        "{{ raise_exception('No, ' + messages[0].role) }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ missing.member }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_what_one_refuses_the_other_refuses(tokenizer: Any, text: str) -> None:
    with pytest.raises(Exception) as found:  # noqa: PT011 - jinja2 has several
        theirs(tokenizer, text, MESSAGES, None, prompt=True)
    with pytest.raises(TemplateRejected) as made:
        ours(text, MESSAGES, None, prompt=True)
    assert str(found.value) in made.value.detail
