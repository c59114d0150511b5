"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, served as a chat."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.model_limits import PromptTooLong
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
from dynamo.text.output import (
    CallArguments,
    CallBegan,
    CallDropped,
    CallEnded,
    Content,
    OutputEvent,
    Reasoning,
)

_NO_INPUT: Final = "{}"
_STOP_REASONS: Final = {"length": "max_tokens", "content_filter": "refusal"}


class BlockWriter(Protocol):
    """Writes blocks, one after the other."""

    def begin(self, kind: BlockKind, call_id: str, name: str) -> None:
        """Open a block; `call_id` and `name` are those of a call, and else empty."""

    def piece(self, kind: BlockKind, text: str) -> None:
        """Add to the open block: text, reasoning, or the JSON of an input."""

    def end(self, kind: BlockKind) -> None:
        """Close the open block."""


class _Call:
    __slots__ = ("has_input", "id", "is_eager", "is_over", "name", "pieces")

    def __init__(self, call_id: str, name: str, *, is_eager: bool) -> None:
        self.id, self.name, self.is_eager = call_id, name, is_eager
        self.pieces: list[str] = []
        self.has_input = self.is_over = False


class BlockOrder:
    """Takes the events of one answer in any pieces, and passes a writer its blocks."""

    __slots__ = ("_calls", "_calls_last", "_eager", "_held", "_held_kind", "_writer", "blocks", "has_called", "open")

    def __init__(self, writer: BlockWriter, eager: Collection[str] = (), *, calls_last: bool = False) -> None:
        """`eager`: the tools whose input is written before it is known to be whole.

        `calls_last`: calls are sent at the end, as an engine that reads its own text may add to any of them until then.
        """
        self._writer, self._eager, self._calls_last = writer, () if calls_last else eager, calls_last
        self._calls: list[_Call] = []
        self._held = ""  # white space that may begin a block of its kind
        self._held_kind = BlockKind.TEXT
        self.open: BlockKind | None = None
        self.blocks = 0
        self.has_called = False  # a whole call was sent

    def take(self, events: Iterable[OutputEvent]) -> None:
        """Take the next events, and write what they make known."""
        for event in events:
            match event:
                case Content(text):
                    self._text(BlockKind.TEXT, text)
                case Reasoning(text):
                    self._text(BlockKind.THINKING, text)
                case CallBegan(name, call_id):
                    call = _Call(call_id or "", name, is_eager=name in self._eager)
                    self._calls.append(call)
                    if call.is_eager:
                        self._begin(BlockKind.TOOL_USE, call.id, name)
                case CallArguments(text, number):
                    self._arguments(self._calls[-1 if number is None else number], text)
                case CallEnded():
                    if not self._calls_last:
                        self._end_call(self._calls[-1])
                case CallDropped(text):
                    self._drop(self._calls[-1])
                    self._text(BlockKind.TEXT, text)

    def finish(self, *, is_cut: bool) -> None:
        """Close what is open; of an answer without blocks make an empty one. `is_cut`: the engine had to stop."""
        if self._calls_last:
            for call in self._calls:
                if not (is_cut and _is_broken("".join(call.pieces))):
                    self._end_call(call)
        if self.blocks == 0:
            held = self._held if self._held_kind is BlockKind.TEXT else ""
            self._begin(BlockKind.TEXT)
            if held:
                self._writer.piece(BlockKind.TEXT, held)
        self._close()

    def _text(self, kind: BlockKind, text: str) -> None:
        if self.open is kind:
            self._held = ""
            if text:
                self._writer.piece(kind, text)
            return
        if kind is not self._held_kind:
            self._held, self._held_kind = "", kind
        self._held += text
        if self._held and not self._held.isspace():
            held = self._held
            self._begin(kind)
            self._writer.piece(kind, held)

    def _arguments(self, call: _Call, text: str) -> None:
        if not call.is_eager:
            call.pieces.append(text)
        elif text:
            call.has_input = True
            self._writer.piece(BlockKind.TOOL_USE, text)

    def _end_call(self, call: _Call) -> None:
        if call.is_over:
            return
        call.is_over = True
        if call.is_eager:
            if not call.has_input:
                self._writer.piece(BlockKind.TOOL_USE, _NO_INPUT)
            self._close()
            self.has_called = True
            return
        text, call.pieces = "".join(call.pieces), []
        if _is_broken(text):
            self._text(BlockKind.TEXT, text)  # an engine's own reading of it: what it wrote is all there is
            return
        self._begin(BlockKind.TOOL_USE, call.id, call.name)
        self._writer.piece(BlockKind.TOOL_USE, text if text.strip() else _NO_INPUT)
        self._close()
        self.has_called = True

    def _drop(self, call: _Call) -> None:
        call.is_over = True
        call.pieces = []
        if call.is_eager:
            self._close()

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> None:
        self._close()
        self._held = ""
        self.open = kind
        self.blocks += 1
        self._writer.begin(kind, call_id, name)

    def _close(self) -> None:
        if self.open is not None:
            self._writer.end(self.open)
            self.open = None


def _is_broken(text: str) -> bool:
    """Return whether this is no input of a call: neither nothing nor a JSON object."""
    try:
        return bool(text.strip()) and not isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return True


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
            begin = message_start(self._id, self._answer.request.model, self._usage())
        if events:
            if isinstance(last := events[-1], Finished):
                self._finished = last
            _take(self._order, events)
        return begin + self._blocks.taken()

    def splice(self) -> tuple[bytes, bytes] | None:
        return self._blocks.ends() if self._is_spliced and self._order.open is BlockKind.TEXT else None

    def end(self, *, with_usage: bool) -> bytes:
        """Return the last events; every stream of this API ends with its usage."""
        begin = b"" if self._has_begun else message_start(self._id, self._answer.request.model, self._usage())
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
        start = message_start(self._id, self._answer.request.model, self._usage())
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
            answer.request.model,
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
