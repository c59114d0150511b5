"""From a preprocessed request to text: pick workers, read their streams, decode, stop. The frontend's hot path.

A reader wakes once for everything that has arrived and gets one `Delta` per choice for it, however many tokens that
is. Several choices or prompts are fanned out into single-choice requests, so that each can be placed, retried and
cancelled alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol

from dynamo.errors import (
    DynamoException,
    InvalidArgument,
    Overloaded,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
    revive,
    rule_of,
)
from dynamo.frontend.pipeline.parsing import OutputPlan
from dynamo.frontend.pipeline.stage_timer import StageTimer
from dynamo.frontend.stalls import StallWatch
from dynamo.placement import PlacementRequest, WorkerKey
from dynamo.protocol.finish import EngineFailed, normalise
from dynamo.router.migration import Move, continued, tokens_left, why_not
from dynamo.router.pool import ChosenWorker
from dynamo.router.prefill import PrefillAnswer, PrefillRouter, may_go_without
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import Instance, ResponseStream, StreamItem
from dynamo.text.decoder import ChoiceDecoder
from dynamo.text.model import TextModel

__all__ = ["Delta", "GenerationModel", "SingleGeneration", "WorkRequest", "generate"]

logger = logging.getLogger(__name__)

DEFAULT_RETRIES: Final = 3  # other workers that are tried before the first token

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
    prefill: PrefillRouter | None  # who computes prompts; None: whoever decodes

    def choose(self, request: PlacementRequest) -> ChosenWorker: ...

    @property
    def runtime_data(self) -> Mapping[str, Any]:
        """What the engine said about itself when it registered."""


class WorkRequest:
    """One client request, preprocessed: what every choice shares, and what came out in the end.

    `body` is the worker's request without its prompt; it is sent once per choice with `token_ids` set. After (and
    during) `generate`, `prompt_tokens` and `completion_tokens` are the usage so far, `cached_tokens` is what the workers
    reported, and `instances` says who served.
    """

    __slots__ = (
        "_cached",
        "body",
        "choices",
        "completion_tokens",
        "finish_reason",
        "instances",
        "is_single",
        "longest_movable",
        "moves",
        "overhead",
        "parsing",
        "pinned_instance_id",
        "prefill_instance_id",
        "prompt_tokens",
        "prompts",
        "reasoning_tokens",
        "retries",
        "running",
        "watch",
    )

    def __init__(
        self,
        body: dict[str, Any],
        prompts: Sequence[list[int]],
        *,
        n: int = 1,
        pinned_instance_id: int | None = None,
        retries: int = DEFAULT_RETRIES,
        longest_movable: int | None = None,
        overhead: StageTimer | None = None,
    ) -> None:
        """`n`: choices per prompt; choice i of prompt p has index `p * n + i`. `retries`: how many other workers each choice
        may need; `longest_movable`: of how many tokens it may be when it does. `overhead`: where the times go."""
        self.body = body
        self.prompts = prompts
        self.choices = n
        self.pinned_instance_id = pinned_instance_id
        self.retries = retries
        self.longest_movable = longest_movable
        self.running: tuple[_Choice, ...] = ()
        self.watch: StallWatch | None = None  # who looks after its progress; None: nobody
        self.moves: list[Move] = []  # for the metrics; bounded by `retries` and the number of choices
        self.overhead = overhead or StageTimer()
        self.prompt_tokens = sum(map(len, prompts))
        self.is_single = n == 1 and len(prompts) == 1
        self.completion_tokens = 0
        self.finish_reason: str | None = None  # of the choice that ended last
        self._cached: dict[int, int] = {}  # prompt -> the most that was reported of it
        self.instances: list[Instance] = []
        self.parsing: OutputPlan | None = None  # how the text is read; None: it is shown as it comes
        self.reasoning_tokens: int | None = None  # of `completion_tokens`; None: nobody counts them
        self.prefill_instance_id: int | None = None  # who computed the prompt, where that was another worker

    @property
    def cached_tokens(self) -> int | None:
        """How many of `prompt_tokens` the workers had cached; None when none of them said."""
        return sum(self._cached.values()) if self._cached else None

    def open_choice(self, model: GenerationModel, context: Context, index: int, prompt: list[int]) -> _Choice:
        """One choice of it, ready to run."""
        return _Choice(model, self, context, index, prompt)

    def give_up_silent_workers(self, error: DynamoException) -> bool:
        """Nothing was heard of any choice for too long: go on at other workers; False when no choice can."""
        moved = [choice.give_up(error) for choice in self.running]  # all of them, not only the first that can
        return any(moved)

    def note_cached(self, prompt_index: int, tokens: int) -> None:
        """A worker reported this. Choices share their prompt and some engines repeat themselves: the most counts."""
        self._cached[prompt_index] = max(tokens, self._cached.get(prompt_index, 0))


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
        DynamoException: typed, also before the first delta; `errors.rule_of` tells what the client gets.
    """
    if work.is_single:
        async with aclosing(SingleGeneration(model, work, context)) as single:
            while (deltas := await single.next()) is not None:
                yield deltas
    else:
        async with aclosing(_fan_out(model, work, context)) as merged:
            async for deltas in merged:
                yield deltas


