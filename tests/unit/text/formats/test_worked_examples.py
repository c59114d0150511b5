"""Worked examples of every format: what a model wrote, and what it means, reasoning and calls together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from dynamo.text.formats.reasoning import REASONING_FORMATS
from dynamo.text.formats.tagged_answer import tagged_machine
from dynamo.text.formats.tools import TOOL_FORMATS, unified_parser
from dynamo.text.output import OutputEvent, joined
from dynamo.text.output_parser import OutputParser
from support.cases import each_case
from support.format_runs import TOOL_SET

EXAMPLES: Final[list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "corpus" / "examples.json").read_text(encoding="utf-8")
)


def parser(example: dict[str, Any]) -> OutputParser:
    tools = TOOL_FORMATS[example["format"]]
    if tools.unified is not None:
        return OutputParser(unified_parser(tools.unified, TOOL_SET))
    reasoning = REASONING_FORMATS.get(example["reasoning_parser"])
    tags = reasoning.tags(begins_inside=reasoning.starts_inside) if reasoning is not None else None
    return OutputParser(tagged_machine(tools.call_form, TOOL_SET, tags))


@each_case("example", EXAMPLES)
def test_an_example_means_what_it_says_whole_and_by_character(example: dict[str, Any]) -> None:
    text = example["text"]
    for pieces in ([text], list(text)):
        reader = parser(example)
        events: list[OutputEvent] = []
        for piece in pieces:
            events += reader.push(piece)
        found = joined([*events, *reader.finish(is_cut=example["cut"])])
        calls = [[call.name, json.loads(call.arguments)] for call in found.calls]
        if "begins" in example:  # cut off in a call: there is none
            assert (found.content.startswith(example["begins"]), calls) == (True, [])
        else:
            expected = (example["content"], example["reasoning"], example["calls"])
            assert (found.content, found.reasoning, calls) == expected
