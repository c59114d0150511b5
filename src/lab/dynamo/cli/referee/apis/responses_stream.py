"""Checks of the events that OpenAI's Responses API streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from dynamo.cli.referee.apis.responses import PATH, TOOL, body, demand_arguments, demand_usage, text_of, whole
from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, checks_of_named_events, demand, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member

PAGE: Final = "OpenAI reference, Streaming events"
LAST: Final = ("response.completed", "response.incomplete", "response.failed")


async def stream(probe: Probe, **more: Json) -> ServerAnswer:
    """Request a stream."""
    return served(await probe.post(PATH, body(probe.model, stream=True, **more)))


check_headers, check_cache, check_names = checks_of_named_events(stream)


async def events_of(probe: Probe, **more: Json) -> list[Json]:
    """Request a stream, and return its parsed events."""
    found = [event for _, event in (await stream(probe, **more)).named_events() if event is not None]
    if not found:
        raise CannotJudge("the stream has no event that can be read", Cause.SERVER)
    return found


def of_kind(events: list[Json], kind: str) -> list[Json]:
    """Return the events of a type."""
    return [event for event in events if member(event, "type") == f"response.{kind}"]


def final(events: list[Json]) -> Json:
    """Return the response in the last event. Raises CannotJudge where there is none."""
    found = [event for event in events if member(event, "type") in LAST]
    if not found:
        raise CannotJudge("the stream has no last event with the response", Cause.SERVER)
    return member(found[-1], "response")


async def check_numbers(probe: Probe) -> None:
    found = [member(event, "sequence_number") for event in await events_of(probe)]
    demand(all(isinstance(n, int) for n in found), f"the sequence numbers are {found[:8]}")
    demand(found[0] in (0, 1), f"the first sequence_number is {found[0]}")
    gap = next((n for n, number in enumerate(found) if number != found[0] + n), None)
    demand(gap is None, f"{found[gap or 0]} follows {found[(gap or 1) - 1]} in the sequence numbers")


async def check_begin(probe: Probe) -> None:
    kinds = [k for event in await events_of(probe) if (k := member(event, "type")) != "response.queued"]
    demand(kinds[0] == "response.created", f"the first event is {kinds[0]!r}, not response.created")
    demand(kinds.count("response.created") == 1, "response.created comes more than once")
    demand(kinds[1:2] == ["response.in_progress"], f"{kinds[1:2]} follows response.created, not response.in_progress")


async def check_first_response(probe: Probe) -> None:
    for event in (await events_of(probe))[:2]:
        if member(event, "type") not in ("response.created", "response.in_progress"):
            continue
        response = member(event, "response")
        demand(isinstance(member(response, "id"), str), f"{event['type']} has no response with an id")
        demand(member(response, "status") in ("in_progress", "queued"), f"status is {member(response, 'status')!r}")
        demand(member(response, "output") == [], f"{event['type']} has an output already")


async def check_end(probe: Probe) -> None:
    kinds = [member(event, "type") for event in await events_of(probe)]
    ends = [kind for kind in kinds if kind in LAST]
    demand(len(ends) == 1, f"{len(ends)} events end the response")
    demand(kinds[-1] == ends[0], f"{kinds[-1]!r} follows {ends[0]!r}")
    demand(ends[0] != "response.failed", "the response failed")


async def check_last_response(probe: Probe) -> None:
    events = await events_of(probe)
    last = final(events)
    kind = next(event["type"] for event in events if member(event, "type") in LAST)
    status = member(last, "status")
    demand(f"response.{status}" == kind, f"the status in {kind} is {status!r}")
    demand_usage(member(last, "usage"))
    done = [member(event, "item") for event in of_kind(events, "output_item.done")]
    if done:
        demand(member(last, "output") == done, "the output of the last event is not the list of the finished items")


async def check_one_id(probe: Probe) -> None:
    found = {str(member(event, "response", "id")) for event in await events_of(probe) if member(event, "response")}
    demand(len(found) == 1, f"the events name {len(found)} responses")


async def check_items(probe: Probe) -> None:
    open_items: dict[Json, Json] = {}  # by output_index: the id
    number = 0
    for event in await events_of(probe):
        kind, index, name = member(event, "type"), member(event, "output_index"), member(event, "item", "id")
        if kind == "response.output_item.added":
            demand(index == number, f"output_index is {index!r}, not {number}")
            open_items[index], number = name, number + 1
        elif kind == "response.output_item.done":
            demand(index in open_items, f"an item is done at output_index {index!r}, where none is open")
            demand(open_items.pop(index) == name, "the id of an item changes")
        elif kind in LAST:
            demand(not open_items, "the response ends while an item is open")
    demand(number, "no item was added")


async def check_one_open(probe: Probe) -> None:
    open_items = 0
    for event in await events_of(probe):
        kind = member(event, "type")
        if kind == "response.output_item.added":
            demand(not open_items, "an item is added while another one is open")
        open_items += (kind == "response.output_item.added") - (kind == "response.output_item.done")


def text_parts(events: list[Json]) -> Iterator[tuple[str, list[Json]]]:
    """Yield the events of each part of text, with the id of its item."""
    keys = dict.fromkeys(_key(event) for event in events if member(event, "type") == "response.output_text.delta")
    keys |= dict.fromkeys(_key(event) for event in of_kind(events, "output_text.done"))
    for key in keys:
        yield str(key[0]), [event for event in events if _key(event) == key]


def _key(event: Json) -> tuple[Json, Json]:
    return member(event, "item_id"), member(event, "content_index")


async def check_parts(probe: Probe) -> None:
    events = await events_of(probe)
    added = {member(event, "item", "id") for event in of_kind(events, "output_item.added")}
    found = list(text_parts(events))
    if not found:
        raise CannotJudge("the answer has no text")
    for name, group in found:
        demand(name in added, f"events of a text name the item {name!r}, which was not added")
        kinds = [event["type"].removeprefix("response.") for event in group]
        order = [kind for kind in kinds if kind != "output_text.delta"]
        wanted = ["content_part.added", "output_text.done", "content_part.done"]
        demand(order == wanted, f"the events of a text are {order}")
        deltas = [n for n, kind in enumerate(kinds) if kind == "output_text.delta"]
        inside = not deltas or (deltas[0] > 0 and deltas[-1] < kinds.index("output_text.done"))
        demand(inside, "a delta comes before its part is added, or after its text is done")


async def check_text(probe: Probe) -> None:
    events = await events_of(probe)
    for name, group in text_parts(events):
        deltas = "".join(member(event, "delta") or "" for event in of_kind(group, "output_text.delta"))
        finished = [member(event, "text") for event in of_kind(group, "output_text.done")]
        finished += [member(event, "part", "text") for event in of_kind(group, "content_part.done")]
        for done in of_kind(events, "output_item.done"):
            if member(done, "item", "id") == name:
                finished.append(member(done, "item", "content", int(_key(group[0])[1] or 0), "text"))
        other = next((text for text in finished if text != deltas), None)
        demand(other is None, f"the deltas are {deltas[:80]!r}, and a finished text is {str(other)[:80]!r}")


async def check_unicode(probe: Probe) -> None:
    answer = await stream(probe)
    try:
        answer.body.decode()
    except UnicodeDecodeError as error:
        demand(False, f"the stream is not UTF-8: {error}")
    deltas = [member(event, "delta") for _, event in answer.named_events()]
    text = "".join(delta for delta in deltas if isinstance(delta, str))
    demand(not any("\ud800" <= c <= "\udfff" for c in text), "half a character is in a delta")
    replaced, alone = text.count("\ufffd"), json.dumps(await whole(probe), ensure_ascii=False).count("\ufffd")
    demand(replaced <= alone, f"{replaced} characters are U+FFFD in the stream, and {alone} in the whole answer")


async def check_usage_equal(probe: Probe) -> None:
    streamed, alone = final(await events_of(probe)), await whole(probe)
    usages = [member(answer, "usage") for answer in (streamed, alone)]
    if not all(isinstance(member(u, "input_tokens"), int) for u in usages):
        raise CannotJudge("one of the answers has no usage", Cause.SERVER)
    found = [u["input_tokens"] for u in usages]
    demand(found[0] == found[1], f"input_tokens is {found[0]} streamed and {found[1]} not streamed")
    if text_of(streamed) != text_of(alone):
        raise CannotJudge("the two answers differ, so their output_tokens may")
    found = [member(u, "output_tokens") for u in usages]
    demand(found[0] == found[1], f"output_tokens is {found[0]} streamed and {found[1]} not streamed")


async def check_tool_events(probe: Probe) -> None:
    answer = served(await probe.post(PATH, body(probe.model, stream=True, **TOOL)), is_optional=True)
    events = [event for _, event in answer.named_events() if event is not None]
    added = [e for e in of_kind(events, "output_item.added") if member(e, "item", "type") == "function_call"]
    if not added and of_kind(events, "incomplete"):
        raise CannotJudge("the answer was cut before the call")
    demand(added, "tool_choice names a function, and no item of a call was added")
    call = added[0]["item"]
    demand(member(call, "name") == "report", f"the name of the added call is {member(call, 'name')!r}")
    demand(isinstance(member(call, "call_id"), str) and call["call_id"], "the added call has no call_id")
    demand(not member(call, "arguments"), "the added call has arguments before their deltas")
    mine = [event for event in events if member(event, "item_id") == member(call, "id")]
    deltas = "".join(member(event, "delta") or "" for event in of_kind(mine, "function_call_arguments.delta"))
    done = of_kind(mine, "function_call_arguments.done")
    demand(len(done) == 1, f"function_call_arguments.done came {len(done)} times")
    demand(member(done, 0, "arguments") == deltas, f"the deltas are {deltas[:80]!r}, and the arguments others")
    finished = [e for e in of_kind(events, "output_item.done") if member(e, "item", "id") == member(call, "id")]
    last = member(finished, 0, "item")
    demand(member(last, "arguments") == deltas, "the arguments of the finished call are not those of the deltas")
    demand(member(last, "call_id") == call["call_id"], "the call_id of the finished call is not that of the added one")
    demand_arguments(deltas, "incomplete" if of_kind(events, "incomplete") else "completed")


_CORE, _AGENT = Level.CORE, Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("stream.content-type", check_headers, _CORE, "major", "HTML standard, Server-sent events: a stream is text/event-stream", "Send Content-Type: text/event-stream"),
    ("stream.cache-control", check_cache, _AGENT, "minor", "RFC 9111 section 5.2: a stream is not kept by caches", "Send Cache-Control: no-cache"),
    ("stream.names", check_names, _CORE, "major", f"{PAGE}: The data of an event is JSON whose type is the name of the event", "Write event: and type alike"),
    ("stream.numbers", check_numbers, _CORE, "major", f"{PAGE}: sequence_number orders the events, without a gap", "Count all events of a stream"),
    ("stream.begin", check_begin, _CORE, "major", f"{PAGE}: response.created comes first, then response.in_progress", "Send both before the first item"),
    ("stream.first-response", check_first_response, _CORE, "major", f"{PAGE}: The first events have the response in progress, without output", "Send the whole object there"),
    ("stream.end", check_end, _CORE, "major", f"{PAGE}: One event ends the response, and it is the last one", "Send response.completed or response.incomplete once"),
    ("stream.last-response", check_last_response, _CORE, "major", f"{PAGE}: The last event has the response with status, usage and every finished item", "Send the whole object there"),
    ("stream.one-id", check_one_id, _CORE, "major", f"{PAGE}: All events are of one response", "Make the id once"),
    ("stream.items", check_items, _CORE, "major", f"{PAGE}: Each item is added, then done, with one id and its output_index", "Close every item before the response"),
    ("stream.one-open", check_one_open, _AGENT, "major", "Practice of coding agents: an item is done before the next one is added", "Close an item before the next one is added"),
    ("stream.parts", check_parts, _CORE, "major", f"{PAGE}: content_part.added, the deltas, output_text.done and content_part.done follow each other", "Send all four, with the item's id"),
    ("stream.text", check_text, _CORE, "major", f"{PAGE}: The deltas of a text are the finished text", "Join what was sent"),
    ("stream.unicode", check_unicode, _CORE, "major", "RFC 8259 section 8.1: JSON between systems is UTF-8, and characters are whole", "Hold bytes back until a character is whole"),
    ("usage.streamed-equal", check_usage_equal, _CORE, "major", "OpenAI reference, Responses: Usage does not depend on streaming", "Count at one place for both forms"),
    ("stream.tool-events", check_tool_events, _AGENT, "major", f"{PAGE}: The deltas of a call's arguments are its arguments, and its ids stay", "Add the call with name and call_id, then send its arguments"),
)  # fmt: skip
