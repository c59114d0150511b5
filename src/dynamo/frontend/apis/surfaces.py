"""What differs between the two inference routes: how a body is read, and the shape of what goes back.

The two halves of an answer, a stream's chunks and a unary body, are built from the same `Delta`s, so they cannot disagree.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

from dynamo.frontend.models.directory import ServedModel
from dynamo.frontend.pipeline.generation import Delta, WorkRequest
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.stage_timer import StageTimer
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Request,
    decode_chat,
    decode_completion,
    validate_chat,
    validate_completion,
)
from dynamo.protocol.openai.responses import (
    Choice,
    TokenLogprob,
    chat_body,
    chat_logprobs,
    completion_body,
    completion_logprobs,
    token_logprobs,
)
from dynamo.protocol.openai.sse import ChatStream, CompletionStream, nvext_json, usage_json

__all__ = ["Answer", "Api", "ChatApi", "ChunkWriter", "CompletionApi", "UnaryAnswer"]

R = TypeVar("R", ChatRequest, CompletionRequest)

_MILLISECONDS: Final = 1000.0


class Api(ABC, Generic[R]):
    """One inference route's own part."""

    endpoint: ClassVar[str]  # the metric label
    id_prefix: ClassVar[str]
    model_type: ClassVar[ModelType]

    @abstractmethod
    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> R:
        """Raises `RequestRejected` (400) for what is no such request."""

    @abstractmethod
    def validate(self, request: R) -> None:
        """Raises `RequestRejected` for a broken rule."""

    @abstractmethod
    async def prepare(
        self,
        preprocessor: Preprocessor,
        request: R,
        effects: HeaderEffects,
        model: ServedModel,
        overhead: StageTimer,
    ) -> tuple[WorkRequest, str | None]:
        """The work and the text that was tokenised."""

    @abstractmethod
    def open_stream(self, answer: Answer, choices: int) -> ChatStream | CompletionStream:
        """The writer of a streamed answer."""

    @abstractmethod
    def logprobs(self, items: Sequence[TokenLogprob], text_offset: int) -> bytes:
        """Ready JSON of this route's shape."""

    @abstractmethod
    def body(self, answer: Answer, choices: Sequence[Choice], usage: bytes, nvext: bytes | None) -> bytes:
        """A unary answer."""


class ChatApi(Api[ChatRequest]):
    """`/v1/chat/completions`."""

    endpoint = "chat_completions"
    id_prefix = "chatcmpl-"
    model_type = ModelType.Chat

    def __init__(self, *, reasoning_field: str = "reasoning_content") -> None:
        """`reasoning_field`: the member of a message that holds its reasoning."""
        self._reasoning_field = reasoning_field

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> ChatRequest:
        return decode_chat(body, ignore_unsupported=ignore_unsupported, limits=limits)

    def validate(self, request: ChatRequest) -> None:
        validate_chat(request)

    async def prepare(
        self,
        preprocessor: Preprocessor,
        request: ChatRequest,
        effects: HeaderEffects,
        model: ServedModel,
        overhead: StageTimer,
    ) -> tuple[WorkRequest, str | None]:
        return await preprocessor.chat(request, effects, model, overhead)

    def open_stream(self, answer: Answer, choices: int) -> ChatStream:
        return ChatStream(answer.id, answer.created, answer.model_name, n=choices)

    def logprobs(self, items: Sequence[TokenLogprob], text_offset: int) -> bytes:
        return chat_logprobs(items)

    def body(self, answer: Answer, choices: Sequence[Choice], usage: bytes, nvext: bytes | None) -> bytes:
        return chat_body(
            answer.id,
            answer.created,
            answer.model_name,
            choices,
            usage,
            nvext=nvext,
            reasoning_field=self._reasoning_field,
        )


class CompletionApi(Api[CompletionRequest]):
    """`/v1/completions`."""

    endpoint = "completions"
    id_prefix = "cmpl-"
    model_type = ModelType.Completions

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> CompletionRequest:
        return decode_completion(body, ignore_unsupported=ignore_unsupported, limits=limits)

    def validate(self, request: CompletionRequest) -> None:
        validate_completion(request)

    async def prepare(
        self,
        preprocessor: Preprocessor,
        request: CompletionRequest,
        effects: HeaderEffects,
        model: ServedModel,
        overhead: StageTimer,
    ) -> tuple[WorkRequest, str | None]:
        return await preprocessor.completion(request, effects, model, overhead)

    def open_stream(self, answer: Answer, choices: int) -> CompletionStream:
        return CompletionStream(answer.id, answer.created, answer.model_name, choices=choices)

    def logprobs(self, items: Sequence[TokenLogprob], text_offset: int) -> bytes:
        return completion_logprobs(items, text_offset=text_offset)

    def body(self, answer: Answer, choices: Sequence[Choice], usage: bytes, nvext: bytes | None) -> bytes:
        return completion_body(answer.id, answer.created, answer.model_name, choices, usage, nvext=nvext)


