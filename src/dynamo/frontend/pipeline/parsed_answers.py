"""The two halves of a chat answer whose text is parsed: reasoning and tool calls in members of their own.

Both read the text through the same `OutputParser`, and what that says does not depend on how the text was cut: so a
streamed answer joined by its client is the unary one.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

from dynamo.frontend.apis.surfaces import Answer, ChunkWriter, UnaryAnswer
from dynamo.frontend.pipeline.generation import Delta
from dynamo.frontend.pipeline.parsing import OutputPlan, ReasoningCounter
from dynamo.protocol.openai.escaping import json_line, json_text
from dynamo.protocol.openai.responses import Choice, TokenLogprob
from dynamo.protocol.openai.sse import ChatStream, named_event
from dynamo.text.output import CallArguments, CallBegan, CallEnded, Content, Joiner, OutputEvent, Reasoning

__all__ = ["ParsedChunkWriter", "ParsedUnaryAnswer"]

TOOL_CALL_DISPATCH: Final = "tool_call_dispatch"
REASONING_DISPATCH: Final = "reasoning_dispatch"


def _new_call_id() -> str:
    return f"call-{uuid.uuid4()}"


def _finish_reason(reason: str | None, complete_calls: int) -> str | None:
    """An answer that ended by itself and called is "tool_calls"; one that was cut off stays cut off."""
    return "tool_calls" if reason == "stop" and complete_calls else reason


class _Counters:
    """The reasoning tokens of one answer, by choice."""

    __slots__ = ("_answer", "_by_choice", "_plan")

    def __init__(self, answer: Answer, plan: OutputPlan) -> None:
        self._answer, self._plan = answer, plan
        self._by_choice: dict[int, ReasoningCounter] = {}
        if plan.reasoning is not None and not answer.model.takes_text:  # which has no tokens to count
            answer.work.reasoning_tokens = 0

    def count(self, delta: Delta) -> None:
        work = self._answer.work
        if work.reasoning_tokens is None or not delta.token_ids:
            return
        counter = self._by_choice.get(delta.choice)
        if counter is None:
            skip = (work.body.get("output_options") or {}).get("skip_special_tokens")
            prompt = work.prompts[delta.choice // work.choices]
            counter = self._by_choice[delta.choice] = self._plan.counter(
                self._answer.model.text.tokenizer, prompt, skip_special_tokens=skip is None or bool(skip)
            )
        work.reasoning_tokens += counter.count(delta.token_ids)


class _StreamedChoice:
    """What has been told of one choice."""

    __slots__ = (
        "call_id",
        "calls",
        "complete_calls",
        "engine_data",
        "items",
        "name",
        "parser",
        "said",
        "thought",
        "token_ids",
    )

    def __init__(self, plan: OutputPlan) -> None:
        self.parser = plan.parser()
        self.calls = 0  # that began
        self.complete_calls = 0
        # Of the call at hand, for the dispatch event.
        self.call_id = self.name = ""
        self.said: list[str] = []
        self.thought: list[str] = []
        # Of deltas that showed nothing yet: they go out with the next chunk that does.
        self.items: list[TokenLogprob] = []
        self.token_ids: list[int] = []
        self.engine_data: dict[str, Any] | None = None


class ParsedChunkWriter(ChunkWriter):
    """Deltas to the bytes of one streamed answer, parsed on the way."""

    __slots__ = (
        "_chat",
        "_choices",
        "_counters",
        "_dispatches_calls",
        "_dispatches_reasoning",
        "_plan",
        "_reasoning_head",
    )

    def __init__(
        self,
        answer: Answer,
        plan: OutputPlan,
        *,
        continuous_usage: bool,
        reasoning_field: str,
        dispatches_calls: bool = False,
        dispatches_reasoning: bool = False,
    ) -> None:
        """`dispatches_*` also tell every complete call, and the whole reasoning, in a named event of their own."""
        super().__init__(answer, continuous_usage=continuous_usage)
        assert isinstance(self._stream, ChatStream)  # only chat answers are parsed
        self._chat = self._stream
        self._plan = plan
        self._counters = _Counters(answer, plan)
        self._choices: dict[int, _StreamedChoice] = {}
        self._reasoning_head = json_text(reasoning_field) + b":"
        self._dispatches_calls, self._dispatches_reasoning = dispatches_calls, dispatches_reasoning

    def splice(self) -> None:
        """Never: what a text is, only the parser can say."""
        return

    def write(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([self._parsed(delta) for delta in deltas])

    def _parsed(self, delta: Delta) -> bytes:
        choice = self._choices.get(delta.choice)
        if choice is None:
            choice = self._choices[delta.choice] = _StreamedChoice(self._plan)
        self._counters.count(delta)
        events = choice.parser.push(delta.text)
        if delta.finish_reason is not None:
            events += choice.parser.finish()
        elif self._is_plain and not self._dispatches_reasoning and len(events) < 2:
            # Nearly every delta: nothing yet, or one piece of text and nothing else to say.
            if not events:
                return b""
            if isinstance(events[0], Content):
                return self._chat.delta(delta.choice, events[0].text)
            if isinstance(events[0], Reasoning):
                return self._chat.members(delta.choice, self._reasoning_head + json_text(events[0].text))
        self._note(choice, delta)
        before: list[bytes] = []  # events of their own
        if self._dispatches_reasoning:
            before.append(self._reasoning_event(delta, choice, events))
        chunks = self._members(delta.choice, choice, events, before)
        if delta.finish_reason is None and not chunks:
            return b"".join(before)
        return b"".join((*before, self._chunks(delta, choice, chunks or [b""])))

    def _note(self, choice: _StreamedChoice, delta: Delta) -> None:
        answer = self._answer
        if answer.wants_logprobs:
            choice.items += answer.logprob_items(delta)
        if answer.wants_nvext:
            choice.token_ids += delta.token_ids
            if delta.engine_data is not None:
                choice.engine_data = {**(choice.engine_data or {}), **delta.engine_data}

    def _members(
        self, index: int, choice: _StreamedChoice, events: list[OutputEvent], dispatched: list[bytes]
    ) -> list[bytes]:
        """The members of the chunks that tell these events: one for all text, one for each call or piece of one."""
        chunks: list[bytes] = []
        text = "".join([event.text for event in events if isinstance(event, Content)])
        reasoning = "".join([event.text for event in events if isinstance(event, Reasoning)])
        if reasoning or text:
            members = [self._reasoning_head + json_text(reasoning)] if reasoning else []
            chunks.append(b",".join([*members, b'"content":' + json_text(text)] if text else members))
        pieces: list[dict[str, Any]] = []
        piece: dict[str, Any] | None = None
        for event in events:
            match event:
                case CallBegan(name):
                    choice.call_id, choice.name, choice.said = _new_call_id(), name, []
                    piece = {"index": choice.calls, **_call(choice.call_id, name, "")}
                    pieces.append(piece)
                    choice.calls += 1
                case CallArguments(said):
                    if piece is None:  # of a call that began in an earlier chunk
                        piece = {"index": choice.calls - 1, "function": {"arguments": ""}}
                        pieces.append(piece)
                    piece["function"]["arguments"] += said
                    if self._dispatches_calls:
                        choice.said.append(said)
                case CallEnded():
                    piece = None
                    choice.complete_calls += 1
                    if self._dispatches_calls:
                        dispatched.append(_call_event(index, choice))
                case Content() | Reasoning():
                    pass  # told above
        return chunks + [_call_members(piece) for piece in pieces]

    def _reasoning_event(self, delta: Delta, choice: _StreamedChoice, events: list[OutputEvent]) -> bytes:
        """The whole reasoning, once something else follows it or the choice has ended."""
        choice.thought += [event.text for event in events if isinstance(event, Reasoning)]
        has_more = delta.finish_reason is None and all(isinstance(event, Reasoning) for event in events)
        if has_more or not choice.thought:
            return b""
        thought, choice.thought = "".join(choice.thought), []
        return named_event(REASONING_DISPATCH, json_line({"index": delta.choice, "reasoning_content": thought}))

    def _chunks(self, delta: Delta, choice: _StreamedChoice, chunks: list[bytes]) -> bytes:
        """The chunks' bytes: log probabilities and extensions go with the first, the reason with the last."""
        answer, stream, index = self._answer, self._chat, delta.choice
        reason = _finish_reason(delta.finish_reason, choice.complete_calls)
        logprobs = answer.logprobs(index, choice.items) if choice.items else None
        choice.items = []
        written = []
        for position, members in enumerate(chunks):
            is_first, is_last = position == 0, position == len(chunks) - 1
            nvext = None
            if answer.wants_nvext and (is_first or (is_last and reason is not None)):
                nvext = answer.nvext(
                    finished=is_last and reason is not None,
                    stop_reason=delta.stop_reason if is_last else None,
                    token_ids=choice.token_ids if is_first else None,
                    engine_data=choice.engine_data if is_first else None,
                    first_token_seconds=self.first_token_seconds,
                )
            written.append(
                stream.members(
                    index,
                    members,
                    finish_reason=reason if is_last else None,
                    logprobs=logprobs if is_first else None,
                    usage=answer.usage() if self._with_usage else None,
                    nvext=nvext,
                )
            )
        choice.token_ids, choice.engine_data = [], None
        return b"".join(written)


