"""The inspector of a frontend of two processes: whichever is asked answers for both, and acts on both."""

from __future__ import annotations

import asyncio
import re
import signal
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime.http.inspector_token import InspectorAccess, find_access
from support.http_client import CHAT, Exchange, Reply, ask, chat, exchange, script
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, until, wait
from support.serve_command import serve_command

PROCESSES = 2
ROUNDS = 2 * PROCESSES  # of connections at one time, which are dealt out evenly, so that each process is asked


class Rig:
    """A frontend of two processes, two workers of one model, and what the owner's tools know of the inspector."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self.workers = [cluster.worker(name, "group") for name in ("left", "right")]
        flags = (f"--workers={PROCESSES}", "--router-mode=round-robin")
        self.frontend = cluster.frontend("group", *flags, XDG_RUNTIME_DIR=str(folder))
        cluster.wait_ready(self.frontend, *self.workers)
        wait(lambda: len(members(self.frontend)) == PROCESSES, lambda: f"both; log:\n{self.frontend.log}")

    @property
    def access(self) -> InspectorAccess:
        found = find_access(self.frontend.port, {"XDG_RUNTIME_DIR": str(self.folder)})
        assert found is not None, self.frontend.log
        return found

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.access.token}"}

    async def ask(self, path: str, body: Any = None) -> Reply:
        """What the inspector answers; again where a process that is busy for long was left out and its request not found."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (
                found := await ask(self.frontend.port, f"/admin/v1/{path}", body, headers=self.headers)
            ).status == 404:
                await asyncio.sleep(0.5)  # there may be two actions a second
        return found

    async def get(self, path: str) -> Any:
        found = await self.ask(path)
        assert found.status == 200, found.body
        return found.json()

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        found = await self.ask(path, body or {})
        return found.status, found.json()

    async def until_shown(self, views: str, holds: Callable[[Any], bool]) -> Any:
        """Wait until the pictures of all processes are whole, and each holds; one of them."""
        agreed: set[int] = set()
        picture = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(agreed) < PROCESSES:
                    for picture in await asyncio.gather(*[self.get(f"snapshot?views={views}") for _ in range(ROUNDS)]):
                        if picture["partial"] or not holds(picture):
                            agreed.clear()
                            await asyncio.sleep(0.05)
                            break
                        agreed.add(
                            picture["seq"] >> 32
                        )  # each process numbers its pictures from a beginning of its own
        except TimeoutError:
            raise AssertionError(f"the last picture was {picture}") from None
        return picture

    async def sees(self, event: str, tag: str, times: int) -> None:
        """Wait until the workers together have noted an event so often."""
        await until(lambda: sum(worker.count(event, tag) for worker in self.workers) >= times)


def members(frontend: Frontend) -> set[int]:
    return {int(pid) for pid in re.findall(r"frontend process \d+ \(pid (\d+)\) serves", frontend.log)}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Cluster(tmp_path_factory.mktemp("inspected")) as cluster:
        yield Rig(cluster, tmp_path_factory.mktemp("run"))


@asynccontextmanager
async def streams(rig: Rig, tag: str, count: int = PROCESSES) -> AsyncIterator[list[Exchange]]:
    """At least so many streams under way that go on until they are ended, at each of the processes."""
    async with AsyncExitStack() as stack:
        found: list[Exchange] = []
        places: set[str] = set()
        # A connection that is about to be closed counts as well when they are dealt out, so there may be one stream more.
        while len(found) < count or len(places) < PROCESSES:
            headers = script(["say", "x"], ["wait"], tag=tag)
            one = await stack.enter_async_context(
                exchange(rig.frontend.port, CHAT, chat("group", stream=True), headers=headers)
            )
            assert await one.head() == 200
            found.append(one)
            picture = await rig.until_shown("streams", lambda shown: len(shown["streams"]) == len(found))
            places = {row["frontend"] for row in picture["streams"]}
        yield found
    await rig.until_shown("streams", lambda picture: not picture["streams"])