class Answer:
    """What both halves know about the request they answer, and the optional members both can show."""

    __slots__ = (
        "_one_token_logprobs",
        "_text_offsets",
        "_wanted",
        "api",
        "created",
        "id",
        "model",
        "model_name",
        "received_at",
        "request",
        "work",
    )

    def __init__(
        self,
        api: Api[Any],
        request: Request,
        model: ServedModel,
        work: WorkRequest,
        id: str,
        received_at: float,
    ) -> None:
        """`received_at`: seconds since the epoch."""
        self.api, self.request, self.model, self.work = api, request, model, work
        self.id = id
        self.created = int(received_at)
        self.received_at = received_at
        self.model_name = request.model
        self._wanted = frozenset(request.extra_fields)
        self._text_offsets: dict[int, int] = {}
        is_plain = api.endpoint == ChatApi.endpoint and request.return_tokens_as_token_ids is not True
        self._one_token_logprobs = model.text.logprob_pieces.line if is_plain else None

    @property
    def wants_logprobs(self) -> bool:
        return self.request.requested_logprobs is not None

    @property
    def wants_nvext(self) -> bool:
        return bool(self._wanted)

    @property
    def wants_token_ids(self) -> bool:
        return "completion_token_ids" in self._wanted

    @property
    def choices(self) -> int:
        return len(self.work.prompts) * self.work.choices

    def usage(self) -> bytes:
        """The usage so far."""
        work = self.work
        return usage_json(
            work.prompt_tokens,
            work.completion_tokens,
            cached_tokens=work.cached_tokens,
            reasoning_tokens=work.reasoning_tokens,
        )

    def logprob_items(self, delta: Delta) -> list[TokenLogprob]:
        """The log probabilities of one delta; [] when the engine gave none."""
        tokenizer = self.model.text.tokenizer
        return token_logprobs(
            delta.token_ids,
            delta.log_probs,
            delta.top_logprobs,
            tokenizer.token_text,
            token_bytes=tokenizer.token_bytes,
            as_token_ids=self.request.return_tokens_as_token_ids is True,
        )

    def delta_logprobs(self, delta: Delta) -> bytes | None:
        """The JSON of one delta's log probabilities; None when the engine gave none."""
        log_probs = delta.log_probs
        if (
            self._one_token_logprobs is not None
            and log_probs is not None
            and len(delta.token_ids) == len(log_probs) == 1
            and not delta.top_logprobs
        ):
            return self._one_token_logprobs(delta.token_ids[0], log_probs[0])
        return self.logprobs(delta.choice, self.logprob_items(delta))

    def logprobs(self, choice: int, items: Sequence[TokenLogprob]) -> bytes | None:
        """The JSON of `items`, which follow those given before for the same choice."""
        if not items:
            return None
        offset = self._text_offsets.get(choice, 0)
        self._text_offsets[choice] = offset + sum(len(item.token) for item in items)
        return self.api.logprobs(items, offset)

    def nvext(
        self,
        *,
        finished: bool,
        stop_reason: str | int | None = None,
        token_ids: Sequence[int] | None = None,
        engine_data: dict[str, Any] | None = None,
        first_token_seconds: float | None = None,
    ) -> bytes | None:
        """The extension members the client asked for; None when there is nothing to say."""
        wanted = self._wanted
        members: dict[str, Any] = {
            "stop_reason": stop_reason if "stop_reason" in wanted else None,
            "completion_token_ids": token_ids if "completion_token_ids" in wanted else None,
            "engine_data": engine_data if "engine_data" in wanted else None,
        }
        if finished and "worker_id" in wanted and self.work.instances:
            worker_id = self.work.instances[-1].instance_id
            prefill_id = worker_id if self.work.prefill_instance_id is None else self.work.prefill_instance_id
            members["worker_id"] = {"prefill_worker_id": prefill_id, "decode_worker_id": worker_id}
        if finished and "timing" in wanted:
            timing = {
                "request_received_ms": int(self.received_at * _MILLISECONDS),
                "total_time_ms": (time.time() - self.received_at) * _MILLISECONDS,
            }
            if first_token_seconds is not None:
                timing["ttft_ms"] = first_token_seconds * _MILLISECONDS
            members["timing"] = timing
        return nvext_json(**members)


