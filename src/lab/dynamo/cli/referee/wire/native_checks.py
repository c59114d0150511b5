"""Checks of the native wire of ai-dynamo 1.6: requests and ACKs, answers that the worker brings, cancelling, hostile bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

from dynamo.cli.referee.checks import Broken, Level, demand
from dynamo.cli.referee.exchange import Json
from dynamo.cli.referee.wire.mux_seen import ERROR_TYPES, error_type
from dynamo.cli.referee.wire.native_line import (
    SENTINEL,
    NativeAnswer,
    NativeLine,
    demand_clean,
    demand_served,
    error_of,
    native_line,
    request_frame,
    two_part,
)
from dynamo.cli.referee.wire.run import FLOOD, FLOOD_PATH, LONG, WireProbe, WireRow, flood, too_short

MANY: Final = 8
HELD: Final = 24
UNAVAILABLE, OVERLOADED = "Server unavailable:", "Server overloaded:"
NOT_LATER_SECONDS: Final = 1.0  # an answer that goes on for longer after its cancelling was not cancelled
RETRY_SECONDS: Final = 0.1
FINAL: Final = {"complete_final": True}
# Error types that the native system has, and `mux` has no use for.
NATIVE_TYPES: Final = ERROR_TYPES | {"ResourceExhausted", "Unavailable"}


async def ack(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        await line.call()


async def handshake(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        answer = await line.call()
        try:
            await answer.streams()
        except Broken as broken:
            raise Broken(f"{broken}; other frames that came first: {line.strange}") from None
        found = answer.handshake
        demand(found.get("stream_type") == "response", f"the handshake is {found!r}, without stream_type response")
        await answer.everything()


async def prologue(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        found = await (await line.call()).prologue()
        demand(found == {"error": None}, f'the prologue is {found!r:.200}, not {{"error": null}}')


async def items(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        found = [item for item in await line.served() if item not in (SENTINEL, FINAL)]
        demand(found, "the answer has no item")
        for item in found:
            is_right = (
                isinstance(item, dict) and isinstance(item.get("data"), dict) and item.get("complete_final") is False
            )
            demand(is_right, f"an item is not data and complete_final: {item!r:.200}")
            known = {"data", "id", "event", "comment", "error"}
            demand(set(item["data"]) <= known, f"the envelope of an item has {sorted(set(item['data']) - known)}")
        if probe.shared.is_in_tokens:
            ids = [item["data"].get("data", {}).get("token_ids") for item in found]
            demand(all(isinstance(one, list) for one in ids), f"the token_ids of the items are {ids!r:.200}")


async def end(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        found = [item for item in await line.served() if item != SENTINEL]
        demand(found and found[-1] == FINAL, f"the last item is {found[-1:]!r:.200}, not complete_final")
        demand(found.count(FINAL) == 1, "complete_final is true before the last item")


async def sentinel(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        found = await line.served()
        demand(found[-1:] == [SENTINEL], f"the answer ends with {found[-1:]!r:.200}, not the sentinel")


async def json_codec(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        for codec in ("json", None):
            demand_clean(await (await line.call(codec=codec)).everything())


async def unknown_members(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        more: dict[str, Json] = {"colour": "blue", "metadata": {"a": "b"}}
        demand_clean(await (await line.call(headers={"x-colour": "blue"}, **more)).everything())


async def no_headers(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        demand_clean(await (await line.call(headers={})).everything())


async def pipelined(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        body = probe.shared.sized(4)
        first, one = line.request(body)
        refused, _ = line.request(body, path="unknown")
        last, other = line.request(body)
        await line.send(first + refused + last, "three requests in one piece, the second for an unknown path")
        acks = [await line.ack() for _ in range(3)]
        is_right = acks[0] == "" and str(acks[1]).startswith(UNAVAILABLE) and acks[2] == ""
        demand(is_right, f"the ACKs of three requests, the second for an unknown path, are {acks!r:.300}")
        for answer in (one, other):
            demand_clean(await answer.everything())


async def split(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        frame, answer = line.request(probe.shared.sized(4))
        for at in range(0, len(frame), 40):
            await line.send(frame[at : at + 40], "40 bytes of a request")
            await asyncio.sleep(0.001)  # so that the system sends them apart
        await line.accepted()
        demand_clean(await answer.everything())


async def many(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        began = asyncio.get_running_loop().time()
        answers = [await line.call(LONG), *[await line.call() for _ in range(MANY)]]
        long, *short = await asyncio.gather(*map(_ended_at, answers))
        if max(short) > long:
            seconds = long - began
            demand(seconds < NOT_LATER_SECONDS, f"{MANY} short answers came after a long one of {seconds:.1f} s")
            raise too_short(f"{LONG} tokens")


async def _ended_at(answer: NativeAnswer) -> float:
    demand_clean(await answer.everything())
    return asyncio.get_running_loop().time()


async def _until_over(answer: NativeAnswer, word: str) -> int:
    """Cancel an answer after its first item, and return the items that came until its connection ended."""
    await answer.prologue()
    first = await answer.item()
    demand(isinstance(first, dict), f"the first item is {first!r:.100}")
    loop = asyncio.get_running_loop()
    await answer.send(word)
    began, count = loop.time(), 1
    while (item := await answer.item()) is not None and item != SENTINEL:
        count += item != FINAL
        if loop.time() - began > answer.probe.timeout:
            raise Broken(f"items still come {answer.probe.timeout:g} s after {word!r}")
    if count >= LONG:
        demand(loop.time() - began < NOT_LATER_SECONDS, f"all {count} items came in spite of {word!r}")
        raise too_short(f"{LONG} tokens")
    return count


async def stop(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        await _until_over(await line.call(LONG), "stop")
        await line.served()


async def kill(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        await _until_over(await line.call(LONG), "kill")
        await line.served()


async def left(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        answers = [answer for _ in range(HELD) if (answer := await _admitted(line))]
        await answers[0].streams()
        for answer in answers:
            if answer.has_come:
                await answer.leave()
    async with native_line(probe) as line:
        loop = asyncio.get_running_loop()
        late = loop.time() + probe.timeout
        while (answer := await _admitted(line, 4)) is None:
            demand(loop.time() < late, f"there is no room {probe.timeout:g} s after {HELD} callers left")
            await asyncio.sleep(RETRY_SECONDS)
        demand_clean(await answer.everything())


async def _admitted(line: NativeLine, tokens: int = LONG) -> NativeAnswer | None:
    """Send a request, and return its answer, or None where the worker has no room for it."""
    frame, answer = line.request(line.probe.shared.sized(tokens))
    await line.send(frame, f"request for {tokens} tokens")
    found = await line.ack()
    if found is not None and found.startswith(OVERLOADED):
        return None
    demand(found == "", f"the ACK is {found!r:.200}")
    return answer


async def left_after_request(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        frame, answer = line.request(probe.shared.sized(4))
        await line.send(frame, "a request, and then the end of what is sent")
        line.close_half()
        demand_clean(await answer.everything())


async def error_path(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        frame, _ = line.request(probe.shared.sized(4), path=f"{probe.shared.path}-unknown")
        await line.send(frame, "request for an unknown path")
        found = await line.ack()
        demand(
            str(found).startswith(UNAVAILABLE), f"the ACK for an unknown path is {found!r:.200}, not {UNAVAILABLE} ..."
        )
        await line.served()  # on the same connection


async def error_item(probe: WireProbe) -> None:
    wrong = probe.shared.wrong_types()
    async with native_line(probe) as line:
        frame, answer = line.request(wrong)
        await line.send(frame, "request with token_ids that are a text")
        await line.accepted()
        found = await answer.everything()
        record = error_of(found)
        demand(record is not None, f"token_ids that are a text are answered without an error: {found!r:.200}")
        demand(error_type(record) == "InvalidArgument", f"the error is {record!r:.200}, not an InvalidArgument")
        demand(isinstance(record.get("message"), str), f"the error has no message: {record!r:.200}")
        demand(FINAL in found, "the answer with an error has no complete_final")


async def error_body(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        frame, answer = line.request(None, raw=b"\xc1")
        await line.send(frame, "request whose body is c1, which is no msgpack")
        found = await line.ack()
        if found == "":
            prologue = await answer.prologue()
            if prologue == {"error": None}:
                seen = []
                while (item := await answer.item()) is not None and item != SENTINEL:
                    seen.append(item)
                record = error_of(seen)
                demand(error_type(record) in NATIVE_TYPES, f"a body that is no msgpack is answered with {seen!r:.200}")
        else:
            demand(str(found).startswith(UNAVAILABLE), f"the ACK for a body that is no msgpack is {found!r:.200}")
    await demand_served(probe, "after a malformed body")


# -- hostile bytes -------------------------------------------------------------------------------------------------------


async def hostile_length(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        path = probe.shared.path.encode()
        head = struct.pack(">H", len(path)) + path + struct.pack(">H", 2) + b"{}" + struct.pack(">I", 2**32 - 1)
        await line.send(head, "a request that announces 4 GiB")
        await line.closes()
    await demand_served(probe, "after a request that announced 4 GiB")


async def hostile_parts(probe: WireProbe) -> None:
    path = probe.shared.path.encode()
    for prefix in ((2**63, 0, 0), (2, 2**64 - 1, 0), (100, 0, 0)):
        async with native_line(probe) as line:
            payload = struct.pack(">QQQ", *prefix) + b"{}"
            await line.send(request_frame(path, b"{}", payload), f"a payload whose parts claim {prefix[:2]} bytes")
            await _demand_refused(line, "a payload whose lengths lie")
    await demand_served(probe, "after payloads whose lengths lie")


async def hostile_control(probe: WireProbe) -> None:
    path = probe.shared.path.encode()
    for control in (b"", b"null", b"[" * 5000, b'{"id":1}', b'{"id":"a","connection_info":[]}', b"\xff" * 50):
        async with native_line(probe) as line:
            await line.send(request_frame(path, b"{}", two_part(control, b"\x80")), f"control message {control[:40]!r}")
            await _demand_refused(line, f"the control message {control[:40]!r}")
    await demand_served(probe, "after malformed control messages")


async def hostile_context(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        frame, answer = line.request(probe.shared.sized(4), id="another-id")
        await line.send(frame, "a request whose connection_info names another one")
        found = await line.ack()
        demand(found != "" or not (await _comes(answer)), "an answer was brought although its context is another one's")
    await demand_served(probe, "after a request that names another one")


async def _comes(answer: NativeAnswer) -> bool:
    await asyncio.sleep(NOT_LATER_SECONDS)
    return answer.has_come


async def _demand_refused(line: NativeLine, what: str) -> None:
    found = await line.ack()
    demand(found != "", f"{what} was accepted")


async def hostile_garbage(probe: WireProbe) -> None:
    for data in (b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n", bytes(64), b"\x00\x02\xff\xfe\x00\x00\x00\x00\x00\x00"):
        async with native_line(probe) as line:
            await line.send(data, f"{data[:16]!r} ... in place of a request")
            line.close_half()
            await line.closes()
    await demand_served(probe, "after garbage")


async def hostile_half(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        frame, _ = line.request(probe.shared.sized(4))
        await line.send(frame[:-1], "a request without its last byte")
        await demand_served(probe, "beside half of a request")


async def hostile_home(probe: WireProbe) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and not listening: a connection to it is refused
        async with native_line(probe) as line:
            own, line.port = line.port, closed.getsockname()[1]
            frame, _ = line.request(probe.shared.sized(4))
            line.port = own
            await line.send(frame, "a request whose answer cannot be brought anywhere")
            await line.ack()
            await line.served()


async def not_read(probe: WireProbe) -> None:
    async with native_line(probe) as line:
        frame, _ = line.request({}, path=FLOOD_PATH)
        line.stop_reading()
        await flood(lambda: line.send(frame, "request for an unknown path"), FLOOD)
        await demand_served(probe, "beside a caller that does not read its ACKs")


CORE, OPERATOR = Level.CORE, Level.OPERATOR
ROWS: Final[tuple[WireRow, ...]] = (
    ("ack", ack, CORE, "major", "Requests: an accepted request is acknowledged with four zero bytes",
        "Write the ACK when the request is admitted; its answer does not wait for it."),
    ("ack.pipelined", pipelined, CORE, "major", "Requests: ACKs come in the order of the requests",
        "Answer the requests of a connection one after another."),
    ("request.split", split, CORE, "major", "Requests: a request may arrive in any pieces",
        "Keep what has arrived until the payload's length is there."),
    ("request.headers", no_headers, CORE, "minor", "Requests: no header is mandatory",
        "Take an empty set of headers."),
    ("request.unknown-members", unknown_members, CORE, "major", "Requests: unknown headers and members are ignored",
        "Read the members that you know, and let the others pass."),
    ("request.json", json_codec, CORE, "major", "Requests: payload_codec is msgpack or json, json where it is absent",
        "Decode the body, and encode the items, in the codec of the request."),
    ("request.left", left_after_request, CORE, "minor", "Answers: an answer does not depend on the request's connection",
        "Let a request go on whose connection has ended."),
    ("answer.handshake", handshake, CORE, "major", "Answers: the first frame names subject and stream_type",
        "Send the subject of connection_info, with a header only."),
    ("answer.prologue", prologue, CORE, "major", 'Answers: the second frame is {"error": null}',
        "Send the prologue before any item, also before an error of the engine."),
    ("answer.items", items, CORE, "major", "Answers: an item is data with its envelope and complete_final",
        "Put a chunk into data.data, with complete_final false."),
    ("answer.end", end, CORE, "major", "Answers: the last item is complete_final alone",
        "Send it once, behind the last chunk."),
    ("answer.sentinel", sentinel, CORE, "minor", "Answers: the sentinel follows the last item",
        'Send the control frame "sentinel".'),
    ("answer.many", many, CORE, "major", "Answers: each answer has a connection of its own",
        "Serve the requests of a connection at once."),
    ("cancel.stop", stop, CORE, "major", "Cancelling: stop ends the answer early",
        "Read the answer's connection while you write, and let the engine stop."),
    ("cancel.kill", kill, CORE, "major", "Cancelling: kill ends the answer at once",
        "Close the answer's connection."),
    ("cancel.left", left, OPERATOR, "major", "Cancelling: a lost answer's connection is a kill",
        "End the engine's work where its caller leaves."),
    ("error.unknown-path", error_path, CORE, "major", "Errors: an unknown path is an ACK of Server unavailable:",
        "Begin its text with these words, and keep the connection."),
    ("error.item", error_item, CORE, "major", "Errors: an engine's error is an item with event error, then the end",
        "Send the record as `error` of the envelope, then complete_final."),
    ("error.malformed-body", error_body, OPERATOR, "major", "Errors: a body that cannot be decoded is refused",
        "Refuse it in the ACK, in the prologue or as an item."),
    ("hostile.length", hostile_length, OPERATOR, "major", "Requests: a request has at most 32 MiB",
        "Close once the lengths are there; do not await the payload."),
    ("hostile.parts", hostile_parts, OPERATOR, "major", "Requests: the payload is a two-part frame",
        "Compare its lengths with the payload's before you use them."),
    ("hostile.control", hostile_control, OPERATOR, "major", "Requests: the control message is a JSON object",
        "Refuse it in the ACK, or close."),
    ("hostile.context", hostile_context, OPERATOR, "minor", "Requests: context of connection_info is the request's id",
        "Refuse a request that names another one."),
    ("hostile.garbage", hostile_garbage, OPERATOR, "major", "Requests: what is no request ends its connection only",
        "Close such a connection, at its end at the latest, and go on listening."),
    ("hostile.half", hostile_half, OPERATOR, "major", "Requests: callers do not wait for each other",
        "Read each connection by itself."),
    ("hostile.home", hostile_home, OPERATOR, "major", "Answers: a caller that cannot be reached ends its request only",
        "Give up the request where its connection fails."),
    ("hostile.not-read", not_read, OPERATOR, "major", "Requests: callers do not wait for each other",
        "Wait for a full socket in its own connection's task only."),
)  # fmt: skip
