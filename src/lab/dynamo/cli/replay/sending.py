"""Sends recorded requests at their recorded times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from dynamo.cli.bench.answers import AnswerReader, BadAnswer
from dynamo.cli.bench.targets import Target
from dynamo.cli.replay.answers import ReplayedAnswer, read_body, read_stream
from dynamo.engines.recorded.files import RecordedRequest

# Puts text in the place of what was not recorded, so that a request can be sent again without its content. Pure.


_WORDS: Final = "the quick brown fox jumps over the lazy dog and looks for another place to sleep until the rain ends "
MAX_CHARACTERS: Final = 16 * 1024 * 1024
_GONE: Final[object] = object()


def filled(shape: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a described body as one that can be sent, and the members that had to be left out.

    A text becomes another one of its length, and equal texts become equal ones; ids become as many ids. Tools, schemas and
    media cannot be made up.
    """
    lost: list[str] = []
    found = _value(shape, "", lost)
    return (found if isinstance(found, dict) else {}), lost


def _value(value: Any, where: str, lost: list[str]) -> Any:
    if isinstance(value, list):
        made = [_value(each, where, lost) for each in value]
        return [each for each in made if each is not _GONE]
    if not isinstance(value, dict):
        return value
    kind = value.get("omitted")
    if kind == "text":
        return _text(int(value.get("characters", 0)), str(value.get("mark", "")))
    if kind == "ids":
        seed = sum(map(ord, str(value.get("mark", ""))))
        return [1 + (seed + place) % 200 for place in range(min(int(value.get("count", 0)), MAX_CHARACTERS))]
    if kind is not None:
        lost.append(where or str(kind))
        return _GONE
    members = {name: _value(each, f"{where}.{name}".lstrip("."), lost) for name, each in value.items()}
    kept = {name: each for name, each in members.items() if each is not _GONE}
    if "type" in kept and len(members) > 1 and set(kept) == {"type"}:
        return _GONE  # a part of a message of which nothing is left
    return kept


def _text(characters: int, mark: str) -> str:
    characters = min(characters, MAX_CHARACTERS)
    text = f"{mark} " + _WORDS * (characters // len(_WORDS) + 1)
    return text[:characters]


CONNECT_SECONDS: Final = 10.0
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
_READ: Final = 64 * 1024


class SendLimits(Struct, frozen=True):
    """How fast, and how many at once."""

    speed: float  # 0: nothing waits for its time
    concurrency: int
    timeout_seconds: float


class ResentRequest(Struct):
    """A recorded request, and what came of it this time."""

    request: RecordedRequest
    answer: ReplayedAnswer
    left_out: Sequence[str] = ()  # members that were not recorded and could not be made up


async def send_all(
    requests: Sequence[RecordedRequest], target: Target, limits: SendLimits, done: Callable[[ResentRequest], None]
) -> list[ResentRequest]:
    """Send them all, and return what came of each, in their order. `done` is called as each one ends."""
    first = requests[0].received_ms if requests else 0.0
    slots, began = asyncio.Semaphore(limits.concurrency), time.perf_counter()

    async def one(request: RecordedRequest) -> ResentRequest:
        due = began + ((request.received_ms - first) / 1000 / limits.speed if limits.speed else 0.0)
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        async with slots:
            late = time.perf_counter() - due if limits.speed else 0.0
            made = await _send(request, target, limits.timeout_seconds)
            made.answer.late_ms = round(late * 1000, 3)
        done(made)
        return made

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request), name=f"replay {request.id}") for request in requests]
    return [task.result() for task in tasks]


async def _send(request: RecordedRequest, target: Target, timeout_seconds: float) -> ResentRequest:
    body, lost = (request.body or {}, []) if request.is_whole else filled(request.body or {})
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_seconds):
            answer = await _exchange(target, request.path, body, began)
    except TimeoutError:
        answer = ReplayedAnswer(error=f"no answer within {timeout_seconds:g} s")
    except (OSError, BadAnswer) as error:
        answer = ReplayedAnswer(error=f"{type(error).__name__}: {error}")
    answer.total_ms = round((time.perf_counter() - began) * 1000, 3)
    return ResentRequest(request, answer, tuple(lost))


async def _exchange(target: Target, path: str, body: dict[str, object], began: float) -> ReplayedAnswer:
    async with asyncio.timeout(CONNECT_SECONDS):
        incoming, outgoing = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
    reader, received, first = AnswerReader(), bytearray(), None
    try:
        outgoing.write(target.post(path, body))
        await outgoing.drain()
        while not reader.is_complete:
            data = await incoming.read(_READ)
            if not data:
                if not reader.end():
                    raise BadAnswer("the connection was closed before the end of the answer")
                break
            received += reader.feed(data)
            if first is None and reader.status == 200 and b"data:" in received:
                first = time.perf_counter() - began
            if len(received) > MAX_BODY_BYTES:
                raise BadAnswer(f"an answer of more than {MAX_BODY_BYTES} bytes")
    finally:
        outgoing.close()
        with suppress(OSError):
            await outgoing.wait_closed()
    whole = bytes(received)
    if reader.status == 200 and body.get("stream") is True:
        answer = read_stream(whole)
        answer.ttft_ms = None if first is None else round(first * 1000, 3)
        return answer
    return read_body(reader.status, whole)
