"""What flows through the answer pipeline: events of one choice, in the order in which its client sees them.

A source turns what workers send into events (`TokenSource`; `text_generation` for models that take text), the parsing stage
turns text into reasoning and tool calls, and a renderer (`apis/`) turns events into the bytes of its API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, final

from msgspec import Struct

from dynamo.frontend.pipeline.choice import Delta
from dynamo.text.output import Content, OutputEvent

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


class TokenSource:
    """Events from the deltas of a model that takes token ids."""

    __slots__ = ("_wants_logprobs",)

    def __init__(self, *, wants_logprobs: bool) -> None:
        self._wants_logprobs = wants_logprobs

    def outputs(self, deltas: Sequence[Delta]) -> list[ChoiceOutput]:
        """Return one output for each delta."""
        return [self._output(delta) for delta in deltas]

    def _output(self, delta: Delta) -> ChoiceOutput:
        from_text = (Content(delta.text),) if delta.text else ()
        if delta.finish_reason is None and not self._wants_logprobs:  # nearly every delta
            return ChoiceOutput(delta.choice, from_text, delta.token_ids, delta.engine_data)
        events: list[Event] = [*from_text]
        if self._wants_logprobs and (delta.log_probs is not None or delta.top_logprobs):
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
