"""What only the file store promises: its layout on disk, leases by modification time, many processes."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.runtime.discovery import Delete, FileDiscovery, Put
from dynamo.runtime.discovery.file import bucket as bucket_module
from dynamo.runtime.discovery.file.bucket import CONFIRM_SECONDS, LOCK_ATTEMPTS
from dynamo.runtime.discovery.file.discovery import FileStore
from dynamo.runtime.discovery.keys import decode_name, encode_name, split_key
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS

KEY = "v1/instances/ns/my_comp/gen-1/1f"
NAME = "ns%2Fmy%5Fcomp%2Fgen%2D1%2F1f"
TTL = 10.0


class Clocks:
    """Wall and monotonic time under the test's control; the wall starts at the real time, as the files' times do."""

    def __init__(self) -> None:
        self.wall_now = time.time()
        self.monotonic_now = 1000.0

    def advance(self, seconds: float) -> None:
        self.wall_now += seconds
        self.monotonic_now += seconds

    def wall(self) -> float:
        return self.wall_now

    def monotonic(self) -> float:
        return self.monotonic_now


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def store(tmp_path: Path, clocks: Clocks) -> FileStore:
    return open_store(tmp_path, clocks)


def open_store(root: Path, clocks: Clocks) -> FileStore:
    store = FileStore(root, ttl_seconds=TTL, wall=clocks.wall, monotonic=clocks.monotonic)
    store.open()
    return store


def pass_time(clocks: Clocks, seconds: float, *stores: FileStore) -> list[object]:
    """Let time go by in steps that a living thread would make; the changes of the first store."""
    changes: list[object] = []
    steps = max(1, round(seconds / 0.5))
    for _ in range(steps):
        clocks.advance(seconds / steps)
        for index, store in enumerate(stores):
            found = store.poll()
            for path in renewed_now(store):
                os.utime(path, (clocks.wall_now, clocks.wall_now))
            if index == 0:
                changes += found
    return changes


def renewed_now(store: FileStore) -> Iterator[Path]:
    """A poll renews files with the real time; these are to be moved to the test's time."""
    for key in store._own:
        bucket, inside = split_key(key)
        path = store.root / bucket / encode_name(inside)
        if path.exists() and abs(path.stat().st_mtime - time.time()) < 2:
            yield path


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def age(path: Path, seconds: float, clocks: Clocks) -> None:
    os.utime(path, (clocks.wall_now - seconds, clocks.wall_now - seconds))


