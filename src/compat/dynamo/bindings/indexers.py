"""`KvIndexer` and `ApproxKvIndexer`: what ranks hold of a prompt, by their KV events or by where prompts went.

The installed 1.6.1 declares both classes and no longer has them; code written for releases before it awaits their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from dynamo.bindings.opened import Opened
from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.index import PrefixIndex
from dynamo.kv.native_bindings import OverlapScores
from dynamo.kv.overlap import OverlapIndex, WorkerRank
from dynamo.router.kv_events.feed import KvEventFeed
from dynamo.runtime.endpoint import Endpoint

__all__ = ["ApproxKvIndexer", "KvIndexer"]

DEFAULT_TTL_SECONDS: Final = 120.0


class KvIndexer:
    """The blocks that the workers of an endpoint hold on their devices, by their KV events."""

    def __init__(self, endpoint: Endpoint, block_size: int) -> None:
        """Follows events from now on, and requests from the workers that are there what they hold. On the event loop."""
        self._block_size = _checked_size(block_size)
        self._opened = Opened(self, endpoint, _fed_index(endpoint), name="KvIndexer")

    def block_size(self) -> int:
        return self._block_size

    async def find_matches(self, sequence: Sequence[int]) -> OverlapScores:
        """Return how many blocks of a prompt each rank holds, by block hashes (not chained)."""
        return _scores(await self._opened.value(), sequence)

    async def find_matches_for_request(
        self, token_ids: Sequence[int], lora_name: str | None = None, is_eagle: bool | None = None
    ) -> OverlapScores:
        """Return how many blocks of a prompt each rank holds."""
        return await self.find_matches(
            block_hashes(token_ids, self._block_size, lora_name=lora_name, eagle=bool(is_eagle))
        )

    async def close(self) -> None:
        """Stop following. Idempotent; the end of the runtime does it, too."""
        await self._opened.close()


class ApproxKvIndexer:
    """The blocks that ranks probably hold, by the prompts that were sent there, for `router_ttl_secs` each."""

    def __init__(self, endpoint: Endpoint, kv_block_size: int, router_ttl_secs: float = DEFAULT_TTL_SECONDS) -> None:
        """Nothing is requested from `endpoint`. Raises ValueError for a size or a time that is not positive."""
        self._block_size = _checked_size(kv_block_size)
        self._index = ApproximateIndex(ttl_seconds=router_ttl_secs)

    def block_size(self) -> int:
        return self._block_size

    async def find_matches_for_request(
        self, token_ids: Sequence[int], lora_name: str | None = None, is_eagle: bool | None = None
    ) -> OverlapScores:
        """Return how many blocks of a prompt each rank probably holds."""
        return _scores(
            self._index, block_hashes(token_ids, self._block_size, lora_name=lora_name, eagle=bool(is_eagle))
        )

    async def process_routing_decision_for_request(
        self, tokens: Sequence[int], worker_id: int, dp_rank: int = 0
    ) -> None:
        """Take a prompt that was sent to a rank."""
        sequence = sequence_hashes(block_hashes(tokens, self._block_size))
        self._index.add(WorkerRank(worker_id, dp_rank), sequence, _now())


@asynccontextmanager
async def _fed_index(endpoint: Endpoint) -> AsyncIterator[PrefixIndex]:
    index = PrefixIndex()
    async with KvEventFeed(endpoint, index):
        yield index


def _scores(index: OverlapIndex, hashes: Sequence[int]) -> OverlapScores:
    found = index.find(sequence_hashes(hashes), _now())
    return OverlapScores({rank: overlap.device for rank, overlap in found.items() if overlap.device})


def _checked_size(block_size: int) -> int:
    if block_size < 1:
        raise ValueError(f"the block size must be at least 1, got {block_size}")
    return block_size


def _now() -> float:
    return asyncio.get_running_loop().time()
