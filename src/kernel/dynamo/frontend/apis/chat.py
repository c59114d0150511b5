"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import PROMPT_LOGPROBS, Answer, GenerationApi, Renderer, RenderOptions
from dynamo.frontend.pipeline.collector import CollectedAnswer, CollectedChoice
from dynamo.frontend.pipeline.events import ChoiceOutput, Finished, Logprobs
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.escaping import json_line, json_text
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.requests import ChatRequest, decode_chat, validate_chat
from dynamo.protocol.openai.responses import (
    FinishedChoice,
    chat_body,
    chat_logprobs,
    plain_chat_body,
    tool_call,
    written_chat_logprobs,
)
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.protocol.openai.sse import DONE, ChatStream, named_event
from dynamo.text.output import CallArguments, CallBegan, CallDropped, CallEnded, Content, Reasoning

_NO_CONTENT: Final = b'"content":""'


class ChatApi(GenerationApi[ChatRequest]):
    """Chat completions."""

    endpoint = "chat_completions"
    id_prefix = "chatcmpl-"
    model_type = ModelType.Chat

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> ChatRequest:
        return decode_chat(body, ignore_unsupported=ignore_unsupported, limits=limits)

    def validate(self, request: ChatRequest) -> None:
        validate_chat(request)

    def prepare(
        self,
        preprocessor: Preprocessor,
        request: ChatRequest,
        effects: HeaderEffects,
        model: ServedModel,
        timer: StageTimer,
    ) -> Coroutine[None, None, tuple[Plan, str | None]]:
        return preprocessor.chat(request, effects, model, timer)

    def renderer(self, answer: Answer, options: RenderOptions) -> Renderer:
        return _ChatRenderer(answer, options)


@lru_cache(maxsize=16)
def _member_name(name: str) -> bytes:
    """Return the beginning of a JSON member; there is one name in each frontend."""
    return json_text(name) + b":"