class ChunkWriter:
    """Deltas to the bytes of one streamed answer."""

    __slots__ = ("_answer", "_held", "_is_plain", "_stream", "_with_usage", "first_token_seconds")

    def __init__(self, answer: Answer, *, continuous_usage: bool) -> None:
        self._answer = answer
        self._stream = answer.api.open_stream(answer, answer.choices)
        self._with_usage = continuous_usage
        self._is_plain = not (continuous_usage or answer.wants_logprobs or answer.wants_nvext)
        # Token ids and engine data of deltas that showed nothing yet, by choice.
        self._held: dict[int, tuple[list[int], dict[str, Any] | None]] = {}
        self.first_token_seconds: float | None = None

    def splice(self) -> tuple[bytes, bytes] | None:
        """What stands before and behind the JSON string of a text in an event of choice 0 that says nothing else.

        None where every event says more, or the next one has to.
        """
        return self._stream.plain_ends() if self._is_plain else None

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """The events of a batch, ready for one send; b"" when nothing in it is visible."""
        if not self._is_plain:
            return b"".join([self._in_full(delta) for delta in deltas])
        event = self._stream.delta
        if len(deltas) == 1:
            delta = deltas[0]
            if delta.finish_reason is None:
                return event(delta.choice, delta.text) if delta.text else b""
            return event(delta.choice, delta.text, finish_reason=delta.finish_reason)
        return b"".join(
            [
                event(delta.choice, delta.text)
                if delta.finish_reason is None
                else event(delta.choice, delta.text, finish_reason=delta.finish_reason)
                for delta in deltas
            ]
        )

    def _in_full(self, delta: Delta) -> bytes:
        answer, choice = self._answer, delta.choice
        finished = delta.finish_reason is not None
        logprobs = answer.delta_logprobs(delta) if answer.wants_logprobs else None
        token_ids, engine_data = delta.token_ids, delta.engine_data
        if answer.wants_nvext:
            if (held := self._held.pop(choice, None)) is not None:
                token_ids = held[0] + token_ids
                engine_data = {**held[1], **(engine_data or {})} if held[1] is not None else engine_data
            if not delta.text and not finished and logprobs is None:
                self._held[choice] = (token_ids, engine_data)
                return b""
        return self._stream.delta(
            choice,
            delta.text,
            finish_reason=delta.finish_reason,
            logprobs=logprobs,
            usage=answer.usage() if self._with_usage else None,
            nvext=answer.nvext(
                finished=finished,
                stop_reason=delta.stop_reason,
                token_ids=token_ids,
                engine_data=engine_data,
                first_token_seconds=self.first_token_seconds,
            )
            if answer.wants_nvext
            else None,
        )

    def usage_chunk(self) -> bytes:
        """The last chunk, without choices."""
        return self._stream.usage_chunk(self._answer.usage())


class UnaryAnswer:
    """Deltas gathered into one body."""

    __slots__ = (
        "_answer",
        "_engine_data",
        "_finish",
        "_items",
        "_stop_reason",
        "_texts",
        "_token_ids",
        "first_token_seconds",
    )

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        count = answer.choices
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._finish: list[str | None] = [None] * count
        self._items: list[list[TokenLogprob]] = [[] for _ in range(count)] if answer.wants_logprobs else []
        self._token_ids: list[int] = []
        self._stop_reason: str | int | None = None
        self._engine_data: dict[str, Any] | None = None
        self.first_token_seconds: float | None = None

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.text:
                self._texts[delta.choice].append(delta.text)
            if delta.finish_reason is not None:
                self._finish[delta.choice] = delta.finish_reason
                self._stop_reason = delta.stop_reason
            if self._items:
                self._items[delta.choice] += self._answer.logprob_items(delta)
            if self._answer.wants_token_ids:
                self._token_ids += delta.token_ids
            if delta.engine_data is not None:
                self._engine_data = {**(self._engine_data or {}), **delta.engine_data}

    def body(self) -> bytes:
        answer = self._answer
        choices = [
            self.choice(
                index,
                "".join(texts),
                self._finish[index],
                answer.logprobs(index, self._items[index]) if self._items else None,
            )
            for index, texts in enumerate(self._texts)
        ]
        nvext = None
        if answer.wants_nvext:
            nvext = answer.nvext(
                finished=True,
                stop_reason=self._stop_reason,
                token_ids=self._token_ids if answer.wants_token_ids else None,
                engine_data=self._engine_data,
                first_token_seconds=self.first_token_seconds,
            )
        return answer.api.body(answer, choices, answer.usage(), nvext)

    def choice(self, index: int, text: str, finish_reason: str | None, logprobs: bytes | None) -> Choice:
        """One finished choice of the body."""
        return Choice(index, text, finish_reason, logprobs=logprobs)
