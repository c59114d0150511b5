"""Embeddings by a key, within a bound of bytes: the least recently used makes room."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo.errors import InvalidArgument


@dataclass(slots=True)
class CachedEmbedding:
    """One embedding, and where its parts stand in a picture or a video."""

    tensor: Any  # of torch, of NumPy, or a buffer
    image_grid_thw: Any = None
    video_grid_thw: Any = None
    second_per_grid_ts: Any = None
    video_timestamps: Any = None


class CacheMutation(NamedTuple):
    """What an addition has changed."""

    stored: bool
    added_keys: list[str]  # none where the key was there before
    removed_keys: list[str]


class CacheReservation(NamedTuple):
    """What was removed to make room, and whether there is room now."""

    admitted: bool
    removed_keys: list[str]


class MultimodalEmbeddingCacheManager:
    """Embeddings by a key. Not safe from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        """Raises InvalidArgument for a negative capacity; 0 keeps nothing."""
        if capacity_bytes < 0:
            raise InvalidArgument(f"capacity_bytes must not be negative, got {capacity_bytes}")
        self._capacity = capacity_bytes
        self._kept: OrderedDict[str, tuple[CachedEmbedding, int]] = OrderedDict()
        self._bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: str) -> CachedEmbedding | None:
        """Return an embedding that is kept, and count whether there was one."""
        found = self._kept.get(key)
        if found is None:
            self._misses += 1
            return None
        self._hits += 1
        self._kept.move_to_end(key)
        return found[0]

    def keys(self) -> list[str]:
        """Return the keys, the least recently used first."""
        return list(self._kept)

    def set(self, key: str, embedding: CachedEmbedding) -> bool:
        """Keep an embedding; return False for one that is larger than the whole cache."""
        return self.set_with_delta(key, embedding).stored

    def set_with_delta(self, key: str, embedding: CachedEmbedding) -> CacheMutation:
        """Keep an embedding in place of any older one of its key, and return what changed.

        One that is larger than the whole cache is not kept, and removes nothing but an older one of its key.
        """
        size = size_of(embedding.tensor)
        was_there = key in self._kept
        if size > self._capacity:
            if was_there:
                self._bytes -= self._kept.pop(key)[1]
            return CacheMutation(False, [], [key] if was_there else [])
        removed = self.make_room_for(key, size).removed_keys
        if was_there:
            self._bytes -= self._kept.pop(key)[1]
        self._kept[key] = embedding, size
        self._bytes += size
        return CacheMutation(True, [] if was_there else [key], removed)

    def make_room_for(self, key: str, size: int) -> CacheReservation:
        """Remove others until `size` bytes fit under `key`; nothing is removed for a size that never fits."""
        if size < 0:
            raise InvalidArgument(f"size must not be negative, got {size}")
        if size > self._capacity:
            return CacheReservation(False, [])
        own = self._kept[key][1] if key in self._kept else 0
        removed = []
        for other in list(self._kept):
            if self._bytes - own + size <= self._capacity:
                break
            if other != key:
                self._bytes -= self._kept.pop(other)[1]
                self._evictions += 1
                removed.append(other)
        return CacheReservation(True, removed)

    @property
    def stats(self) -> dict[str, int | float]:
        """Figures of what is kept and of how often it was found."""
        looks = self._hits + self._misses
        return {
            "entries": len(self._kept),
            "current_bytes": self._bytes,
            "capacity_bytes": self._capacity,
            "utilization": self._bytes / self._capacity if self._capacity else 0.0,
            "hits": self._hits,
            "misses": self._misses,
            "evictions": self._evictions,
            "hit_rate": self._hits / looks if looks else 0.0,
        }


def size_of(tensor: Any) -> int:
    """Return the bytes of a tensor or buffer. Raises InvalidArgument for an object of no size."""
    if type(found := getattr(tensor, "nbytes", None)) is int:
        return found
    try:
        return memoryview(tensor).nbytes
    except TypeError as error:
        raise InvalidArgument(f"an embedding must be a tensor or a buffer, got {type(tensor).__name__}") from error
