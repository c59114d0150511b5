"""Gathers the events of an answer that goes out as one body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from dynamo.frontend.pipeline.events import ChoiceOutput, Event, Finished, Logprobs
from dynamo.text.output import Content, Joined, joined


class CollectedChoice(Struct, eq=False):
    """One choice of the answer."""

    outputs: list[Sequence[Event]] = []  # of each wake-up, in the order in which they came
    finished: Finished | None = None
    logprobs: list[Logprobs] = []  # those that are not written yet
    scores: list[Sequence[bytes]] = []
    """Written log probabilities, in the pieces that their API makes of them."""
    token_ids: list[int] = []
    engine_data: dict[str, object] | None = None

    def add(self, output: ChoiceOutput) -> None:
        self.token_ids += output.token_ids
        if output.engine_data is not None:
            self.engine_data = merged(self.engine_data, output.engine_data)
        for event in output.events:
            if type(event) is Logprobs:
                self.logprobs.append(event)
            elif type(event) is Finished:
                self.finished = event
        if output.events:
            self.outputs.append(output.events)

    def take_logprobs(self) -> list[Logprobs]:
        """Return the log probabilities that are not written yet, and let go of them."""
        found, self.logprobs = self.logprobs, []
        left = len(found)
        for place in reversed(range(len(self.outputs))):
            if not left:
                break
            events = self.outputs[place]
            kept = [event for event in events if type(event) is not Logprobs]
            left -= len(events) - len(kept)
            self.outputs[place] = kept
        return found

    def joined(self) -> Joined:
        """Return its text, reasoning and calls."""
        return joined(
            event for events in self.outputs for event in events if not isinstance(event, Logprobs | Finished)
        )

    def plain_text(self) -> str | None:
        """Return its text, where it is nothing but a text with a reason for its end; None: it is more, or less."""
        if self.finished is None or self.finished.stop_reason is not None or self.scores:
            return None
        shown = [event for events in self.outputs for event in events if event is not self.finished]
        texts = [event.text for event in shown if type(event) is Content]
        return "".join(texts) if len(texts) == len(shown) else None


class CollectedAnswer:
    """All choices of the answer."""

    __slots__ = ("choices", "engine_data", "stop_reason")

    def __init__(self, choices: int) -> None:
        self.choices = [CollectedChoice() for _ in range(choices)]
        self.engine_data: dict[str, object] | None = None
        self.stop_reason: str | int | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all choices."""
        return [token for choice in self.choices for token in choice.token_ids]

    def add(self, outputs: Sequence[ChoiceOutput]) -> None:
        """Take over the events of one wake-up."""
        for output in outputs:
            choice = self.choices[output.choice]
            choice.add(output)
            if choice.finished is not None:
                self.stop_reason = choice.finished.stop_reason
            if output.engine_data is not None:
                self.engine_data = merged(self.engine_data, output.engine_data)


def merged(first: Mapping[str, object] | None, second: Mapping[str, object] | None) -> dict[str, object] | None:
    """Return the members of both; those of the second win."""
    if first is None and second is None:
        return None
    return {**(first or {}), **(second or {})}