class SingleGeneration:
    """`generate` for one choice of one prompt, which can also be told to push."""

    __slots__ = ("_choice",)

    def __init__(self, model: GenerationModel, work: WorkRequest, context: Context) -> None:
        self._choice = work.open_choice(model, context, 0, work.prompts[0])
        self._choice.watched()
        work.running = (self._choice,)

    async def next(self) -> list[Delta] | None:
        """What has arrived, waiting for something; None when the choice has ended. Raises as `generate`."""
        delta = await self._choice.next()
        return None if delta is None else [delta]

    async def push(
        self, accept: Callable[[list[Delta]], bool], plain: Callable[[str, int], bool] | None = None
    ) -> None:
        """Call `accept` with what arrives, at once and without waking a task for it.

        `plain`, where given, gets (text, number of tokens) instead for tokens of which there is nothing else to say: no
        stop, no end, no log probabilities. Text may be "". That is nearly every token, and a `Delta` less for each.

        Returns when one of them said False (go on with `next`) or the choice has ended; raises as `generate`, and what
        they raise. To be called after `next` has returned something.
        """
        await self._choice.push(accept, plain)

    async def aclose(self) -> None:
        """Cancel what is still running; idempotent."""
        self._choice.close()


async def _fan_out(model: GenerationModel, work: WorkRequest, context: Context) -> AsyncGenerator[list[Delta], None]:
    """Run every choice by itself and merge what they say."""
    arrived: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=64)

    async def pump(choice: _Choice) -> None:
        try:
            while (delta := await choice.next()) is not None:
                await arrived.put(delta)
            await arrived.put(None)
        except Exception as error:  # whoever reads the merged stream raises it
            await arrived.put(error)
        finally:
            choice.close()

    tasks: list[asyncio.Task[None]] = []
    choices: list[_Choice] = []
    unlink = []
    try:
        for prompt_index, prompt in enumerate(work.prompts):
            for number in range(work.choices):
                index = prompt_index * work.choices + number
                # Engines key their requests by id, so each choice gets one of its own.
                child = context.detached(f"{context.id()}-{index}")
                unlink.append(context.link_child(child))
                choice = work.open_choice(model, child, index, prompt)
                choices.append(choice)
                choice.watched()
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


