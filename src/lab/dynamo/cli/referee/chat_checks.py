"""Checks of chat alone: calls of tools, and answers after a schema."""

from __future__ import annotations

import json
from typing import Final

from dynamo.cli.referee.checks import CannotJudge, Level, Probe, Row, demand, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member
from dynamo.cli.referee.text_checks import CHAT, pieces

SCHEMA: Final[dict[str, Json]] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL: Final[dict[str, Json]] = {
    "tools": [{"type": "function", "function": {"name": "report", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "report"}},
    "max_tokens": 128,
}


def _arguments(text: str, reason: object) -> None:
    try:
        parsed = json.loads(text)
    except ValueError:
        if reason == "length":
            raise CannotJudge("the call was cut at max_tokens") from None
        demand(False, f"the arguments are not JSON: {text[:200]!r}")
        return
    demand(isinstance(parsed, dict), f"the arguments are not an object: {text[:200]!r}")


async def _asked(probe: Probe, **more: Json) -> ServerAnswer:
    return served(await probe.post(CHAT.path, CHAT.body(probe.model, **{**TOOL, **more})), is_optional=True)


async def check_tool_call(probe: Probe) -> None:
    choice = member((await _asked(probe)).json(), "choices", 0)
    call = member(choice, "message", "tool_calls", 0)
    if call is None and member(choice, "finish_reason") == "length":
        raise CannotJudge("the answer was cut before the call")
    demand(call is not None, "tool_choice names a function, and the message has no tool_calls")
    demand(isinstance(member(call, "id"), str) and call["id"], "the call has no id")
    demand(member(call, "type") == "function", f"the call's type is {member(call, 'type')!r}")
    demand(member(call, "function", "name") == "report", f"the name is {member(call, 'function', 'name')!r}")
    _arguments(member(call, "function", "arguments") or "", member(choice, "finish_reason"))


async def check_tool_deltas(probe: Probe) -> None:
    chunks = pieces(await _asked(probe, stream=True))
    choices = [choice for chunk in chunks for choice in member(chunk, "choices") or []]
    reason = next((r for choice in choices if (r := member(choice, "finish_reason"))), None)
    deltas = [call for choice in choices for call in member(choice, "delta", "tool_calls") or []]
    if not deltas and reason == "length":
        raise CannotJudge("the answer was cut before the call")
    demand(deltas, "tool_choice names a function, and no delta has tool_calls")
    demand(all(isinstance(member(d, "index"), int) for d in deltas), "a delta of a call has no index")
    first = [d for d in deltas if d["index"] == 0]
    ids = [i for d in first if (i := member(d, "id"))]
    names = [n for d in first if (n := member(d, "function", "name"))]
    demand(len(ids) == 1 and member(first, 0, "id"), f"the id of the call came {len(ids)} times, or late")
    demand(names == ["report"], f"the name of the call came as {names}")
    _arguments("".join(member(d, "function", "arguments") or "" for d in first), reason)


async def check_schema(probe: Probe) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "report", "strict": True, "schema": SCHEMA}}
    body = CHAT.body(probe.model, response_format=wanted, max_tokens=128)
    choice = member(served(await probe.post(CHAT.path, body), is_optional=True).json(), "choices", 0)
    if member(choice, "finish_reason") == "length":
        raise CannotJudge("the answer was cut at max_tokens")
    text = member(choice, "message", "content")
    try:
        parsed = json.loads(text or "")
    except ValueError:
        parsed = None
    is_valid = isinstance(parsed, dict) and parsed.keys() == {"ok"} and isinstance(parsed["ok"], bool)
    demand(is_valid, f"the content does not follow the schema: {str(text)[:200]!r}")


_AGENT: Final = Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("tool-call", check_tool_call, _AGENT, "major", "OpenAI reference, Function calling: a forced function is called, with JSON arguments", "Constrain the answer to the named function"),
    ("stream.tool-deltas", check_tool_deltas, _AGENT, "major", "OpenAI reference, Function calling: deltas have an index, id and name come once, arguments join to JSON", "Send id and name in the first delta only"),
    ("json-schema", check_schema, _AGENT, "major", "OpenAI reference, Structured outputs: a strict answer follows its schema", "Constrain decoding by the schema, or refuse it with 400"),
)  # fmt: skip
