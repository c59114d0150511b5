"""Requests to models that take text: the worker gets the client's own body and yields OpenAI's chunks.

No template and no tokenizer. What is left to do here is to check the chunks, stop strings, and the counts: text, reasoning,
tool calls, log probabilities, usage and the id of the answer pass through.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from dynamo.errors import DynamoException, Unknown, revive
from dynamo.frontend.pipeline.events import ChoiceOutput, Event, Finished, Logprobs
from dynamo.frontend.pipeline.generation import Choice, Delta, GenerationModel, WorkRequest
from dynamo.protocol.finish import EngineFailed, normalise
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.plain_text import TextChunk, TextDelta, count, prompt_tokens, read_chunk
from dynamo.protocol.openai.requests import ChatRequest, CompletionRequest
from dynamo.router.failover import DispatchRequest
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import StreamItem
from dynamo.text.output import CallArguments, CallBegan, CallEnded, Content, Reasoning
from dynamo.text.stops import StopStrings

__all__ = ["TextSource", "TextWork", "text_prompts", "text_work"]

_TOKEN_ONLY: Final = ("prompt_logprobs", "stop_token_ids", "allowed_token_ids", "bad_words_token_ids")


class TextWork(WorkRequest):
    """A request to a text model: one body and one stream per prompt, whatever the number of choices."""

    __slots__ = ("_prompt_counts", "_usage_of", "bodies", "include_stop", "stops", "worker_answer_id")

    def __init__(
        self, request: ChatRequest | CompletionRequest, work: WorkRequest, bodies: list[dict[str, Any]]
    ) -> None:
        super().__init__(
            {},
            work.prompts,
            n=work.choices,
            pinned_instance_id=work.pinned_instance_id,
            retries=work.retries,
            overhead=work.overhead,
        )
        self.is_single = len(bodies) == 1
        self.bodies = bodies
        self.stops = work.body["stop_conditions"]["stop"] or []
        self.include_stop = request.include_stop_str_in_output is True
        self.worker_answer_id: str | None = None  # what the worker calls its answer
        # Until the worker reports usage the counts are bytes of UTF-8. Metrics need some count, clients never see it.
        self._prompt_counts = [prompt_tokens(body) for body in bodies]
        self.prompt_tokens = sum(self._prompt_counts)
        self._usage_of: set[int] = set()  # the prompts with a usage of the worker's own

    @property
    def streams_per_prompt(self) -> int:
        return 1

    @property
    def is_usage_known(self) -> bool:
        """Whether the worker has reported usage for every prompt."""
        return len(self._usage_of) == len(self.bodies)

    def open_choice(self, model: GenerationModel, context: Context, index: int, prompt: list[int]) -> Choice:
        return _TextStream(model, self, context, index)

    def has_usage(self, prompt_index: int) -> bool:
        """Whether the worker has reported usage for this prompt."""
        return prompt_index in self._usage_of

    def note_usage(self, prompt_index: int, usage: Mapping[str, Any]) -> None:
        """Take over what the worker reports of a prompt, but for the tokens of its answer."""
        self._usage_of.add(prompt_index)
        prompt = usage.get("prompt_tokens")
        if isinstance(prompt, int):
            self.prompt_tokens += prompt - self._prompt_counts[prompt_index]
            self._prompt_counts[prompt_index] = prompt
        if isinstance(cached := _detail(usage, "prompt_tokens_details", "cached_tokens"), int):
            self.note_cached(prompt_index, cached)
        if isinstance(reasoning := _detail(usage, "completion_tokens_details", "reasoning_tokens"), int):
            self.reasoning_tokens = reasoning if self.is_single else (self.reasoning_tokens or 0) + reasoning


def _detail(usage: Mapping[str, Any], group: str, name: str) -> Any:
    details = usage.get(group)
    return details.get(name) if isinstance(details, Mapping) else None


def text_prompts(request: CompletionRequest) -> list[str]:
    """The batch. Raises RequestRejected (400) for token ids."""
    prompts = request.prompts()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise _needs_tokens("prompt", "must be text")
    return texts


def text_work(request: ChatRequest | CompletionRequest, work: WorkRequest) -> TextWork:
    """`work` (for its routing and retries) as work for a text model.

    Raises RequestRejected (400) naming the field that only token ids could serve.
    """
    if request.token_data is not None:
        raise _needs_tokens("nvext.token_data", "cannot be served")
    stops = work.body["stop_conditions"]
    for name in _TOKEN_ONLY:
        if getattr(request, name):
            raise _needs_tokens(name, "cannot be served")
    if stops["stop_token_ids"]:
        raise _needs_tokens("stop", "must be text")
    body = {name: value for name, value in msgspec.to_builtins(request).items() if value is not None}
    body["stream"] = True
    asked = {name: value for name, value in (body.get("stream_options") or {}).items() if value is not None}
    body["stream_options"] = {"include_usage": True, **asked}  # an answer as one body has usage, too
    bodies = [body]
    if isinstance(request, CompletionRequest):
        bodies = [{**body, "prompt": prompt} for prompt in text_prompts(request)]
    return TextWork(request, work, bodies)


def _needs_tokens(field: str, verdict: str) -> RequestRejected:
    return RequestRejected(400, f"`{field}` {verdict}: this model takes and gives text, not token ids", param=field)


class TextDeltas(Delta):
    """What one wake-up brought of all choices of one prompt."""

    __slots__ = ("outputs",)

    def __init__(self, choice: int) -> None:
        super().__init__(choice)
        self.outputs: list[ChoiceOutput] = []


class TextSource:
    """Events from the deltas of a model that takes text."""

    __slots__ = ("_answer_id", "_work")

    def __init__(self, work: TextWork, answer_id: Callable[[str], None]) -> None:
        """`answer_id` is called with what the worker calls its answer, before the first event."""
        self._work = work
        self._answer_id: Callable[[str], None] | None = answer_id

    def outputs(self, deltas: Sequence[Delta]) -> list[ChoiceOutput]:
        """Return what the chunks of one wake-up hold."""
        if self._answer_id is not None and self._work.worker_answer_id is not None:
            self._answer_id(self._work.worker_answer_id)
            self._answer_id = None
        return [output for delta in deltas if isinstance(delta, TextDeltas) for output in delta.outputs]


class _OpenChoice:
    """How far one choice has come."""

    __slots__ = ("_calls", "has_run_on", "index", "is_over", "stops")

    def __init__(self, index: int, stops: StopStrings | None) -> None:
        self.index = index
        self.stops = stops
        self.is_over = False
        self.has_run_on = False  # the worker sent more text behind a stop string
        self._calls: dict[int, int] = {}  # the worker's number of a call -> its place among those that began

    def events(self, delta: TextDelta) -> list[Event]:
        """Return the events of a delta. Once a stop string or a reason came, `is_over` is set."""
        events: list[Event] = []
        if delta.reasoning:
            events.append(Reasoning(delta.reasoning))
        text, matched = (delta.text, None) if self.stops is None else self.stops.push(delta.text)
        if delta.finish_reason is not None and matched is None and self.stops is not None:
            text += self.stops.finish()
        if text:
            events.append(Content(text))
        for position, call in enumerate(delta.tool_calls):
            events += self._call(position, call)
        if delta.logprobs is not None:
            events.append(Logprobs(ready=(delta.logprobs,)))
        if matched is not None or delta.finish_reason is not None:
            self.is_over = True
            if self._calls:
                events.append(CallEnded())
            reason = "stop" if matched is not None else _finish_reason(delta.finish_reason or "")
            events.append(Finished(reason, matched))
        return events

    def _call(self, position: int, call: Mapping[str, Any]) -> list[Event]:
        number, function = call.get("index"), call["function"]
        number = position if number is None else number
        events: list[Event] = []
        if number not in self._calls:
            if self._calls:
                events.append(CallEnded())
            self._calls[number] = len(self._calls)
            events.append(CallBegan(function.get("name") or "", call.get("id") or f"call-{uuid.uuid4()}"))
        if arguments := function.get("arguments"):
            events.append(CallArguments(arguments, self._calls[number]))
        return events


class _TextStream(Choice):
    """The choices of one prompt, whose stream is made of OpenAI's chunks."""

    __slots__ = ("_choices", "_text_work")

    def __init__(self, model: GenerationModel, work: TextWork, context: Context, index: int) -> None:
        self._text_work = work
        request = DispatchRequest(
            work.bodies[index // work.choices],
            (),
            record=work,
            timer=work.overhead,
            limits=work.limits,
            pinned_instance_id=work.pinned_instance_id,
            takes_text=True,
            stall_detector=work.watch,
        )
        stops, include = work.stops, work.include_stop
        self._choices = [
            _OpenChoice(index + number, StopStrings(stops, include=include) if stops else None)
            for number in range(work.choices)
        ]
        super().__init__(model, work, context, index, request)

    async def next(self) -> Delta | None:
        """Return everything new; None once all choices have ended. A worker lost behind its whole answer is no failure."""
        try:
            return await super().next()
        except DynamoException:
            if not self._request.is_complete:
                raise
            self._is_over = True
            return None

    async def push(self, accept: Callable[[list[Delta]], bool], plain: Callable[[str, int], bool] | None) -> None:
        """Call `accept` with what arrives. See `SingleGeneration.push`."""
        try:
            await super().push(accept, plain)
        except DynamoException:
            if not self._request.is_complete:
                raise
            self._is_over = True

    def _absorb(self, items: Sequence[StreamItem]) -> TextDeltas:
        delta, work, request = TextDeltas(self._index), self._text_work, self._request
        for item in items:
            chunk = _chunk_of(item)
            if work.worker_answer_id is None and work.is_single:
                work.worker_answer_id = chunk.id
            for one in chunk.deltas:
                if one.choice >= len(self._choices):
                    raise Unknown(f"the worker sent choice {one.choice} of a request for {len(self._choices)}")
                choice = self._choices[one.choice]
                if choice.is_over:  # cut by a stop string of the request
                    choice.has_run_on = choice.has_run_on or bool(one.text)
                    continue
                tokens = count(one.text) + count(one.reasoning)
                request.text_tokens += tokens
                delta.tokens += tokens
                work.completion_tokens += tokens
                if events := choice.events(one):
                    delta.outputs.append(ChoiceOutput(choice.index, events))
            if chunk.usage is not None:
                self._note_usage(chunk.usage)
        if all(choice.is_over for choice in self._choices):
            request.is_complete = True  # from here on only usage can follow
            if work.has_usage(self._prompt_index):
                self._is_over = True
                self.stream.finish()
            elif any(choice.has_run_on for choice in self._choices):
                self._is_over = True
                self.stream.stop()  # the worker does not look for the request's stop strings, and would go on
        return delta

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        self._text_work.note_usage(self._prompt_index, usage)
        completion = usage.get("completion_tokens")
        if isinstance(completion, int):
            self._work.completion_tokens += completion - self._request.text_tokens
            self._request.text_tokens = completion


def _chunk_of(item: StreamItem) -> TextChunk:
    """Return the chunk of an item. Raises the error that the item may carry, and Unknown for what is not a chunk."""
    if item.index >= 0:
        raise Unknown("a model that takes text sent token ids")
    envelope = item.extra or {}
    if envelope.get("event") == "error":
        raise revive(envelope.get("error") or {"message": "; ".join(envelope.get("comment") or ["unknown error"])})
    try:
        return read_chunk(envelope.get("data"))
    except ValueError as error:
        raise Unknown(f"the worker's chunk is invalid: {error}") from error


def _finish_reason(word: str) -> str:
    """Return OpenAI's word: an engine that reads its own tool calls may end with them."""
    if word in ("tool_calls", "function_call"):
        return "tool_calls"
    try:
        found = normalise(word)
    except (EngineFailed, TypeError) as error:
        raise Unknown(str(error)) from error
    return found if found in ("length", "content_filter") else "stop"
