"""What became of a request on its way to a worker: noted by the dispatch, read by the metrics and the answer."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.placement import Placement
from dynamo.placement.prefill_bypass import BypassVerdict
from dynamo.router.migration import Move
from dynamo.runtime.request_plane.base import Instance

__all__ = ["DispatchRecord"]


class DispatchRecord:
    """The workers that served one request, and its moves between them."""

    __slots__ = (
        "bypass", "encode_instance_id", "instances", "moves", "placement", "prefill_instance_id", "prefill_placement", "queued_seconds", "sequences",
    )  # fmt: skip

    def __init__(self) -> None:
        self.moves: list[Move] = []  # bounded by the retries and the number of choices
        self.instances: list[Instance] = []  # the workers that answered
        self.encode_instance_id: int | None = None  # the worker that encoded the media, if one did
        self.prefill_instance_id: int | None = None  # the worker that computed the prompt, where that was another one
        self.placement: Placement | None = None  # of the last worker that answered
        self.prefill_placement: Placement | None = None  # of the worker that computed the prompt
        self.bypass: BypassVerdict | None = (
            None  # whether a prefill worker was to compute the prompt; None: no question
        )
        self.queued_seconds = 0.0  # how long it has waited in queues of the router
        # The hashes of the prompts' blocks, each with its prompt: choices and stages share them.
        self.sequences: list[tuple[Sequence[int], int, Sequence[int]]] | None = None