class _Choice:
    """One choice: its stream, its decoder, and whom it has tried."""

    __slots__ = (
        "_body",
        "_context",
        "_decoder",
        "_ended",
        "_generated",
        "_index",
        "_lost_at",
        "_lost_by",
        "_model",
        "_origin",
        "_pardoned",
        "_prompt",
        "_shed",
        "_silent",
        "_stream",
        "_tried",
        "_work",
        "_worker",
        "attempts",
        "is_reading",
    )

    def __init__(
        self, model: GenerationModel, work: WorkRequest, context: Context, index: int, prompt: list[int]
    ) -> None:
        self._model = model
        self._work = work
        self._context = context
        self._index = index
        self._prompt = prompt
        self._generated: list[int] = []  # what was decoded so far: another worker would go on behind it
        self._origin = {**_for_choice(work.body, index % work.choices), "token_ids": prompt}
        self._body = self._origin
        self._silent: DynamoException | None = None  # set: the worker was left because it said nothing
        self._pardoned: DynamoException | None = None  # set: that, and it is not to be left out for it
        self.is_reading = False  # whether it waits for the worker, or for whoever reads what it said
        self._lost_by: DynamoException | None = None  # why the last worker was given up
        self._lost_at = 0.0
        self._stream: ResponseStream | None = None
        self._worker: ChosenWorker | None = None
        self._tried: list[WorkerKey] = []  # not to be asked again
        self._shed: set[WorkerKey] = set()  # of those, who only had no room
        self.attempts = 0
        self._ended = False
        body = self._body
        self._decoder = ChoiceDecoder(
            model.text.tokenizer,
            prompt,
            body.get("stop_conditions") or {},
            body.get("output_options") or {},
            include_stop_str=bool((body.get("sampling_options") or {}).get("include_stop_str_in_output")),
        )

    async def next(self) -> Delta | None:
        """Everything new, waiting for something to arrive; None once the choice has ended."""
        while not self._ended:
            if self._stream is not None:
                self.is_reading = True
                try:
                    items = await self._stream.next_batch()
                    if not items:
                        self._ended_silently()
                except DynamoException as error:
                    self._lose(error)
                    continue
                finally:
                    self.is_reading = False
            elif self._generated and tokens_left(self._origin, len(self._generated)) == 0:
                return self._complete()
            else:
                items = await self._start()
                if not items:
                    self._ended_silently()
            if items:
                return self._absorb(items)
        return None

    async def push(self, accept: Callable[[list[Delta]], bool], plain: Callable[[str, int], bool] | None) -> None:
        """See `SingleGeneration.push`."""
        stream = self._stream
        if stream is None or self._ended:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        take = stream.take

        def arrived() -> None:
            try:
                try:
                    items = take()
                    if items is None:
                        self._ended_silently()
                except DynamoException as error:
                    self._lose(error)  # or else `next` goes on elsewhere
                    items = None
                if not items:
                    if items is not None:
                        return
                elif plain is not None and (said := self._said_plainly(items)) is not None:
                    if plain(*said):
                        return
                elif accept([self._absorb(items)]) and not self._ended:
                    return
            except BaseException as error:
                settle(error)
            else:
                settle(None)

        def settle(error: BaseException | None) -> None:
            stream.listen(None)
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self.is_reading = True
        stream.listen(arrived)
        try:
            await done
        finally:
            self.is_reading = False
            stream.listen(None)

    def _said_plainly(self, items: list[StreamItem]) -> tuple[str, int] | None:
        """(text, number of tokens) of a batch of tokens and nothing else; None, and nothing done, for any other."""
        ids: list[int] = []
        for item in items:
            if item.index < 0 or item.finish_reason is not None or item.extra is not None:
                return None
            ids += item.token_ids  # all in one go: a burst brings dozens of chunks at once
        text = self._decoder.push_plain(ids)
        if text is None:
            return None
        self._generated += ids
        self._work.completion_tokens += len(ids)
        return text, len(ids)

    def _ended_silently(self) -> None:
        """The stream ended without a terminal chunk: right after a cancellation, else a breach."""
        if not self._context.is_stopped():
            raise self._incomplete("the worker ended the stream without a finish reason")
        self._ended = True

    def _incomplete(self, text: str) -> DynamoException:
        silent, self._silent = self._silent, None
        return silent or StreamIncomplete(text)

    # -- what whoever watches its progress needs (`stalls.Watched`) --------------------------------------------------

    def watched(self) -> None:
        """From now on, until `close`, its progress is looked after."""
        if self._work.watch is not None:
            self._work.watch.add(self)

    @property
    def request_id(self) -> str:
        return self._context.id()

    @property
    def tokens(self) -> int:
        """How many were generated so far."""
        return len(self._generated)

    @property
    def instance_id(self) -> int | None:
        """The worker whose answer is awaited or read; None between two of them."""
        return self._worker.instance.instance_id if self._stream is not None and self._worker is not None else None

    def give_up(self, error: DynamoException, *, blames_worker: bool = True, is_last: bool = False) -> bool:
        """Leave a worker that says nothing, with `error`; whether that was done. Not `is_last`: only if another may go on."""
        stream = self._stream
        if stream is None or self._ended or self._silent is not None or not (is_last or self._can_move(error)):
            return False
        self._silent = error
        if not blames_worker:
            self._pardoned = error
        stream.kill()  # and whoever reads it finds that it has ended
        return True

    def _can_move(self, error: DynamoException) -> bool:
        """Whether another worker is there, and may go on after `error`."""
        if not self._may_move(error) or (self.tokens and self._why_not() is not None):
            return False
        try:
            self._model.choose(PlacementRequest(excluded=self._tried, healthy_only=True))
        except DynamoException:
            return False  # nobody else is there, or nobody who is well
        return True

    def _may_move(self, error: DynamoException) -> bool:
        """Whether another worker may be tried after `error`."""
        work = self._work
        return (
            rule_of(error).retryable
            and not self._context.is_stopped()
            and not self._is_late()
            and work.pinned_instance_id is None
            and self.attempts <= work.retries
        )

    def _is_late(self) -> bool:
        """Whether the request's own deadline has passed: then its end is nobody's fault, and nobody else need be asked."""
        deadline = self._context.deadline
        return deadline is not None and asyncio.get_running_loop().time() >= deadline

    def _lose(self, error: DynamoException) -> None:
        """The worker was lost after it had begun to answer. Raises `error` unless another one may go on."""
        self._blame(self._worker, error)
        context = self._context
        if not self._may_move(error):
            raise error
        reason = self._why_not()
        if reason is not None:
            logger.warning("request %s cannot go on at another worker: %s", context.id(), reason)
            raise error
        logger.warning(
            "request %s: worker %x was lost after %d tokens (%s: %s); going on at another",
            context.id(),
            self._lost_id,
            len(self._generated),
            type(error).__name__,
            error,
        )
        self._release()
        if self._worker is not None:
            self._note_failure(self._worker.key, error)
        self._lost_by, self._lost_at = error, asyncio.get_running_loop().time()

    def _why_not(self) -> str | None:
        """What keeps the rest of the answer from another worker."""
        length = len(self._prompt) + len(self._generated)
        data = self._model.runtime_data
        return why_not(self._origin, length, longest=self._work.longest_movable, runtime_data=data)

    async def _start(self) -> list[StreamItem]:
        """The first items of the stream, or of the one that takes the place of a lost one."""
        prefill = self._model.prefill
        if self._lost_by is None:
            return await (self._begin() if prefill is None else self._begin_apart(prefill))
        context, lost_by = self._context, self._lost_by
        self._body = continued(self._origin, self._prompt, self._generated)
        context.prompt_tokens = len(self._prompt)
        move = Move(is_ongoing=True)
        self._work.moves.append(move)
        try:
            worker = self._pick()
        except WorkerUnavailable:
            raise lost_by from None  # nobody else is left, and why the last one failed says more
        try:
            items = await (self._begin(worker) if prefill is None else self._begin_apart(prefill))
            move.outcome = "cancelled" if context.is_stopped() else "success"
        finally:
            move.seconds = asyncio.get_running_loop().time() - self._lost_at
        return items

    def _complete(self) -> Delta:
        """Everything the request allows had arrived when its worker was lost, all but the word that it was the end."""
        self._ended = True
        delta = Delta(self._index)
        delta.text = self._decoder.finish()
        delta.finish_reason = self._work.finish_reason = "length"
        return delta

    async def _begin(self, worker: ChosenWorker | None = None) -> list[StreamItem]:
        """Open the stream and wait for its first items, trying other workers while nothing has been received.

        `worker`: must be one returned by `_pick`: picking advances the round-robin cursor.
        """
        context, work = self._context, self._work
        overhead = work.overhead
        move: Move | None = None
        lost_at = 0.0
        if worker is None:
            worker = self._pick()
        while True:
            overhead.routed()
            instance = worker.instance
            self._worker = worker
            self._tried.append(worker.key)
            self.attempts += 1
            try:
                self._stream = await worker.open(self._body, context)
                overhead.dispatched()
                self.is_reading = True
                items = await self._stream.next_batch()
                if not items and not context.is_stopped():
                    raise self._incomplete("the worker ended the stream without a single chunk")
            except DynamoException as error:
                self.is_reading = False
                overhead.arrived(failed=True)
                self._release()
                self._blame(worker, error)
                self._note_failure(worker.key, error)
                if not self._may_move(error):
                    raise
                logger.info(
                    "request %s: worker %x failed before its first token (%s: %s); trying another",
                    context.id(),
                    instance.instance_id,
                    type(error).__name__,
                    error,
                )
                last = error
                move = Move(is_ongoing=False)
                work.moves.append(move)
                lost_at = asyncio.get_running_loop().time()
            else:
                if move is not None:
                    move.outcome, move.seconds = "success", asyncio.get_running_loop().time() - lost_at
                self.is_reading = False
                overhead.arrived()
                work.instances.append(instance)
                return items
            try:
                worker = self._pick()
            except WorkerUnavailable:
                raise last from None  # nobody else is left, and why the last one failed says more

    async def _begin_apart(self, prefill: PrefillRouter) -> list[StreamItem]:
        """As `_begin`, with the prompt computed by another worker first."""
        context, work = self._context, self._work
        try:
            limit = None if work.watch is None else work.watch.patience.first_token_seconds
            handoff = await prefill.prefill(
                self._body, context, work.overhead, retries=work.retries, limit_seconds=limit
            )
        except DynamoException as error:
            if prefill.is_enforced or context.is_stopped() or not may_go_without(error):
                raise
            prefill.note(error)
            try:
                return await self._begin()
            except (InvalidArgument, Unknown) as refusal:
                raise error from refusal  # an engine that only decodes: it is not the client's request that is wrong
        prefill.note(None)
        work.prefill_instance_id = handoff.instance.instance_id
        if isinstance(handoff, PrefillAnswer):
            work.instances.append(handoff.instance)
            return handoff.items
        self._body = handoff.body
        if context.is_stopped():
            prefill.hand_over(handoff, self._model, context)
            return []
        return await handoff.beside(self._begin())

    def _note_failure(self, key: WorkerKey, error: DynamoException) -> None:
        """A worker that sheds is not a worker that failed: when another one is lost, it may be asked again."""
        if isinstance(error, Overloaded):
            self._shed.add(key)
        elif self._shed:
            self._tried = [each for each in self._tried if each not in self._shed]
            self._shed.clear()

    def _blame(self, worker: ChosenWorker | None, error: DynamoException) -> None:
        """The worker was lost: the next request need not find out for itself."""
        if worker is None or error is self._pardoned or self._is_late():
            return
        if worker.record_failure(error):
            self._tried = [key for key in self._tried if key != worker.key]

    @property
    def _lost_id(self) -> int:
        return 0 if self._worker is None else self._worker.instance.instance_id

    def _pick(self) -> ChosenWorker:
        work = self._work
        return self._model.choose(
            PlacementRequest(
                token_ids=self._body.get("token_ids") or (),
                pinned_instance_id=work.pinned_instance_id,
                excluded=self._tried,
            )
        )

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
        self._work.completion_tokens += delta.tokens
        if delta.tokens < len(delta.token_ids):  # a stop fired inside the chunk: what follows was never said
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
            self._work.note_cached(self._index // self._work.choices, min(cached, len(self._prompt)))

    def _finish(self, delta: Delta, reason: Any) -> None:
        decoder = self._decoder
        self._ended = True
        if decoder.finish_reason is not None:
            # A stop of ours: the worker may go on for a moment, but nobody listens any more.
            delta.finish_reason = self._work.finish_reason = decoder.finish_reason
            delta.stop_reason = decoder.stop_reason
            if reason is None and self._stream is not None:
                self._stream.stop()
                self._release()
        else:
            try:
                word = normalise(reason)  # a bare handler says whatever its author likes
            except (EngineFailed, TypeError) as error:
                raise Unknown(str(error)) from error
            delta.text += decoder.finish()
            delta.finish_reason = self._work.finish_reason = _OPENAI_REASON[word]
        if self._stream is not None:
            self._stream.finish()
            self._stream = None

    def _release(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        """Leave the stream; the worker is told if it had not ended. Idempotent."""
        self._ended = True
        if self._work.watch is not None:
            self._work.watch.remove(self)
        self._release()


def _for_choice(body: dict[str, Any], number: int) -> dict[str, Any]:
    """The body of one of n choices. With a seed, each gets another one: the same seed n times is the same text n times."""
    options = body.get("sampling_options") or {}
    if number == 0 or options.get("seed") is None:
        return body
    return {**body, "sampling_options": {**options, "seed": options["seed"] + number}}


def _chunk_of(item: StreamItem) -> tuple[list[int], Any, dict[str, Any] | None]:
    """A chunk that came as an object (from a bare endpoint handler), taken apart. Raises the error it may carry."""
    envelope = item.extra or {}
    if envelope.get("event") == "error":
        raise revive(envelope.get("error") or {"message": "; ".join(envelope.get("comment") or ["unknown error"])})
    data = envelope.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("token_ids"), list):
        raise Unknown(f"the worker sent {type(data).__name__} where a chunk with token_ids was expected")
    extra = {key: value for key, value in data.items() if key not in ("token_ids", "index", "finish_reason")}
    return data["token_ids"], data.get("finish_reason"), extra or None
