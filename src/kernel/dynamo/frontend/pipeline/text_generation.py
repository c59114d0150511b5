"""Requests to models that take text: the worker gets the client's own body and yields OpenAI's chunks.

No template and no tokenizer. What is left to do here is to check the chunks, stop strings, and the counts: text, reasoning,
tool calls, log probabilities, usage and the id of the answer pass through.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from dynamo.errors import DynamoException, Unknown, revive
from dynamo.frontend.pipeline.choice import Choice, Delta
from dynamo.frontend.pipeline.events import ChoiceOutput, Event, Finished, Logprobs
from dynamo.frontend.pipeline.plain import PlainOutput
from dynamo.frontend.pipeline.plan import GenerationModel, Plan, Tally, WorkRequest, reported_count
from dynamo.protocol.finish import EngineFailed, normalise
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.plain_text import TextChunk, TextDelta, count, prompt_tokens, read_chunk
from dynamo.protocol.openai.requests import ChatRequest, CompletionRequest
from dynamo.protocol.worker_request import PlannedRequest, WorkerRequest
from dynamo.router.dispatch.failover import AnswerSoFar, DispatchRequest
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import StreamItem
from dynamo.text.output import CallArguments, CallBegan, CallEnded, Content, Reasoning
from dynamo.text.stops import StopStrings

_TOKEN_ONLY: Final = (
    "prompt_logprobs",
    "return_token_ids",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words_token_ids",
)


class TextTally(Tally, eq=False, kw_only=True):
    """Until the worker reports usage the counts are bytes of UTF-8: metrics need some count, clients never see it."""

    _prompt_counts: list[int]
    _reported: set[int] = msgspec.field(default_factory=set)  # the prompts with a usage of the worker's own
    worker_answer_id: str | None = None  # what the worker calls its answer

    @property
    def is_usage_known(self) -> bool:
        """Whether the worker has reported usage for every prompt."""
        return len(self._reported) == len(self._prompt_counts)

    def has_usage(self, prompt_index: int) -> bool:
        """Return whether the worker has reported usage for this prompt."""
        return prompt_index in self._reported

    def note_usage(self, prompt_index: int, usage: Mapping[str, object]) -> None:
        """Take over what the worker reports of a prompt, but for the tokens of its answer."""
        self._reported.add(prompt_index)
        prompt = reported_count(usage.get("prompt_tokens"))
        if prompt is not None:
            self.prompt_tokens += prompt - self._prompt_counts[prompt_index]
            self._prompt_counts[prompt_index] = prompt
        cached = reported_count(_detail(usage, "prompt_tokens_details", "cached_tokens"))
        if cached is not None:
            self.note_cached(prompt_index, min(cached, self._prompt_counts[prompt_index]))
        reasoning = reported_count(_detail(usage, "completion_tokens_details", "reasoning_tokens"))
        if reasoning is not None:
            is_only = len(self._prompt_counts) == 1
            self.reasoning_tokens = reasoning if is_only else (self.reasoning_tokens or 0) + reasoning


class TextPlan(Plan, frozen=True):
    """A request to a text model: one body and one stream per prompt, whatever the number of choices."""

    bodies: Sequence[dict[str, object]] = ()
    stops: Sequence[str] = ()
    include_stop: bool = False

    @property
    def streams_per_prompt(self) -> int:
        return 1

    def tally(self) -> TextTally:
        counts = [prompt_tokens(body) for body in self.bodies]
        return TextTally(sum(counts), _prompt_counts=counts)


def _detail(usage: Mapping[str, object], group: str, name: str) -> object:
    details = usage.get(group)
    return details.get(name) if isinstance(details, Mapping) else None


def text_prompts(request: CompletionRequest) -> list[str]:
    """Return the batch. Raises RequestRejected (400) for token ids."""
    prompts = request.prompts()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise _needs_tokens("prompt", "must be text")
    return texts


def text_plan(request: ChatRequest | CompletionRequest, plan: Plan) -> TextPlan:
    """Return `plan` (for its routing and limits) as the plan for a text model.

    Raises RequestRejected (400) naming the field that only token ids could serve.
    """
    if request.token_data is not None:
        raise _needs_tokens("nvext.token_data", "cannot be served")
    stops = plan.fields.stop_conditions
    for name in _TOKEN_ONLY:
        if getattr(request, name):
            raise _needs_tokens(name, "cannot be served")
    if stops.stop_token_ids:
        raise _needs_tokens("stop", "must be text")
    body = {name: value for name, value in msgspec.to_builtins(request).items() if value is not None}
    if (salt := plan.fields.routing.get("cache_salt")) is not None:
        body["cache_salt"] = salt
        if "nvext" in body:
            body["nvext"]["cache_salt"] = salt  # which may hold what the client named, outside its owner
    body["stream"] = True
    asked = {name: value for name, value in (body.get("stream_options") or {}).items() if value is not None}
    body["stream_options"] = {"include_usage": True, **asked}  # an answer as one body has usage, too
    bodies = [body]
    if isinstance(request, CompletionRequest):
        bodies = [{**body, "prompt": prompt} for prompt in text_prompts(request)]
    return TextPlan(
        PlannedRequest(),
        plan.prompts,
        plan.choices,
        plan.pinned_instance_id,
        plan.limits,
        is_query=plan.is_query,
        bodies=bodies,
        stops=stops.stop or (),
        include_stop=request.include_stop_str_in_output is True,
    )


def _needs_tokens(field: str, verdict: str) -> RequestRejected:
    return RequestRejected(400, f"`{field}` {verdict}: this model takes and gives text, not token ids", param=field)


class TextDeltas(Delta, eq=False):
    """What one wake-up brought of all choices of one prompt."""

    outputs: list[ChoiceOutput] = msgspec.field(default_factory=list)


class TextSource:
    """Events from the deltas of a model that takes text."""

    __slots__ = ("_answer_id", "_tally")

    def __init__(self, tally: TextTally, answer_id: Callable[[str], None]) -> None:
        """`answer_id` is called with what the worker calls its answer, before the first event."""
        self._tally = tally
        self._answer_id: Callable[[str], None] | None = answer_id

    def outputs(self, deltas: Sequence[Delta]) -> list[ChoiceOutput]:
        """Return what the chunks of one wake-up hold."""
        if self._answer_id is not None and self._tally.worker_answer_id is not None:
            self._answer_id(self._tally.worker_answer_id)
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


class TextStream(Choice):
    """The choices of one prompt, whose stream is made of OpenAI's chunks."""

    __slots__ = ("_choices", "_tally")

    def __init__(self, model: GenerationModel, work: WorkRequest, context: Context, index: int, plan: TextPlan) -> None:
        assert isinstance(work.tally, TextTally)
        self._tally = work.tally
        request = DispatchRequest(
            cast(WorkerRequest, plan.bodies[index // plan.choices]),  # the client's own: no member of it is the way's
            (),
            record=work.tally,
            timer=work.timer,
            limits=plan.limits,
            pinned_instance_id=plan.pinned_instance_id,
            answer=AnswerSoFar(takes_text=True),
            stall_detector=work.stall_detector,
        )
        stops, include = plan.stops, plan.include_stop
        self._choices = [
            _OpenChoice(index + number, StopStrings(stops, include=include) if stops else None)
            for number in range(plan.choices)
        ]
        super().__init__(model, work, context, index, request)

    async def next(self) -> Delta | None:
        """Return everything new; None once all choices have ended. A worker lost behind its whole answer is no failure."""
        try:
            return await super().next()
        except DynamoException:
            if not self._request.answer.is_complete:
                raise
            self.is_over = True
            return None

    async def push(self, accept: Callable[[list[Delta]], bool], plain: PlainOutput | None) -> None:
        """Call `accept` with what arrives. See `Choice.push`."""
        try:
            await super().push(accept, plain)
        except DynamoException:
            if not self._request.answer.is_complete:
                raise
            self.is_over = True

    def _absorb(self, items: Sequence[StreamItem]) -> TextDeltas:
        delta, tally, request = TextDeltas(self._index), self._tally, self._request
        for item in items:
            chunk = _chunk_of(item)
            if tally.worker_answer_id is None and self._work.plan.is_single:
                tally.worker_answer_id = chunk.id
            for one in chunk.deltas:
                if one.choice >= len(self._choices):
                    raise Unknown(f"the worker sent choice {one.choice} of a request for {len(self._choices)}")
                choice = self._choices[one.choice]
                if choice.is_over:  # cut by a stop string of the request
                    choice.has_run_on = choice.has_run_on or bool(one.text)
                    continue
                tokens = count(one.text) + count(one.reasoning)
                request.answer.text_tokens += tokens
                delta.tokens += tokens
                tally.completion_tokens += tokens
                if events := choice.events(one):
                    delta.outputs.append(ChoiceOutput(choice.index, events))
                    if isinstance(last := events[-1], Finished):
                        tally.finish_reason = last.reason
            if chunk.usage is not None:
                self._note_usage(chunk.usage)
        if all(choice.is_over for choice in self._choices):
            request.answer.is_complete = True  # from here on only usage can follow
            if tally.has_usage(self._prompt_index):
                self.is_over = True
                self.stream.finish()
            elif any(choice.has_run_on for choice in self._choices):
                self.is_over = True
                self.stream.stop()  # the worker does not search for the request's stop strings, and would go on
        return delta

    def _note_usage(self, usage: Mapping[str, object]) -> None:
        self._tally.note_usage(self._prompt_index, usage)
        completion = reported_count(usage.get("completion_tokens"))
        if completion is not None:
            self._tally.completion_tokens += completion - self._request.answer.text_tokens
            self._request.answer.text_tokens = completion


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
