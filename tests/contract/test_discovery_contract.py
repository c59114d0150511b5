"""The promises of `discovery.base`, held by every backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dynamo.runtime.discovery import Change, Delete, Discovery, Put
from dynamo.runtime.discovery.base import SharedRecords
from support.cases import each_case
from support.discovery_rigs import EtcdRig, FileRig, KubernetesRig, MemoryRig, Rig
from support.fake_kubernetes import FakeKubernetes
from support.patience import PATIENCE_SECONDS

KEY = "v1/instances/ns/c/e/1f"
OTHER = "v1/instances/ns/c/e/2a"

OpenStore = Callable[[], Awaitable[Discovery]]


@pytest.fixture(autouse=True)
def no_defect(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The stores' loops log a defect and go on; here it is a failure."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture(params=["memory", "file", "etcd", "kubernetes"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        match request.param:
            case "memory":
                yield MemoryRig(stack)
            case "file":
                yield FileRig(stack, tmp_path / "store")
            case "kubernetes":
                request.getfixturevalue("patient_requests")
                cluster = FakeKubernetes()
                await cluster.start()
                stack.push_async_callback(cluster.stop)
                yield KubernetesRig(stack, cluster)
            case _:
                yield EtcdRig(stack, request.getfixturevalue("etcd_server"))


@pytest.fixture
def open_store(rig: Rig) -> OpenStore:
    """Opens any number of stores that see each other; closes them."""
    return rig.open


async def until(changes: AsyncIterator[list[Change]], view: dict[str, bytes], wanted: Callable[[], bool]) -> None:
    """Apply batches to `view` until it is as wanted."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not wanted():
            for change in await anext(changes):
                match change:
                    case Put(key, value):
                        view[key] = value
                    case Delete(key):
                        view.pop(key, None)


