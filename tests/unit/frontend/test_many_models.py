"""The frontend of many models beside a command that a test plays: what it orders, and what the inspector and metrics show."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, cluster, say
from support.http_client import CHAT, chat
from support.inspecting import Lens
from support.patience import PATIENCE_SECONDS

BUDGET = 100
METRIC = "dynamo_frontend_residency_"


class Command:
    """The other end of the socket: the command that has the processes."""

    def __init__(self, house: Cluster, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.house, self.lens = house, Lens(house)
        self._reader, self._writer = reader, writer

    async def order(self) -> tuple[str, str]:
        """The next order, and the model that it is about."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            said = json.loads(await self._reader.readline())
        return said["order"], said.get("model", "")

    def report(self, event: str, model: str, **members: Any) -> None:
        self._writer.write(json.dumps({"event": event, "model": model, **members}).encode() + b"\n")

    def ask(self, model: str) -> Exchange:
        return self.house.client.begin("POST", CHAT, chat(model))

    async def shown(self) -> dict[str, Any]:
        picture = await self.lens.get("snapshot", views="fleet,residents")
        return {row["name"]: row for row in picture["residents"]} | {"fleet": picture["fleet"]}

    async def until(self, model: str, **members: Any) -> dict[str, Any]:
        """The row of a model once it has these members."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while members != {name: (row := (await self.shown())[model])[name] for name in members}:
                await asyncio.sleep(0.005)
        return dict(row)

    async def load(self, model: str, taken: int) -> None:
        """Do as ordered: the model is served, and takes so much."""
        await self.house.worker(say("yes"), model=model)
        self.report("serving", model, bytes=taken)

    def metric(self, name: str, **labels: str) -> float:
        return self.house.metric(METRIC + name, **labels)


@asynccontextmanager
async def many(tmp_path: Path, models: Mapping[str, Mapping[str, Any]], **further: Any) -> AsyncIterator[Command]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    rows = [
        {"name": name, "pinned": False, "measured": True, "state": "absent", **members}
        for name, members in models.items()
    ]
    setup = {"event": "setup", "models": rows, "budget_bytes": BUDGET, "idle_seconds": None, "presets": {}, **further}
    writer.write(json.dumps(setup).encode() + b"\n")
    try:
        settings: dict[str, Any] = {
            "residency_descriptor": theirs.detach(),
            "cold_start_wait_seconds": PATIENCE_SECONDS,
        }
        async with cluster(tmp_path, **settings) as house:
            command = Command(house, reader, writer)
            assert await command.order() == ("hello", "")
            yield command
    finally:
        writer.close()


async def test_the_inspector_and_the_metrics_show_what_is_loaded_and_what_waits(tmp_path: Path) -> None:
    presets: dict[str, Any] = {"coding": {"model": "a", "system": None, "members": {}}}
    async with many(tmp_path, {"a": {"bytes": 60}, "b": {"bytes": 50}}, presets=presets) as command:
        before = await command.shown()
        assert (before["a"]["state"], before["a"]["taken_bytes"], before["a"]["needed_bytes"]) == ("absent", None, 60)
        assert (before["a"]["presets"], before["b"]["presets"], before["a"]["used_ms"]) == (["coding"], [], None)
        assert (before["fleet"]["resident_bytes"], before["fleet"]["budget_bytes"]) == (0, BUDGET)
        asked = command.ask("a")
        assert await command.order() == ("load", "a")
        row = await command.until("a", state="loading", waiting=1)
        assert (row["running"], row["taken_bytes"]) == (0, None)
        command.report("measured", "a", bytes=20)
        await command.until("a", taken_bytes=20)
        (stream,) = (await command.lens.get("snapshot", views="streams"))["streams"]
        assert (stream["model"], stream["phase"]) == ("a", "admitted")
        assert command.metric("waiting_requests", model="a") == 1
        await command.load("a", 70)
        assert (await asked.done()).status == 200
        row = await command.until("a", state="idle", waiting=0, running=0)
        assert (row["taken_bytes"], row["needed_bytes"], row["used_ms"] is None) == (70, 70, False)
        assert (await command.shown())["fleet"]["resident_bytes"] == 70
        other = command.ask("b")
        assert await command.order() == ("unload", "a")
        await command.until("a", state="unloading")
        command.report("ended", "a", reason="it was unloaded")
        assert await command.order() == ("load", "b")
        command.report("ended", "b", reason="exited with 1: the weights have a hole")
        assert (await other.done()).status == 503
        row = await command.until("b", state="failed")
        assert row["why"] == "exited with 1: the weights have a hole"
        loads = {(name, result): command.metric("loads_total", model=name, result=result)
                 for name in "ab" for result in ("loaded", "failed")}  # fmt: skip
        assert loads == {("a", "loaded"): 1, ("a", "failed"): 0, ("b", "loaded"): 0, ("b", "failed"): 1}
        assert command.metric("unloads_total", model="a", reason="room") == 1
        assert command.metric("unloads_total", model="a", reason="idle") == 0
        counts = ("load_seconds_count", "unload_seconds_count", "wait_seconds_count")
        assert [command.metric(name, model="a") for name in counts] == [1, 1, 1]
        assert command.metric("memory_bytes", model="a") == 0
        assert command.metric("budget_bytes") == BUDGET


async def test_a_load_that_takes_more_than_there_is_room_for_is_begun_again_in_more_of_it(tmp_path: Path) -> None:
    async with many(tmp_path, {"a": {"bytes": 60}, "b": {"bytes": 30}}) as command:
        first = command.ask("a")
        assert await command.order() == ("load", "a")
        await command.load("a", 60)
        assert (await first.done()).status == 200
        second = command.ask("b")
        assert await command.order() == ("load", "b")
        command.report("measured", "b", bytes=41)
        assert await command.order() == ("unload", "b")
        await command.until("b", state="unloading", waiting=1)
        command.report("ended", "b", reason="it was unloaded")
        assert await command.order() == ("unload", "a")
        command.report("ended", "a", reason="it was unloaded")
        assert await command.order() == ("load", "b")
        command.report("measured", "b", bytes=80)
        await command.load("b", 80)
        assert (await second.done()).status == 200
        assert command.metric("unloads_total", model="b", reason="outgrown") == 1


async def test_a_frontend_that_is_started_again_takes_over_what_is_loaded(tmp_path: Path) -> None:
    models = {"a": {"bytes": 60, "state": "loaded"}, "b": {"bytes": 50, "state": "unloading"}}
    async with many(tmp_path, models) as command:
        waiting = command.ask("a")  # its worker is registered, and this frontend has not read that yet
        await command.until("a", waiting=1)
        await command.house.worker(say("yes"), model="a")
        assert (await waiting.done()).status == 200
        other = command.ask("b")
        await command.until("b", state="unloading", waiting=1)
        command.report("ended", "b", reason="it was unloaded")
        assert await command.order() == ("unload", "a")
        command.report("ended", "a", reason="it was unloaded")
        assert await command.order() == ("load", "b")
        await command.load("b", 50)
        assert (await other.done()).status == 200
        assert command.metric("loads_total", model="a", result="loaded") == 0  # it was no load of this frontend