def plant(root: Path, name: str = "a%2Fb%2Fc%2F1", value: bytes = b"{}", bucket: str = "v1/instances") -> Path:
    """A record as another program would write it."""
    directory = root / bucket
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / ".tmp_other"
    temporary.write_bytes(value)
    return temporary.rename(directory / name)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_record_that_another_program_overwrites_is_written_again_at_the_next_renewal(
    in_place: bool, store: FileStore, tmp_path: Path, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(KEY, b'{"type":"Endpoint"}')
    (path,) = files(tmp_path)
    if in_place:
        path.write_bytes(b"rubbish")
    else:
        plant(tmp_path, path.name, b"rubbish")
    reader = open_store(tmp_path, clocks)
    assert reader.read("v1/instances/")[0] == {KEY: b"rubbish"}
    pass_time(clocks, TTL / 3, store)
    assert reader.read("v1/instances/")[0] == {KEY: b'{"type":"Endpoint"}'}
    pass_time(clocks, TTL, store)
    assert caplog.text.count("was overwritten by another process; writing it again") == 1


def test_a_record_lies_under_its_bucket_with_the_whole_key_percent_encoded(store: FileStore, tmp_path: Path) -> None:
    store.put(KEY, b'{"type":"Endpoint"}')
    assert files(tmp_path) == [tmp_path / "v1" / "instances" / NAME]
    assert files(tmp_path)[0].read_bytes() == b'{"type":"Endpoint"}'


@given(st.text())
def test_every_key_survives_its_file_name(key: str) -> None:
    name = encode_name(key)
    assert re.fullmatch(r"([A-Za-z0-9]|%[0-9A-F]{2})*", name)
    assert decode_name(name) == key


@pytest.mark.parametrize("name", ["%", "%4", "%zz", "%FF", "ä"])
def test_a_name_that_no_key_is_written_as_is_ignored(store: FileStore, tmp_path: Path, name: str) -> None:
    plant(tmp_path, name)
    assert store.read("v1/instances")[0] == {}


def test_temporary_files_are_no_records_and_are_swept_when_old(
    store: FileStore, tmp_path: Path, clocks: Clocks
) -> None:
    fresh, stale = plant(tmp_path, ".tmp_fresh"), plant(tmp_path, ".tmp_stale")
    age(stale, TTL + 1, clocks)
    assert store.read("v1/instances")[0] == {}
    assert files(tmp_path) == [fresh]


def test_a_key_too_long_for_a_file_name_is_refused_and_leaves_nothing(store: FileStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="too long"):
        store.put("v1/instances/" + "x" * 300, b"{}")
    assert files(tmp_path) == []


def test_own_records_are_renewed_within_four_seconds(store: FileStore, tmp_path: Path, clocks: Clocks) -> None:
    store.put(KEY, b"{}")
    (path,) = files(tmp_path)
    age(path, 100, clocks)
    pass_time(clocks, 4, store)
    assert clocks.wall_now - path.stat().st_mtime < 4


def test_a_record_that_is_not_renewed_is_removed_within_a_second_of_its_ttl(
    store: FileStore, tmp_path: Path, clocks: Clocks
) -> None:
    path = plant(tmp_path)
    age(path, 0, clocks)
    assert list(store.read("v1/instances")[0]) == ["v1/instances/a/b/c/1"]
    assert pass_time(clocks, TTL - 0.5, store) == []
    assert path.exists()
    assert pass_time(clocks, 1.5, store) == [Delete("v1/instances/a/b/c/1")]
    assert not path.exists()


def test_what_a_dead_process_left_is_not_in_the_first_snapshot(
    store: FileStore, tmp_path: Path, clocks: Clocks
) -> None:
    age(plant(tmp_path), TTL + 1, clocks)
    assert store.read("v1/instances")[0] == {}
    assert store.put_new("v1/instances/a/b/c/1", b"mine")


def test_a_dead_record_does_not_stand_in_the_way_of_a_new_one(store: FileStore, tmp_path: Path, clocks: Clocks) -> None:
    age(plant(tmp_path), TTL + 1, clocks)
    assert store.put_new("v1/instances/a/b/c/1", b"mine")


def test_a_record_its_owner_renews_stays(store: FileStore, tmp_path: Path, clocks: Clocks) -> None:
    owner = open_store(tmp_path, clocks)
    owner.put(KEY, b"{}")
    age(files(tmp_path)[0], 0, clocks)
    store.read("v1/instances")
    assert pass_time(clocks, 5 * TTL, store, owner) == []


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_jump_kills_nobody(store: FileStore, tmp_path: Path, clocks: Clocks, jump: float) -> None:
    owner = open_store(tmp_path, clocks)
    owner.put(KEY, b"{}")
    age(files(tmp_path)[0], 0, clocks)
    store.read("v1/instances")
    pass_time(clocks, 1, store, owner)
    clocks.wall_now += jump
    assert pass_time(clocks, 2 * TTL, store, owner) == []
    assert list(store.read("v1/instances")[0]) == [KEY]


def test_after_a_clock_jump_the_dead_still_expire(store: FileStore, tmp_path: Path, clocks: Clocks) -> None:
    age(plant(tmp_path), 0, clocks)
    store.read("v1/instances")
    clocks.wall_now -= 3600
    assert pass_time(clocks, 2 * TTL, store) == [Delete("v1/instances/a/b/c/1")]


def test_a_process_that_was_frozen_does_not_bury_the_others(store: FileStore, tmp_path: Path, clocks: Clocks) -> None:
    owner = open_store(tmp_path, clocks)
    owner.put(KEY, b"{}")
    age(files(tmp_path)[0], 0, clocks)
    store.read("v1/instances")
    pass_time(clocks, 1, store, owner)
    clocks.advance(10 * TTL)  # both slept, and the reader wakes first
    assert pass_time(clocks, TTL, store, owner) == []


def test_a_frozen_owner_writes_its_record_again_when_it_was_expired(
    store: FileStore, tmp_path: Path, clocks: Clocks
) -> None:
    store.put(KEY, b"mine")
    store.poll()
    files(tmp_path)[0].unlink()
    pass_time(clocks, 0.5, store)
    assert files(tmp_path)[0].read_bytes() == b"mine"


@pytest.mark.parametrize("is_in_place", [False, True])
def test_an_owner_writes_its_record_again_when_it_was_overwritten(
    store: FileStore, tmp_path: Path, clocks: Clocks, is_in_place: bool
) -> None:
    store.put(KEY, b"mine")
    assert store.read(KEY)[0] == {KEY: b"mine"}
    (path,) = files(tmp_path)
    if is_in_place:  # which no time of the directory shows: the next renewal finds it
        path.write_bytes(b"broken")
    else:
        other = path.with_name("%2E-of-another")
        other.write_bytes(b"broken")
        other.replace(path)
    assert pass_time(clocks, 4.0 if is_in_place else 0.5, store) == []
    assert path.read_bytes() == b"mine"


def test_two_owners_of_one_record_do_not_fight_at_every_poll(store: FileStore, tmp_path: Path, clocks: Clocks) -> None:
    other = open_store(tmp_path, clocks)
    store.put(KEY, b"mine")
    other.put(KEY, b"theirs")
    (path,) = files(tmp_path)
    seen = []
    for _ in range(100):
        clocks.advance(0.1)
        for each in (store, other):
            each.poll()
            seen.append(path.read_bytes())
    assert 2 <= sum(a != b for a, b in itertools.pairwise(seen)) <= 10


def test_a_wiped_store_is_built_again_and_nobody_is_dropped_meanwhile(
    store: FileStore, tmp_path: Path, clocks: Clocks
) -> None:
    owner = open_store(tmp_path, clocks)
    owner.put(KEY, b"{}")
    plant(tmp_path, "dead")
    age(tmp_path / "v1/instances/dead", 0, clocks)
    assert len(store.read("v1/instances")[0]) == 2
    for path in files(tmp_path):
        path.unlink()
    (tmp_path / "v1" / "instances").rmdir()
    (tmp_path / "v1").rmdir()
    assert pass_time(clocks, 1, store) == []
    assert pass_time(clocks, TTL / 2, store, owner) == []
    assert files(tmp_path) == [tmp_path / "v1" / "instances" / NAME]
    # Whoever did not come back within a TTL is gone.
    assert pass_time(clocks, TTL, store, owner) == [Delete("v1/instances/dead")]


def test_a_store_that_fails_keeps_the_last_view_and_says_so_once(
    store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, clocks: Clocks
) -> None:
    caplog.set_level(logging.INFO, "dynamo")
    plant(tmp_path)
    store.read("v1/instances")
    directory = tmp_path / "v1" / "instances"
    for path in files(tmp_path):
        path.unlink()
    directory.rmdir()
    directory.write_text("in the way")
    for _ in range(3):
        clocks.advance(0.05)
        assert store.poll() == []
    assert str(tmp_path) in (store.trouble() or "")
    assert len([record for record in caplog.records if "keeping the last view" in record.message]) == 1
    directory.unlink()
    clocks.advance(0.05)
    store.poll()
    assert store.trouble() is None
    assert any("is back" in record.message for record in caplog.records)


def test_a_file_system_that_hangs_is_reported_while_it_hangs(store: FileStore, clocks: Clocks) -> None:
    store.read("v1/instances")
    clocks.advance(4.9)
    assert store.trouble() is None
    clocks.advance(1.0)
    assert "has not answered for 6 s" in (store.trouble() or "")


def test_an_idle_poll_reads_no_directory(
    store: FileStore, tmp_path: Path, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path)
    store.read("v1/instances")
    clocks.advance(2 * CONFIRM_SECONDS)
    store.poll()
    scans: list[object] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (scans.append(path), real(path))[1])
    for _ in range(20):
        clocks.advance(0.05)
        store.poll()
    assert scans == []


