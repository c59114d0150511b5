"""What an encode worker keeps of its embeddings. It imports without torch: an embedding may be any tensor or buffer."""

from dynamo.common.memory.embedding_cache import (
    CachedEmbedding,
    CacheMutation,
    CacheReservation,
    MultimodalEmbeddingCacheManager,
)

__all__ = ["CacheMutation", "CacheReservation", "CachedEmbedding", "MultimodalEmbeddingCacheManager"]
