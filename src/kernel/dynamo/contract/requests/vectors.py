"""What engines check of a request for vectors, so that each mistake is the client's and names the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynamo.contract.embedding import EmbedRequest
from dynamo.errors import InvalidArgument

EMBED: Final = "embed"
"""The task of a request that names none."""


def inputs_within(request: EmbedRequest, context_length: int, vocab_size: int) -> list[list[int]]:
    """Return the inputs of a request. Raises InvalidArgument for one that is too long or has ids that the model lacks."""
    inputs = request["token_ids"]
    for index, ids in enumerate(inputs):
        if not 0 < len(ids) <= context_length:
            raise InvalidArgument(f"token_ids[{index}] has {len(ids)} tokens; this model takes 1 to {context_length}")
        if max(ids) >= vocab_size or min(ids) < 0:
            raise InvalidArgument(f"token_ids[{index}] holds an id that is not in 0..{vocab_size - 1}")
    return inputs


def task_among(request: EmbedRequest, tasks: Sequence[str]) -> str:
    """Return the task of a request. Raises InvalidArgument for what the model cannot do."""
    task = request.get("task") or EMBED
    if task not in tasks:
        raise InvalidArgument(f"task is {task!r}; this model's tasks are {', '.join(sorted(tasks))}")
    return task