def test_a_change_in_the_same_clock_tick_is_found(store: FileStore, tmp_path: Path, clocks: Clocks) -> None:
    plant(tmp_path)
    store.read("v1/instances")
    directory = tmp_path / "v1" / "instances"
    stamp = directory.stat().st_mtime_ns
    plant(tmp_path, "late")
    os.utime(directory, ns=(stamp, stamp))  # as if both had happened within one tick
    clocks.advance(CONFIRM_SECONDS / 2)
    early = store.poll()
    clocks.advance(CONFIRM_SECONDS)
    assert early + store.poll() == [Put("v1/instances/late", b"{}")]


def test_a_value_renamed_over_an_old_one_is_one_put(store: FileStore, tmp_path: Path, clocks: Clocks) -> None:
    plant(tmp_path, value=b"1")
    store.read("v1/instances")
    plant(tmp_path, value=b"2")
    assert pass_time(clocks, 1, store) == [Put("v1/instances/a/b/c/1", b"2")]


async def test_a_root_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = FileDiscovery(tmp_path / "file" / "root")
    with pytest.raises(CannotConnect, match=r"DYN_FILE_KV.*--discovery-backend"):
        await store.start()
    await store.close()


async def test_a_blocked_event_loop_does_not_lose_the_lease(tmp_path: Path) -> None:
    owner = FileDiscovery(tmp_path, ttl_seconds=1.0)
    await owner.start()
    await owner.put(KEY, b"{}")
    before = files(tmp_path)[0].stat().st_mtime_ns
    time.sleep(0.6)  # noqa: ASYNC251 - blocking the loop is the point
    assert files(tmp_path)[0].stat().st_mtime_ns > before
    await owner.close()