def _call_members(piece: dict[str, Any]) -> bytes:
    """The first piece of a call also says that there is no text, as 1.6.1 does."""
    content = b'"content":"",' if "id" in piece else b""
    return content + b'"tool_calls":[' + json_line(piece) + b"]"


def _call_event(index: int, choice: _StreamedChoice) -> bytes:
    call = _call(choice.call_id, choice.name, "".join(choice.said))
    return named_event(TOOL_CALL_DISPATCH, json_line({"choice_index": index, "tool_call": call}))


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ParsedUnaryAnswer(UnaryAnswer):
    """Deltas gathered into one body, parsed as they arrive: a long answer at once would hold up all others."""

    __slots__ = ("_counters", "_parsers", "_parts")

    def __init__(self, answer: Answer, plan: OutputPlan) -> None:
        super().__init__(answer)
        self._counters = _Counters(answer, plan)
        self._parsers = [plan.parser() for _ in range(answer.choices)]
        self._parts = [Joiner() for _ in range(answer.choices)]

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._counters.count(delta)
            self._parts[delta.choice].add(self._parsers[delta.choice].push(delta.text))
            delta.text = ""
        super().add(deltas)

    def choice(self, index: int, text: str, finish_reason: str | None, logprobs: bytes | None) -> Choice:
        parts = self._parts[index]
        parts.add(self._parsers[index].finish())
        found = parts.result()
        return Choice(
            index,
            found.content or None,
            _finish_reason(finish_reason, sum(call.is_complete for call in found.calls)),
            logprobs=logprobs,
            reasoning_content=found.reasoning or None,
            tool_calls=[_call(_new_call_id(), call.name, call.arguments) for call in found.calls] or None,
        )
