"""Checks of the events that Anthropic's Messages API streams."""

from __future__ import annotations

import json
from typing import Final

from dynamo.cli.referee.apis.messages import TOOL, demand_usage, input_tokens, post, text_of, whole
from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, checks_of_named_events, demand, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member

PAGE: Final = "Anthropic guide, Streaming messages"
STREAMED: Final = {  # which deltas a block takes, and the member with their text
    "text": {"text_delta": "text", "citations_delta": "citation"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


async def stream(probe: Probe, **more: Json) -> ServerAnswer:
    """Request a stream."""
    return served(await post(probe, stream=True, **more))


check_headers, check_cache, check_names = checks_of_named_events(stream)


def events_in(answer: ServerAnswer) -> list[Json]:
    """Return the parsed events of a stream without its pings."""
    found = [event for _, event in answer.named_events() if event is not None and member(event, "type") != "ping"]
    if not found:
        raise CannotJudge("the stream has no event that can be read", Cause.SERVER)
    return found


async def events_of(probe: Probe, **more: Json) -> list[Json]:
    """Request a stream, and return its parsed events without pings."""
    return events_in(await stream(probe, **more))


def of_kind(events: list[Json], kind: str) -> list[Json]:
    """Return the events of a type."""
    return [event for event in events if member(event, "type") == kind]


def joined(events: list[Json], kind: str, name: str) -> str:
    """Return the text of all deltas of a kind."""
    found = [member(event, "delta") for event in of_kind(events, "content_block_delta")]
    return "".join(member(delta, name) or "" for delta in found if member(delta, "type") == kind)


async def check_order(probe: Probe) -> None:
    kinds = [member(event, "type") for event in await events_of(probe)]
    demand("error" not in kinds, "the stream has an error")
    demand(kinds[0] == "message_start", f"the first event is {kinds[0]!r}, not message_start")
    demand(kinds.count("message_start") == 1, "message_start comes more than once")
    demand(kinds[-1] == "message_stop", f"the last event is {kinds[-1]!r}, not message_stop")
    demand(kinds.count("message_stop") == 1, "message_stop comes more than once")
    demand(kinds[-2:-1] == ["message_delta"], f"{kinds[-2:-1]} comes before message_stop, not message_delta")


async def check_start(probe: Probe) -> None:
    found = of_kind(await events_of(probe), "message_start")
    if not found:
        raise CannotJudge("there is no message_start", Cause.SERVER)
    message = member(found[0], "message")
    demand(isinstance(member(message, "id"), str) and message["id"], "the message has no id")
    demand(member(message, "type") == "message", f"the type of the message is {member(message, 'type')!r}")
    demand(member(message, "role") == "assistant", f"the role of the message is {member(message, 'role')!r}")
    demand(isinstance(member(message, "model"), str), "the message has no model")
    demand(member(message, "content") == [], "the message has content already")
    demand(member(message, "stop_reason") is None, "the message has a stop_reason already")
    demand_usage(member(message, "usage"))


async def check_blocks(probe: Probe) -> None:
    number, is_open = 0, False
    for event in await events_of(probe):
        kind, index = member(event, "type"), member(event, "index")
        if kind == "content_block_start":
            demand(not is_open, "a block starts while another one is open")
            demand(index == number, f"the index of a block is {index!r}, not {number}")
            is_open = True
        elif kind in ("content_block_delta", "content_block_stop"):
            demand(is_open and index == number, f"{kind} names the block {index!r}, which is not open")
            if kind == "content_block_stop":
                number, is_open = number + 1, False
        elif kind in ("message_delta", "message_stop"):
            demand(not is_open, f"{kind} comes while a block is open")
    demand(number, "the stream has no block")


async def check_deltas(probe: Probe) -> None:
    kinds: dict[Json, Json] = {}
    for event in await events_of(probe):
        if member(event, "type") == "content_block_start":
            block = member(event, "content_block")
            kinds[member(event, "index")] = kind = member(block, "type")
            demand(kind in STREAMED, f"a block has the type {kind!r}")
            empty = member(block, {"text": "text", "thinking": "thinking", "tool_use": "input"}[kind])
            demand(empty in ("", {}), f"a block of type {kind} begins with {str(empty)[:80]!r}")
        if member(event, "type") == "content_block_delta":
            delta, kind = member(event, "delta"), kinds.get(member(event, "index"))
            taken = STREAMED.get(kind or "", {})
            demand(member(delta, "type") in taken, f"a block of type {kind} has a {member(delta, 'type')!r}")
            name = taken[delta["type"]]
            demand(name in delta, f"a {delta['type']} has no {name}")


async def check_end(probe: Probe) -> None:
    events = await events_of(probe)
    found = of_kind(events, "message_delta")
    if not found:
        raise CannotJudge("there is no message_delta", Cause.SERVER)
    reason = member(found[-1], "delta", "stop_reason")
    wanted = member(await whole(probe), "stop_reason")
    demand(isinstance(reason, str) and reason, f"stop_reason of message_delta is {reason!r}")
    demand("stop_sequence" in found[-1]["delta"], "message_delta has no stop_sequence, which may be null")
    made = member(found[-1], "usage", "output_tokens")
    demand(isinstance(made, int), f"usage.output_tokens of message_delta is {made!r}")
    if joined(events, "text_delta", "text") == text_of(await whole(probe)):
        demand(reason == wanted, f"stop_reason is {reason!r} streamed and {wanted!r} not streamed")


async def check_unicode(probe: Probe) -> None:
    answer = await stream(probe)
    try:
        answer.body.decode()
    except UnicodeDecodeError as error:
        demand(False, f"the stream is not UTF-8: {error}")
    text = json.dumps([event for _, event in answer.named_events()], ensure_ascii=False)
    demand(not any("\ud800" <= c <= "\udfff" for c in text), "half a character is in an event")
    replaced, alone = text.count("\ufffd"), json.dumps(await whole(probe), ensure_ascii=False).count("\ufffd")
    demand(replaced <= alone, f"{replaced} characters are U+FFFD in the stream, and {alone} in the whole answer")


async def check_usage_equal(probe: Probe) -> None:
    events, alone = await events_of(probe), await whole(probe)
    begun = member(of_kind(events, "message_start"), 0, "message", "usage")
    ended = member(of_kind(events, "message_delta")[-1:], 0, "usage")
    # The counts of message_delta are cumulative; it need not repeat those of the input.
    last = {**(begun or {}), **{name: count for name, count in (ended or {}).items() if count is not None}}
    found = [input_tokens(last), input_tokens(member(alone, "usage"))]
    demand(found[0] == found[1], f"the input has {found[0]} tokens streamed and {found[1]} not streamed")
    if joined(events, "text_delta", "text") != text_of(alone):
        raise CannotJudge("the two answers differ, so their output_tokens may")
    found = [last.get("output_tokens", 0), member(alone, "usage", "output_tokens")]
    demand(found[0] == found[1], f"output_tokens is {found[0]} streamed and {found[1]} not streamed")


async def check_tool_deltas(probe: Probe) -> None:
    events = events_in(served(await post(probe, stream=True, **TOOL), is_optional=True))
    reason = member(of_kind(events, "message_delta"), 0, "delta", "stop_reason")
    started = [event for event in of_kind(events, "content_block_start") if member(event, "content_block", "type") == "tool_use"]  # fmt: skip
    if not started and reason == "max_tokens":
        raise CannotJudge("the answer was cut before the call")
    demand(started, "tool_choice names a tool, and no block of a call starts")
    block = started[0]["content_block"]
    demand(isinstance(member(block, "id"), str) and block["id"], "the block of the call has no id")
    demand(member(block, "name") == "report", f"the name of the block is {member(block, 'name')!r}")
    demand(member(block, "input") == {}, f"the block of the call starts with the input {member(block, 'input')!r}")
    mine = [event for event in events if member(event, "index") == started[0]["index"]]
    text = joined(mine, "input_json_delta", "partial_json")
    try:
        parsed = json.loads(text or "{}")
    except ValueError:
        if reason == "max_tokens":
            raise CannotJudge("the call was cut at max_tokens") from None
        parsed = None
    demand(isinstance(parsed, dict), f"the deltas of the input are no JSON object: {text[:200]!r}")


async def check_tool_end(probe: Probe) -> None:
    events = events_in(served(await post(probe, stream=True, **TOOL), is_optional=True))
    last = member(of_kind(events, "message_delta")[-1:], 0)
    reason, made = member(last, "delta", "stop_reason"), member(last, "usage", "output_tokens")
    if reason == "max_tokens":
        raise CannotJudge("the answer was cut at max_tokens")
    demand(reason == "tool_use", f"stop_reason of a streamed call is {reason!r}, not 'tool_use'")
    demand(isinstance(made, int) and made > 0, f"usage.output_tokens of a streamed call is {made!r}")


_CORE, _AGENT = Level.CORE, Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("stream.content-type", check_headers, _CORE, "major", "HTML standard, Server-sent events: a stream is text/event-stream", "Send Content-Type: text/event-stream"),
    ("stream.cache-control", check_cache, _AGENT, "minor", "RFC 9111 section 5.2: a stream is not kept by caches", "Send Cache-Control: no-cache"),
    ("stream.names", check_names, _CORE, "major", f"{PAGE}: The data of an event is JSON whose type is the name of the event", "Write event: and type alike"),
    ("stream.order", check_order, _CORE, "major", f"{PAGE}: message_start is first, message_delta and message_stop are last; ping comes anywhere", "Send each of them once"),
    ("stream.start", check_start, _CORE, "major", f"{PAGE}: message_start has the message without content and stop_reason", "Send the whole object there"),
    ("stream.blocks", check_blocks, _CORE, "major", f"{PAGE}: A block starts, has deltas and stops, with its index; then the next one starts", "Keep one block open"),
    ("stream.deltas", check_deltas, _CORE, "major", f"{PAGE}: The deltas of a block are of its type, and it begins empty", "Start a new block for another type"),
    ("stream.end", check_end, _CORE, "major", f"{PAGE}: message_delta has stop_reason, stop_sequence and usage", "Send them there"),
    ("stream.unicode", check_unicode, _CORE, "major", "RFC 8259 section 8.1: JSON between systems is UTF-8, and characters are whole", "Hold bytes back until a character is whole"),
    ("usage.streamed-equal", check_usage_equal, _CORE, "major", f"{PAGE}: The counts of message_delta are those of the whole answer", "Count at one place for both forms"),
    ("stream.tool-deltas", check_tool_deltas, _AGENT, "major", f"{PAGE}: A call starts with id, name and an empty input, whose deltas join to a JSON object", "Send the input as input_json_delta"),
    ("stream.tool-end", check_tool_end, _AGENT, "major", "Anthropic guide, Tool use: A streamed call ends with stop_reason tool_use and its usage", "Send both in message_delta"),
)  # fmt: skip
