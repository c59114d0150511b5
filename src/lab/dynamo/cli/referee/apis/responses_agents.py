"""Checks of OpenAI's Responses API as Codex and the Agents SDK use it."""

from __future__ import annotations

from typing import Final

from dynamo.cli.referee.apis.responses import PATH, TOOL, body, items, optional, text_of, whole
from dynamo.cli.referee.apis.responses_stream import final
from dynamo.cli.referee.apis.thoughts import demand_apart, demand_unknown_member, turns
from dynamo.cli.referee.checks import CannotJudge, Level, Probe, Row, demand, demand_fits, served
from dynamo.cli.referee.exchange import Json, member

CALLS: Final = [
    {"type": "function_call", "call_id": f"call_{name}", "name": "report", "arguments": '{"ok": true}'}
    for name in ("first", "second")
]
KNOWN: Final[dict[str, Json]] = {
    "client_metadata": {"origin": "referee"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"origin": "referee"},
    "parallel_tool_calls": True,
    "prompt_cache_key": "referee",
    "store": False,
    "tool_choice": "auto",
    "tools": [],
}


def _turn(prompt: str) -> dict[str, Json]:
    return {"role": "user", "content": prompt}


def _outputs(*values: Json) -> list[Json]:
    named = zip(reversed(CALLS), values, strict=True)
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": value} for call, value in named]


async def check_results(probe: Probe) -> None:
    """Give the results of two calls in the other order, as agents do whose tools end at different times."""
    prompt = [_turn("Report twice."), *CALLS, *_outputs("done", "done")]
    await whole(probe, prompt, tools=TOOL["tools"])


async def check_result_parts(probe: Probe) -> None:
    parts = [{"type": "input_text", "text": "done"}]
    await whole(probe, [_turn("Report twice."), *CALLS, *_outputs(parts, parts)], tools=TOOL["tools"])


async def check_no_tool(probe: Probe) -> None:
    answer = await whole(probe, "Report.", tools=TOOL["tools"], tool_choice="none")
    demand(not items(answer, "function_call"), "tool_choice is none, and output has a function_call")


async def check_required(probe: Probe) -> None:
    answer = (
        await optional(probe, "Report.", **{**TOOL, "tool_choice": "required", "parallel_tool_calls": False})
    ).json()
    if not items(answer, "function_call") and member(answer, "status") == "incomplete":
        raise CannotJudge("the answer was cut before the call")
    demand(items(answer, "function_call"), "tool_choice is required, and output has no function_call")


async def check_tool_usage(probe: Probe) -> None:
    answer = served(await probe.post(PATH, body(probe.model, stream=True, **TOOL)), is_optional=True)
    made = member(final([event for _, event in answer.named_events()]), "usage", "output_tokens")
    demand(isinstance(made, int) and made > 0, f"usage.output_tokens of a streamed call is {made!r}")


async def check_reasoning(probe: Probe) -> None:
    more = {"reasoning": {"effort": "low"}, "max_output_tokens": 128}
    answer = (await optional(probe, "What is 27 + 15?", **more)).json()
    found = items(answer, "reasoning")
    demand_apart(text_of(answer), is_apart=bool(found))
    for item in found:
        demand(isinstance(member(item, "id"), str), "a reasoning item has no id")
        demand(isinstance(member(item, "summary"), list), "a reasoning item has no list 'summary'")


async def check_long(probe: Probe) -> None:
    demand_fits(await probe.post(PATH, body(probe.model, turns(), max_output_tokens=16)))


async def check_later_developer(probe: Probe) -> None:
    later = {"role": "developer", "content": "Be short."}
    await whole(probe, [_turn("Hello."), {"role": "assistant", "content": "Hello."}, later, _turn("Go on.")])


async def check_known(probe: Probe) -> None:
    await whole(probe, **KNOWN)


async def check_unknown(probe: Probe) -> None:
    demand_unknown_member(await probe.post(PATH, body(probe.model, referee_of_tests=1)), "referee_of_tests")


_CODEX: Final = "Source of Codex CLI, Responses requests"
_AGENT: Final = Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("agent.tool-results", check_results, _AGENT, "major", "OpenAI guide, Function calling: the outputs of several calls come back as items, in any order", "Match outputs to calls by call_id"),
    ("agent.tool-result-parts", check_result_parts, _AGENT, "major", "OpenAI reference, Responses, Create: The output of a call is a text or a list of parts", "Join the parts"),
    ("agent.tool-choice-none", check_no_tool, _AGENT, "major", "OpenAI guide, Function calling: with tool_choice none no function is called", "Offer the model no tool"),
    ("agent.tool-choice-required", check_required, _AGENT, "major", "OpenAI guide, Function calling: with tool_choice required a function is called", "Constrain the answer to calls"),
    ("agent.tool-usage", check_tool_usage, _AGENT, "major", "OpenAI reference, Streaming events: The last event of a streamed call has usage", "Send usage there"),
    ("agent.reasoning-apart", check_reasoning, _AGENT, "major", "OpenAI guide, Reasoning models: reasoning is an item of its own, with id and summary", "Take reasoning out of the text"),
    ("agent.long-conversation", check_long, _AGENT, "major", "OpenAI guide, Conversation state: earlier turns are sent as input", "Accept lists of many items"),
    ("agent.later-developer", check_later_developer, _AGENT, "major", f"{_CODEX}: developer messages stand between turns", "Render them where the template takes them"),
    ("agent.known-members", check_known, _AGENT, "major", f"{_CODEX}: client_metadata, include, prompt_cache_key and an empty list of tools do no harm", "Ignore what has no meaning here"),
    ("agent.unknown-member", check_unknown, _AGENT, "minor", "OpenAI reference, Error codes: an unknown member is ignored, or refused with 400 by its name", "Name the member in error.param"),
)  # fmt: skip
