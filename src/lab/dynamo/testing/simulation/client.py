"""An HTTP client entered at the ASGI application: it can read slowly, or leave at any moment, and it judges its answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from dynamo.protocol.openai.shapes import JsonObject
from dynamo.runtime.http.cycle import PUSH_EXTENSION
from dynamo.testing.simulation.scenario import RequestPlan

_TEXT: Final = re.compile(rb'"(?:content|text)":"[^"]')  # a first chunk may come without


class Visit:
    """One request and its answer as the client sees it; `task` is the application's side."""

    def __init__(
        self,
        app: Any,
        plan: RequestPlan,
        body: JsonObject,
        *,
        on_chunk: Callable[[Visit], None],
        on_breach: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.chunks = 0
        self.is_complete = False
        self.began_at = asyncio.get_running_loop().time()
        self.answered_at: float | None = None  # when the headers came
        self.first_text_at: float | None = None
        self.ended_at: float | None = None
        self.left_at: float | None = None
        self.read_seconds = 0.0  # for each chunk; slow clients only
        self.frontend = ""  # the process that answers
        self.was_cut = False  # the frontend process was killed
        self._app, self._on_chunk, self._on_breach = app, on_chunk, on_breach
        self._left = asyncio.Event()
        self._parts = _split(json.dumps(body).encode(), plan.body_parts)
        path = "/v1/chat/completions" if plan.is_chat else "/v1/completions"
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"sim-%d" % plan.number)],
            "extensions": {PUSH_EXTENSION: self._push} if plan.can_push else {},
        }
        # Awaited by the run, which owns this visit.
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"visit {plan.number}")

    def leave(self) -> None:
        """Close the connection."""
        if self.left_at is None and self.ended_at is None:
            self.left_at = asyncio.get_running_loop().time()
            self._left.set()

    def lose(self) -> None:
        """Cut the call off: the process at the other end is killed."""
        self.was_cut = True
        self.task.cancel()

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except asyncio.CancelledError:
            if not self.was_cut:
                raise
        except Exception as error:
            self._breach(f"the application raised {type(error).__name__}: {error}")
        finally:
            self.ended_at = asyncio.get_running_loop().time()
        if not self.is_complete and self.left_at is None and not self.was_cut:
            self._breach("the application returned without a whole answer")

    async def _receive(self) -> JsonObject:
        if self._parts and not self._left.is_set():
            await asyncio.sleep(0)
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: JsonObject) -> None:
        if message["type"] == "http.response.start":
            if self.status is not None:
                self._breach("the answer was started twice")
            self.status = message["status"]
            self.headers = dict(message["headers"])
            self.answered_at = asyncio.get_running_loop().time()
            return
        self._take(message.get("body", b""), more=message.get("more_body", False))
        if self.read_seconds and self.left_at is None:
            await asyncio.sleep(self.read_seconds)

    def _push(self, data: bytes) -> bool:
        if self.read_seconds:
            return False
        self._take(data, more=True)
        return True

    def _take(self, data: bytes, *, more: bool) -> None:
        if self.status is None:
            self._breach("a body before its headers")
        if self.is_complete:
            self._breach("a body after the end")
        if self.left_at is not None or self.was_cut:
            return
        self.body += data
        self.is_complete = not more
        self.chunks += 1
        if self.first_text_at is None and _TEXT.search(data):
            self.first_text_at = asyncio.get_running_loop().time()
        self._on_chunk(self)

    def _breach(self, text: str) -> None:
        self._on_breach(f"request {self.plan.number}: {text}")


class MalformedAnswer(ValueError):
    """What came is no answer."""


@dataclass(slots=True)
class Answer:
    """What a client understood."""

    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    error: JsonObject | None = None
    completion_tokens: int | None = None
    is_whole: bool = False  # it ended as an answer must


def read_answer(visit: Visit) -> Answer:
    """Take an answer, or the part that came before the client left, apart. Raises MalformedAnswer."""
    if visit.status is None:
        return Answer()
    try:
        if visit.status == 200 and visit.plan.is_streaming:
            return _read_stream(visit.body)
        if not visit.is_complete:
            return Answer()
        return _read_unary(json.loads(visit.body), visit.status)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise MalformedAnswer(f"{type(error).__name__}: {error} in {visit.body[-200:]!r}") from error


def _read_stream(body: bytes) -> Answer:
    answer = Answer()
    *blocks, rest = body.decode().split("\n\n")
    if rest:
        raise MalformedAnswer("half an event")
    for block in blocks:
        if block.startswith(":"):
            continue
        if answer.is_whole:
            raise MalformedAnswer("an event after [DONE]")
        data = block.removeprefix("data: ")
        if data == block:
            raise MalformedAnswer(f"no data event: {block!r}")
        if data == "[DONE]":
            answer.is_whole = True
            continue
        chunk = json.loads(data)
        if answer.error is not None:
            raise MalformedAnswer("a chunk after the error")
        if "error" in chunk:
            answer.error = chunk["error"]
            continue
        for choice in chunk["choices"]:
            _add(answer, choice, choice["delta"].get("content") if "delta" in choice else choice["text"])
        if chunk.get("usage") is not None:
            answer.completion_tokens = chunk["usage"]["completion_tokens"]
    return answer


def _read_unary(document: JsonObject, status: int) -> Answer:
    answer = Answer(is_whole=True)
    if status != 200:
        answer.error = document["error"]
        return answer
    for choice in document["choices"]:
        _add(answer, choice, choice["message"]["content"] if "message" in choice else choice["text"])
    answer.completion_tokens = document["usage"]["completion_tokens"]
    return answer


def _add(answer: Answer, choice: JsonObject, text: str | None) -> None:
    index = choice["index"]
    if index in answer.finish:
        raise ValueError(f"choice {index} goes on after its finish reason")
    answer.text[index] = answer.text.get(index, "") + (text or "")
    if choice.get("finish_reason") is not None:
        answer.finish[index] = choice["finish_reason"]


def _split(data: bytes, parts: int) -> list[bytes]:
    size = -(-len(data) // parts)
    return [data[start : start + size] for start in range(0, len(data), size)]
