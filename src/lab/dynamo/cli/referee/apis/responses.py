"""Checks of OpenAI's Responses API: whole answers, tools, schemas, and what the server stores."""

from __future__ import annotations

import json
from typing import Final
from urllib.parse import quote

from dynamo.cli.referee.apis.refusals import Refusals, openai_error
from dynamo.cli.referee.chat_checks import SCHEMA
from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, demand, demand_route, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member
from dynamo.cli.referee.text_checks import PROMPT, TOKENS

PATH: Final = "/v1/responses"
PAGE: Final = "OpenAI reference, Responses"
LEAST: Final = 16  # of max_output_tokens, in OpenAI's reference
LONG_PROMPT: Final = "Count from 1 to 60."
STATUSES: Final = ("completed", "failed", "in_progress", "cancelled", "queued", "incomplete")
ITEM_STATUSES: Final = ("in_progress", "completed", "incomplete")
REQUIRED: Final = ("parallel_tool_calls", "tool_choice", "tools")
TOOL: Final[dict[str, Json]] = {
    "tools": [{"type": "function", "name": "report", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "function", "name": "report"},
    "max_output_tokens": 128,
}


def body(model: str, prompt: Json = PROMPT, **more: Json) -> dict[str, Json]:
    """Build a request."""
    return {"model": model, "input": prompt, "max_output_tokens": TOKENS, "temperature": 0, "store": False, **more}


REFUSALS: Final = Refusals(
    PATH, body, "max_output_tokens", "input", PAGE, "OpenAI reference, Error codes", openai_error, (404, 400)
)


async def whole(probe: Probe, prompt: Json = PROMPT, **more: Json) -> Json:
    """Request a whole answer, and return it parsed."""
    return served(await probe.post(PATH, body(probe.model, prompt, **more))).json()


async def optional(probe: Probe, prompt: Json = PROMPT, **more: Json) -> ServerAnswer:
    """Request with a feature that a server may refuse."""
    return served(await probe.post(PATH, body(probe.model, prompt, **more)), is_optional=True)


async def is_there(probe: Probe) -> None:
    demand_route(probe, await probe.post(PATH, body(probe.model)))


def items(answer: Json, kind: str) -> list[Json]:
    """Return the items of a kind in an answer's output."""
    return [item for item in member(answer, "output") or [] if member(item, "type") == kind]


def text_of(answer: Json) -> str:
    """Return the text of an answer's messages."""
    parts = [part for item in items(answer, "message") for part in member(item, "content") or []]
    return "".join(member(part, "text") or "" for part in parts)


async def check_shape(probe: Probe) -> None:
    answer = await whole(probe)
    demand(isinstance(answer, dict), "the answer is not a JSON object")
    demand(answer.get("object") == "response", f"object is {answer.get('object')!r}, not 'response'")
    demand(isinstance(answer.get("id"), str) and answer["id"], "id is not a text")
    demand(isinstance(answer.get("created_at"), int | float), "created_at is not a number")
    demand(isinstance(answer.get("model"), str), "model is not a text")
    demand(isinstance(answer.get("output"), list), "output is not a list")
    missing = [name for name in REQUIRED if name not in answer]
    demand(not missing, f"there is no {', '.join(missing)}")


async def check_items(probe: Probe) -> None:
    found = member(await whole(probe), "output")
    demand(found, "output has no item")
    for item in found:
        kind = member(item, "type")
        demand(isinstance(kind, str), "an item has no type")
        demand(isinstance(member(item, "id"), str) and item["id"], f"an item of type {kind!r} has no id")
        if kind != "message":
            continue
        demand(member(item, "role") == "assistant", f"the role of a message is {member(item, 'role')!r}")
        demand(member(item, "status") in ITEM_STATUSES, f"the status of a message is {member(item, 'status')!r}")
        for part in item["content"]:
            demand(member(part, "type") in ("output_text", "refusal"), f"a part has type {member(part, 'type')!r}")
            if part["type"] == "output_text":
                demand(isinstance(member(part, "text"), str), "a part has no text")
                demand(isinstance(member(part, "annotations"), list), "a part has no list of annotations")


async def check_status(probe: Probe) -> None:
    answer = await whole(probe)
    status, error, details = (member(answer, name) for name in ("status", "error", "incomplete_details"))
    demand(status in STATUSES, f"status is {status!r}")
    demand(status in ("completed", "incomplete"), f"status is {status!r} in a whole answer")
    demand(error is None, f"error is {error!r} beside status {status!r}")
    demand(status == "incomplete" or details is None, f"incomplete_details is {details!r} beside 'completed'")


async def check_json_type(probe: Probe) -> None:
    kind = served(await probe.post(PATH, body(probe.model))).headers.get("content-type", "")
    demand(kind.startswith("application/json"), f"Content-Type is {kind!r}")


def demand_usage(usage: Json) -> tuple[int, int]:
    """Return the tokens of the input and of the output. Raises Broken where they do not add up."""
    numbers = [member(usage, f"{name}_tokens") for name in ("input", "output", "total")]
    demand(all(isinstance(n, int) and n >= 0 for n in numbers), f"usage is {usage!r}")
    demand(numbers[0] + numbers[1] == numbers[2], f"{numbers[0]} + {numbers[1]} is not {numbers[2]}")
    return numbers[0], numbers[1]


async def check_usage(probe: Probe) -> None:
    demand_usage(member(await whole(probe), "usage"))


async def check_usage_details(probe: Probe) -> None:
    usage = member(await whole(probe), "usage")
    for whole_name, details, name in (("input", "input_tokens_details", "cached"), ("output", "output_tokens_details", "reasoning")):  # fmt: skip
        found = member(usage, details, f"{name}_tokens")
        demand(isinstance(found, int), f"usage.{details}.{name}_tokens is {found!r}")
        limit = member(usage, f"{whole_name}_tokens")
        demand(not isinstance(limit, int) or 0 <= found <= limit, f"{name}_tokens is {found} of {limit}")


async def check_limit(probe: Probe) -> None:
    answer = await whole(probe, LONG_PROMPT, max_output_tokens=LEAST)
    made, status = member(answer, "usage", "output_tokens"), member(answer, "status")
    demand(not isinstance(made, int) or made <= LEAST, f"{made} tokens were made, max_output_tokens is {LEAST}")
    if status == "completed" and (made is None or made < LEAST):
        raise CannotJudge("the model ended its answer before the limit")
    demand(status == "incomplete", f"status is {status!r}, not 'incomplete'")
    reason = member(answer, "incomplete_details", "reason")
    demand(reason == "max_output_tokens", f"incomplete_details.reason is {reason!r}, not 'max_output_tokens'")


def input_tokens(answer: Json) -> int:
    """Return the tokens of the input. Raises CannotJudge without them."""
    found = member(answer, "usage", "input_tokens")
    if not isinstance(found, int):
        raise CannotJudge("an answer has no usage.input_tokens", Cause.SERVER)
    return found


async def check_instructions(probe: Probe) -> None:
    short = input_tokens(await whole(probe))
    long = input_tokens(await whole(probe, instructions="Use short words, and write about the sea alone."))
    demand(long > short, f"the input has {short} tokens without instructions and {long} with them")


async def check_messages(probe: Probe) -> None:
    """Give the same input as items: the text is no other, so its tokens are as many."""
    part = {"type": "input_text", "text": PROMPT}
    plain = input_tokens(await whole(probe))
    for content in (PROMPT, [part]):
        found = input_tokens(await whole(probe, [{"role": "user", "content": content}]))
        demand(found == plain, f"the text alone has {plain} input tokens, and {found} as a message")


async def check_tool_call(probe: Probe) -> None:
    answer = (await optional(probe, **TOOL)).json()
    calls = items(answer, "function_call")
    if not calls and member(answer, "status") == "incomplete":
        raise CannotJudge("the answer was cut before the call")
    demand(calls, "tool_choice names a function, and output has no function_call")
    call = calls[0]
    demand(isinstance(member(call, "call_id"), str) and call["call_id"], "the call has no call_id")
    demand(member(call, "name") == "report", f"the name is {member(call, 'name')!r}")
    demand_arguments(member(call, "arguments"), member(answer, "status"))


def demand_arguments(text: Json, status: Json) -> None:
    """Raise Broken unless arguments are a JSON object, CannotJudge where the answer was cut."""
    try:
        parsed = json.loads(text or "")
    except (TypeError, ValueError):
        if status == "incomplete":
            raise CannotJudge("the call was cut at max_output_tokens") from None
        demand(False, f"the arguments are not JSON: {str(text)[:200]!r}")
        return
    demand(isinstance(parsed, dict), f"the arguments are not an object: {str(text)[:200]!r}")


async def check_schema(probe: Probe) -> None:
    wanted = {"format": {"type": "json_schema", "name": "report", "strict": True, "schema": SCHEMA}}
    answer = (await optional(probe, text=wanted, max_output_tokens=128)).json()
    if member(answer, "status") == "incomplete":
        raise CannotJudge("the answer was cut at max_output_tokens")
    text = text_of(answer)
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    is_valid = isinstance(parsed, dict) and parsed.keys() == {"ok"} and isinstance(parsed["ok"], bool)
    demand(is_valid, f"the text does not follow the schema: {text[:200]!r}")


async def _stored(probe: Probe) -> Json:
    async def make() -> Json:
        return (await optional(probe, store=True)).json()

    answer = await probe.step("responses-stored", make)
    if member(answer, "store") is not True:
        raise CannotJudge("the server does not store responses: store is not true in its answer", Cause.NOT_OFFERED)
    return answer


async def check_previous(probe: Probe) -> None:
    first = await _stored(probe)
    second = (await optional(probe, "Go on.", previous_response_id=first["id"])).json()
    named = member(second, "previous_response_id")
    demand(named == first["id"], f"previous_response_id is {named!r}, not the id of the first response")
    alone = input_tokens(await whole(probe, "Go on."))
    found = input_tokens(second)
    demand(found > alone, f"the input has {found} tokens, and {alone} without the earlier response")


async def check_previous_unknown(probe: Probe) -> None:
    await _stored(probe)
    answer = await probe.post(PATH, body(probe.model, previous_response_id="resp_00000000000000000000000000000000"))
    demand(answer.status in (400, 404), f"expected status 400 or 404, got {answer.message}")


async def check_retrieve(probe: Probe) -> None:
    first = await _stored(probe)
    found = served(await probe.get(f"{PATH}/{quote(first['id'])}"), is_optional=True).json()
    for name in ("id", "object", "model", "status", "output"):
        demand(member(found, name) == member(first, name), f"{name} is not that of the response that was made")


async def check_delete(probe: Probe) -> None:
    await _stored(probe)
    mine = (await optional(probe, LONG_PROMPT, store=True)).json()
    where = f"{PATH}/{quote(str(member(mine, 'id')))}"
    gone = served(await probe.get(where, "DELETE"), is_optional=True).json()
    demand(member(gone, "deleted") is True, f"deleted is {member(gone, 'deleted')!r}, not true")
    after = await probe.get(where)
    demand(after.status == 404, f"a deleted response is found with status {after.status}")


_CORE, _AGENT = Level.CORE, Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("answer.shape", check_shape, _CORE, "major", f"{PAGE}, The response object: id, object, created_at, model, output, tools, tool_choice and parallel_tool_calls", "Write every required member with its type"),
    ("answer.items", check_items, _CORE, "major", f"{PAGE}, The response object: An item has type and id; a message has role, status and parts with text and annotations", "Write every required member of an item"),
    ("answer.status", check_status, _CORE, "major", f"{PAGE}, The response object: status is one of the named ones; error and incomplete_details are null where all went well", "Map the end of the answer onto a status"),
    ("answer.content-type", check_json_type, _CORE, "minor", "RFC 8259 section 11: JSON is application/json", "Send Content-Type: application/json"),
    ("usage.adds-up", check_usage, _CORE, "major", f"{PAGE}, The response object: total_tokens are those of the input and of the output", "Count each part once, and add them"),
    ("usage.details", check_usage_details, _AGENT, "minor", f"{PAGE}, The response object: usage has cached_tokens and reasoning_tokens in its details", "Write both details, 0 included"),
    ("max-output-tokens", check_limit, _CORE, "major", f"{PAGE}, Create: At max_output_tokens the status is incomplete, and the reason max_output_tokens", "End at the limit with that status"),
    ("instructions", check_instructions, _CORE, "major", f"{PAGE}, Create: instructions are put into the model's context", "Render them as a system message"),
    ("input.messages", check_messages, _CORE, "major", f"{PAGE}, Create: A text as input is a user's message with that text", "Render both forms alike"),
    ("tool-call", check_tool_call, _AGENT, "major", "OpenAI guide, Function calling: a forced function is called, with call_id, name and JSON arguments", "Constrain the answer to the named function"),
    ("json-schema", check_schema, _AGENT, "major", "OpenAI guide, Structured outputs: a strict answer follows text.format", "Constrain decoding by the schema, or refuse it with 400"),
    ("stored.previous", check_previous, _AGENT, "major", "OpenAI guide, Conversation state: previous_response_id brings the earlier turns", "Put the stored items before the input, or write store: false"),
    ("stored.unknown", check_previous_unknown, _AGENT, "minor", f"{PAGE}, Create: An unknown previous_response_id is refused", "Refuse it with 400"),
    ("stored.retrieve", check_retrieve, _AGENT, "minor", f"{PAGE}, Get a model response: the stored object", "Serve GET /v1/responses/ID"),
    ("stored.delete", check_delete, _AGENT, "minor", f"{PAGE}, Delete a model response: it is gone", "Serve DELETE /v1/responses/ID"),
)  # fmt: skip
