"""From a preprocessed request to text: pick workers, read their streams, decode, stop. The frontend's hot path.

A reader wakes once for everything that has arrived and gets one `Delta` per choice for it, however many tokens that
is. Several choices or prompts are fanned out into single-choice requests, so that each can be placed, retried and
cancelled alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dynamo.errors import DynamoException, Unknown, revive
from dynamo.frontend.pipeline.parsing import OutputPlan
from dynamo.frontend.pipeline.stage_timer import StageTimer
from dynamo.protocol.finish import EngineFailed, normalise
from dynamo.protocol.openai.chat_options import ChatOptions
from dynamo.router.dispatch import Dispatcher
from dynamo.router.failover import DispatchLimits, DispatchRequest
from dynamo.router.migration import Move
from dynamo.router.stall_detector import StallDetector
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import Instance, StreamItem
from dynamo.text.decoder import ChoiceDecoder
from dynamo.text.model import TextModel

__all__ = ["Choice", "Delta", "GenerationModel", "Plan", "SingleGeneration", "Tally", "WorkRequest", "generate"]

_OPENAI_REASON: Final = {
    "stop": "stop",
    "eos": "stop",
    "cancelled": "stop",
    "length": "length",
    "content_filter": "content_filter",
}


class GenerationModel(Protocol):
    """What is needed of a `ServedModel`."""

    text: TextModel
    dispatcher: Dispatcher


_DEFAULT_LIMITS: Final = DispatchLimits()


class Tally:
    """What came of a request so far: its usage, and the workers that served it."""

    __slots__ = (
        "_cached",
        "completion_tokens",
        "finish_reason",
        "instances",
        "moves",
        "prefill_instance_id",
        "prompt_tokens",
        "reasoning_tokens",
    )

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None  # of `completion_tokens`; None: nothing counts them
        self.finish_reason: str | None = None  # of the choice that ended last
        self.moves: list[Move] = []  # for the metrics; bounded by the retries and the number of choices
        self.instances: list[Instance] = []  # the workers that answered
        self.prefill_instance_id: int | None = None  # the worker that computed the prompt, where that was another one
        self._cached: dict[int, int] = {}  # prompt -> the most that was reported of it

    @property
    def cached_tokens(self) -> int | None:
        """How many of `prompt_tokens` the workers had cached; None when none of them reported it."""
        return sum(self._cached.values()) if self._cached else None

    @property
    def is_usage_known(self) -> bool:
        """Whether the counts are tokens of the model, and may be shown as usage."""
        return True

    def note_cached(self, prompt_index: int, tokens: int) -> None:
        """Take over what a worker reports. Choices share their prompt and some engines repeat themselves: the most counts."""
        self._cached[prompt_index] = max(tokens, self._cached.get(prompt_index, 0))


@dataclass(frozen=True, slots=True)
class Plan:
    """A request as it is to be served. Made once, before a worker is chosen.

    `body` is the worker's request without its prompt; it is sent once per choice with `token_ids` set. Choice i of prompt p
    has index `p * choices + i`.
    """

    body: dict[str, Any]
    prompts: Sequence[list[int]]
    choices: int = 1  # per prompt
    pinned_instance_id: int | None = None
    limits: DispatchLimits = _DEFAULT_LIMITS
    options: ChatOptions | None = None  # of a chat request
    parsing: OutputPlan | None = None  # how the text is read; None: it is shown as it comes

    @property
    def streams_per_prompt(self) -> int:
        """How many requests to workers each prompt becomes."""
        return self.choices

    @property
    def is_single(self) -> bool:
        """Whether one request to a worker serves all of it."""
        return len(self.prompts) * self.streams_per_prompt == 1

    def tally(self) -> Tally:
        """Return an empty tally of it."""
        return Tally(sum(map(len, self.prompts)))

    def open_choice(
        self, model: GenerationModel, work: WorkRequest, context: Context, index: int, prompt: list[int]
    ) -> Choice:
        """Make one choice of the request, ready to run."""
        return _TokenChoice(model, work, context, index, prompt)


class WorkRequest:
    """One request while it is served: its plan, what came of it so far, and the choices that run."""

    __slots__ = ("plan", "running", "stall_detector", "tally", "timer")

    def __init__(self, plan: Plan, timer: StageTimer, stall_detector: StallDetector | None = None) -> None:
        """`stall_detector` moves the request when it makes no progress; None: nothing does."""
        self.plan = plan
        self.tally = plan.tally()
        self.timer = timer
        self.stall_detector = stall_detector
        self.running: tuple[Choice, ...] = ()

    def fail_over_idle_streams(self, error: DynamoException) -> bool:
        """Move every choice to another worker, as none has sent anything for too long; False when no choice can move."""
        moved = [choice.stream.fail_over(error) for choice in self.running]  # all of them, not only the first that can
        return any(moved)


class Delta:
    """What became visible of one choice since the last one."""

    __slots__ = (
        "choice",
        "engine_data",
        "finish_reason",
        "log_probs",
        "stop_reason",
        "text",
        "token_ids",
        "tokens",
        "top_logprobs",
    )

    def __init__(self, choice: int) -> None:
        self.choice = choice
        self.text = ""
        self.token_ids: list[int] = []  # those that `text` (or what is still held back) came from
        self.tokens = 0
        self.finish_reason: str | None = None  # "stop", "length", "content_filter"; on the choice's last delta
        self.stop_reason: str | int | None = None
        self.log_probs: list[float] | None = None
        self.top_logprobs: list[list[dict[str, Any]]] | None = None
        self.engine_data: dict[str, Any] | None = None


async def generate(model: GenerationModel, work: WorkRequest, context: Context) -> AsyncGenerator[list[Delta], None]:
    """Yield the deltas of all choices as they arrive; ends when every choice has its finish reason.

    Close it (`aclosing`) to cancel what is still running. A failure of one choice cancels the others.

    Raises:
        DynamoException: typed, also before the first delta; `errors.rule_of` gives the client's status.
    """
    if work.plan.is_single:
        async with aclosing(SingleGeneration(model, work, context)) as single:
            while (deltas := await single.next()) is not None:
                yield deltas
    else:
        async with aclosing(_fan_out(model, work, context)) as merged:
            async for deltas in merged:
                yield deltas


class SingleGeneration:
    """`generate` for one choice of one prompt, which can also push."""

    __slots__ = ("_choice",)

    def __init__(self, model: GenerationModel, work: WorkRequest, context: Context) -> None:
        self._choice = work.plan.open_choice(model, work, context, 0, work.plan.prompts[0])
        work.running = (self._choice,)

    async def next(self) -> list[Delta] | None:
        """Return what has arrived, waiting for something; None when the choice has ended. Raises as `generate`."""
        delta = await self._choice.next()
        return None if delta is None else [delta]

    async def push(
        self, accept: Callable[[list[Delta]], bool], plain: Callable[[str, int], bool] | None = None
    ) -> None:
        """Call `accept` with what arrives, at once and without waking a task for it.

        `plain`, where given, gets (text, number of tokens) instead for tokens with nothing else to report: no stop, no end,
        no log probabilities. Text may be "". That is nearly every token, and saves a `Delta` for each.

        Returns when one of them returned False (go on with `next`) or the choice has ended; raises as `generate`, and what
        they raise. To be called after `next` has returned something.
        """
        await self._choice.push(accept, plain)

    async def aclose(self) -> None:
        """Cancel what is still running; idempotent."""
        self._choice.close()


async def _fan_out(model: GenerationModel, work: WorkRequest, context: Context) -> AsyncGenerator[list[Delta], None]:
    """Run every choice by itself and merge their deltas."""
    arrived: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=64)

    async def pump(choice: Choice) -> None:
        try:
            while (delta := await choice.next()) is not None:
                await arrived.put(delta)
            await arrived.put(None)
        except Exception as error:  # the reader of the merged stream raises it
            await arrived.put(error)
        finally:
            choice.close()

    tasks: list[asyncio.Task[None]] = []
    choices: list[Choice] = []
    unlink = []
    try:
        for prompt_index, prompt in enumerate(work.plan.prompts):
            for number in range(work.plan.streams_per_prompt):
                index = prompt_index * work.plan.choices + number
                # Engines key their requests by id, so each choice gets one of its own.
                child = context.detached(f"{context.id()}-{index}")
                unlink.append(context.link_child(child))
                choice = work.plan.open_choice(model, work, child, index, prompt)
                choices.append(choice)
                # Ended and awaited in the `finally` below.
                tasks.append(asyncio.create_task(pump(choice), name=f"choice {child.id()}"))
        work.running = tuple(choices)
        running = len(tasks)
        while running:
            entries = [await arrived.get()]
            while not arrived.empty():
                entries.append(arrived.get_nowait())
            deltas = [entry for entry in entries if isinstance(entry, Delta)]
            running -= sum(entry is None for entry in entries)
            if deltas:
                yield deltas
            for entry in entries:
                if isinstance(entry, Exception):
                    raise entry
    finally:
        for forget in unlink:
            forget()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for choice in choices:
            choice.close()  # also those whose task never began


class Choice:
    """One choice: its stream of items, which subclasses turn into deltas."""

    __slots__ = ("_index", "_is_over", "_request", "_work", "stream")

    def __init__(
        self, model: GenerationModel, work: WorkRequest, context: Context, index: int, request: DispatchRequest
    ) -> None:
        self._work = work
        self._index = index
        self._is_over = False
        self._request = request
        self.stream = model.dispatcher.open(request, context)

    async def next(self) -> Delta | None:
        """Return everything new, waiting for something to arrive; None once the choice has ended."""
        if self._is_over:
            return None
        items = await self.stream.next_batch()
        if items:
            return self._absorb(items)
        self._is_over = True
        return None

    async def push(self, accept: Callable[[list[Delta]], bool], plain: Callable[[str, int], bool] | None) -> None:
        """Call `accept` or `plain` with what arrives. See `SingleGeneration.push`."""
        if not self._is_over:
            await self.stream.push(lambda items: accept([self._absorb(items)]) and not self._is_over)

    def close(self) -> None:
        """Leave the stream; a worker that has not ended the stream receives a kill. Idempotent."""
        self._is_over = True
        self.stream.close()

    def _absorb(self, items: list[StreamItem]) -> Delta:
        """Turn a batch into a delta."""
        raise NotImplementedError

    @property
    def _prompt_index(self) -> int:
        return self._index // self._work.plan.choices


class _TokenChoice(Choice):
    """One choice whose stream is made of token ids."""

    __slots__ = ("_decoder", "_generated")

    def __init__(
        self, model: GenerationModel, work: WorkRequest, context: Context, index: int, prompt: list[int]
    ) -> None:
        body = {**_for_choice(work.plan.body, index % work.plan.choices), "token_ids": prompt}
        request = DispatchRequest(
            body,
            prompt,
            record=work.tally,
            timer=work.timer,
            limits=work.plan.limits,
            pinned_instance_id=work.plan.pinned_instance_id,
            stall_detector=work.stall_detector,
        )
        self._generated = request.generated
        self._decoder = ChoiceDecoder(
            model.text.tokenizer,
            prompt,
            body.get("stop_conditions") or {},
            body.get("output_options") or {},
            include_stop_str=bool((body.get("sampling_options") or {}).get("include_stop_str_in_output")),
        )
        super().__init__(model, work, context, index, request)

    async def push(self, accept: Callable[[list[Delta]], bool], plain: Callable[[str, int], bool] | None) -> None:
        """Call `accept` or `plain` with what arrives. See `SingleGeneration.push`."""
        if plain is None or self._is_over:
            await super().push(accept, plain)
            return
        tally, generated, push_plain = self._work.tally, self._generated, self._decoder.push_plain

        def take(items: list[StreamItem]) -> bool:
            # The hot path: nearly every batch is tokens and nothing else.
            ids: list[int] = []
            for item in items:
                if item.index < 0 or item.finish_reason is not None or item.extra is not None:
                    break
                ids += item.token_ids  # all in one go: a burst brings dozens of chunks at once
            else:
                if (text := push_plain(ids)) is not None:
                    generated.extend(ids)
                    tally.completion_tokens += len(ids)
                    return plain(text, len(ids))
            return accept([self._absorb(items)]) and not self._is_over

        def take_tokens(ids: list[int]) -> bool:
            # The same for ids that come alone.
            if (text := push_plain(ids)) is not None:
                generated.extend(ids)
                tally.completion_tokens += len(ids)
                return plain(text, len(ids))
            return accept([self._absorb([StreamItem(0, 0, 0, ids)])]) and not self._is_over

        await self.stream.push(take, take_tokens)

    def _absorb(self, items: list[StreamItem]) -> Delta:
        """Decode a batch."""
        delta = Delta(self._index)
        decoder = self._decoder
        before = decoder.generated
        reason: Any = None
        for item in items:
            if item.index < 0:
                ids, reason, extra = _chunk_of(item)
            else:
                ids, reason, extra = item.token_ids, item.finish_reason, item.extra
            if extra is None:
                if ids:
                    delta.token_ids += ids
                    delta.text += decoder.push(ids)
            else:
                self._absorb_extra(delta, ids, extra)
            if reason is not None or decoder.finish_reason is not None:
                self._finish(delta, reason)
                break
        delta.tokens = decoder.generated - before
        self._generated += delta.token_ids
        self._work.tally.completion_tokens += delta.tokens
        if delta.tokens < len(delta.token_ids):  # a stop fired inside the chunk: what follows is not part of the answer
            del delta.token_ids[delta.tokens :]
            if delta.log_probs is not None:
                del delta.log_probs[delta.tokens :]
            if delta.top_logprobs is not None:
                del delta.top_logprobs[delta.tokens :]
        return delta

    def _absorb_extra(self, delta: Delta, ids: list[int], extra: dict[str, Any]) -> None:
        delta.token_ids += ids
        delta.text += self._decoder.push(ids, extra.get("text"))
        if (log_probs := extra.get("log_probs")) is not None:
            delta.log_probs = [*(delta.log_probs or ()), *log_probs]
        if (top_logprobs := extra.get("top_logprobs")) is not None:
            delta.top_logprobs = [*(delta.top_logprobs or ()), *top_logprobs]
        if (engine_data := extra.get("engine_data")) is not None:
            delta.engine_data = {**(delta.engine_data or {}), **engine_data}
        if (stop_reason := extra.get("stop_reason")) is not None:
            delta.stop_reason = stop_reason
        details = (extra.get("completion_usage") or {}).get("prompt_tokens_details") or {}
        if (cached := details.get("cached_tokens")) is not None:
            # A worker that went on for another one may have found more than the prompt in its cache.
            self._work.tally.note_cached(self._prompt_index, min(cached, len(self._request.prompt)))

    def _finish(self, delta: Delta, reason: Any) -> None:
        decoder = self._decoder
        self._is_over = True
        if decoder.finish_reason is not None:
            delta.finish_reason = self._work.tally.finish_reason = decoder.finish_reason
            delta.stop_reason = decoder.stop_reason
            if reason is None:
                self.stream.stop()  # a stop of ours: the worker may go on for a moment, but its stream is left
        else:
            try:
                word = normalise(reason)  # a bare handler may end with any word
            except (EngineFailed, TypeError) as error:
                raise Unknown(str(error)) from error
            delta.text += decoder.finish()
            delta.finish_reason = self._work.tally.finish_reason = _OPENAI_REASON[word]
        self.stream.finish()


def _for_choice(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the body of one of n choices. Each choice gets a different seed, as equal seeds give equal texts."""
    options = body.get("sampling_options") or {}
    if number == 0 or options.get("seed") is None:
        return body
    return {**body, "sampling_options": {**options, "seed": options["seed"] + number}}


def _chunk_of(item: StreamItem) -> tuple[list[int], Any, dict[str, Any] | None]:
    """Decode a chunk that came as an object (from a bare endpoint handler). Raises the error the chunk carries, if any."""
    envelope = item.extra or {}
    if envelope.get("event") == "error":
        raise revive(envelope.get("error") or {"message": "; ".join(envelope.get("comment") or ["unknown error"])})
    data = envelope.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("token_ids"), list):
        raise Unknown(f"the worker sent {type(data).__name__} where a chunk with token_ids was expected")
    extra = {key: value for key, value in data.items() if key not in ("token_ids", "index", "finish_reason")}
    return data["token_ids"], data.get("finish_reason"), extra or None
