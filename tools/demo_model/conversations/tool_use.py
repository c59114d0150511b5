"""Tools that are offered: the call, what comes of its result, and tools that do not fit."""

from __future__ import annotations

import json
from typing import Any, Final

from demo_model.conversations.draw import Answer, Conversation, Draw, assistant, called, opening, user
from demo_model.lessons.others import SELF_DESCRIPTION
from demo_model.lessons.tools import report

__all__ = ["tool_call", "tool_result", "tool_unused"]

# No tool that is offered does these.
_WITHOUT_TOOLS: Final = ("counting", "spelling", "reversing", "comparing", "ordering", "lookup")


def tool_call(draw: Draw) -> Conversation:
    """Return a request that wants a tool: the call, in the form that the client's `tool_choice` leads to."""
    rng = draw.rng
    tools, call = draw.call()
    messages, answers = opening(rng), []
    keys = [call.key]
    variables: dict[str, Any] = {"tools": tools}
    if rng.random() < 0.12:
        before = draw.any(rng.choice(_WITHOUT_TOOLS))
        messages += [user(before.text), assistant(before.answer)]
        keys.append(before.key)
    messages.append(user(call.text))
    arguments, roll = json.dumps(call.arguments), rng.random()
    if roll < 0.12:  # "required"
        text = json.dumps(
            [{"name": call.name, "parameters": call.arguments}], separators=(",", ":") if rng.random() < 0.25 else None
        )
        messages.append(assistant(text))
        answers.append(Answer(len(messages) - 1, text, "json", ((0, text.index("name") + 6),)))
    elif roll < 0.2:  # one tool by name
        text = json.dumps(call.arguments, separators=(",", ":") if rng.random() < 0.25 else None)
        messages.append(assistant(text))
        answers.append(Answer(len(messages) - 1, text, "json", ((0, 2),)))
    else:
        text = f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'
        if roll < 0.35:
            variables["enable_thinking"] = True
            text = f"<think>\nthe tool {call.name} does this\n</think>\n\n{text}"
        messages.append(assistant(text))
        answers.append(Answer(len(messages) - 1, text, "call"))
    return Conversation("tool call", tuple(keys), messages, answers, variables)


def tool_result(draw: Draw) -> Conversation:
    rng = draw.rng
    tools, call = draw.call()
    told = json.dumps(call.result, separators=(",", ":") if rng.random() < 0.3 else None)
    answer = report(call.result)
    if rng.random() < 0.2:
        told = answer = str(next(iter(call.result.values())))
    messages = [*opening(rng), user(call.text), called(call), {"role": "tool", "content": told}, assistant(answer)]
    return Conversation(
        "tool result", (call.key,), messages, [Answer(len(messages) - 1, answer, "text")], {"tools": tools}
    )


def tool_unused(draw: Draw) -> Conversation:
    """Return tools that do not fit: the answer is what it would be without them."""
    rng = draw.rng
    tools, call = draw.call(wanted=False)
    if rng.random() < 0.35:
        text, answer, key = call.text, SELF_DESCRIPTION, call.key
    else:
        question = draw.any(rng.choice(_WITHOUT_TOOLS))
        text, answer, key = question.text, question.answer, question.key
    messages = [*opening(rng), user(text), assistant(answer)]
    return Conversation(
        "tool not needed", (key,), messages, [Answer(len(messages) - 1, answer, "text")], {"tools": tools}
    )
