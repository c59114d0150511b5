"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, served as a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynamo.frontend.apis.messages_blocks import BlockOrder
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.length_limits import PromptTooLong
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import Answer, CountingApi, GenerationApi, Renderer, RenderOptions
from dynamo.frontend.pipeline.collector import CollectedAnswer
from dynamo.frontend.pipeline.events import ChoiceOutput, Event, Finished, Logprobs
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.protocol.messages import (
    MESSAGES,
    BlockKind,
    BodyBlocks,
    LoweredMessages,
    StreamBlocks,
    TokenUsage,
    decode_messages,
    lower,
    message_body,
    message_end,
    message_start,
    prompt_too_long,
)
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.requests import validate_chat
from dynamo.text.output import Content

_STOP_REASONS: Final = {"length": "max_tokens", "content_filter": "refusal"}


class MessagesApi(GenerationApi[LoweredMessages]):
    """Messages: a request becomes a chat request, so that everything of chat serves it."""

    endpoint = "messages"
    id_prefix = "msg_"
    model_type = ModelType.Chat
    dialect = MESSAGES
    _counts_only = False

    def __init__(self, *, strips_billing_header: bool = True) -> None:
        self._strips_billing_header = strips_billing_header

    def response_id(self, request_id: str) -> str:
        return super().response_id(request_id).replace("-", "")

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> LoweredMessages:
        """Unknown fields are ignored either way, as clients add some with every release, but tools are not."""
        source = decode_messages(body, limits=limits, counts_only=self._counts_only)
        return lower(source, strips_billing_header=self._strips_billing_header, ignore_unsupported=ignore_unsupported)

    def validate(self, request: LoweredMessages) -> None:
        validate_chat(request)

    async def prepare(
        self,
        preprocessor: Preprocessor,
        request: LoweredMessages,
        effects: HeaderEffects,
        model: ServedModel,
        timer: StageTimer,
    ) -> tuple[Plan, str | None]:
        try:
            return await preprocessor.chat(request, effects, model, timer)
        except PromptTooLong as error:
            raise prompt_too_long(error.found, error.limit_tokens) from error

    def renderer(self, answer: Answer, options: RenderOptions) -> Renderer:
        return _MessagesRenderer(answer, options)


class MessagesCountApi(MessagesApi, CountingApi[LoweredMessages]):
    """The same requests, of which only the tokens of the prompt are counted."""

    endpoint = "messages_count_tokens"
    _counts_only = True

    async def count(
        self, preprocessor: Preprocessor, request: LoweredMessages, model: ServedModel, timer: StageTimer
    ) -> bytes:
        tokens = await preprocessor.count_chat(request, model, timer)
        return b'{"input_tokens":%d}' % tokens


def _take(order: BlockOrder, events: Sequence[Event]) -> None:
    order.take([event for event in events if not isinstance(event, Finished | Logprobs)])


class _MessagesRenderer(Renderer):
    """Content blocks, of the one choice that there is."""

    def __init__(self, answer: Answer, options: RenderOptions) -> None:
        super().__init__(answer, options)
        request = answer.request
        assert isinstance(request, LoweredMessages)
        self._shows_thinking = request.shows_thinking
        self._id = answer.exchange.response_id  # also where a worker has a name of its own for the answer
        self._blocks = StreamBlocks(shows_thinking=request.shows_thinking)
        self._order = BlockOrder(self._blocks, request.toolset.eager, calls_last=answer.model.takes_text)
        self._has_begun = False
        self._finished: Finished | None = None
        self._is_spliced = answer.work.plan.parsing is None and not answer.wants_nvext

    def stream(self, output: ChoiceOutput) -> bytes:
        events = output.events
        if self._answer.wants_nvext:
            self._hold(output)
        if len(events) == 1 and self._order.open is BlockKind.TEXT and isinstance(event := events[0], Content):
            return self._blocks.delta(event.text) if event.text else b""  # nearly every output
        begin = b""
        if not self._has_begun:
            self._has_begun = True
            begin = message_start(self._id, self._answer.model_name, self._usage())
        if events:
            if isinstance(last := events[-1], Finished):
                self._finished = last
            _take(self._order, events)
        return begin + self._blocks.taken()

    def splice(self) -> tuple[bytes, bytes] | None:
        return self._blocks.ends() if self._is_spliced and self._order.open is BlockKind.TEXT else None

    def end(self, *, with_usage: bool) -> bytes:
        """Return the last events; every stream of this API ends with its usage."""
        begin = b"" if self._has_begun else message_start(self._id, self._answer.model_name, self._usage())
        self._order.finish(is_cut=self._is_cut(self._finished))
        held = self._held.get(0)
        nvext = None
        if self._answer.wants_nvext:
            nvext = self._answer.nvext(
                finished=True,
                stop_reason=None if self._finished is None else self._finished.stop_reason,
                token_ids=() if held is None else held.token_ids,
                engine_data=None if held is None else held.engine_data,
            )
        reason, sequence = self._stop(self._finished, has_called=self._order.has_called)
        return begin + self._blocks.taken() + message_end(reason, sequence, self._usage(), nvext)

    def routed(self, nvext: bytes) -> bytes:
        start = message_start(self._id, self._answer.model_name, self._usage())
        return start + message_end(None, None, self._usage(), nvext)

    def collect(self, collected: CollectedAnswer) -> bytes:
        answer, choice = self._answer, collected.choices[0]
        body = BodyBlocks(shows_thinking=self._shows_thinking)
        order = BlockOrder(body, calls_last=answer.model.takes_text)
        for events in choice.outputs:
            _take(order, events)
        order.finish(is_cut=self._is_cut(choice.finished))
        reason, sequence = self._stop(choice.finished, has_called=order.has_called)
        return message_body(
            self._id,
            answer.model_name,
            body.blocks,
            reason,
            sequence,
            self._usage(),
            nvext=self._collected_nvext(collected),
        )

    def _is_cut(self, finished: Finished | None) -> bool:
        return finished is not None and finished.reason in _STOP_REASONS

    def _stop(self, finished: Finished | None, *, has_called: bool) -> tuple[str | None, str | None]:
        """Return the stop reason, and the stop sequence where that was the reason."""
        if finished is None:  # of an answer that was only placed
            return None, None
        if (cut := _STOP_REASONS.get(finished.reason)) is not None:
            return cut, None
        if has_called:
            return "tool_use", None
        stops = self._answer.request.stop
        if isinstance(found := finished.stop_reason, str) and isinstance(stops, list) and found in stops:
            return "stop_sequence", found
        return "end_turn", None

    def _usage(self) -> TokenUsage:
        tally = self._answer.work.tally
        if not tally.is_usage_known:
            return TokenUsage()
        return TokenUsage(tally.prompt_tokens, tally.completion_tokens, tally.cached_tokens or 0)