CHILD = """
import asyncio, sys
from dynamo.runtime.discovery import FileDiscovery

async def main(root, key):
    store = FileDiscovery(root, ttl_seconds=1.5)
    await store.start()
    await store.put(key, b"child")
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("killed", [True, False])
async def test_processes_on_one_directory_see_each_other_come_and_go(tmp_path: Path, killed: bool) -> None:
    store = FileDiscovery(tmp_path, ttl_seconds=1.5, poll_seconds=0.02)
    await store.start()
    child = subprocess.Popen(  # noqa: ASYNC220 - it starts once, and the pipes are read after it ended
        [sys.executable, "-c", CHILD, str(tmp_path), KEY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        async with store.watch("v1/instances") as changes, asyncio.timeout(PATIENCE_SECONDS):
            assert await anext(changes) == []
            assert await anext(changes) == [Put(KEY, b"child")]
            assert child.stdin is not None
            began = time.monotonic()
            if killed:
                child.kill()
            else:
                child.stdin.write(b"\n")
                child.stdin.flush()
            assert await anext(changes) == [Delete(KEY)]
            assert time.monotonic() - began < PROMPT_SECONDS
            assert files(tmp_path) == []
    finally:
        child.kill()
        child.communicate()
        await store.close()


async def test_an_idle_store_costs_next_to_nothing(tmp_path: Path) -> None:
    store = FileDiscovery(tmp_path)
    await store.start()
    for bucket in ("instances", "mdc", "event_channels"):
        await store.put(f"v1/{bucket}/ns/c/e/1", b"{}")
    await asyncio.sleep(0.3)  # past the confirming scans
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(1.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    await store.close()
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used / 1.5 < 0.02  # measured at 0.001-0.002; the bound leaves room for a busy machine


async def test_a_watch_that_is_cancelled_before_its_snapshot_leaves_nothing_behind(tmp_path: Path) -> None:
    discovery = FileDiscovery(tmp_path)
    await discovery.start()

    async def watch() -> None:
        async with discovery.watch("v1/instances") as changes:
            async for _ in changes:
                pass

    for _ in range(3):
        task = asyncio.create_task(watch())
        await asyncio.sleep(0)  # the subscription is on its way to the thread
        task.cancel()
        await asyncio.wait({task})
    await discovery.get_prefix("v1/instances")  # behind whatever was asked for before
    assert discovery._feeds == {}
    await discovery.close()


def test_a_lock_that_another_program_never_releases_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(bucket_module, "time", SimpleNamespace(sleep=waits.append))  # not of other threads
    first, second = (FileStore(tmp_path, ttl_seconds=10) for _ in range(2))
    for store in (first, second):
        store.open()
    bucket = tmp_path / "v1" / "instances"
    bucket.mkdir(parents=True)
    with_lock = os.open(bucket, os.O_RDONLY)
    try:
        fcntl.flock(with_lock, fcntl.LOCK_EX)
        first.put("v1/instances/a", b"1")
        assert len(waits) == LOCK_ATTEMPTS - 1  # about a second, once
        assert (first.put_new("v1/instances/b", b"2"), second.put_new("v1/instances/b", b"3")) == (True, False)
        first.delete("v1/instances/a")
        assert second.read("v1/instances")[0] == {"v1/instances/b": b"2"}
        assert len(waits) == 2 * (LOCK_ATTEMPTS - 1)  # each process has waited once
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == 2
        assert "going on without the lock" in warnings[0]
    finally:
        os.close(with_lock)
    first.put("v1/instances/c", b"4")
    for store in (first, second):
        store.close()
    assert [path.name for path in bucket.iterdir()] == []
