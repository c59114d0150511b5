"""Every format reads every text in linear time: ordinary ones, floods of its marks, and calls cut anywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Final

import pytest

from dynamo.text.formats import REASONING_FORMATS, TOOL_FORMATS, TextMachine
from dynamo.text.formats.tagged_answer import tagged_machine
from dynamo.text.formats.tools import unified_parser
from support.format_runs import TOOL_SET
from support.format_writers import WRITERS
from support.properties import some_of
from support.reading_cost import FACTOR, growth

SIZE: Final = 2_000
ORDINARY: Final = ("It is 4, since two and two is four. ", "größe 👩‍🚀\n", '- `a[0]` < b: {"x": [1, 2]}\n')
HOSTILE: Final = (
    "<",
    "[",
    "{",
    " ",
    "\n",
    '"',
    "\\",
    '{"',
    '{"a":',
    '[{"name": "x" ',
    "[f(",
    "[f(a=1",
    "</think>",
    "[THINK]",
    "-1",
)
DISTINCT: Final = list({id(form): name for name, form in reversed(list(TOOL_FORMATS.items()))}.values())


def units(name: str, marks: tuple[str, ...]) -> Sequence[str]:
    """Return what a text is made of, again and again: of many such units, those of this run's share."""
    found = [*ORDINARY, *HOSTILE, *marks[:12]]
    if (writer := WRITERS.get(name)) is not None:
        call = writer.calls([("run", {"code": "ab", "values": [1]})])
        found += [call, call[: len(call) // 2], call[: 2 * len(call) // 3], call[:-3]]
    dice = random.Random(f"units {name}")
    pieces = [*HOSTILE, *marks[:12]]
    found += ["".join(dice.choices(pieces, k=dice.randrange(2, 5))) for _ in range(12)]
    return some_of(list(dict.fromkeys(filter(None, found))), len(name))


def slow(
    make: Callable[[], TextMachine], begins: tuple[str, ...], repeated: Sequence[str]
) -> list[tuple[str, str, float]]:
    found = []
    for begin, unit, piece in itertools.product(begins, repeated, (0, 64)):
        if (factor := growth(make, begin, unit, SIZE, piece)) >= FACTOR:
            found.append((begin, unit, factor))
    return found


@pytest.mark.property
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", DISTINCT)
def test_every_tool_format_reads_in_linear_time(name: str, inside: bool) -> None:
    form = TOOL_FORMATS[name]
    tags = REASONING_FORMATS["qwen3" if inside else "mistral"].tags(begins_inside=inside)

    def make() -> TextMachine:
        if form.unified is not None:
            return unified_parser(form.unified, TOOL_SET, begins_inside=inside)
        return tagged_machine(form.call_form, TOOL_SET, tags)

    begin = WRITERS[name].begin if name in WRITERS else form.marks[0]
    assert not slow(make, ("", begin), units(name, form.marks))


@pytest.mark.property
@pytest.mark.parametrize("name", [name for name, form in REASONING_FORMATS.items() if form.unified is None])
def test_every_reasoning_format_reads_in_linear_time(name: str) -> None:
    form = REASONING_FORMATS[name]
    make = lambda: tagged_machine(None, TOOL_SET, form.tags())  # noqa: E731
    assert not slow(make, ("", form.marks[0]), units(name, form.tokens))
