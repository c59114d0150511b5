"""Named events beside the chunks of a chat stream, for clients that act on a whole call or the whole reasoning at once."""

from __future__ import annotations

from typing import Final

from dynamo.frontend.pipeline.api import RenderOptions
from dynamo.frontend.pipeline.events import ChoiceOutput, Finished, Logprobs
from dynamo.protocol.openai.escaping import json_line
from dynamo.protocol.openai.responses import tool_call
from dynamo.protocol.openai.sse import named_event
from dynamo.text.output import CallArguments, CallBegan, CallEnded, Reasoning

__all__ = ["DispatchEvents"]

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
