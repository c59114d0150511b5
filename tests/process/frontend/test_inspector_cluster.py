"""The inspectors of two frontends with processes of their own, one of them a group: whichever is asked answers for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from dynamo.runtime.http.inspector_token import find_access
from support.http_client import CHAT, Reply, ask, chat, exchange, script
from support.patience import PATIENCE_SECONDS
from support.ports import free_ports
from support.processes import Cluster

KEY = "all-frontends-share-this"
PROCESSES = 3  # two of the group, and the other frontend


def worker_id(picture: Any) -> str:
    (row,) = picture["workers"]
    return str(row["id"])


async def test_a_group_and_another_frontend_show_and_end_the_requests_of_each_other_and_drain_together(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, XDG_RUNTIME_DIR=str(tmp_path), DYN_ADMIN_PEER_KEY=KEY) as cluster:
        ports = free_ports(2)
        doors = []
        for name, port, more in (("group", ports[0], ["--workers=2"]), ("single", ports[1], [])):
            flags = [f"--admin-port={port}", f"--admin-advertise=http://127.0.0.1:{port}", *more]
            doors.append(cluster.frontend(name, *flags))
        worker = cluster.worker("worker", "shown")
        for door in doors:
            cluster.wait_ready(door, worker)

        async def admin(port: int, path: str, body: Any = None) -> Reply:
            found = find_access(port, {"XDG_RUNTIME_DIR": str(tmp_path)})
            assert found is not None
            headers = {"authorization": f"Bearer {found.token}"}
            return await ask(port, f"/admin/v1/{path}", body, headers=headers)

        async def abort(port: int, id: str) -> Any:
            """End a request. A frontend that rests from asking the one that has it does not find it, and is asked again."""
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (answer := await admin(port, f"requests/{id}/abort", {"reason": "enough"})).status == 404:
                    await asyncio.sleep(0.5)  # there may be two a second
            assert answer.status == 202, answer.body
            return answer.json()

        async def until(port: int, views: str, is_so: Callable[[Any], bool]) -> Any:
            """Look again and again: what one frontend knows of another is some moments old, and it may rest from asking."""
            found = None
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while True:
                        answer = await admin(port, f"snapshot?views={views}")
                        assert answer.status == 200, answer.body
                        found = answer.json()
                        if not found["partial"] and is_so(found):
                            return found
                        await asyncio.sleep(0.05)
            except TimeoutError:
                raise AssertionError(f"the last picture was {found}") from None

        for port in ports:
            await until(port, "frontends,streams", lambda found: len(found["frontends"]) == PROCESSES)
        async with AsyncExitStack() as stack:
            requests = []
            for door in (doors[0], doors[0], doors[1]):
                headers = script(["say", "x"], ["wait"], tag="shown")
                one = await stack.enter_async_context(
                    exchange(door.port, CHAT, chat("shown", stream=True), headers=headers)
                )
                assert await one.head() == 200
                requests.append(one)
            await worker.sees("first", "shown", PROCESSES)
            for port in ports:
                picture = await until(
                    port,
                    "streams,workers",
                    lambda found: [len(found["streams"]), found["workers"][0]["running"]] == [PROCESSES, PROCESSES],
                )
                assert len({row["frontend"] for row in picture["streams"]}) == PROCESSES
            rows = picture["streams"]
            for number, row in enumerate(rows):  # each by way of either frontend
                ended = await abort(ports[number % 2], row["id"])
                assert ended["frontend"] == row["frontend"]
            for request in requests:
                assert b'"code":"request_aborted"' in await request.rest()
            await worker.sees("abort", "shown", PROCESSES)
        id = worker_id(await until(ports[0], "workers", lambda found: len(found["workers"]) == 1))
        for action, state in (("drain", "draining"), ("undrain", "ready")):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (held := (await admin(ports[1], f"workers/{id}/{action}", {})).json())["partial"]:
                    await asyncio.sleep(0.5)  # one that rests is told again; there may be two a second
            assert held["state"] == state
            for port in ports:
                await until(port, "workers", lambda found, state=state: found["workers"][0]["state"] == state)  # type: ignore[misc]
            answers = [await ask(doors[0].port, CHAT, chat("shown"), headers=script(["say", "x"])) for _ in range(4)]
            assert {answer.status for answer in answers} == {503 if action == "drain" else 200}  # at either process
        for door in doors:
            assert KEY not in door.log
        doors[0].terminate()
        assert await doors[0].ended() == 0
        await until(ports[1], "frontends", lambda found: len(found["frontends"]) == 1)  # and nobody who does not answer
