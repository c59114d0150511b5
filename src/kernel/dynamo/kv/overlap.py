"""How much of a prompt each worker rank already holds: what every index of KV blocks answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker."""

    worker_id: int
    dp_rank: int = 0


class Overlap(msgspec.Struct, frozen=True, gc=False):
    """The blocks of one prompt that one rank holds, counted from the first block on, each tier behind the one before."""

    device: int = 0
    host: int = 0  # host_pinned blocks right behind the device ones
    disk: int = 0  # disk and external blocks right behind the host ones


class OverlapIndex(Protocol):
    """Finds the ranks that hold the beginning of a prompt."""

    def find(self, sequence: Sequence[int], now: float = 0.0) -> Mapping[WorkerRank, Overlap]:
        """Return the overlap of each rank with a prompt. Ranks without a block of the prompt are absent.

        `sequence` are chained sequence hashes (`dynamo.kv.hashing.sequence_hashes`). `now` is in seconds; only an index
        whose blocks expire reads it.
        """