async def test_a_key_is_seen_by_another_store_with_its_value(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    await one.put(KEY, b'{"a":1}')
    assert await two.get_prefix("v1/instances") == {KEY: b'{"a":1}'}


async def test_put_overwrites_and_put_new_leaves_alone(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    assert await one.put_new(KEY, b'"first"')
    assert not await two.put_new(KEY, b'"second"')
    assert await two.get_prefix(KEY) == {KEY: b'"first"'}
    await one.put(KEY, b'"third"')
    assert await two.get_prefix(KEY) == {KEY: b'"third"'}


async def test_delete_removes_and_an_absent_key_is_fine(open_store: OpenStore) -> None:
    store = await open_store()
    await store.put(KEY, b'"x"')
    await store.delete(KEY)
    await store.delete(KEY)
    assert await store.get_prefix("v1/instances") == {}
    assert await store.put_new(KEY, b'"y"')


@each_case(
    ("prefix", "expected"),
    [
        ("v1/instances", {"ns/c/e/1", "ns/cc/e/2", "ns/c/ee/3", "n_s/c/e/4"}),
        ("v1/instances/", {"ns/c/e/1", "ns/cc/e/2", "ns/c/ee/3", "n_s/c/e/4"}),
        ("v1/instances/ns", {"ns/c/e/1", "ns/cc/e/2", "ns/c/ee/3"}),
        ("v1/instances/ns/c", {"ns/c/e/1", "ns/c/ee/3"}),
        ("v1/instances/ns/c/e", {"ns/c/e/1"}),
        ("v1/instances/ns/c/e/1", {"ns/c/e/1"}),
        ("v1/instances/n", set()),
        ("v1/mdc", set()),
    ],
)
async def test_prefixes_match_whole_segments(open_store: OpenStore, prefix: str, expected: set[str]) -> None:
    store = await open_store()
    for key in ("ns/c/e/1", "ns/cc/e/2", "ns/c/ee/3", "n_s/c/e/4"):
        await store.put(f"v1/instances/{key}", b'"x"')
    found = {key.removeprefix("v1/instances/") for key in await store.get_prefix(prefix)}
    assert found == expected
    async with store.watch(prefix) as changes:
        snapshot = await anext(changes)
    assert {change.key.removeprefix("v1/instances/") for change in snapshot} == expected


@each_case("key", ["", "v1", "v1/instances", "v1/instances/"])
async def test_a_key_without_a_bucket_and_a_name_is_refused(open_store: OpenStore, key: str) -> None:
    store = await open_store()
    with pytest.raises(ValueError, match="bucket"):
        await store.put(key, b'"x"')


async def test_an_empty_store_gives_an_empty_snapshot(open_store: OpenStore) -> None:
    store = await open_store()
    async with store.watch("v1/instances") as changes:
        assert await anext(changes) == []


async def test_a_watch_sees_puts_changes_and_deletes_after_its_snapshot(open_store: OpenStore) -> None:
    writer, reader = await open_store(), await open_store()
    await writer.put(KEY, b"1")
    async with reader.watch("v1/instances/ns/c") as changes:
        assert await anext(changes) == [Put(KEY, b"1")]
        await writer.put(KEY, b"2")
        assert await anext(changes) == [Put(KEY, b"2")]
        await writer.put("v1/instances/ns/cc/e/1", b'"other component"')
        await writer.put("v1/mdc/ns/c/e/1", b'"other bucket"')
        await writer.delete(KEY)
        assert await anext(changes) == [Delete(KEY)]


async def test_a_store_sees_its_own_changes(open_store: OpenStore) -> None:
    store = await open_store()
    async with store.watch("v1/instances") as changes:
        assert await anext(changes) == []
        await store.put(KEY, b"1")
        assert await anext(changes) == [Put(KEY, b"1")]


async def test_nothing_is_lost_between_a_snapshot_and_the_changes(open_store: OpenStore) -> None:
    writer, reader = await open_store(), await open_store()
    expected = {f"v1/instances/ns/c/e/{number:x}": b"%d" % number for number in range(60)}
    started = asyncio.Event()

    async def write() -> None:
        for number, (key, value) in enumerate(expected.items()):
            await writer.put(key, b'"old"')
            await writer.put(key, value)
            if number == 10:
                started.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        await started.wait()
        views: list[dict[str, bytes]] = []
        for _ in range(5):
            async with reader.watch("v1/instances") as changes:
                view: dict[str, bytes] = {}
                await until(changes, view, lambda view=view: len(view) > len(views) * 12)  # type: ignore[misc]
                if len(views) == 4:
                    await until(changes, view, lambda view=view: view == expected)  # type: ignore[misc]
                views.append(view)
    assert views[-1] == expected


async def test_closing_removes_what_one_put_and_nothing_else(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    await one.put("v1/instances/a/b/c/1", b"1")
    await one.put("v1/mdc/a/b/c/1", b"1")
    await two.put("v1/instances/a/b/c/2", b"2")
    async with two.watch("v1/instances") as changes:
        assert len(await anext(changes)) == 2
        await one.close()
        await one.close()
        assert await anext(changes) == [Delete("v1/instances/a/b/c/1")]
    assert await two.get_prefix("v1/instances") == {"v1/instances/a/b/c/2": b"2"}
    assert await two.get_prefix("v1/mdc") == {}


async def test_closing_ends_ones_watches(open_store: OpenStore) -> None:
    store = await open_store()
    async with store.watch("v1/instances") as changes:
        await anext(changes)
        await store.close()
        with pytest.raises(StopAsyncIteration):
            await anext(changes)


async def test_a_closed_store_refuses_to_write(open_store: OpenStore) -> None:
    store = await open_store()
    await store.close()
    with pytest.raises(RuntimeError, match="closed"):
        await store.put(KEY, b'"x"')


async def test_lease_ids_are_u64_stable_and_distinct(open_store: OpenStore) -> None:
    stores = [await open_store() for _ in range(4)]
    ids = [store.lease_id for store in stores]
    assert ids == [store.lease_id for store in stores]
    assert len(set(ids)) == 4
    assert all(0 < lease < 2**64 for lease in ids)


async def test_a_slow_reader_costs_one_entry_for_each_key(open_store: OpenStore) -> None:
    store = await open_store()
    async with store.watch("v1/instances") as changes:
        assert await anext(changes) == []
        for number in range(50):
            await store.put(KEY, b"%d" % number)
        view: dict[str, bytes] = {}
        batches = 0
        while view.get(KEY) != b"49":
            batch = await anext(changes)
            assert len(batch) == 1
            view.update({change.key: change.value for change in batch if isinstance(change, Put)})
            batches += 1
    assert batches <= 50


async def test_of_many_who_create_a_key_at_once_one_has_done_it(open_store: OpenStore) -> None:
    stores = [await open_store() for _ in range(4)]
    for number in range(5):
        key = f"v1/instances/ns/c/e/{number:x}"
        made = await asyncio.gather(*(store.put_new(key, b"%d" % store.lease_id) for store in stores))
        assert made.count(True) == 1
        (winner,) = [store for store, was_made in zip(stores, made, strict=True) if was_made]
        assert (await stores[0].get_prefix(key))[key] == b"%d" % winner.lease_id
        assert not await winner.put_new(key, b'"again"')


@pytest.mark.parametrize("fault", ["expire", "take away"])
async def test_a_record_that_was_taken_from_a_healthy_owner_comes_back(rig: Rig, fault: str) -> None:
    owner, reader = await rig.open(), await rig.open()
    lease_id = owner.lease_id
    await owner.put(KEY, b'"alive"')
    async with reader.watch("v1/instances") as changes:
        view: dict[str, bytes] = {}
        await until(changes, view, lambda: view == {KEY: b'"alive"'})
        if fault == "expire":
            await rig.expire(owner, KEY)
        else:
            await rig.take_away(KEY)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await reader.get_prefix("v1/instances") != {KEY: b'"alive"'}:
                await asyncio.sleep(0.005)
        await reader.put("v1/instances/mark", b"{}")
        await until(changes, view, lambda: "v1/instances/mark" in view)
    assert view[KEY] == b'"alive"'
    assert owner.lease_id == lease_id
    await owner.delete(KEY)
    assert KEY not in await reader.get_prefix("v1/instances")


async def test_a_store_that_was_lost_and_came_back_is_followed_without_a_gap_or_a_repetition(rig: Rig) -> None:
    owner, reader = await rig.open(), await rig.open()
    await owner.put(KEY, b"1")
    seen: list[Change] = []
    async with reader.watch("v1/instances") as changes:
        seen += await anext(changes)
        await rig.lose_store()
        await owner.put(OTHER, b"1")
        await owner.put(KEY, b"2")
        await owner.put("v1/instances/mark", b"{}")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while Put("v1/instances/mark", b"{}") not in seen:
                seen += await anext(changes)
    assert sorted(seen, key=repr) == sorted(
        [Put(KEY, b"1"), Put(OTHER, b"1"), Put(KEY, b"2"), Put("v1/instances/mark", b"{}")], key=repr
    )


async def test_a_store_that_was_wiped_is_filled_again_and_readers_are_not_told_of_it(rig: Rig) -> None:
    owner, reader = await rig.open(), await rig.open()
    expected = {f"v1/instances/ns/c/e/{number:x}": b"%d" % number for number in range(5)}
    for key, value in expected.items():
        await owner.put(key, value)
    async with reader.watch("v1/instances") as changes:
        view: dict[str, bytes] = {}
        await until(changes, view, lambda: view == expected)
        await rig.wipe_store()
        third = await rig.open()  # it knows nothing of what was there before
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await third.get_prefix("v1/instances") != expected:
                await asyncio.sleep(0.01)
        await owner.put("v1/instances/mark", b"{}")
        news = await anext(changes)
    if not isinstance(rig, MemoryRig):  # a hub tells of the loss, and of the return at once
        assert news == [Put("v1/instances/mark", b"{}")]


async def test_a_store_that_answers_has_no_trouble_and_its_ids_survive_a_reader_of_doubles(
    open_store: OpenStore,
) -> None:
    store = await open_store()
    await store.put(KEY, b"{}")
    assert store.trouble() is None
    assert int(float(store.lease_id)) == store.lease_id < 2**53


async def test_of_several_that_replace_a_shared_record_at_once_one_does_and_it_outlives_its_writer(
    open_store: OpenStore,
) -> None:
    stores = [await open_store() for _ in range(3)]
    if not isinstance(stores[0], SharedRecords):
        pytest.skip("this store has no records that are shared")
    key = "v1/limits/pages/07"

    async def replace(before: bytes | None, *, after: bytes) -> int:
        written = await asyncio.gather(
            *[store.swap(key, before, after) for store in stores if isinstance(store, SharedRecords)]
        )
        return sum(written)

    assert await replace(None, after=b"1") == 1
    assert await replace(None, after=b"2") == 0
    assert await replace(b"2", after=b"3") == 0
    assert await replace(b"1", after=b"4") == 1
    view: dict[str, bytes] = {}
    async with stores[2].watch("v1/limits") as changes:
        await until(changes, view, lambda: view == {key: b"4"})
        assert await replace(b"4", after=b"5") == 1
        await until(changes, view, lambda: view == {key: b"5"})
    for store in stores[:2]:
        await store.close()
    assert await stores[2].get_prefix("v1/limits") == {key: b"5"}
