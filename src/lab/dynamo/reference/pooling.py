"""From the hidden states of a prompt to one vector: a request's inputs as typed values, and the state of one on its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dynamo.contract.requests.pooling import dimensions_within
from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonMapping
from dynamo.reference.blocks import PrefixKey
from dynamo.reference.lora import Adapter
from dynamo.reference.request import Limits, adapter_of
from dynamo.reference.scheduler import Sequenced
from dynamo.reference.tensor_files import Array
from dynamo.reference.weights import Weights

TASKS: Final = ("embed", "classify", "score", "token_embed")
MIN_NORM: Final = 1e-12  # a vector of zeros stays one, as torch has it


@dataclass(frozen=True, slots=True)
class InputJob:
    """One input of a request, understood."""

    prompt: tuple[int, ...]
    task: str
    mode: str
    normalize: bool
    activates: bool  # classes and scores are probabilities, and not logits
    dimensions: int | None
    key: PrefixKey
    priority: int
    adapter: Adapter | None


@dataclass(slots=True, eq=False)
class RunningInput:
    """One input on its way: its pieces are computed in order, some of them again after a preemption."""

    sequence: Sequenced
    job: InputJob
    index: int  # among the inputs of its request
    seen: int = 0  # tokens whose hidden states were taken
    total: Array | None = None  # the sum of them, or the one that counts
    rows: list[Array] | None = None  # all of them, where each token has its vector

    @property
    def adapter(self) -> Adapter | None:
        return self.job.adapter

    def take(self, hidden: Array, start: int) -> None:
        """Take the hidden states of consecutive tokens from position `start` on."""
        fresh = hidden[self.seen - start :] if self.seen > start else hidden
        if not len(fresh):
            return
        is_first, self.seen = self.seen == 0, start + len(hidden)
        match self.job.mode:
            case "all":
                self.rows = [*(self.rows or ()), fresh.copy()]
            case "mean":
                added = fresh.sum(axis=0)
                self.total = added if self.total is None else self.total + added
            case "last":
                self.total = fresh[-1].copy()
            case "cls" if is_first:
                self.total = fresh[0].copy()

    def result(self, weights: Weights) -> Array:
        """Return the vector, once every token was taken."""
        job = self.job
        if job.mode == "all":
            assert self.rows is not None
            matrix: Array = np.concatenate(self.rows)
            return _normalised(matrix) if job.normalize else matrix
        assert self.total is not None
        vector: Array = self.total / np.float32(self.seen) if job.mode == "mean" else self.total
        if job.task in ("classify", "score"):
            assert weights.classes is not None
            logits: Array = weights.classes @ vector
            return _probabilities(logits) if job.activates else logits
        if job.dimensions is not None:
            vector = vector[: job.dimensions]
        return _normalised(vector) if job.normalize else vector


@dataclass(frozen=True, slots=True)
class Pooled:
    """What one step made of one input: all of it."""

    choice: RunningInput
    vector: Array


def read_inputs(request: JsonMapping, limits: Limits, adapters: Mapping[str, Adapter]) -> list[InputJob]:
    """Parse a request for vectors. Raises InvalidArgument naming the field for what cannot be served."""
    pooling = limits.pooling
    task = request.get("task") or "embed"
    if task not in TASKS:
        raise InvalidArgument(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    if task in ("classify", "score") and not pooling.labels:
        raise InvalidArgument(f"this model has no classification head, which the task {task!r} needs")
    if task == "score" and len(pooling.labels) != 1:
        raise InvalidArgument(f"this model has {len(pooling.labels)} classes; the task 'score' needs a model with one")
    routing = request.get("routing")
    routing = routing if isinstance(routing, Mapping) else {}
    name = routing.get("lora_name")
    adapter = adapter_of(name if isinstance(name, str) else None, request.get("model"), adapters)
    normalize = request.get("normalize")
    priority = routing.get("priority")
    modes = {"token_embed": "all", "classify": "last", "score": "last"}
    return [
        InputJob(
            prompt=_prompt(ids, position, limits),
            task=task,
            mode=modes.get(task, pooling.mode),
            normalize=pooling.normalize if normalize is None else normalize is True,
            activates=request.get("use_activation") is not False,
            dimensions=dimensions_within(request.get("dimensions"), pooling),
            key=PrefixKey(cache_salt=routing.get("cache_salt"), lora_name=None if adapter is None else adapter.name),
            priority=priority if type(priority) is int else 0,
            adapter=adapter,
        )
        for position, ids in enumerate(request["token_ids"])
    ]


def _prompt(ids: Sequence[int], position: int, limits: Limits) -> tuple[int, ...]:
    if not 0 < len(ids) <= limits.context_length:
        raise InvalidArgument(
            f"token_ids[{position}] has {len(ids)} tokens; this model takes 1 to {limits.context_length}"
        )
    if max(ids) >= limits.vocab_size or min(ids) < 0:
        raise InvalidArgument(f"token_ids[{position}] holds an id that is not in 0..{limits.vocab_size - 1}")
    return tuple(ids)


def _normalised(vectors: Array) -> Array:
    norms = np.sqrt(np.einsum("...i,...i->...", vectors, vectors))[..., None]
    normed: Array = (vectors / np.maximum(norms, np.float32(MIN_NORM))).astype(np.float32)
    return normed


def _probabilities(logits: Array) -> Array:
    if len(logits) == 1:  # one class: how likely it is, on its own
        alone: Array = (0.5 + 0.5 * np.tanh(logits * 0.5)).astype(np.float32)
        return alone
    raised = np.exp(logits - logits.max())
    shares: Array = (raised / raised.sum()).astype(np.float32)
    return shares