async def test_one_token_in_a_file_of_its_owner_opens_every_process(rig: Rig) -> None:
    path = rig.folder / "dynamo" / f"inspect-{rig.frontend.port}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (rig.access.url, rig.access.pid) == (rig.frontend.url, rig.frontend.pid)
    assert rig.access.token not in rig.frontend.log

    def is_all(picture: Any) -> bool:
        fleet, pids = picture["fleet"], {row["pid"] for row in picture["frontends"]}
        counts = (fleet["frontends"], fleet["workers"], len(picture["workers"]))
        return pids == members(rig.frontend) and counts == (PROCESSES, 2, 2)

    await rig.until_shown("fleet,frontends,workers", is_all)
    for headers in ({}, {"authorization": "Bearer no"}):
        asked = [ask(rig.frontend.port, "/admin/v1/snapshot", headers=headers) for _ in range(ROUNDS)]
        assert {answer.status for answer in await asyncio.gather(*asked)} == {401}


async def test_each_process_shows_and_ends_the_streams_of_both(rig: Rig) -> None:
    async with streams(rig, "shown") as under_way:
        count = len(under_way)

        def is_all(picture: Any) -> bool:
            running = sum(row["running"] for row in picture["workers"])
            return len(picture["streams"]) == running == picture["fleet"]["now"]["running"] == count

        picture = await rig.until_shown("streams,workers,fleet", is_all)
        ids = [row["id"] for row in picture["streams"]]
        for id in ids:
            details = await asyncio.gather(*[rig.get(f"requests/{id}") for _ in range(ROUNDS)])
            assert [detail["stream"]["id"] for detail in details] == [id] * ROUNDS
            # One of the processes has the stream, the other has not.
            aborts = [rig.post(f"requests/{id}/abort", {"reason": "enough"}) for _ in range(ROUNDS)]
            assert [status for status, _ in await asyncio.gather(*aborts)] == [202] * ROUNDS
        rests = [await one.rest() for one in under_way]
        assert [b"request_aborted" in rest and b"[DONE]" in rest for rest in rests] == [True] * count
        await rig.sees("stopped", "shown", count)
    await rig.until_shown(
        "recent", lambda shown: {row["id"] for row in shown["recent"] if row["outcome"] == "aborted"} >= set(ids)
    )
    wrong = await ask(rig.frontend.port, "/admin/v1/requests/no-such/abort", {}, headers=rig.headers)
    assert wrong.status == 404


async def test_each_process_has_the_bundles_of_both(rig: Rig, tmp_path: Path) -> None:
    go_on, count = tmp_path / "go on", 2 * PROCESSES
    headers = script(["say", "x"], ["until", str(go_on)], ["raise", "RuntimeError", "it broke"], tag="broken")
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(rig.frontend.port, CHAT, chat("group"), headers=headers)) for _ in range(count)]
        await rig.sees("first", "broken", count)  # all at one time, so that each process has some of them
        go_on.touch()
    assert [task.result().status for task in asked] == [500] * count

    def failed(picture: Any) -> list[Any]:
        return [row for row in picture["recent"] if row["status"] == 500]

    rows = failed(await rig.until_shown("recent", lambda shown: len(failed(shown)) == count))
    assert len({row["frontend"] for row in rows}) == PROCESSES
    for row in rows:
        bundles = await asyncio.gather(*[rig.get(f"errors/{row['id']}") for _ in range(ROUNDS)])
        assert {(bundle["id"], bundle["schema"]) for bundle in bundles} == {(row["id"], "dynamo.failure.v1")}
    wrong = await ask(rig.frontend.port, "/admin/v1/errors/none", headers=rig.headers)
    assert wrong.status == 404


