"""Vectors instead of tokens: requests of a pooling worker to `AsyncLLM.encode`, and its tensors back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any, Final

from dynamo.contract.embedding import Embedding, EmbedRequest, embedding
from dynamo.contract.requests.vectors import EMBED, inputs_within, task_among
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.base.tasks import Background
from dynamo.vllm.adapters import VllmAdapters

POOLING: Final = "pooling"  # vLLM's name of the runner

NewId = Callable[[], AbstractContextManager[str]]
"""Gives the id of a request at vLLM for as long as it runs."""


class VllmPooling:
    """Serves the requests for vectors of one running engine."""

    def __init__(self, client: Any, config: Any, adapters: VllmAdapters, tasks: Sequence[str]) -> None:
        """`client`: vLLM's `AsyncLLM`. `config`: its `VllmConfig`. `tasks`: what the model can do, in vLLM's words."""
        self._client, self._adapters, self._tasks = client, adapters, tuple(tasks)
        self._context_length: int = config.model_config.max_model_len
        self._vocab_size: int = config.model_config.get_vocab_size()
        self._has_priorities = config.scheduler_config.policy == "priority"

    @property
    def canary_task(self) -> str:
        """A task that the model has."""
        return EMBED if EMBED in self._tasks else self._tasks[0]

    async def vectors(self, request: EmbedRequest, new_id: NewId) -> list[Embedding] | None:
        """Return the vectors of all inputs, which run at the same time; None when they were aborted.

        Raises InvalidArgument naming the field, and what vLLM raises.
        """
        params, inputs = self._params(request), inputs_within(request, self._context_length, self._vocab_size)
        with self._adapters.used(self._adapters.of(request)) as adapter:
            keywords: dict[str, Any] = {"lora_request": adapter}
            if self._has_priorities:
                keywords["priority"] = -((request.get("routing") or {}).get("priority") or 0)  # vLLM's lowest is first

            async def vector(index: int, ids: list[int]) -> Embedding | None:
                from vllm.inputs import tokens_input

                with new_id() as request_id:
                    stream = self._client.encode(tokens_input(ids), params.clone(), request_id, **keywords)
                    async with aclosing(stream):
                        async for output in stream:
                            if output.finished:
                                return _embedding(index, output.outputs.data)
                raise EngineShutdown("vLLM ended an input without its vector")

            async with Background() as work:
                running = [
                    work.start(vector(index, ids), f"input {index}", is_awaited=True)
                    for index, ids in enumerate(inputs)
                ]
                found = [await task for task in running]
        vectors = [each for each in found if each is not None]
        return vectors if len(vectors) == len(found) else None

    def _params(self, request: EmbedRequest) -> Any:
        from vllm import PoolingParams

        task = task_among(request, self._tasks)
        activation = request.get("use_activation")
        if activation is None and task in (EMBED, "token_embed"):
            activation = request.get("normalize")  # what vLLM calls the activation of these tasks
        return PoolingParams(task=task, dimensions=request.get("dimensions"), use_activation=activation)


def _embedding(index: int, data: Any) -> Embedding | None:
    """Make the result of an input from vLLM's tensor; None for an input that was aborted."""
    if data.numel() == 0:
        return None
    values = data.float().cpu().contiguous().numpy()
    return embedding(index, values.astype("<f4", copy=False).tobytes(), list(data.shape) if data.ndim > 1 else None)


def check_tasks(tasks: Sequence[str], endpoint_types: str) -> None:
    """Raise InvalidArgument for a model that has no task for what the worker is to serve."""
    if not tasks or ("embed" in endpoint_types.lower() and EMBED not in tasks):
        raise InvalidArgument(
            f"endpoint types {endpoint_types!r}: the model makes no such vectors, its tasks are "
            f"{', '.join(sorted(tasks)) or 'none'}"
        )
