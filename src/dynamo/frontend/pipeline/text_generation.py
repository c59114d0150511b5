"""Requests to models that take text: the worker gets the client's own body and yields OpenAI's chunks.

No template, no tokenizer: what is left to do here is one choice at a time, stop strings, and the counts. A token is one byte
of UTF-8 unless the worker reports its own usage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from dynamo.errors import Unknown, revive
from dynamo.frontend.pipeline.generation import Choice, Delta, GenerationModel, WorkRequest
from dynamo.protocol.finish import EngineFailed, normalise
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.plain_text import TextPiece, count, prompt_tokens, read_piece
from dynamo.protocol.openai.requests import ChatRequest, CompletionRequest
from dynamo.router.dispatch import DispatchRequest
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import StreamItem
from dynamo.text.stops import StopStrings

__all__ = ["TextWork", "text_prompts", "text_work"]

_TOKEN_ONLY: Final = ("prompt_logprobs", "stop_token_ids", "allowed_token_ids", "bad_words_token_ids")


class TextWork(WorkRequest):
    """A request to a text model: one body per prompt instead of token ids."""

    __slots__ = ("_prompt_counts", "bodies", "include_stop", "stops")

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
        self.bodies = bodies
        self.stops = work.body["stop_conditions"]["stop"] or []
        self.include_stop = request.include_stop_str_in_output is True
        self._prompt_counts = [prompt_tokens(body) for body in bodies]
        self.prompt_tokens = sum(self._prompt_counts)

    def open_choice(self, model: GenerationModel, context: Context, index: int, prompt: list[int]) -> Choice:
        return _TextChoice(model, self, context, index)

    def note_prompt(self, prompt_index: int, tokens: int) -> None:
        """A worker counted this prompt itself."""
        self.prompt_tokens += tokens - self._prompt_counts[prompt_index]
        self._prompt_counts[prompt_index] = tokens


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
    if request.requested_logprobs is not None:
        raise _needs_tokens("logprobs", "cannot be served")
    stops = work.body["stop_conditions"]
    for name in _TOKEN_ONLY:
        if getattr(request, name):
            raise _needs_tokens(name, "cannot be served")
    if stops["stop_token_ids"]:
        raise _needs_tokens("stop", "must be text")
    body = {name: value for name, value in msgspec.to_builtins(request).items() if value is not None}
    for name in ("n", "stream_options", "best_of"):
        body.pop(name, None)
    body["stream"] = True
    bodies = [body]
    if isinstance(request, CompletionRequest):
        bodies = [{**body, "prompt": prompt} for prompt in text_prompts(request)]
    return TextWork(request, work, bodies)


def _needs_tokens(field: str, verdict: str) -> RequestRejected:
    return RequestRejected(400, f"`{field}` {verdict}: this model takes and gives text, not token ids", param=field)


class _TextChoice(Choice):
    """One choice whose stream is made of OpenAI's chunks."""

    __slots__ = ("_stops", "_text_work")

    def __init__(self, model: GenerationModel, work: TextWork, context: Context, index: int) -> None:
        self._text_work = work
        number = index % work.choices
        body = work.bodies[index // work.choices]
        if number and body.get("seed") is not None:  # as in `generation`: the same seed twice is the same text twice
            body = {**body, "seed": body["seed"] + number}
        request = DispatchRequest(
            body,
            (),
            record=work,
            timer=work.overhead,
            limits=work.limits,
            pinned_instance_id=work.pinned_instance_id,
            takes_text=True,
            stall_detector=work.watch,
        )
        self._stops = StopStrings(work.stops, include=work.include_stop) if work.stops else None
        super().__init__(model, work, context, index, request)

    def _absorb(self, items: Sequence[StreamItem]) -> Delta:
        delta = Delta(self._index)
        for item in items:
            piece = _piece_of(item)
            tokens = count(piece.text)
            self._request.text_tokens += tokens
            delta.tokens += tokens
            self._work.completion_tokens += tokens
            matched = None
            if self._stops is None:
                delta.text += piece.text
            elif piece.text:
                shown, matched = self._stops.push(piece.text)
                delta.text += shown
            if piece.usage is not None:
                self._note_usage(piece.usage)
            if matched is not None:
                delta.finish_reason, delta.stop_reason = "stop", matched
                self._work.finish_reason = "stop"
                self._leave(has_finished=piece.finish_reason is not None)
                break
            if piece.finish_reason is not None:
                delta.text += "" if self._stops is None else self._stops.finish()
                delta.finish_reason = self._work.finish_reason = _finish_reason(piece.finish_reason)
                self._leave(has_finished=True)
                break
        return delta

    def _leave(self, *, has_finished: bool) -> None:
        self._is_over = True
        if has_finished:
            self.stream.finish()
        else:
            self.stream.stop()  # a stop of ours: the worker may go on for a moment, but its stream is left

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int):
            self._text_work.note_prompt(self._prompt_index, prompt)
        if isinstance(completion, int):
            self._work.completion_tokens += completion - self._request.text_tokens
            self._request.text_tokens = completion
        details = usage.get("prompt_tokens_details")
        if isinstance(details, Mapping) and isinstance(cached := details.get("cached_tokens"), int):
            self._work.note_cached(self._prompt_index, cached)


def _piece_of(item: StreamItem) -> TextPiece:
    """Raises the error that the chunk may carry, and Unknown for what is no chunk."""
    if item.index >= 0:
        raise Unknown("a model that takes text sent token ids")
    envelope = item.extra or {}
    if envelope.get("event") == "error":
        raise revive(envelope.get("error") or {"message": "; ".join(envelope.get("comment") or ["unknown error"])})
    try:
        return read_piece(envelope.get("data"))
    except ValueError as error:
        raise Unknown(f"the worker's chunk is invalid: {error}") from error


def _finish_reason(word: str) -> str:
    try:
        found = normalise(word)
    except (EngineFailed, TypeError) as error:
        raise Unknown(str(error)) from error
    return found if found in ("length", "content_filter") else "stop"
