"""The promises of `response_store.base`, held by every store."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.history import StoredResponse
from dynamo.frontend.base.settings.stored_responses import StoreLimits, read_store_place
from dynamo.frontend.parts.stored_responses.base import ResponseStore, StoreUnavailable
from dynamo.frontend.parts.stored_responses.memory import MemoryResponseStore
from dynamo.frontend.parts.stored_responses.part import open_response_store
from dynamo.frontend.parts.stored_responses.sqlite import SqliteResponseStore

LIMITS = StoreLimits(entries=3, bytes=1000, ttl_seconds=60)
Open = Callable[[StoreLimits], ResponseStore]


class Clock:
    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        self.time += 0.001  # no two uses at the same time
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Open]:
    stores: list[ResponseStore] = []

    def make(limits: StoreLimits) -> ResponseStore:
        is_memory = request.param == "memory"
        stores.append(
            MemoryResponseStore(limits, now=clock)
            if is_memory
            else SqliteResponseStore(tmp_path / "responses.db", limits, now=clock)
        )
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()
        await store.aclose()


def response(number: int, *, size: int = 20, owner: str = "", previous: str | None = None) -> StoredResponse:
    id = f"resp_{number:032x}".replace("0" * 27, f"{number:027x}")
    return StoredResponse(id, b"r" * (size // 2), b"i" * (size - size // 2), previous, owner)


async def test_what_was_put_is_found_until_it_is_deleted(opened: Open) -> None:
    store = opened(LIMITS)
    kept = response(1, previous="resp_x")
    assert await store.put(kept) == (1, 20)
    assert await store.get(kept.id) == kept
    assert await store.usage() == (1, 20)
    assert not await store.delete(response(2).id)
    assert await store.delete(kept.id)
    assert not await store.delete(kept.id)
    assert await store.get(kept.id) is None
    assert await store.usage() == (0, 0)


async def test_an_item_finds_the_response_it_belongs_to(opened: Open) -> None:
    store = opened(LIMITS)
    kept = response(1)
    await store.put(kept)
    stem = kept.id[len("resp_") : -5]
    assert await store.get(f"msg_{stem}00007") == kept
    assert await store.get(f"resp_{stem}fffff") is None
    assert not await store.delete(f"msg_{stem}00007")
    for strange in ("", "x", "resp_", "_" * 40, "resp_\x00", "msg_" + "0" * 1000):
        assert await store.get(strange) is None


async def test_another_owner_finds_nothing(opened: Open) -> None:
    store = opened(LIMITS)
    kept = response(1, owner="a")
    await store.put(kept)
    assert await store.get(kept.id) is None
    assert await store.get(kept.id, "b") is None
    assert not await store.delete(kept.id, "b")
    assert await store.get(kept.id, "a") == kept


async def test_the_same_id_is_replaced(opened: Open) -> None:
    store = opened(LIMITS)
    await store.put(response(1, size=500))
    await store.put(response(1, size=40))
    assert await store.usage() == (1, 40)


async def test_what_was_used_longest_ago_goes_first(opened: Open) -> None:
    store = opened(LIMITS)
    for number in (1, 2, 3):
        await store.put(response(number))
    assert await store.get(response(1).id) is not None
    await store.put(response(4))
    assert [await store.get(response(number).id) is not None for number in (1, 2, 3, 4)] == [True, False, True, True]


async def test_the_bytes_are_bounded(opened: Open) -> None:
    store = opened(LIMITS)
    await store.put(response(1, size=600))
    await store.put(response(2, size=300))
    await store.put(response(3, size=200))
    assert await store.usage() == (2, 500)
    assert await store.put(response(4, size=1001)) is None
    assert await store.usage() == (2, 500)
    assert await store.put(response(5, size=1000))
    assert await store.usage() == (1, 1000)


async def test_a_project_that_has_most_makes_the_room(opened: Open) -> None:
    store = opened(StoreLimits(entries=6, bytes=1000, ttl_seconds=60))
    quiet = [response(number, owner="key quiet\n") for number in (1, 2)]
    for each in quiet:
        await store.put(each)
    for number in range(10, 40):  # whatever tenants its clients name
        await store.put(response(number, owner=f"project greedy\ntenant {number % 3}"))
    assert await store.projects() == {"key quiet": 40, "project greedy": 80}
    assert all([await store.get(each.id, each.owner) is not None for each in quiet])
    newest = [await store.get(response(number).id, f"project greedy\ntenant {number % 3}") for number in range(34, 40)]
    assert [found is not None for found in newest] == [False, False, True, True, True, True]
    await store.put(response(50, size=900, owner="project greedy\n"))  # by its bytes, too
    assert await store.projects() == {"key quiet": 40, "project greedy": 960}
    assert all([await store.get(each.id, each.owner) is not None for each in quiet])


async def test_without_keys_tenants_are_one_project(opened: Open) -> None:
    store = opened(LIMITS)
    for number, tenant in enumerate(("a", "b", "b", "b"), start=1):
        await store.put(response(number, owner=tenant))
    assert await store.projects() == {"": 60}
    assert await store.get(response(1).id, "a") is None


async def test_what_is_not_used_for_long_is_gone(opened: Open, clock: Clock) -> None:
    store = opened(LIMITS)
    await store.put(response(1))
    await store.put(response(2))
    clock.time += 40
    assert await store.get(response(1).id) is not None
    clock.time += 40
    assert await store.get(response(2).id) is None
    assert await store.usage() == (1, 20)


async def test_many_at_once(opened: Open) -> None:
    store = opened(StoreLimits(entries=50, bytes=10_000, ttl_seconds=60))

    async def use(number: int) -> None:
        await store.put(response(number))
        await store.get(response(number).id)
        if number % 3 == 0:
            await store.delete(response(number).id)

    await asyncio.gather(*(use(number) for number in range(120)))
    entries, size = await store.usage()
    assert entries <= 50
    assert size == entries * 20


# -- of the file alone ---------------------------------------------------------------------------------------------------


async def test_two_processes_share_a_file_and_it_outlives_them(tmp_path: Path) -> None:
    first = SqliteResponseStore(tmp_path / "r.db", LIMITS)
    second = SqliteResponseStore(tmp_path / "r.db", LIMITS)
    await first.put(response(1))
    assert await second.get(response(1).id) == response(1)
    await asyncio.gather(*(store.put(response(2 + number)) for number, store in enumerate([first, second] * 4)))
    assert (await first.usage())[0] == (await second.usage())[0] == 3
    await first.aclose()
    await second.aclose()
    third = SqliteResponseStore(tmp_path / "r.db", LIMITS)
    assert (await third.usage())[0] == 3
    assert (tmp_path / "r.db").stat().st_mode & 0o077 == 0
    await third.aclose()
    with pytest.raises(StoreUnavailable):
        await third.get(response(1).id)


def test_a_file_that_is_no_store_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    path.write_bytes(b"a letter to nobody " * 100)
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        SqliteResponseStore(path, LIMITS)
    assert path.read_bytes() == b"a letter to nobody " * 100
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        SqliteResponseStore(tmp_path / "missing" / "r.db", LIMITS)


def test_a_store_of_another_version_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(InvalidArgument, match="version 9"):
        SqliteResponseStore(path, LIMITS)


async def test_which_store_there_is(tmp_path: Path) -> None:
    assert open_response_store("off", LIMITS, is_shared_port=False) is None
    assert open_response_store("memory", LIMITS, is_shared_port=True) is None
    assert isinstance(open_response_store("memory", LIMITS, is_shared_port=False), MemoryResponseStore)
    found = open_response_store(f"sqlite:{tmp_path / 'r.db'}", LIMITS, is_shared_port=True)
    assert isinstance(found, SqliteResponseStore)
    await found.aclose()
    assert [read_store_place(place) for place in ("memory", "off", "sqlite:x")] == ["memory", "off", "sqlite:x"]
    for wrong in ("", "disk", "sqlite:", "Memory"):
        with pytest.raises(ValueError, match="is not"):
            read_store_place(wrong)
