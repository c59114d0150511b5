"""Chat templates of model families, written from their grammars, and conversations to render with them.

Each is `tests/support/chat_templates/NAME.jinja`. None is a model's own file: they use the features of Jinja that those use,
and write reasoning and calls as the family does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DIRECTORY: Final = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Family:
    """How a family's history is read back."""

    tools: str  # the format of calls
    reasoning: str | None
    ends: tuple[str, ...]  # what ends a turn, and is a token that the parser does not see
    variables: tuple[tuple[str, Any], ...] = ()  # that switch thinking on


FAMILIES: Final = {
    "hermes": Family("hermes", "qwen3", ("<|im_end|>\n",)),
    "qwen3_coder": Family("qwen3_coder", "qwen3_coder", ("<|im_end|>\n",)),
    "llama3_json": Family("llama3_json", None, ("<|eom_id|>", "<|eot_id|>")),
    "mistral": Family("mistral", "mistral", ("</s>",)),
    "deepseek_v3_1": Family("deepseek_v3_1", "deepseek_v3_1", ("<｜end▁of▁sentence｜>",), (("thinking", True),)),
    "deepseek_v3_2": Family("deepseek_v3_2", "deepseek_v3_2", ("</s>",)),
    "glm47": Family("glm47", "glm47", ()),
    "kimi_k2": Family("kimi_k2", "kimi_k2", ("<|im_end|>",)),
    "harmony": Family("harmony", "gpt_oss", ()),
    "gemma4": Family("gemma4", "gemma4", ("<turn|>\n",)),
    "minimax_m2": Family("minimax_m2", "basic", ("[e~[\n",)),
    "pythonic": Family("pythonic", None, ("<|eot_id|>",)),
}


def source(name: str) -> str:
    return (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: Final = [
    tool(
        "find",
        'Finds <things> & "more"; l\'été.',
        query={"type": "string", "description": "größe, 你好"},
        filters={"type": "object", "properties": {"max": {"type": "number"}}},
        kind={"type": "string", "enum": ["a", "b"]},
    ),
    tool("run", "Runs code.", code={"type": "string"}, values={"type": "array", "items": {"type": "integer"}}),
    tool("ping", "Pings."),
]


def call(name: str, arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def with_ids(messages: list[dict[str, Any]], family: str) -> list[dict[str, Any]]:
    """Return the messages with ids of calls as the family's template demands."""
    if family != "mistral":
        return messages
    ids: dict[str, str] = {}
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            renamed = [{**one, "id": ids.setdefault(one["id"], f"abcdefgh{len(ids)}")} for one in calls]
            message = {**message, "tool_calls": renamed}
        if given := message.get("tool_call_id"):
            message = {**message, "tool_call_id": ids[given]}
        found.append(message)
    return found


USER: Final = {"role": "user", "content": "Find the <größe> of 👩‍🚀 & co.\nPlease."}
FIND: Final = call("find", {"query": "2 < 3 & \"so\" 'x'", "filters": {"max": 2.5, "tags": ["x", "你好"]}})
RUN: Final = call("run", {"code": 'if a < b:\n\tprint("c:\\\\d")  # {x}\n', "values": [1, -2]}, 1)
PING: Final = call("ping", {}, 2)
SYSTEM: Final = {"role": "system", "content": "Be <brief>.\nUse tools."}


def result(of: dict[str, Any], content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of["id"], "name": of["function"]["name"], "content": content}


def said(content: str, reasoning: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": list(calls)} if calls else message


CONVERSATIONS: Final[dict[str, list[dict[str, Any]]]] = {
    "a question": [USER],
    "a system message": [SYSTEM, USER],
    "an answer": [SYSTEM, USER, said("It is 4 < 5."), {"role": "user", "content": "And now?"}],
    "reasoning": [USER, said("Four.", "Two plus two\nis four."), {"role": "user", "content": "Sure?"}],
    "a call": [SYSTEM, USER, said("", None, FIND), result(FIND, '{"found": ["é", 1]}')],
    "calls": [USER, said("I look.", None, FIND, RUN), result(FIND, "one"), result(RUN, "two <b>")],
    "a loop": [
        SYSTEM,
        USER,
        said("", "I should ping.", PING),
        result(PING, "pong"),
        said("", "And run.", RUN),
        result(RUN, "done"),
        said("All done: größe."),
        {"role": "user", "content": "Thanks \t "},
    ],
}