async def test_a_filter_counts_and_ends_what_both_have(rig: Rig) -> None:
    async with streams(rig, "filtered", 2 * PROCESSES) as under_way:
        count, is_partial = len(under_way), True
        while is_partial:
            status, counted = await rig.post("requests/abort", {"filter": "model:group"})
            assert (status, counted["aborted"]) == (200, 0)
            is_partial = bool(counted["partial"])
        assert counted["matched"] == count
        status, ended = await rig.post("requests/abort", {"filter": "model:group", "dry_run": False})
        assert status == 202
        # A process that was busy for long does it all the same, and is named.
        assert (ended["matched"], ended["aborted"]) == (count, count) or ended["partial"]
        rests = [await one.rest() for one in under_way]
        assert all(b"request_aborted" in rest for rest in rests)


async def test_a_worker_drained_at_one_process_is_drained_at_both(rig: Rig) -> None:
    (row, _) = (await rig.until_shown("workers", lambda shown: len(shown["workers"]) == 2))["workers"]

    def state_is(state: str) -> Callable[[Any], bool]:
        return lambda picture: [each["state"] for each in picture["workers"] if each["id"] == row["id"]] == [state]

    assert (await rig.post(f"workers/{row['id']}/drain", {"reason": "for its disk"}))[0] == 200
    await rig.until_shown("workers", state_is("draining"))
    for _ in range(2 * ROUNDS):
        assert (
            await ask(rig.frontend.port, CHAT, chat("group"), headers=script(["say", "x"], tag="drained"))
        ).status == 200
    await rig.sees("first", "drained", 2 * ROUNDS)
    counts = sorted(worker.count("first", "drained") for worker in rig.workers)
    assert counts == [0, 2 * ROUNDS]
    assert (await rig.post(f"workers/{row['id']}/undrain"))[0] == 200
    await rig.until_shown("workers", state_is("ready"))


async def test_the_end_of_the_frontend_ends_watches_and_takes_the_file_away(rig: Rig) -> None:
    path = rig.folder / "dynamo" / f"inspect-{rig.frontend.port}.json"
    async with AsyncExitStack() as stack:
        watches = []
        for _ in range(PROCESSES):
            watch = await stack.enter_async_context(
                exchange(rig.frontend.port, "/admin/v1/watch?views=fleet", headers=rig.headers)
            )
            assert await watch.head() == 200
            async with asyncio.timeout(PATIENCE_SECONDS):
                await watch.reader.readuntil(b"event: snapshot\n")
            watches.append(watch)
        rig.frontend.terminate()
        for watch in watches:
            assert (await watch.rest()).endswith(b"0\r\n\r\n")  # ended, not cut off
    assert await rig.frontend.ended() == 0
    assert not path.exists()


async def test_the_command_prints_where_the_inspector_of_a_group_is(tmp_path: Path) -> None:
    engine = ("--engine", "guide_engine:GuideEngine", "--http-host", "127.0.0.1", "--http-port", "0")
    flags = (*engine, f"--frontend-workers={PROCESSES}")
    with serve_command(tmp_path, "my-model", *flags, XDG_RUNTIME_DIR=str(tmp_path)) as command:
        command.wait_ready()
        found = find_access(command.port, {"XDG_RUNTIME_DIR": str(tmp_path)})
        assert found is not None
        line = f"inspector: {command.url}/inspect/#k={found.token}"
        command.wait_for(lambda: line in command.out.splitlines(), "the line of the inspector")
        headers = {"authorization": f"Bearer {found.token}"}

        async def shown() -> set[tuple[int, int]]:
            """Frontends and workers, as each process shows them."""
            path = "/admin/v1/snapshot?views=frontends,workers"
            pictures = [(await ask(command.port, path, headers=headers)).json() for _ in range(ROUNDS)]
            return {(len(each["frontends"]), len(each["workers"])) for each in pictures}

        async with asyncio.timeout(PATIENCE_SECONDS):  # Ready needs one process; the other may come a moment later
            while await shown() != {(PROCESSES, 1)}:
                await asyncio.sleep(0.05)
        command.process.send_signal(signal.SIGINT)
        assert command.wait_ended() == 0
        assert found.token not in command.err
    assert find_access(command.port, {"XDG_RUNTIME_DIR": str(tmp_path)}) is None
