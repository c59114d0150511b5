"""Checks of chat as the Agents SDK, pydantic-ai and other agents use it."""

from __future__ import annotations

from typing import Final

from dynamo.cli.referee.apis.thoughts import demand_apart, demand_unknown_member, turns
from dynamo.cli.referee.chat_checks import SCHEMA, TOOL
from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, demand, demand_fits, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member
from dynamo.cli.referee.text_checks import CHAT, PROMPT, pieces

CALLS: Final = [
    {"id": f"call_{name}", "type": "function", "function": {"name": "report", "arguments": '{"ok": true}'}}
    for name in ("first", "second")
]
TOOLS: Final[list[Json]] = TOOL["tools"]
KNOWN: Final[dict[str, Json]] = {
    "metadata": {"origin": "referee"},
    "parallel_tool_calls": True,
    "store": False,
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "report", "description": "Report.", "parameters": SCHEMA, "strict": True}}],
    "user": "referee",
}  # fmt: skip


async def _whole(probe: Probe, messages: list[Json], **more: Json) -> Json:
    answer = await probe.post(CHAT.path, CHAT.body(probe.model, **{"messages": messages, **more}))
    return served(answer).json()


def _turn(content: Json, role: str = "user") -> dict[str, Json]:
    return {"role": role, "content": content}


def _conversation(contents: list[Json]) -> list[Json]:
    """Build a conversation with two calls, whose results come in the other order."""
    named = zip(reversed(CALLS), contents, strict=True)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": content} for call, content in named]
    return [_turn("Report twice."), {"role": "assistant", "content": None, "tool_calls": CALLS}, *results]


async def check_results(probe: Probe) -> None:
    await _whole(probe, _conversation(["done", "done"]), tools=TOOLS)


async def check_result_parts(probe: Probe) -> None:
    parts = [{"type": "text", "text": "done"}]
    await _whole(probe, _conversation([parts, parts]), tools=TOOLS)


async def check_parts(probe: Probe) -> None:
    answers = [
        await _whole(probe, [_turn(PROMPT)]),
        await _whole(probe, [_turn([{"type": "text", "text": PROMPT}])]),
    ]
    found = [member(answer, "usage", "prompt_tokens") for answer in answers]
    if not all(isinstance(n, int) for n in found):
        raise CannotJudge("an answer has no usage.prompt_tokens", Cause.SERVER)
    demand(found[0] == found[1], f"the prompt has {found[0]} tokens as a text, and {found[1]} as a part")


async def check_no_tool(probe: Probe) -> None:
    answer = await _whole(probe, [_turn("Report.")], tools=TOOLS, tool_choice="none")
    calls = member(answer, "choices", 0, "message", "tool_calls")
    demand(not calls, "tool_choice is none, and the message has tool_calls")


async def _required(probe: Probe, **more: Json) -> ServerAnswer:
    body = CHAT.body(
        probe.model, "Report.", **{**TOOL, "tool_choice": "required", "parallel_tool_calls": False, **more}
    )
    return served(await probe.post(CHAT.path, body), is_optional=True)


async def check_required(probe: Probe) -> None:
    choice = member((await _required(probe)).json(), "choices", 0)
    calls, reason = member(choice, "message", "tool_calls"), member(choice, "finish_reason")
    if reason == "length":
        raise CannotJudge("the answer was cut at max_tokens")
    demand(calls, "tool_choice is required, and the message has no tool_calls")
    demand(reason == "tool_calls", f"finish_reason is {reason!r}, not 'tool_calls'")


async def check_tool_usage(probe: Probe) -> None:
    answer = await _required(probe, stream=True, stream_options={"include_usage": True})
    made = next((member(u, "completion_tokens") for c in pieces(answer) if (u := member(c, "usage"))), None)
    demand(isinstance(made, int) and made > 0, f"usage.completion_tokens of a streamed call is {made!r}")


def _thoughts(message: Json) -> str:
    return "".join(member(message, name) or "" for name in ("reasoning_content", "reasoning"))


