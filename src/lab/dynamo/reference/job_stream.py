"""One request between the step thread, which computes its chunks, and the generator that hands them on."""

from __future__ import annotations

import asyncio
from collections import deque

from dynamo.contract.chunks import CompletionUsage, TopLogprob
from dynamo.contract.engine import GenerateChunk, final_chunk, usage
from dynamo.errors import DynamoException
from dynamo.reference.core import Core, Emission, RunningChoice
from dynamo.reference.request import Job
from dynamo.runtime.base.tasks import OneWaiter
from dynamo.runtime.calls.context import Context, on_loop


class JobStream:
    """One request between the step thread and its generator. Used on the loop, except `open` and `abort`.

    What waits here is bounded by the request's own length.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._choices: list[RunningChoice] = []
        self._chunks: deque[GenerateChunk] = deque()
        self._waiter = OneWaiter()
        self._error: DynamoException | None = None
        self._open = set(range(job.choices))
        self._shown = 0  # tokens taken, of all choices
        self._cached_tokens: int | None = None
        self._is_reserved = False

    @property
    def choice(self) -> RunningChoice:
        """The first one; known once there was a chunk, or blocks were reserved."""
        return self._choices[0]

    @property
    def is_complete(self) -> bool:
        """Every choice's last chunk was taken."""
        return not self._open

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def open(
        self, core: Core, results: dict[RunningChoice, JobStream], *, keep: bool = False, arrives: bool = False
    ) -> None:
        self._choices = core.add(self._job, keep=keep, arrives=arrives)
        results.update(dict.fromkeys(self._choices, self))

    def abort(self, core: Core, results: dict[RunningChoice, JobStream]) -> None:
        core.abort(self._choices)
        for choice in self._choices:
            results.pop(choice, None)

    def reserve(self) -> None:
        """Mark the choice's blocks as held; the choice now waits for their content."""
        self._is_reserved = True
        self.wake()

    async def reserved(self, context: Context) -> RunningChoice | None:
        """Wait for that; None when the context is stopped first. Raises what `fail` was given."""
        forget = context.on_cancel(on_loop(asyncio.get_running_loop(), lambda killed: self.wake()))
        try:
            while not self._is_reserved and not context.is_stopped():
                await self.wait()
        finally:
            forget()
        return None if context.is_stopped() else self.choice

    def put(self, emission: Emission) -> None:
        """Take what one step yielded of a choice."""
        if self._cached_tokens is None:
            self._cached_tokens = emission.choice.sequence.cached
        self._chunks.append(_chunk(emission))
        self.wake()

    def fail(self, error: DynamoException) -> None:
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        self._waiter.wake()

    async def wait(self) -> None:
        """Wait until there is a chunk, or for a wake-up. Raises what `fail` was given."""
        if self._error is None:
            await self._waiter.wait()
        if self._error is not None and not self._chunks:
            raise self._error

    def take(self) -> list[GenerateChunk]:
        """Return the chunks that have arrived. The chunk that ends the last choice counts the whole stream."""
        chunks = list(self._chunks)
        self._chunks.clear()
        for chunk in chunks:
            self._shown += len(chunk["token_ids"])
            if chunk.get("finish_reason") is not None:
                self._open.discard(chunk["index"])
                if not self._open:
                    chunk["completion_usage"] = self._usage()
        return chunks

    def cancelled(self) -> list[GenerateChunk]:
        """Return the last chunks of a stopped request: those that had arrived, then the end of every open choice."""
        chunks = self.take()
        for index in sorted(self._open):
            chunks.append(final_chunk("cancelled", index=index))
        if self._open:
            chunks[-1]["completion_usage"] = self._usage()
        return chunks

    def _usage(self) -> CompletionUsage:
        return usage(len(self._job.prompt) - self._job.produced, self._shown, cached_tokens=self._cached_tokens)


def _chunk(emission: Emission) -> GenerateChunk:
    choice, drawn = emission.choice, emission.drawn
    chunk: GenerateChunk = {"token_ids": [drawn.token] if emission.shown else [], "index": choice.number}
    if emission.shown and drawn.logprob is not None:
        chunk["log_probs"] = [drawn.logprob]
        if drawn.top or drawn.asked:
            top: list[TopLogprob] = [
                {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
                for rank, (token, logprob) in enumerate(drawn.top, 1)
            ]
            top += [
                {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
                for token, rank, logprob in drawn.asked
            ]
            chunk["top_logprobs"] = [top]
    if emission.reason is not None:
        chunk["finish_reason"] = emission.reason
        if emission.reason == "stop":
            chunk["stop_reason"] = drawn.token
        if choice.prompt_logprobs is not None:
            entries = [
                {
                    str(token): {"logprob": logprob, "rank": rank, "decoded_token": None}
                    for token, rank, logprob in entry
                }
                for entry in choice.prompt_entries
            ]
            chunk["engine_data"] = {"prompt_logprobs": [None, *entries]}
    return chunk
