"""What a family's template writes of a turn is what the family's parser reads: calls, reasoning and text come back equal."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from typing import Any

from dynamo.text import ChatTemplate
from dynamo.text.formats import REASONING_FORMATS, TOOL_FORMATS, ToolSet
from dynamo.text.formats.scanner import TextMachine
from dynamo.text.formats.tagged_answer import tagged_machine
from dynamo.text.formats.tools import unified_parser
from dynamo.text.output import OutputEvent, joined
from support.cases import each_case
from support.demo_model import FILES
from support.template_families import FAMILIES, FIND, PING, RUN, SYSTEM, TOOLS, USER, Family, said, source, with_ids


def template(name: str) -> ChatTemplate:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    return ChatTemplate(source(name), bos_token="<s>", eos_token="</s>", now=lambda: now)


def machine(family: Family, prompt: str) -> TextMachine:
    tools, form = TOOL_FORMATS[family.tools], REASONING_FORMATS.get(family.reasoning or "")
    if tools.unified is not None:
        return unified_parser(tools.unified, ToolSet(TOOLS))
    tags = form.tags(begins_inside=prompt.endswith(form.marks[0])) if form is not None else None
    return tagged_machine(tools.call_form, ToolSet(TOOLS), tags)


def check(rendered: str, prompt: str, family: Family, turn: dict[str, Any]) -> None:
    assert rendered.startswith(prompt), (prompt, rendered)
    text = rendered.removeprefix(prompt)
    for end in family.ends:
        text = text.removesuffix(end)
    for pieces in ([text], list(text)):
        reader = machine(family, prompt)
        events: list[OutputEvent] = []
        for piece in pieces:
            events += reader.push(piece)
        found = joined([*events, *reader.finish()])
        calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
        wanted = [(one["function"]["name"], one["function"]["arguments"]) for one in turn.get("tool_calls", ())]
        assert calls == wanted, text
        assert all(call.is_complete for call in found.calls)
        assert found.reasoning == turn.get("reasoning_content", ""), text
        assert found.content.strip("\n") == turn["content"], text
        if family.tools in ("kimi_k2", "mistral"):
            assert [call.id for call in found.calls] == [one["id"] for one in turn.get("tool_calls", ())]


TURNS = {
    "text": said("It is 4 < 5: größe."),
    "a call": said("", None, FIND),
    "two calls": said("", None, FIND, RUN),
    "three calls": said("", None, PING, RUN, PING),
    "text and a call": said("I look.", None, RUN),
    "reasoning and text": said("Four.", "Two plus two\nis four."),
    "reasoning and a call": said("", "I should look.", FIND),
    "reasoning, text and calls": said("I look.", "I should.", PING, RUN),
}


@each_case("name,turn", list(itertools.product(FAMILIES, TURNS)))
def test_a_turn_that_a_template_wrote_is_read_back(name: str, turn: str) -> None:
    family = FAMILIES[name]
    message = TURNS[turn]
    if "reasoning_content" in message and family.reasoning is None:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
    variables = dict(family.variables) if "reasoning_content" in message else {}
    if name == "glm47":
        variables["enable_thinking"] = "reasoning_content" in message
    if name == "deepseek_v3_2":
        variables["thinking"] = "reasoning_content" in message
    if name == "kimi_k2":
        calls = [
            {**one, "id": f"functions.{one['function']['name']}:{at}"}
            for at, one in enumerate(message.get("tool_calls", ()))
        ]
        message = {**message, "tool_calls": calls} if calls else message
    messages = with_ids([SYSTEM, USER, message], name)
    if name == "mistral" and turn == "three calls":
        messages[2]["tool_calls"] = [{**one, "id": f"abcdefgh{at}"} for at, one in enumerate(messages[2]["tool_calls"])]
    program = template(name)
    prompt = program.render(messages[:2], tools=TOOLS, variables=variables)
    rendered = program.render(messages, tools=TOOLS, add_generation_prompt=False, variables=variables)
    check(rendered, prompt, family, messages[2])


@each_case("turn", [turn for turn in TURNS.values() if "reasoning_content" not in turn])
def test_the_demonstration_models_template_writes_what_is_read_back(turn: dict[str, Any]) -> None:
    text = (FILES / "chat_template.jinja").read_text(encoding="utf-8")
    program = ChatTemplate(text, bos_token="<s>", eos_token="</s>")
    prompt = program.render([USER], tools=TOOLS)
    rendered = program.render([USER, turn], tools=TOOLS, add_generation_prompt=False)
    check(rendered, prompt, Family("hermes", "qwen3", ("<|im_end|>\n", "<|im_end|>")), turn)
