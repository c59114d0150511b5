"""What came of one answer and when, noted while it is sent. Only for requests that are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from dynamo.frontend.pipeline.events import ChoiceOutput, Finished
from dynamo.frontend.pipeline.exchange import Exchange, PartSlot
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.runtime.observe.tracing import exports_content
from dynamo.text.output import CallArguments, CallBegan, Content, Reasoning

MAX_PARTS: Final = 200_000  # of one answer
MAX_CHARACTERS: Final = 8 * 1024 * 1024


class _Content:
    """What the parts of an answer hold."""

    __slots__ = ("_calls", "characters", "outputs")

    def __init__(self) -> None:
        self.outputs: list[str | dict[str, object]] = []
        self.characters = 0
        self._calls: dict[int, int] = {}  # choice -> calls that began

    def add(self, output: ChoiceOutput) -> None:
        """Note a part: a string where it is text alone, else an object in the form of a chat's delta."""
        text, reasoning, calls = "", "", list[JsonObject]()
        found: JsonObject = {}
        for event in output.events:
            if isinstance(event, Content):
                text += event.text
            elif isinstance(event, Reasoning):
                reasoning += event.text
            elif isinstance(event, CallBegan):
                number = self._calls.get(output.choice, 0)
                self._calls[output.choice] = number + 1
                function = {"name": event.name, "arguments": ""}
                calls.append({"index": number, "id": event.id, "type": "function", "function": function})
            elif isinstance(event, CallArguments):
                last = self._calls.get(output.choice, 1) - 1
                number = last if event.call is None else event.call
                calls.append({"index": number, "function": {"arguments": event.text}})
            elif isinstance(event, Finished):
                found["finish_reason"] = event.reason
        self.characters += len(text) + len(reasoning) + sum(len(each["function"]["arguments"]) for each in calls)
        if not (reasoning or calls or found):
            self.outputs.append(text)
            return
        if text:
            found["content"] = text
        if reasoning:
            found["reasoning_content"] = reasoning
        if calls:
            found["tool_calls"] = calls
        self.outputs.append(found)


class RequestTap:
    """One answer. The times are loop times; nothing is formatted before the answer has ended."""

    __slots__ = ("_at", "_choices", "_content", "_tokens", "agent_context", "body", "follows", "is_recorded", "request")

    def __init__(
        self, request: object, agent: dict[str, object] | None, at: float, *, follows: bool, keeps_content: bool
    ) -> None:
        """`at`: when the request came. `follows`: notes the parts of the answer. `keeps_content`: with what they hold."""
        self.request, self.agent_context, self.follows = request, agent, follows
        self.is_recorded = True  # False: it is for the span of the request alone
        self.body: bytes | None = None  # of the whole answer, as one body
        self._at = [at]  # and when each part of the answer came
        self._tokens: list[int] = []
        self._choices: list[int] = []
        self._content = _Content() if keeps_content else None

    def add(self, outputs: Sequence[ChoiceOutput], tokens: Sequence[int], now: float) -> None:
        """Note what one wake-up brought: the outputs and tokens of some choices, in the same order."""
        for position, output in enumerate(outputs):
            if len(self._tokens) >= MAX_PARTS:
                return
            self._at.append(now)
            self._tokens.append(tokens[position] if position < len(tokens) else 0)
            self._choices.append(output.choice)
            if self._content is not None and self._content.characters < MAX_CHARACTERS:
                self._content.add(output)

    def folded(self) -> JsonObject:
        """Return the parts that were kept as one chat completion, whichever API they were for."""
        choices: dict[int, JsonObject] = {}
        for number, output in zip(self._choices, () if self._content is None else self._content.outputs, strict=False):
            message = choices.setdefault(number, {"content": "", "finish_reason": None, "calls": {}})
            part: JsonObject = {"content": output} if isinstance(output, str) else output
            message["content"] += part.get("content", "")
            message["finish_reason"] = part.get("finish_reason", message["finish_reason"])
            if "reasoning_content" in part:
                message["reasoning_content"] = message.get("reasoning_content", "") + part["reasoning_content"]
            for call in part.get("tool_calls", ()):
                made = message["calls"].setdefault(
                    call["index"], {"id": call.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
                )
                made["function"]["name"] = made["function"]["name"] or call["function"].get("name", "")
                made["function"]["arguments"] += call["function"].get("arguments", "")
        return {
            "object": "chat.completion",
            "choices": [_folded_choice(number, choices[number]) for number in sorted(choices)],
        }

    @property
    def keeps_content(self) -> bool:
        """Whether it keeps what the parts of the answer hold."""
        return self._content is not None

    def timing(self, *, with_content: bool) -> dict[str, object]:
        """Return the parts as a record shows them: the first time counts from the request, each further one from the time before.

        A part of plain text is a string, any other an object in the form of a chat's delta.
        """
        at = self._at
        found: dict[str, object] = {
            "gaps_ms": [round((later - before) * 1000, 1) for before, later in pairwise(at)],
            "tokens": self._tokens,
        }
        if any(self._choices):
            found["choices"] = self._choices
        content = self._content
        if with_content and content is not None:
            found["outputs"] = content.outputs
        if len(self._tokens) >= MAX_PARTS or (content is not None and content.characters >= MAX_CHARACTERS):
            found["is_cut"] = True
        return found


TAP: Final[PartSlot[RequestTap]] = PartSlot("notes of the answer")
"""What notes the answer for a part, which keeps it here once the request is planned."""


def open_tap(exchange: Exchange, request: object, effects: HeaderEffects) -> RequestTap | None:
    """Return what notes the answer to a request, for a part or for its span; None: neither needs it."""
    tap = exchange.of(TAP)
    is_shown = exports_content() and exchange.context.current_span().is_recording
    if is_shown and (tap is None or not tap.keeps_content):
        is_recorded = tap is not None
        tap = RequestTap(request, effects.agent_context, exchange.arrival.at, follows=True, keeps_content=True)
        tap.is_recorded = is_recorded
    return tap


def _folded_choice(number: int, found: JsonObject) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": found["content"] or None}
    if "reasoning_content" in found:
        message["reasoning_content"] = found["reasoning_content"]
    if found["calls"]:
        message["tool_calls"] = [found["calls"][index] for index in sorted(found["calls"])]
    return {"index": number, "message": message, "finish_reason": found["finish_reason"]}
