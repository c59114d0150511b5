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
from dynamo.cli.replay.filling import filled
from dynamo.engines.recorded.files import RecordedRequest

__all__ = ["ResentRequest", "SendLimits", "send_all"]

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


async def _exchange(target: Target, path: str, body: dict[str, Any], began: float) -> ReplayedAnswer:
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
