"""Chat templates that never end, or grow without end: bounded, and no other stream waits for them."""

from __future__ import annotations

import asyncio
import itertools
import time
import tracemalloc
from pathlib import Path

import pytest

from dynamo.errors import InvalidArgument
from dynamo.text.template_budget import BudgetSpec
from dynamo.text.templates import INLINE_BUDGET, BudgetExceeded, ChatTemplate, TemplateRejected
from support.frontend_cluster import cluster
from support.tiny_model import write_tiny_model

MESSAGES = [{"role": "user", "content": "hello"}]
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"

ENDLESS = {
    "loops": FOREVER,
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loops": "{% for a in [[1], [1]] recursive %}{{ loop([[1], [1]]) }}{{ loop([[1], [1]]) }}{% endfor %}",
    "map": "{% for a in range(99999) %}{% set x = range(99999)|map('string')|list %}{% endfor %}",
}
GROWING = {
    "doubling by +": "{% set n = namespace(s='xxxxxxxx') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(s='xxxxxxxx') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling lists": "{% set n = namespace(s=[0]) %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by replace": "{% set n = namespace(s='xx') %}{% for a in range(99) %}"
    "{% set n.s = n.s.replace('x', n.s) %}{% endfor %}",
    "the filter replace": "{% set n = namespace(s='xx') %}{% for a in range(99) %}"
    "{% set n.s = n.s|replace('x', n.s) %}{% endfor %}",
    "doubling by join": "{% set n = namespace(s='xx') %}{% for a in range(99) %}{% set n.s = n.s.join([n.s, n.s]) %}{% endfor %}",
    "the filter join": "{% set n = namespace(s='xx') %}{% for a in range(99) %}{% set n.s = [n.s, n.s]|join(n.s) %}{% endfor %}",
    "shared lists": "{% set n = namespace(s=['x']) %}{% for a in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "shared lists as JSON": "{% set n = namespace(s=['x']) %}{% for a in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ n.s|tojson }}",
    "shared dicts": "{% set n = namespace(s={}) %}{% for a in range(60) %}{% set n.s = {'a': n.s, 'b': n.s} %}{% endfor %}"
    "{{ n.s|string }}",
    "dict()": "{% set n = namespace(s={}) %}{% for a in range(60) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}{{ n.s }}",
    "namespaces": "{% set n = namespace(s=1) %}{% for a in range(60) %}{% set n.s = namespace(a=n.s, b=n.s) %}{% endfor %}"
    "{{ n.s }}{{ [n.s, n.s] }}{{ 1 // 0 }}",
    "multiplication": "{{ 'x' * 10000000000 }}",
    "lists times": "{{ [0] * 10000000000 }}",
    "times a text": "{{ 10000000000 * 'x' }}",
    "powers": "{{ 10 ** 10000000 }}",
    "powers of powers": "{{ 9 ** (9 ** 9) }}",
    "center": "{{ 'x'|center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ ('\t' * 9999).expandtabs(99999) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "the filter format": "{{ '%10000000000d'|format(1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format of a width": "{{ '{:{}}'.format(1, 10000000000) }}",
    "indent": "{{ 'x'|indent(10000000000, true) }}",
    "tojson": "{{ [1]|tojson(indent=10000000000) }}",
    "round": "{{ 1.5|round(10000000000) }}",
    "batch": "{{ [1]|batch(10000000000, 0)|list }}",
    "to_bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "output": "{% set s = 'x' * 99999 %}{% for a in range(99999) %}{{ s }}{% endfor %}",
    "range": "{{ range(10000000000)|list }}",
    "lipsum": "{{ lipsum(100000000) }}",
    "map with a width": "{{ ['x']|map('center', 10000000000)|list }}",
}
SPEC = BudgetSpec(steps=20_000, sizes=16 * 1024 * 1024, seconds=60.0)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_refused(name: str) -> None:
    with pytest.raises(TemplateRejected):
        ChatTemplate(ENDLESS[name], budget=SPEC).render(MESSAGES)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_costs_one_rendering_when_it_is_loaded(name: str) -> None:
    looks = itertools.count()  # at the clock, after so many steps each
    template = ChatTemplate("{# arguments, reasoning_effort #}" + ENDLESS[name], budget=SPEC, clock=lambda: next(looks))
    loaded = next(looks)
    with pytest.raises(TemplateRejected):
        template.render(MESSAGES)
    assert loaded <= next(looks) - loaded + 2


@pytest.mark.parametrize("name", GROWING)
def test_a_template_that_grows_without_end_is_refused_before_it_has_grown(name: str) -> None:
    template = ChatTemplate(GROWING[name], budget=SPEC)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateRejected):
            template.render(MESSAGES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * SPEC.sizes


@pytest.mark.parametrize("source", ["{{ 'x' * 10000000000 }}", "{{ 'x'|center(10000000000) }}", "{{ 9 ** (9 ** 9) }}"])
def test_nothing_is_computed_while_a_template_is_compiled(source: str) -> None:
    ChatTemplate("{% if false %}" + source + "{% endif %}").render(MESSAGES)


def test_time_ends_a_template_that_its_steps_would_not() -> None:
    now = iter(range(1_000_000))
    template = ChatTemplate(
        FOREVER, budget=BudgetSpec(steps=10**9, sizes=10**9, seconds=20), clock=lambda: float(next(now))
    )
    with pytest.raises(TemplateRejected, match="more than 20 s"):
        template.render(MESSAGES)


def test_a_template_of_many_megabytes_is_not_compiled() -> None:
    with pytest.raises(InvalidArgument, match="at most 262144"):
        ChatTemplate("x" * 300_000)


def test_the_bound_of_one_rendering_is_not_the_templates() -> None:
    template = ChatTemplate("{% for a in range(50000) %}x{% endfor %}")
    with pytest.raises(BudgetExceeded):
        template.render(MESSAGES, budget=INLINE_BUDGET)
    assert len(template.render(MESSAGES)) == 50_000


def test_an_ordinary_long_conversation_is_no_attack() -> None:
    source = (
        "{% set ns = namespace(last=0, seen=[]) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content|trim + '\n' }}"
        "{% if m.tools %}{{ m.tools|tojson(indent=4) }}{% endif %}"
        "{% if 'zzz' in m.content %}{{ m.content.split('zzz')[0].replace('a', 'b') }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a word and another " * 20, "tools": [{"a": [1, {"b": "c"}]}]}] * 8192
    assert len(ChatTemplate(source).render(messages)) > 3_000_000


async def longest_gap(stop: asyncio.Event) -> float:
    """How long the loop was away at most."""
    longest, last = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


async def test_a_frontend_with_a_model_whose_template_never_ends_serves_the_others(tmp_path: Path) -> None:
    poisoned = write_tiny_model(tmp_path / "poisoned", chat_template=FOREVER)
    async with cluster(tmp_path, inline=False, template_budget=BudgetSpec(seconds=1.0)) as house:
        await house.worker(model="good")
        await house.worker(model="bad", directory=poisoned)
        stop = asyncio.Event()
        watch = asyncio.create_task(longest_gap(stop))
        answers = await asyncio.gather(*(house.client.chat("hi", model="bad") for _ in range(3)))
        assert [answer.status for answer in answers] == [400] * 3
        assert "takes more than" in answers[0].json["message"]
        assert (await house.client.chat("hi", model="good")).status == 200
        stop.set()
        assert await watch < 0.5  # for ever before; the bar of 20 ms is measured by test_neighbours, on a quiet machine
