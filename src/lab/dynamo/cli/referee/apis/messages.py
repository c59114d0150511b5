"""Checks of Anthropic's Messages API: whole answers, tools, the system text, and counts of tokens."""

from __future__ import annotations

from typing import Final

from dynamo.cli.referee.apis.refusals import Refusals
from dynamo.cli.referee.chat_checks import SCHEMA
from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, demand, demand_route, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member
from dynamo.cli.referee.text_checks import PROMPT, TOKENS

PATH: Final = "/v1/messages"
PAGE: Final = "Anthropic reference, Messages"
ERRORS_PAGE: Final = "Anthropic reference, Errors"
TOOLS_PAGE: Final = "Anthropic guide, Tool use"
STOPS: Final = (
    *("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"),
    "model_context_window_exceeded",
)
TOOL: Final[dict[str, Json]] = {
    "tools": [{"name": "report", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "report"},
    "max_tokens": 128,
}
SYSTEM: Final = "Use short words, and write about the sea alone."
_COUNTED: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def body(model: str, prompt: Json = PROMPT, **more: Json) -> dict[str, Json]:
    """Build a request. `prompt` is the text of a user, or a list of messages."""
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return {"model": model, "messages": turns, "max_tokens": TOKENS, "temperature": 0, **more}


def headers(probe: Probe) -> dict[str, str]:
    """Return the headers that Anthropic's clients send, beside the bearer token that every request has."""
    key = probe.shared.secret
    return {"anthropic-version": "2023-06-01", **({"x-api-key": key} if key else {})}


def check_error(answer: Json) -> None:
    demand(member(answer, "type") == "error", "the body of the refusal is not JSON with the type 'error'")
    kind, message = member(answer, "error", "type"), member(answer, "error", "message")
    demand(isinstance(kind, str) and kind, f"error.type is {kind!r}")
    demand(isinstance(message, str) and message, f"error.message is {message!r}")


REFUSALS: Final = Refusals(PATH, body, "max_tokens", "messages", PAGE, ERRORS_PAGE, check_error, headers=headers)


async def post(probe: Probe, prompt: Json = PROMPT, *, path: str = PATH, **more: Json) -> ServerAnswer:
    """Send a request."""
    return await probe.post(path, body(probe.model, prompt, **more), more=headers(probe))


async def whole(probe: Probe, prompt: Json = PROMPT, **more: Json) -> Json:
    """Request a whole answer, and return it parsed."""
    return served(await post(probe, prompt, **more)).json()


async def optional(probe: Probe, prompt: Json = PROMPT, **more: Json) -> ServerAnswer:
    """Request with a feature that a server may refuse."""
    return served(await post(probe, prompt, **more), is_optional=True)


async def is_there(probe: Probe) -> None:
    demand_route(probe, await post(probe))


def blocks(answer: Json, kind: str) -> list[Json]:
    """Return the blocks of a kind in an answer's content."""
    return [block for block in member(answer, "content") or [] if member(block, "type") == kind]


def text_of(answer: Json) -> str:
    """Return the text of an answer."""
    return "".join(member(block, "text") or "" for block in blocks(answer, "text"))


def input_tokens(usage: Json) -> int:
    """Return the tokens of the input, cached ones included. Raises CannotJudge without them."""
    found = [member(usage, name) or 0 for name in _COUNTED]
    if not isinstance(member(usage, "input_tokens"), int) or not all(isinstance(n, int) for n in found):
        raise CannotJudge("an answer has no usage.input_tokens", Cause.SERVER)
    return sum(found)


async def check_shape(probe: Probe) -> None:
    answer = await whole(probe)
    demand(isinstance(answer, dict), "the answer is not a JSON object")
    demand(isinstance(answer.get("id"), str) and answer["id"], "id is not a text")
    demand(answer.get("type") == "message", f"type is {answer.get('type')!r}, not 'message'")
    demand(answer.get("role") == "assistant", f"role is {answer.get('role')!r}, not 'assistant'")
    demand(isinstance(answer.get("model"), str), "model is not a text")
    demand(isinstance(answer.get("content"), list), "content is not a list")
    demand("stop_sequence" in answer, "there is no stop_sequence, which is null where none was met")


async def check_blocks(probe: Probe) -> None:
    found = member(await whole(probe), "content")
    demand(found, "content has no block")
    texts = {"text": ("text",), "thinking": ("thinking", "signature"), "redacted_thinking": ("data",)}
    for block in found:
        kind = member(block, "type")
        demand(kind in texts or kind == "tool_use", f"a block has the type {kind!r}")
        for name in texts.get(kind, ()):
            demand(isinstance(member(block, name), str), f"a block of type {kind} has no text {name!r}")


async def check_stop_reason(probe: Probe) -> None:
    reason = member(await whole(probe), "stop_reason")
    demand(reason in STOPS, f"stop_reason is {reason!r}")


async def check_json_type(probe: Probe) -> None:
    kind = served(await post(probe)).headers.get("content-type", "")
    demand(kind.startswith("application/json"), f"Content-Type is {kind!r}")


def demand_usage(usage: Json) -> None:
    """Demand counts of tokens."""
    for name in ("input_tokens", "output_tokens"):
        found = member(usage, name)
        demand(isinstance(found, int) and found >= 0, f"usage.{name} is {found!r}")
    for name in _COUNTED[1:]:
        found = member(usage, name)
        demand(found is None or (isinstance(found, int) and found >= 0), f"usage.{name} is {found!r}")


async def check_usage(probe: Probe) -> None:
    demand_usage(member(await whole(probe), "usage"))


async def check_limit(probe: Probe) -> None:
    answer = await whole(probe, max_tokens=2)
    made, reason = member(answer, "usage", "output_tokens"), member(answer, "stop_reason")
    demand(not isinstance(made, int) or made <= 2, f"{made} tokens were made, max_tokens is 2")
    if reason == "end_turn" and (made is None or made < 2):
        raise CannotJudge("the model ended its answer before the limit")
    demand(reason == "max_tokens", f"stop_reason is {reason!r}, not 'max_tokens'")


async def check_stop(probe: Probe) -> None:
    text = text_of(await whole(probe))
    if len(text.strip()) < 8:
        raise CannotJudge("the model's answer is too short to stop it in the middle")
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = await whole(probe, stop_sequences=[stop])
    shown = text_of(cut)
    demand(stop not in shown, f"the stop sequence {stop!r} is in the answer")
    if not text.startswith(shown):
        raise CannotJudge("two answers to the same request differ")
    reason, named = member(cut, "stop_reason"), member(cut, "stop_sequence")
    demand(reason == "stop_sequence", f"stop_reason is {reason!r}, not 'stop_sequence'")
    demand(named == stop, f"stop_sequence is {named!r}, not {stop!r}")


async def check_system(probe: Probe) -> None:
    short = input_tokens(member(await whole(probe), "usage"))
    long = input_tokens(member(await whole(probe, system=SYSTEM), "usage"))
    demand(long > short, f"the input has {short} tokens without a system text and {long} with it")


async def check_system_blocks(probe: Probe) -> None:
    text = input_tokens(member(await whole(probe, system=SYSTEM), "usage"))
    block = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
    found = input_tokens(member(await whole(probe, system=[block]), "usage"))
    demand(found == text, f"the system text has {text} input tokens in all as a text, and {found} as a block")


async def check_content_blocks(probe: Probe) -> None:
    text = input_tokens(member(await whole(probe), "usage"))
    turn = {"role": "user", "content": [{"type": "text", "text": PROMPT}]}
    found = input_tokens(member(await whole(probe, [turn]), "usage"))
    demand(found == text, f"the message has {text} input tokens as a text, and {found} as a block")


async def check_request_id(probe: Probe) -> None:
    demand(served(await post(probe)).headers.get("request-id"), "there is no header request-id")


async def check_missing_limit(probe: Probe) -> None:
    asked = {name: value for name, value in body(probe.model).items() if name != "max_tokens"}
    answer = await probe.post(PATH, asked, more=headers(probe))
    demand(answer.status == 400, f"expected status 400, got {answer.message}")


async def check_error_types(probe: Probe) -> None:
    """Compare the type of an error with its status, whatever status the server chose."""
    named = {400: "invalid_request_error", 404: "not_found_error"}
    for asked in (body("no-such-model-of-the-referee"), {**body(probe.model), "max_tokens": "many"}):
        answer = await probe.post(PATH, asked, more=headers(probe))
        kind = member(answer.json(), "error", "type")
        wanted = named.get(answer.status, kind)
        demand(kind == wanted, f"error.type of status {answer.status} is {kind!r}, not {wanted!r}")


async def check_tool_use(probe: Probe) -> None:
    answer = (await optional(probe, **TOOL)).json()
    calls, reason = blocks(answer, "tool_use"), member(answer, "stop_reason")
    if not calls and reason == "max_tokens":
        raise CannotJudge("the answer was cut before the call")
    demand(calls, "tool_choice names a tool, and content has no tool_use")
    demand(isinstance(member(calls, 0, "id"), str) and calls[0]["id"], "the call has no id")
    demand(member(calls, 0, "name") == "report", f"the name is {member(calls, 0, 'name')!r}")
    demand(isinstance(member(calls, 0, "input"), dict), f"input is {member(calls, 0, 'input')!r}, not an object")
    demand(reason in ("tool_use", "max_tokens"), f"stop_reason is {reason!r}, not 'tool_use'")


async def _counted(probe: Probe) -> ServerAnswer:
    asked = {name: value for name, value in body(probe.model).items() if name in ("model", "messages")}
    answer = await probe.post(f"{PATH}/count_tokens", asked, more=headers(probe))
    return served(answer, is_optional=True)


async def check_count(probe: Probe) -> None:
    found = member((await _counted(probe)).json(), "input_tokens")
    demand(isinstance(found, int) and found > 0, f"input_tokens is {found!r}")


async def check_count_equal(probe: Probe) -> None:
    found = member((await _counted(probe)).json(), "input_tokens")
    used = input_tokens(member(await whole(probe), "usage"))
    if not isinstance(found, int):
        raise CannotJudge("the count is not a number", Cause.SERVER)
    # The reference calls a count an estimate; a tenth is room for what a server adds itself.
    demand(abs(found - used) <= max(2, used // 10), f"input_tokens is {found} in the count and {used} in usage")


async def check_models(probe: Probe) -> None:
    answer = served(await probe.get("/v1/models", more=headers(probe))).json()
    if member(answer, "object") == "list":
        raise CannotJudge("the list of models has OpenAI's form for these clients, too", Cause.NOT_OFFERED)
    demand(isinstance(member(answer, "has_more"), bool), "has_more is not a truth value")
    demand(member(answer, "data"), "data has no model")
    for model in answer["data"]:
        demand(member(model, "type") == "model", f"the type of a model is {member(model, 'type')!r}")
        for name in ("id", "display_name", "created_at"):
            demand(isinstance(member(model, name), str), f"a model has no {name}")


_CORE, _AGENT = Level.CORE, Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("answer.shape", check_shape, _CORE, "major", f"{PAGE}: A message has id, type, role, model, content and stop_sequence", "Write every member with its type"),
    ("answer.blocks", check_blocks, _CORE, "major", f"{PAGE}: A block of content has one of the named types, and its members", "Write every member of a block"),
    ("answer.stop-reason", check_stop_reason, _CORE, "major", f"{PAGE}: stop_reason is one of the named ones", "Map the engine's reason onto a named one"),
    ("answer.content-type", check_json_type, _CORE, "minor", "RFC 8259 section 11: JSON is application/json", "Send Content-Type: application/json"),
    ("usage", check_usage, _CORE, "major", f"{PAGE}: usage has input_tokens and output_tokens; counts of the cache are numbers or null", "Count the prompt and the answer"),
    ("max-tokens", check_limit, _CORE, "major", f"{PAGE}: No more tokens than max_tokens are made, and stop_reason is max_tokens", "End at the limit with that reason"),
    ("stop-sequences", check_stop, _CORE, "major", f"{PAGE}: The text ends before a stop sequence, which stop_sequence names", "Hold back text that may begin one, and name it"),
    ("system", check_system, _CORE, "major", f"{PAGE}: system is put into the model's context", "Render it as a system message"),
    ("system.blocks", check_system_blocks, _CORE, "major", f"{PAGE}: system is a text or a list of text blocks", "Take the text of the blocks"),
    ("content.blocks", check_content_blocks, _CORE, "major", f"{PAGE}: A text as content is one text block", "Render both forms alike"),
    ("request-id", check_request_id, _AGENT, "minor", f"{ERRORS_PAGE}: An answer names its request in request-id", "Send request-id"),
    ("error.missing-max-tokens", check_missing_limit, _CORE, "major", f"{PAGE}: max_tokens is required; without it the status is 400", "Refuse it with 400"),
    ("error.types", check_error_types, _AGENT, "major", f"{ERRORS_PAGE}: error.type fits the status", "Write invalid_request_error with 400, not_found_error with 404"),
    ("tool-use", check_tool_use, _AGENT, "major", f"{TOOLS_PAGE}: a forced tool is called, with id, name and an object as input", "Constrain the answer to the named tool"),
    ("count-tokens", check_count, _AGENT, "minor", "Anthropic reference, Count tokens: input_tokens of a prompt", "Serve /v1/messages/count_tokens"),
    ("count-tokens.equal", check_count_equal, _AGENT, "minor", "Anthropic reference, Count tokens: The count is close to usage.input_tokens", "Render and tokenise the prompt"),
    ("models", check_models, _AGENT, "minor", "Anthropic reference, Models: a list with type, display_name and has_more, for requests with anthropic-version", "Write that form for them"),
)  # fmt: skip
