"""Reading takes time in proportion to the text. `tests/process/formats` has every format and many more texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynamo.text.formats import REASONING_FORMATS, TOOL_FORMATS, TextMachine, ToolSet
from dynamo.text.formats.tagged_answer import tagged_machine
from support.format_runs import TOOL_SET, parser, run
from support.reading_cost import FACTOR, cost, growth


def in_reasoning(name: str) -> Callable[[], TextMachine]:
    tags = REASONING_FORMATS["qwen3"].tags(begins_inside=True)
    return lambda: tagged_machine(TOOL_FORMATS[name].call_form, TOOL_SET, tags)


@pytest.mark.parametrize("piece", [0, 512])
@pytest.mark.parametrize(
    ("make", "unit", "size"),
    [
        (lambda: parser("deepseek_v3_2"), "<｜DSML｜", 8_000),
        (lambda: parser("harmony"), "<|start|>", 64_000),
        pytest.param(in_reasoning("hermes"), '<tool_call>{"a</think><think>"x', 120_000, marks=pytest.mark.process),
        (lambda: parser("default"), '[{"name": "ping"},', 8_000),
        (lambda: parser("pythonic", REASONING_FORMATS["mistral"].tags()), "[", 4_000),
        (lambda: parser("xlam"), "{", 4_000),
        (lambda: parser("xlam"), "[", 4_000),
    ],
    ids=["marks", "headers", "read again", "calls that are held", "beside a tag", "braces", "brackets"],
)
def test_a_text_eight_times_as_long_costs_about_eight_times_as_much(
    make: Callable[[], TextMachine], unit: str, size: int, piece: int
) -> None:
    assert growth(make, "", unit, size, piece) < FACTOR


def test_what_is_no_number_costs_as_much_as_a_number() -> None:
    number, no_number = (f"[run(ratio={'1' * 900}{end}), " * 40 for end in ("", "-"))
    assert cost(lambda: parser("pythonic"), no_number, 0) < 8 * cost(lambda: parser("pythonic"), number, 0) + 0.01


def test_separators_too_long_are_no_separators_however_the_text_is_cut() -> None:
    call = '{"name": "ping", "parameters": {}}'
    for many in (10, 255, 256, 257, 300):
        text = f"<|python_tag|>{call}{';' * many}{call}"
        whole = run("llama3_json", [text])
        assert len(whole.calls) == (2 if many <= 256 else 1), many
        assert run("llama3_json", list(text)) == whole


def test_a_call_without_tools_is_read_in_linear_time_too() -> None:
    form = TOOL_FORMATS["kimi_k3"]
    assert growth(lambda: form.parser(ToolSet()), "", "<|open|>x", 8_000) < FACTOR
