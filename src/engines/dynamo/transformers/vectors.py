"""Vectors instead of tokens: the inputs of all requests go in batches through the model's layers, in a thread of their own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from dynamo.contract.embedding import Embedding, EmbedRequest, embedding
from dynamo.contract.requests.pooling import Pooling, dimensions_within
from dynamo.contract.requests.vectors import EMBED, inputs_within, task_among
from dynamo.errors import EngineShutdown
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.transformers.loading import LoadedEncoder

TOKENS: Final = "token_embed"
TASKS: Final = (EMBED, TOKENS)


class TransformersVectors:
    """Serves the requests for vectors of one model."""

    def __init__(self, loaded: LoadedEncoder, pooling: Pooling, *, max_inputs: int, max_tokens: int) -> None:
        """`max_inputs`, `max_tokens`: of one batch; an input that is longer is one by itself."""
        self._loaded, self._pooling = loaded, pooling
        self._batches = _Batches(loaded.states, max_inputs, max_tokens)

    async def vectors(self, request: EmbedRequest, context: Context) -> AsyncGenerator[Embedding, None]:
        """Yield the vector of each input, in order; ends early once the context is stopped.

        Raises InvalidArgument naming the field, EngineShutdown after `close`.
        """
        task = task_among(request, TASKS)
        dimensions = dimensions_within(request.get("dimensions"), self._pooling)
        inputs = inputs_within(request, self._loaded.context_length, self._loaded.vocab_size)
        asked, mode = request.get("normalize"), "all" if task == TOKENS else self._pooling.mode
        is_normal = self._pooling.normalize if asked is None else asked is True
        if context.is_stopped():
            return
        finish = partial(pooled, mode=mode, dimensions=dimensions, is_normal=is_normal)
        waiting = self._batches.add(inputs, finish)

        def leave(_killed: bool) -> None:
            for each in waiting:
                each.cancel()

        forget = context.on_cancel(on_loop(asyncio.get_running_loop(), leave))
        try:
            for index, each in enumerate(waiting):
                await asyncio.wait([each])
                if each.cancelled():
                    return
                vector = each.result().contiguous().numpy()
                shape = None if vector.ndim == 1 else list(vector.shape)
                yield embedding(index, vector.astype("<f4", copy=False).tobytes(), shape)
        finally:
            forget()
            leave(True)
            for each in waiting:
                if not each.cancelled():
                    each.exception()  # marked as retrieved: that of the first one was raised

    async def close(self) -> None:
        """End what waits, and wait for the batch that runs. Safe twice."""
        await self._batches.close()


class _Input(NamedTuple):
    """One input that waits."""

    ids: Sequence[int]
    finish: Callable[[Any], Any]  # from the states of its tokens to its vector
    vector: asyncio.Future[Any]


class _Batches:
    """What waits for the model, oldest first. Bounded by the requests that the worker lets in."""

    def __init__(self, compute: Callable[[Sequence[Sequence[int]]], Any], max_inputs: int, max_tokens: int) -> None:
        self._compute, self._max_inputs, self._max_tokens = compute, max_inputs, max_tokens
        self._waiting: deque[_Input] = deque()
        self._work = Background()
        self._is_running = False

    def add(self, inputs: Sequence[Sequence[int]], finish: Callable[[Any], Any]) -> list[asyncio.Future[Any]]:
        """Return what will hold the vectors. Cancel those that no request waits for any more. Raises EngineShutdown once closed."""
        if self._work.is_closed:
            raise EngineShutdown("transformers is not running")
        loop = asyncio.get_running_loop()
        added = [_Input(ids, finish, loop.create_future()) for ids in inputs]
        self._waiting.extend(added)
        if not self._is_running:
            self._is_running = True
            self._work.start(self._run(), "batches of inputs")
        return [each.vector for each in added]

    async def _run(self) -> None:
        try:
            while batch := self._next():
                await self._one(batch)
        finally:
            self._is_running = False
            _fail(self._waiting, EngineShutdown("transformers is shutting down"))  # there are none unless it was closed

    async def _one(self, batch: list[_Input]) -> None:
        computing = asyncio.get_running_loop().run_in_executor(None, self._vectors, batch)
        try:
            vectors = await asyncio.shield(computing)
        except asyncio.CancelledError:
            await asyncio.wait([computing])  # the thread cannot be stopped, and the model must not go before it
            _fail(batch, EngineShutdown("transformers is shutting down"))
            raise
        except Exception as error:  # each request of the batch reports it
            _fail(batch, error)
            return
        for each, vector in zip(batch, vectors, strict=True):
            if not each.vector.done():
                each.vector.set_result(vector)

    def _vectors(self, batch: list[_Input]) -> list[Any]:
        """Compute a batch; in a thread."""
        states = self._compute([each.ids for each in batch])
        return [each.finish(states[row, : len(each.ids)]) for row, each in enumerate(batch)]

    def _next(self) -> list[_Input]:
        """Take the inputs of the next batch: each counts as many tokens as the longest one."""
        batch: list[_Input] = []
        longest = 0
        while self._waiting and len(batch) < self._max_inputs:
            first = self._waiting[0]
            if not first.vector.done():  # else it was cancelled
                longest = max(longest, len(first.ids))
                if batch and longest * (len(batch) + 1) > self._max_tokens:
                    break
                batch.append(first)
            self._waiting.popleft()
        return batch

    async def close(self) -> None:
        await self._work.close()


def _fail(inputs: Iterable[_Input], error: Exception) -> None:
    for each in inputs:
        if not each.vector.done():
            each.vector.set_exception(error)


def pooled(states: Any, *, mode: str, dimensions: int | None = None, is_normal: bool = True) -> Any:
    """Return the vector of one input. `states`: a tensor with a row for each token. `mode`: "all" is a vector for each token."""
    import torch

    match mode:
        case "mean":
            vector = states.mean(dim=0)
        case "cls":
            vector = states[0]
        case "last":
            vector = states[-1]
        case _:
            vector = states
    if dimensions is not None:
        vector = vector[..., :dimensions]
    return torch.nn.functional.normalize(vector, dim=-1) if is_normal else vector
