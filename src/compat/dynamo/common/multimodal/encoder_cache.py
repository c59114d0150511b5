"""Embeddings that are kept, with one computation for all requests that need the same one at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dynamo.common.memory import CachedEmbedding, MultimodalEmbeddingCacheManager
from dynamo.runtime.base.tasks import SingleFlight


class AsyncEncoderCache:
    """A cache of embeddings in front of an encoder."""

    def __init__(self, cache: MultimodalEmbeddingCacheManager) -> None:
        self._cache = cache
        self._attempts: SingleFlight[str, CachedEmbedding] = SingleFlight()

    def get(self, key: str) -> CachedEmbedding | None:
        """Return an embedding that is kept."""
        return self._cache.get(key)

    async def get_or_compute(self, key: str, compute: Callable[[], Awaitable[CachedEmbedding]]) -> CachedEmbedding:
        """Return the embedding of a key; `compute` makes it once for all callers that need it meanwhile.

        A caller that is cancelled leaves the computation to the others. Raises what `compute` raises; that is not kept.
        """
        if (found := self._cache.get(key)) is not None:
            return found

        async def attempt() -> CachedEmbedding:
            made = await compute()
            self._cache.set(key, made)
            return made

        return await self._attempts.run(key, attempt, f"encode {key}")

    @property
    def stats(self) -> dict[str, int | float]:
        """Figures of the cache."""
        return self._cache.stats

    async def close(self) -> None:
        """Cancel what is computed, and compute nothing more."""
        await self._attempts.close()
