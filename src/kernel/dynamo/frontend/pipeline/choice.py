"""One choice of an answer: the items that its worker sends become deltas. The frontend's hot path.

A reader wakes once for everything that has arrived and gets one `Delta` per choice for it, however many tokens that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct

from dynamo.errors import Unknown, revive
from dynamo.frontend.pipeline.plain import PlainOutput, PlainTokens
from dynamo.frontend.pipeline.plan import GenerationModel, WorkRequest, reported_count
from dynamo.protocol.finish import EngineFailed, normalise
from dynamo.router.dispatch.failover import DispatchRequest
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import StreamItem
from dynamo.text.decoder import ChoiceDecoder

T = TypeVar("T")

_OPENAI_REASON: Final = {
    "stop": "stop",
    "eos": "stop",
    "cancelled": "stop",
    "length": "length",
    "content_filter": "content_filter",
}


class Delta(Struct, eq=False):
    """What became visible of one choice since the last one."""

    choice: int
    text: str = ""
    token_ids: list[int] = []  # those that `text` (or what is still held back) came from
    tokens: int = 0
    finish_reason: str | None = None  # "stop", "length", "content_filter"; on the choice's last delta
    stop_reason: str | int | None = None
    log_probs: list[float | None] | None = None  # by position of `token_ids`
    top_logprobs: list[list[dict[str, object]]] | None = None
    engine_data: dict[str, object] | None = None


class Choice:
    """One choice: its stream of items, which subclasses turn into deltas."""

    __slots__ = ("_index", "_request", "_work", "is_over", "stream")

    def __init__(
        self, model: GenerationModel, work: WorkRequest, context: Context, index: int, request: DispatchRequest
    ) -> None:
        self._work = work
        self._index = index
        self.is_over = False  # nothing more comes
        self._request = request
        self.stream = model.dispatcher.open(request, context)

    async def next(self) -> Delta | None:
        """Return everything new, waiting for something to arrive; None once the choice has ended."""
        if self.is_over:
            return None
        items = await self.stream.next_batch()
        if items:
            return self._absorb(items)
        self.is_over = True
        return None

    async def push(self, accept: Callable[[list[Delta]], bool], plain: PlainOutput | None) -> None:
        """Call `accept` with what arrives, at once and without waking a task for it. Call it after `next` has returned something.

        `plain`, where given, gets instead what comes of tokens with nothing else to report: no stop, no end, no log
        probabilities. That is nearly every token, and saves a `Delta` for each.

        Returns when `accept` returned False or `plain` could not send (go on with `next`), or when the choice has ended.
        Raises as `next`, and what they raise.
        """
        if not self.is_over:
            await self.stream.push(self._otherwise(accept))

    def _otherwise(self, accept: Callable[[list[Delta]], bool]) -> Callable[[list[StreamItem]], bool]:
        return lambda items: accept([self._absorb(items)]) and not self.is_over

    def close(self) -> None:
        """Leave the stream; a worker that has not ended the stream receives a kill. Idempotent."""
        self.is_over = True
        self.stream.close()

    def _absorb(self, items: list[StreamItem]) -> Delta:
        """Turn a batch into a delta."""
        raise NotImplementedError

    @property
    def _prompt_index(self) -> int:
        return self._index // self._work.plan.choices


class TokenChoice(Choice):
    """One choice whose stream is made of token ids."""

    __slots__ = ("_decoder", "_generated")

    def __init__(
        self, model: GenerationModel, work: WorkRequest, context: Context, index: int, prompt: list[int]
    ) -> None:
        fields = work.plan.fields
        body = fields.for_prompt(prompt, index % work.plan.choices)
        request = DispatchRequest(
            body,
            prompt,
            record=work.tally,
            timer=work.timer,
            limits=work.plan.limits,
            pinned_instance_id=work.plan.pinned_instance_id,
            stall_detector=work.stall_detector,
        )
        self._generated = request.answer.generated
        self._decoder = ChoiceDecoder(
            model.text.tokenizer,
            prompt,
            body["stop_conditions"] or {},
            body["output_options"],
            include_stop_str=fields.sampling_options.include_stop_str_in_output is True,
            visible=work.plan.parsing.visible if work.plan.parsing is not None else frozenset(),
        )
        super().__init__(model, work, context, index, request)

    async def push(self, accept: Callable[[list[Delta]], bool], plain: PlainOutput | None) -> None:
        """Call `accept` or `plain` with what arrives. See `Choice.push`."""
        if plain is None or self.is_over:
            await super().push(accept, plain)
            return
        tokens = PlainTokens(self._decoder, self._generated, self._work.tally, plain, self._otherwise(accept))
        try:
            await self.stream.push(tokens.take_items, tokens)
        finally:
            tokens.settle()

    def _absorb(self, items: list[StreamItem]) -> Delta:
        """Decode a batch."""
        delta = Delta(self._index)
        decoder = self._decoder
        before = decoder.generated
        reason: object = None
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
        before = len(delta.token_ids)
        delta.token_ids += ids
        text: str | None = None
        for name, value in extra.items():
            if value is None:
                continue
            if name == "completion_usage":
                self._absorb_usage(value)
            elif name == "log_probs":
                delta.log_probs = _placed(delta.log_probs, before, None, value, len(ids))
            elif name == "top_logprobs":
                delta.top_logprobs = _placed(delta.top_logprobs, before, [], value, len(ids))
            elif name == "text":
                text = value
            elif name == "engine_data":
                delta.engine_data = {**(delta.engine_data or {}), **value}
            elif name == "stop_reason":
                delta.stop_reason = value
        delta.text += self._decoder.push(ids, text)

    def _absorb_usage(self, usage: dict[str, object]) -> None:
        details: object = usage.get("prompt_tokens_details")
        # The wire makes dicts; whether another object is a mapping takes a search through its bases.
        if details.__class__ is dict or isinstance(details, Mapping):
            cached = reported_count(details.get("cached_tokens"))
        else:
            cached = None
        if cached is not None:
            # A worker that went on for another one may have found more than the prompt in its cache.
            tally, prompt = self._work.tally, len(self._request.prompt)
            tally.note_cached(
                self._prompt_index, min(cached, prompt if not tally.image_tokens else tally.prompt_tokens)
            )

    def _finish(self, delta: Delta, reason: Any) -> None:
        decoder = self._decoder
        self.is_over = True
        if decoder.finish_reason is not None:
            delta.finish_reason = self._work.tally.finish_reason = decoder.finish_reason
            delta.stop_reason = decoder.stop_reason
            if reason is None:
                self.stream.stop()  # a stop of ours: the worker may go on for a moment, but its stream is left
        else:
            try:
                is_known = reason.__class__ is str and reason in _OPENAI_REASON
                word = reason if is_known else normalise(reason)  # a bare handler may end with any word
            except (EngineFailed, TypeError) as error:
                raise Unknown(str(error)) from error
            delta.text += decoder.finish()
            delta.finish_reason = self._work.tally.finish_reason = _OPENAI_REASON[word]
        self.stream.finish()


def _placed(held: list[T] | None, before: int, absent: T, added: Sequence[T], count: int) -> list[T]:
    """Return what belongs to each token: `held` to the first `before` of them, `added` to the `count` behind those.

    An engine may send fewer than it sends tokens: the places of the others stay empty, and no one moves into them.
    """
    found = [] if held is None else held
    return [*found, *[absent] * (before - len(found)), *added[:count]]


def _chunk_of(item: StreamItem) -> tuple[list[int], object, dict[str, object] | None]:
    """Decode a chunk that came as an object (from a bare endpoint handler). Raises the error the chunk carries, if any."""
    envelope = item.extra or {}
    if envelope.get("event") == "error":
        raise revive(envelope.get("error") or {"message": "; ".join(envelope.get("comment") or ["unknown error"])})
    data = envelope.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("token_ids"), list):
        raise Unknown(f"the worker sent {type(data).__name__} where a chunk with token_ids was expected")
    extra = {key: value for key, value in data.items() if key not in ("token_ids", "index", "finish_reason")}
    return data["token_ids"], data.get("finish_reason"), extra or None