class _ChatRenderer(Renderer):
    """Text, reasoning and tool calls in members of their own."""

    def __init__(self, answer: Answer, options: RenderOptions) -> None:
        super().__init__(answer, options)
        dispatches = options.dispatches_calls or options.dispatches_reasoning
        self._dispatch = DispatchEvents(options) if dispatches else None
        self._is_plain = not (options.continuous_usage or answer.wants_nvext or answer.wants_members or dispatches)
        self._has_begun = False
        self._is_spliced = self._is_plain and not answer.wants_logprobs and answer.work.plan.parsing is None
        self._chunks: ChatStream | None = None
        self._calls: dict[int, int] = {}  # how many began, by choice
        self._reasoning_head = _member_name(options.reasoning_field)
        as_text = answer.request.return_tokens_as_token_ids is not True
        is_alone = answer.wants_logprobs and as_text and not answer.has_alternatives
        self._one_token_logprobs = answer.model.text.logprob_pieces.line if is_alone else None

    def stream(self, output: ChoiceOutput) -> bytes:
        events = output.events
        if not self._is_plain or len(events) > 2:
            return self._in_full(output)
        # Nearly every output: nothing yet, or one piece of text, or the end of the choice.
        if not events:
            return b""
        first, last = events[0], events[-1]
        text = first.text if isinstance(first, Content) else ""
        if first is last:
            if isinstance(first, Content):
                return self._opened().delta(output.choice, text)
            if isinstance(first, Reasoning):
                return self._opened().plain_member(output.choice, self._reasoning_head, first.text)
        if isinstance(last, Finished) and last.stop_reason is None and (text or first is last):
            return self._opened().delta(output.choice, text, finish_reason=self._reason(last))
        if text and isinstance(last, Logprobs) and (logprobs := self._logprobs((last,))) is not None:
            return self._opened().scored(output.choice, text, logprobs)
        return self._in_full(output)

    def splice(self) -> tuple[bytes, bytes] | None:
        return self._opened().plain_ends() if self._is_spliced else None

    def end(self, *, with_usage: bool) -> bytes:
        usage = self._answer.usage() if with_usage else None
        return DONE if usage is None else self._opened().usage_chunk(usage) + DONE

    def routed(self, nvext: bytes) -> bytes:
        return self._opened().members(0, b"", nvext=nvext) + DONE

    def write_scores(self, index: int, choice: CollectedChoice) -> None:
        if not any(each.ready for each in choice.logprobs):  # which a worker writes, as one object
            items = [item for each in choice.take_logprobs() for item in self._answer.logprob_items(each)]
            if items:
                choice.scores.append((json_line(items)[1:-1],))

    def collect(self, collected: CollectedAnswer) -> bytes:
        answer, only = self._answer, collected.choices[0]
        if self._is_plain and len(collected.choices) == 1 and (text := only.plain_text()) is not None:
            usage, reason = answer.usage(), self._reason(cast(Finished, only.finished))
            return plain_chat_body(answer.id, int(answer.received_at), answer.request.model, text, reason, usage)
        return chat_body(
            answer.id,
            int(answer.received_at),
            answer.request.model,
            [self._choice(index, choice) for index, choice in enumerate(collected.choices)],
            answer.usage(),
            nvext=self._collected_nvext(collected),
            reasoning_field=self._options.reasoning_field,
            beside=self._collected_members(collected),
        )

    def _collected_members(self, collected: CollectedAnswer) -> dict[str, object]:
        """Return vLLM's members of the whole answer, which are about its prompt."""
        members = self._prompt_members(0)
        if self._answer.request.prompt_logprobs is not None:
            members[PROMPT_LOGPROBS] = (collected.choices[0].engine_data or {}).get(PROMPT_LOGPROBS)
        return members

    def _choice(self, index: int, choice: CollectedChoice) -> FinishedChoice:
        found = choice.joined()
        is_all_text = not found.reasoning and not found.calls
        return FinishedChoice(
            index,
            found.content or ("" if is_all_text else None),
            None if choice.finished is None else self._reason(choice.finished),
            logprobs=written_chat_logprobs(choice.scores) if choice.scores else self._logprobs(choice.logprobs),
            reasoning_content=found.reasoning or None,
            tool_calls=[tool_call(call.id or "", call.name, call.arguments) for call in found.calls] or None,
            beside=self._members(choice.token_ids, choice.finished),
        )

    def _reason(self, finished: Finished) -> str:
        """Return the word for the end. A function that was named ends with "stop", as at OpenAI and vLLM: it was no choice
        of the model's to call it.
        """
        request = self._answer.request
        is_named = isinstance(request, ChatRequest) and bool(request.forced_choice)
        return "stop" if is_named and finished.reason == "tool_calls" else finished.reason

    def _opened(self) -> ChatStream:
        """Return the chunks' fixed bytes; made late, as a model that takes text brings its own id."""
        if self._chunks is None:
            answer = self._answer
            self._chunks = ChatStream(answer.id, int(answer.received_at), answer.request.model, n=answer.choices)
        return self._chunks

    def _in_full(self, output: ChoiceOutput) -> bytes:
        """Return the chunks of an output with everything its client requests: one for all text, one for each call or piece
        of one. Log probabilities and extensions go with the first chunk, the reason with the last."""
        answer, chunks = self._answer, self._opened()
        beside = b"" if self._dispatch is None else self._dispatch.events(output)
        deltas, found, finished = self._read(output)
        logprobs = self._logprobs(found)
        if not deltas and logprobs is None and finished is None:
            self._hold(output)
            return beside
        output = self._with_held(output)
        usage = answer.usage() if self._options.continuous_usage else None
        if not deltas:
            deltas = [b"" if chunks.has_role(output.choice) else _NO_CONTENT]
        written = [beside]
        for position, members in enumerate(deltas):
            is_first, is_end = position == 0, position == len(deltas) - 1 and finished is not None
            nvext = None
            if answer.wants_nvext:
                nvext = answer.nvext(
                    finished=is_end,
                    stop_reason=finished.stop_reason if is_end and finished is not None else None,
                    token_ids=output.token_ids if is_first else None,
                    engine_data=output.engine_data if is_first else None,
                )
            members_beside = self._members(
                output.token_ids if is_first else (),
                finished if is_end else None,
                output.engine_data if is_first else None,
            )
            behind = {} if self._has_begun else self._prompt_members(output.choice)
            if (scores := members_beside.pop(PROMPT_LOGPROBS, None)) is not None:
                behind[PROMPT_LOGPROBS] = scores
            self._has_begun = True
            written.append(
                chunks.members(
                    output.choice,
                    members,
                    finish_reason=self._reason(finished) if is_end and finished is not None else None,
                    logprobs=logprobs if is_first else None,
                    usage=usage,
                    nvext=nvext,
                    beside=_joined_members(members_beside),
                    behind=_joined_members(behind),
                )
            )
        return b"".join(written)

    def _read(self, output: ChoiceOutput) -> tuple[list[bytes], list[Logprobs], Finished | None]:
        """Return the deltas' members as JSON without braces, the log probabilities, and the end."""
        text = reasoning = ""
        found: list[Logprobs] = []
        finished: Finished | None = None
        pieces: list[JsonObject] = []
        is_open = False  # the last piece takes more arguments
        began = self._calls.get(output.choice, 0)
        for event in output.events:
            match event:
                case Content():
                    text += event.text
                case Reasoning():
                    reasoning += event.text
                case CallBegan(name, call_id):
                    pieces.append({"index": began, **tool_call(call_id or "", name, "")})
                    began += 1
                    is_open = True
                case CallArguments(said, call):
                    index = began - 1 if call is None else call
                    if not is_open or pieces[-1]["index"] != index:  # of a call that began in an earlier chunk
                        pieces.append({"index": index, "function": {"arguments": ""}})
                        is_open = True
                    pieces[-1]["function"]["arguments"] += said
                case CallEnded() | CallDropped():  # a dropped one stays unfinished: its client has seen of it
                    is_open = False
                case Logprobs():
                    found.append(event)
                case Finished():
                    finished = event
        self._calls[output.choice] = began
        members = [self._reasoning_head + json_text(reasoning)] if reasoning else []
        if text:
            members.append(b'"content":' + json_text(text))
        return [b",".join(members)] * bool(members) + [_call_members(piece) for piece in pieces], found, finished

    def _logprobs(self, found: Sequence[Logprobs]) -> bytes | None:
        """Return the JSON of log probabilities; None when there are none."""
        if not found:
            return None
        first, line = found[0], self._one_token_logprobs
        if (
            line is not None
            and len(found) == 1
            and first.log_probs is not None
            and len(first.token_ids) == len(first.log_probs) == 1
            and not first.ready
            and (only := first.log_probs[0]) is not None
        ):
            return line(first.token_ids[0], only)
        ready = [one for each in found for one in each.ready]
        if ready:
            return json_line(_merged(ready, self._answer.request.requested_logprobs or 0))
        items = [item for each in found for item in self._answer.logprob_items(each)]
        return chat_logprobs(items) if items else None


