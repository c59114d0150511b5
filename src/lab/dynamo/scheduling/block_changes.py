"""What a pass changes in the caches of a rank: blocks that became complete, and blocks that are there no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.scheduling.request import ScheduledRequest

DEVICE_TIER: Final = "device"  # as KV events name it
HOST_TIER: Final = "host_pinned"


@dataclass(slots=True, eq=False)
class BlockRun:
    """Blocks of one request that became complete, and that the cache did not hold before: block numbers [begin, end)."""

    request: ScheduledRequest
    begin: int
    end: int
    tier: str = DEVICE_TIER

    def part(self, begin: int, end: int, tier: str) -> BlockRun:
        """Return blocks [begin, end) of the same request, in a tier."""
        return BlockRun(self.request, begin, end, tier)

    @property
    def parent(self) -> int | None:
        """The identity of the block before; None: the run begins the sequence."""
        return self.request.identities[self.begin - 1] if self.begin else None

    @property
    def identities(self) -> list[int]:
        """The blocks' names: chained hashes."""
        return self.request.identities[self.begin : self.end]

    @property
    def content(self) -> list[int]:
        """Hashes of each block's own tokens."""
        return self.request.content[self.begin : self.end]


@dataclass(slots=True, eq=False)
class EvictedBlocks:
    """Blocks that the cache holds no more."""

    identities: list[int]
    tier: str = DEVICE_TIER