async def check_reasoning(probe: Probe) -> None:
    more: dict[str, Json] = {"reasoning_effort": "low", "max_tokens": 128}
    body = CHAT.body(probe.model, "What is 27 + 15?", **more)
    answer = served(await probe.post(CHAT.path, body), is_optional=True).json()
    message = member(answer, "choices", 0, "message")
    demand_apart(member(message, "content") or "", is_apart=bool(_thoughts(message)))


async def check_reasoning_streamed(probe: Probe) -> None:
    more: dict[str, Json] = {"reasoning_effort": "low", "max_tokens": 128, "stream": True}
    answer = served(await probe.post(CHAT.path, CHAT.body(probe.model, "What is 27 + 15?", **more)), is_optional=True)
    deltas = [member(c, "delta") for chunk in pieces(answer) for c in member(chunk, "choices") or []]
    text = "".join(member(delta, "content") or "" for delta in deltas)
    demand_apart(text, is_apart=any(_thoughts(delta) for delta in deltas))


async def check_long(probe: Probe) -> None:
    demand_fits(await probe.post(CHAT.path, CHAT.body(probe.model, messages=turns(), max_tokens=4)))


async def check_developer(probe: Probe) -> None:
    await _whole(probe, [_turn("Be short.", "developer"), _turn("Hello.")])


async def check_known(probe: Probe) -> None:
    await _whole(probe, [_turn("Hello.")], **KNOWN)


async def check_unknown(probe: Probe) -> None:
    answer = await probe.post(CHAT.path, CHAT.body(probe.model, referee_of_tests=1))
    demand_unknown_member(answer, "referee_of_tests")


_AGENT: Final = Level.AGENT
_TOOLS: Final = "OpenAI guide, Function calling"
_THOUGHTS: Final = "DeepSeek guide, Thinking mode"
ROWS: Final[tuple[Row, ...]] = (
    ("agent.tool-results", check_results, _AGENT, "major", f"{_TOOLS}: the results of several calls come back as tool messages, in any order", "Match results to calls by tool_call_id"),
    ("agent.tool-result-parts", check_result_parts, _AGENT, "major", "OpenAI reference, Chat: content of a tool message is a text or a list of text parts", "Join the parts"),
    ("agent.content-parts", check_parts, _AGENT, "major", "OpenAI reference, Chat: content of a message is a text or a list of parts", "Render both forms alike"),
    ("agent.tool-choice-none", check_no_tool, _AGENT, "major", f"{_TOOLS}: with tool_choice none no function is called", "Offer the model no tool"),
    ("agent.tool-choice-required", check_required, _AGENT, "major", f"{_TOOLS}: with tool_choice required a function is called, and finish_reason is tool_calls", "Constrain the answer to calls"),
    ("agent.tool-usage", check_tool_usage, _AGENT, "major", "OpenAI reference, Chat: With include_usage a streamed call has usage", "Send usage before [DONE]"),
    ("agent.reasoning-apart", check_reasoning, _AGENT, "major", f"{_THOUGHTS}: reasoning_content stands beside content", "Take reasoning out of the text"),
    ("agent.reasoning-streamed", check_reasoning_streamed, _AGENT, "major", f"{_THOUGHTS}: deltas of reasoning_content stand beside those of content", "Hold back text that may be a mark of reasoning"),
    ("agent.long-conversation", check_long, _AGENT, "major", "OpenAI reference, Chat: earlier turns are sent as messages", "Accept lists of many messages"),
    ("agent.developer-role", check_developer, _AGENT, "major", "OpenAI reference, Chat: developer is a role of messages", "Render it as system"),
    ("agent.known-members", check_known, _AGENT, "major", "OpenAI reference, Chat: metadata, store, user, parallel_tool_calls and strict do no harm", "Ignore what has no meaning here"),
    ("agent.unknown-member", check_unknown, _AGENT, "minor", "OpenAI reference, Error codes: an unknown member is ignored, or refused with 400 by its name", "Name the member in error.param"),
)  # fmt: skip
