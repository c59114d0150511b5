"""Checks of Anthropic's Messages API as Claude Code and agents with Anthropic's SDK use it."""

from __future__ import annotations

from typing import Final

from dynamo.cli.referee.apis.messages import (  # fmt: skip
    PAGE,
    PATH,
    TOOL,
    TOOLS_PAGE,
    blocks,
    body,
    headers,
    optional,
    post,
    text_of,
    whole,
)
from dynamo.cli.referee.apis.thoughts import demand_apart, demand_unknown_member, turns
from dynamo.cli.referee.checks import CannotJudge, Level, Probe, Row, demand, demand_fits, served
from dynamo.cli.referee.exchange import Json, member

CALLS: Final = [
    {"type": "tool_use", "id": f"toolu_{name}", "name": "report", "input": {"ok": True}} for name in ("first", "second")
]
KNOWN: Final[dict[str, Json]] = {
    "metadata": {"user_id": "referee"},
    "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{**TOOL["tools"][0], "description": "Report.", "cache_control": {"type": "ephemeral"}}],
}


async def _results(probe: Probe, contents: list[Json], **more: Json) -> None:
    named = zip(reversed(CALLS), contents, strict=True)
    results: list[Json] = [
        {"type": "tool_result", "tool_use_id": c["id"], "content": text, **more} for c, text in named
    ]
    prompt = [
        {"role": "user", "content": "Report twice."},
        {"role": "assistant", "content": CALLS},
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    await whole(probe, prompt, tools=TOOL["tools"])


async def check_results(probe: Probe) -> None:
    await _results(probe, ["done", "done"])


async def check_result_blocks(probe: Probe) -> None:
    await _results(probe, [[{"type": "text", "text": "done"}]] * 2)


async def check_result_error(probe: Probe) -> None:
    await _results(probe, ["it failed", "it failed"], is_error=True)


async def check_no_tool(probe: Probe) -> None:
    answer = await whole(probe, "Report.", tools=TOOL["tools"], tool_choice={"type": "none"})
    demand(not blocks(answer, "tool_use"), "tool_choice is none, and content has a tool_use")


async def check_any_tool(probe: Probe) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = (await optional(probe, "Report.", **{**TOOL, "tool_choice": choice})).json()
    if not blocks(answer, "tool_use") and member(answer, "stop_reason") == "max_tokens":
        raise CannotJudge("the answer was cut before the call")
    demand(blocks(answer, "tool_use"), "tool_choice is any, and content has no tool_use")


async def check_thinking(probe: Probe) -> None:
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1152, "temperature": 1}
    answer = (await optional(probe, "What is 27 + 15?", **more)).json()
    found = blocks(answer, "thinking")
    demand_apart(text_of(answer), is_apart=bool(found))
    for block in found:
        demand(isinstance(member(block, "signature"), str), "a thinking block has no signature")


async def check_thinking_back(probe: Probe) -> None:
    """Send a thinking block of another server back, as agents do that changed servers in a conversation."""
    block = {"type": "thinking", "thinking": "It is 42.", "signature": "ABC="}
    asked = [
        {"role": "user", "content": "What is 27 + 15?"},
        {"role": "assistant", "content": [block, {"type": "text", "text": "42"}]},
        {"role": "user", "content": "Go on."},
    ]
    answer = await post(probe, asked)
    if answer.status == 400 and "signature" in answer.message.lower():
        raise CannotJudge("the server takes only its own signatures")
    served(answer)


async def check_long(probe: Probe) -> None:
    demand_fits(await post(probe, turns(), max_tokens=16))


async def check_known(probe: Probe) -> None:
    answer = await probe.post(f"{PATH}?beta=true", body(probe.model, **KNOWN), more=headers(probe))
    served(answer)


async def check_unknown(probe: Probe) -> None:
    demand_unknown_member(await post(probe, referee_of_tests=1), "referee_of_tests")


_AGENT: Final = Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("agent.tool-results", check_results, _AGENT, "major", f"{TOOLS_PAGE}: the results of several calls stand in one message of the user, text behind them", "Match results to calls by tool_use_id"),
    ("agent.tool-result-blocks", check_result_blocks, _AGENT, "major", f"{TOOLS_PAGE}: content of a result is a text or a list of blocks", "Take the text of the blocks"),
    ("agent.tool-result-error", check_result_error, _AGENT, "major", f"{TOOLS_PAGE}: a result may have is_error", "Accept is_error"),
    ("agent.tool-choice-none", check_no_tool, _AGENT, "major", f"{TOOLS_PAGE}: with tool_choice none no tool is called", "Offer the model no tool"),
    ("agent.tool-choice-any", check_any_tool, _AGENT, "major", f"{TOOLS_PAGE}: with tool_choice any a tool is called", "Constrain the answer to calls"),
    ("agent.thinking-apart", check_thinking, _AGENT, "major", "Anthropic guide, Extended thinking: thinking is a block of its own, with a signature", "Take thinking out of the text"),
    ("agent.thinking-back", check_thinking_back, _AGENT, "major", "Anthropic guide, Extended thinking: thinking blocks are sent back", "Accept them, or name the signature in a 400"),
    ("agent.long-conversation", check_long, _AGENT, "major", f"{PAGE}: earlier turns are sent as messages", "Accept lists of many messages"),
    ("agent.known-members", check_known, _AGENT, "major", f"{PAGE}: metadata, cache_control and ?beta=true do no harm", "Ignore what has no meaning here"),
    ("agent.unknown-member", check_unknown, _AGENT, "minor", "Anthropic reference, Errors: an unknown member is ignored, or refused with 400 by its name", "Name the member in the message"),
)  # fmt: skip