def _joined_members(members: Mapping[str, object]) -> bytes:
    """Return members as they stand behind others in an object."""
    return b"," + json_line(members)[1:-1] if members else b""


def _call_members(piece: dict[str, object]) -> bytes:
    """Return the member of one piece of a call; the first piece also has an empty text, as in 1.6.1."""
    content = _NO_CONTENT + b"," if "id" in piece else b""
    return content + b'"tool_calls":[' + json_line(piece) + b"]"


def _merged(parts: Sequence[Mapping[str, Any]], alternatives: int) -> JsonObject:
    """Return log probability objects of a worker as one, with no more alternatives than were requested."""
    content = [
        {**item, "top_logprobs": (item.get("top_logprobs") or [])[:alternatives]}
        for part in parts
        for item in part.get("content") or ()
    ]
    return {**parts[-1], "content": content}


TOOL_CALL_DISPATCH: Final = "tool_call_dispatch"
REASONING_DISPATCH: Final = "reasoning_dispatch"


class _OpenChoice:
    """What is not complete yet of one choice."""

    __slots__ = ("arguments", "call_id", "name", "reasoning")

    def __init__(self) -> None:
        self.call_id = self.name = ""
        self.arguments: list[str] = []
        self.reasoning: list[str] = []


class DispatchEvents:
    """Gathers calls and reasoning until they are complete."""

    __slots__ = ("_choices", "_options")

    def __init__(self, options: RenderOptions) -> None:
        self._options = options
        self._choices: dict[int, _OpenChoice] = {}

    def events(self, output: ChoiceOutput) -> bytes:
        """Return the events of what `output` completes; b"" when that is nothing."""
        choice = self._choices.get(output.choice)
        if choice is None:
            choice = self._choices[output.choice] = _OpenChoice()
        found: list[bytes] = []
        if self._options.dispatches_reasoning:
            found.append(self._reasoning(output, choice))
        if self._options.dispatches_calls:
            for event in output.events:
                match event:
                    case CallBegan(name, call_id):
                        choice.call_id, choice.name, choice.arguments = call_id or "", name, []
                    case CallArguments(text):
                        choice.arguments.append(text)
                    case CallEnded():
                        call = tool_call(choice.call_id, choice.name, "".join(choice.arguments))
                        data = json_line({"choice_index": output.choice, "tool_call": call})
                        found.append(named_event(TOOL_CALL_DISPATCH, data))
        return b"".join(found)

    def _reasoning(self, output: ChoiceOutput, choice: _OpenChoice) -> bytes:
        """Return the whole reasoning, once something else follows it or the choice has ended."""
        choice.reasoning += [event.text for event in output.events if isinstance(event, Reasoning)]
        has_ended = any(isinstance(event, Finished) for event in output.events)
        has_more = not has_ended and all(isinstance(event, Reasoning | Logprobs) for event in output.events)
        if has_more or not choice.reasoning:
            return b""
        reasoning, choice.reasoning = "".join(choice.reasoning), []
        data = json_line({"index": output.choice, "reasoning_content": reasoning})
        return named_event(REASONING_DISPATCH, data)
