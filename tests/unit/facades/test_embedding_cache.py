"""Embeddings that are kept: the bound in bytes, who makes room, and one computation for all who wait."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.memory import CachedEmbedding, CacheMutation, CacheReservation, MultimodalEmbeddingCacheManager
from dynamo.common.multimodal import AsyncEncoderCache
from dynamo.errors import InvalidArgument


def of(size: int) -> CachedEmbedding:
    return CachedEmbedding(np.zeros(size, np.uint8))


def test_the_least_recently_used_makes_room() -> None:
    cache = MultimodalEmbeddingCacheManager(100)
    assert cache.set_with_delta("a", of(40)) == CacheMutation(True, ["a"], [])
    assert cache.set("b", of(40))
    assert cache.get("a") is not None
    assert cache.set_with_delta("c", of(40)) == CacheMutation(True, ["c"], ["b"])
    assert cache.get("b") is None
    assert cache.keys() == ["a", "c"]
    assert cache.stats == {
        "entries": 2, "current_bytes": 80, "capacity_bytes": 100, "utilization": 0.8, "hits": 1, "misses": 1,
        "evictions": 1, "hit_rate": 0.5,
    }  # fmt: skip


def test_a_newer_embedding_of_a_key_takes_the_place_of_the_older_one() -> None:
    cache = MultimodalEmbeddingCacheManager(100)
    cache.set("a", of(40))
    cache.set("b", of(40))
    assert cache.set_with_delta("a", of(60)) == CacheMutation(True, [], [])
    assert cache.set_with_delta("a", of(101)) == CacheMutation(False, [], ["a"])
    assert cache.keys() == ["b"]
    assert not cache.set("c", of(101))


def test_room_is_made_before_an_embedding_is_there() -> None:
    cache = MultimodalEmbeddingCacheManager(100)
    for key in "abc":
        cache.set(key, of(30))
    assert cache.make_room_for("d", 101) == CacheReservation(False, [])
    assert cache.make_room_for("d", 40) == CacheReservation(True, ["a"])
    assert cache.make_room_for("b", 70) == CacheReservation(True, [])
    with pytest.raises(InvalidArgument):
        cache.make_room_for("d", -1)


def test_sizes_are_those_of_buffers_too_and_nothing_else_is_kept() -> None:
    cache = MultimodalEmbeddingCacheManager(10)
    assert cache.set("a", CachedEmbedding(b"12345", image_grid_thw=[1, 2, 3]))
    assert cache.stats["current_bytes"] == 5
    with pytest.raises(InvalidArgument, match="must be a tensor or a buffer, got int"):
        cache.set("b", CachedEmbedding(7))
    with pytest.raises(InvalidArgument):
        MultimodalEmbeddingCacheManager(-1)
    assert not MultimodalEmbeddingCacheManager(0).set("a", of(1))


@pytest.mark.property
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60)), max_size=60), st.integers(0, 100))
def test_the_bound_holds_and_the_deltas_are_what_is_kept(steps: list[tuple[str, int]], capacity: int) -> None:
    cache, known = MultimodalEmbeddingCacheManager(capacity), set[str]()
    for key, size in steps:
        delta = cache.set_with_delta(key, of(size))
        known = (known - set(delta.removed_keys)) | set(delta.added_keys)
        assert known == set(cache.keys())
        assert cache.stats["current_bytes"] <= capacity
        assert delta.stored == (size <= capacity)


async def test_one_computation_serves_all_who_wait() -> None:
    cache, begun, go = AsyncEncoderCache(MultimodalEmbeddingCacheManager(100)), [], asyncio.Event()

    async def compute() -> CachedEmbedding:
        begun.append(1)
        await go.wait()
        return of(10)

    callers = [asyncio.ensure_future(cache.get_or_compute("a", compute)) for _ in range(5)]
    await asyncio.sleep(0)
    callers[0].cancel()
    go.set()
    found = await asyncio.gather(*callers[1:])
    assert all(each is found[0] for each in found)
    assert await cache.get_or_compute("a", compute) is found[0] is cache.get("a")
    assert (len(begun), cache.stats["entries"]) == (1, 1)
    await cache.close()


async def test_a_failed_computation_is_raised_to_all_and_tried_again() -> None:
    cache, attempts = AsyncEncoderCache(MultimodalEmbeddingCacheManager(100)), []

    async def compute() -> CachedEmbedding:
        attempts.append(1)
        if len(attempts) == 1:
            raise InvalidArgument("no picture")
        return of(10)

    results = await asyncio.gather(*(cache.get_or_compute("a", compute) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in results] == [InvalidArgument] * 3
    assert (await cache.get_or_compute("a", compute)).tensor.nbytes == 10
    await cache.close()
