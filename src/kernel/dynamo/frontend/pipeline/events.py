"""What flows through the answer pipeline: events of one choice, in the order in which its client sees them.

A source turns what workers send into events (`TokenSource`; `text_generation` for models that take text), the parsing stage
turns text into reasoning and tool calls, and a renderer (`apis/`) turns events into the bytes of its API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, final

from msgspec import Struct

from dynamo.frontend.pipeline.choice import Delta
from dynamo.frontend.pipeline.parsing import OutputPlan, ReasoningCounter
from dynamo.frontend.pipeline.plan import WorkRequest
from dynamo.text.output import CallBegan, CallEnded, Content, OutputEvent
from dynamo.text.output_parser import OutputParser
from dynamo.text.tokenizer import Tokenizer

T = TypeVar("T")


@final
class Logprobs(Struct, frozen=True):
    """Log probabilities of the tokens since the last such event of the choice."""

    token_ids: Sequence[int] = ()
    log_probs: Sequence[float | None] | None = None  # None at a position: the engine gave none there
    top_logprobs: Sequence[Sequence[Mapping[str, Any]]] | None = None
    ready: tuple[Mapping[str, Any], ...] = ()  # instead of those: objects of the API, from a model that takes text

    def then(self, later: Logprobs) -> Logprobs:
        """Return these and `later` in one."""
        return Logprobs(
            [*self.token_ids, *later.token_ids],
            _joined(self.log_probs, later.log_probs, len(self.token_ids), None),
            _joined(self.top_logprobs, later.top_logprobs, len(self.token_ids), ()),
            self.ready + later.ready,
        )


@final
class Finished(Struct, frozen=True):
    """The end of the choice; no event of it follows."""

    reason: str  # "stop", "length", "content_filter", "tool_calls"
    stop_reason: str | int | None = None  # the stop string or token that ended it


Event: TypeAlias = OutputEvent | Logprobs | Finished


class ChoiceOutput(Struct, frozen=True):
    """The events of one choice in one wake-up. They share one chunk where the API allows it."""

    choice: int
    events: Sequence[Event]
    token_ids: Sequence[int] = ()  # those the events (or what is still held back) came from
    engine_data: Mapping[str, Any] | None = None


class TokenSource(Struct, eq=False):
    """Events from the deltas of a model that takes token ids."""

    wants_logprobs: bool

    def outputs(self, deltas: Sequence[Delta]) -> list[ChoiceOutput]:
        """Return one output for each delta."""
        return [self._output(delta) for delta in deltas]

    def _output(self, delta: Delta) -> ChoiceOutput:
        from_text = (Content(delta.text),) if delta.text else ()
        if delta.finish_reason is None and not self.wants_logprobs:  # nearly every delta
            return ChoiceOutput(delta.choice, from_text, delta.token_ids, delta.engine_data)
        events: list[Event] = [*from_text]
        if self.wants_logprobs and (delta.log_probs is not None or delta.top_logprobs):
            events.append(Logprobs(delta.token_ids, delta.log_probs, delta.top_logprobs))
        if delta.finish_reason is not None:
            events.append(Finished(delta.finish_reason, delta.stop_reason))
        return ChoiceOutput(delta.choice, events, delta.token_ids, delta.engine_data)


def _joined(first: Sequence[T] | None, second: Sequence[T] | None, length: int, absent: T) -> Sequence[T] | None:
    """Return both in one; `first` stands for `length` tokens, whether it has as many or not."""
    if second is None:
        return first
    head = list(first or ())[:length]
    return [*head, *[absent] * (length - len(head)), *second]


class _ParsedChoice:
    """How far one choice has been read."""

    __slots__ = ("complete_calls", "logprobs", "parser")

    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser
        self.complete_calls = 0
        self.logprobs: Logprobs | None = None  # of text that shows nothing yet


class ParsingStage:
    """Events in, events out. Only chat answers are parsed."""

    __slots__ = ("_choices", "_counters", "_counts_reasoning", "_plan", "_tokenizer", "_work")

    def __init__(self, plan: OutputPlan, work: WorkRequest, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: None where the model takes text, and there are no tokens to count."""
        self._plan, self._work, self._tokenizer = plan, work, tokenizer
        self._choices: dict[int, _ParsedChoice] = {}
        self._counters: dict[int, ReasoningCounter] = {}
        self._counts_reasoning = plan.has_reasoning and tokenizer is not None
        if self._counts_reasoning:
            work.tally.reasoning_tokens = 0

    def outputs(self, outputs: Sequence[ChoiceOutput]) -> list[ChoiceOutput]:
        """Return what the same wake-up shows once its text is read."""
        return [self._output(output) for output in outputs]

    def _output(self, output: ChoiceOutput) -> ChoiceOutput:
        choice = self._choices.get(output.choice)
        if choice is None:
            choice = self._choices[output.choice] = _ParsedChoice(self._plan.parser())
        if self._counts_reasoning and output.token_ids:
            self._count_reasoning(output)
        idle = choice.parser.idle
        if idle is not None and len(output.events) == 1 and choice.logprobs is None:
            only = output.events[0]
            if isinstance(only, Content) and idle.characters.isdisjoint(only.text):  # nearly every output
                if idle.kind is Content:
                    return output
                return ChoiceOutput(output.choice, (idle.kind(only.text),), output.token_ids, output.engine_data)
        events: list[Event] = []
        finished: Finished | None = None
        for event in output.events:
            if isinstance(event, Content):
                self._add(choice, events, choice.parser.push(event.text))
            elif isinstance(event, Logprobs):
                choice.logprobs = event if choice.logprobs is None else choice.logprobs.then(event)
            elif isinstance(event, Finished):
                self._add(choice, events, choice.parser.finish(is_cut=event.reason != "stop"))
                finished = event
            else:  # an engine that reads its own text
                self._add(choice, events, choice.parser.kept([event]))
        if choice.logprobs is not None and (events or finished is not None):
            events.append(choice.logprobs)
            choice.logprobs = None
        if finished is not None:
            # An answer that ended by itself and called is "tool_calls"; one that was cut off stays cut off.
            is_call = finished.reason == "stop" and choice.complete_calls > 0
            events.append(Finished("tool_calls", finished.stop_reason) if is_call else finished)
        return ChoiceOutput(output.choice, events, output.token_ids, output.engine_data)

    def _add(self, choice: _ParsedChoice, events: list[Event], found: Sequence[OutputEvent]) -> None:
        for event in found:
            if isinstance(event, CallEnded):
                choice.complete_calls += 1
            elif isinstance(event, CallBegan) and event.id is None:
                event = CallBegan(event.name, self._plan.new_call_id())
            events.append(event)

    def _count_reasoning(self, output: ChoiceOutput) -> None:
        work, counter = self._work, self._counters.get(output.choice)
        if counter is None:
            tokenizer = self._tokenizer
            assert tokenizer is not None
            prompt = work.plan.prompts[output.choice // work.plan.choices]
            skip = work.plan.fields.output_options.skip_special_tokens
            counter = self._counters[output.choice] = self._plan.counter(
                tokenizer, prompt, skip_special_tokens=skip is None or bool(skip)
            )
        counted = counter.count(output.token_ids)
        if counted:
            work.tally.reasoning_tokens = (work.tally.reasoning_tokens or 0) + counted
