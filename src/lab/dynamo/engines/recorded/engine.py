"""Answers requests with what was recorded of equal ones, at the recorded times or as fast as it can.

It takes the client's own body (`ModelInput.Text`), so a recording is served without a tokenizer, without the model's files
and without an accelerator: everything else of the frontend is the real thing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, RawEngine, RawRequest, RawResponseChunk
from dynamo.engines.recorded.files import JsonRecord, RecordedRequest, read_recordings
from dynamo.errors import HttpError, InvalidArgument
from dynamo.protocol.content_key import content_key
from dynamo.protocol.model_types import ModelInput
from dynamo.runtime.calls.context import Context

logger = logging.getLogger(__name__)


class RecordedPart(Struct, frozen=True):
    """One part of a recorded answer: when it came, and what it held."""

    at: float  # seconds since the request
    choice: int
    delta: JsonRecord
    finish_reason: str | None


class RecordedAnswer(Struct, frozen=True):
    """One recorded answer to one prompt."""

    parts: Sequence[RecordedPart]
    usage: Mapping[str, int] | None
    failure: tuple[int, str] | None  # how it ended, where it failed


class RecordedEngine(RawEngine):
    """Serves a recording. Where a request was recorded several times its answers take turns."""

    def __init__(self, recordings: Sequence[Path], model_name: str | None, *, is_fast: bool) -> None:
        """`is_fast`: do not wait for the recorded times."""
        self._recordings, self._model_name, self._is_fast = recordings, model_name, is_fast
        self._answers: dict[str, list[RecordedAnswer]] = {}
        self._turns: Counter[str] = Counter()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        parser = BackendArgumentParser("dynamo.engines.recorded", description="Answers from recordings of requests.")
        parser.add_argument("--recording", action="append", required=True, type=Path, help="a file of a recording")
        parser.add_argument("--model-name", default=None, help="name clients use (default: the one most recorded)")
        parser.add_argument("--as-fast-as-possible", action="store_true", help="do not wait for the recorded times")
        add_backend_arguments(parser)
        args = parser.parse_args(argv)
        engine = cls(args.recording, args.model_name, is_fast=args.as_fast_as_possible)
        await asyncio.to_thread(engine.load)
        name = engine.model_name
        config = worker_config_from(
            args, model_name="", served_model_name=name, model_input=ModelInput.Text, enable_kv_routing=False
        )
        return engine, config

    def load(self) -> None:
        """Read the recordings. Raises InvalidArgument for a file that holds no answer that could be given."""
        requests = read_recordings(self._recordings)
        for request in requests:
            for key, answer in _answers_of(request):
                self._answers.setdefault(key, []).append(answer)
        if not self._answers:
            raise InvalidArgument(
                f"{', '.join(map(str, self._recordings))}: none of {len(requests)} requests was recorded with its content; "
                "DYN_REQUEST_TRACE_RECORDS needs request_payload and request_stream"
            )
        models = Counter(request.model for request in requests if request.model)
        if self._model_name is None and models:
            self._model_name = models.most_common(1)[0][0]
        logger.info("%d recorded answers to %d requests", sum(map(len, self._answers.values())), len(self._answers))

    @property
    def model_name(self) -> str:
        return self._model_name or "recorded"

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.model_name, served_model_name=self.model_name)

    async def cleanup(self) -> None:
        self._answers.clear()

    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        key = content_key(request)
        answers = self._answers.get(key)
        if answers is None:
            raise HttpError(404, f"this request is not in the recording (its key would be {key})")
        answer = answers[self._turns[key] % len(answers)]
        self._turns[key] += 1
        is_chat = isinstance(request.get("messages"), list)
        head = {
            "id": context.id(),
            "created": int(time.time()),
            "model": request.get("model") or self.model_name,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
        }
        loop = asyncio.get_running_loop()
        began = loop.time()
        for part in answer.parts:
            if not self._is_fast and (wait := began + part.at - loop.time()) > 0:
                await _sleep(wait, context)
            if context.is_stopped():
                return
            choice: dict[str, Any] = {"index": part.choice, "finish_reason": part.finish_reason, "logprobs": None}
            choice |= {"delta": part.delta} if is_chat else {"text": part.delta.get("content", "")}
            yield {**head, "choices": [choice]}
        if answer.failure is not None:
            raise HttpError(*answer.failure)
        if answer.usage is not None:
            yield {**head, "choices": [], "usage": dict(answer.usage)}


async def _sleep(seconds: float, context: Context) -> None:
    """Wait, but no longer than until the request is cancelled."""
    try:
        async with asyncio.timeout(seconds):
            await context.async_killed_or_stopped()
    except TimeoutError:
        return


def _answers_of(request: RecordedRequest) -> list[tuple[str, RecordedAnswer]]:
    """Return the answers of one request, one for each of its prompts; none where its content was not recorded."""
    failure = None
    if request.status is not None and request.status >= 400:
        if request.status == 499 or not request.keys:
            return []
        failure = (request.status, request.error or f"the recorded request failed with {request.status}")
    parts = _recorded_parts(request) if request.outputs is not None else _whole_parts(request.response or {})
    if not parts and failure is None:
        return []
    usage = None
    if request.input_tokens is not None and request.output_tokens is not None:
        usage = {
            "prompt_tokens": request.input_tokens,
            "completion_tokens": request.output_tokens,
            "total_tokens": request.input_tokens + request.output_tokens,
        }
    if len(request.keys) <= 1:
        return [(key, RecordedAnswer(parts, usage, failure)) for key in request.keys]
    choices = 1 + max((part.choice for part in parts), default=0)
    each = max(1, -(-choices // len(request.keys)))
    return [
        (key, RecordedAnswer([_numbered(part, number * each) for part in parts if part.choice // each == number], None, failure))
        for number, key in enumerate(request.keys)
    ]  # fmt: skip


def _recorded_parts(request: RecordedRequest) -> list[RecordedPart]:
    parts, at = [], 0.0
    for number, output in enumerate(request.outputs or ()):
        at += request.gaps_ms[number] / 1000 if number < len(request.gaps_ms) else 0.0
        choice = request.choices[number] if number < len(request.choices) else 0
        delta = {"content": output} if isinstance(output, str) else dict(output)
        reason = delta.pop("finish_reason", None)
        parts.append(RecordedPart(at, choice, delta, reason))
    return parts


def _whole_parts(response: JsonRecord) -> list[RecordedPart]:
    """Return an answer that was recorded as one body, in the form of chats and completions."""
    parts = []
    for choice in response.get("choices") or ():
        message = choice.get("message") or {"content": choice.get("text")}
        delta = {name: message[name] for name in ("content", "reasoning_content") if isinstance(message.get(name), str)}
        if message.get("tool_calls"):
            delta["tool_calls"] = [{**call, "index": place} for place, call in enumerate(message["tool_calls"])]
        parts.append(RecordedPart(0.0, int(choice.get("index") or 0), delta, choice.get("finish_reason") or "stop"))
    return parts


def _numbered(part: RecordedPart, first: int) -> RecordedPart:
    return RecordedPart(part.at, part.choice - first, part.delta, part.finish_reason)
