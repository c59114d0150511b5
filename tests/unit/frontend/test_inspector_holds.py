"""Drains and quarantines end: when their time is over, when they are taken back, and in every process at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo.frontend.base.access import KeyRole
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.operating import Members, WorkerOperator
from dynamo.frontend.parts.inspector.visitors import Visitor
from dynamo.protocol.inspector.actions import WorkerActionRequest
from support.cases import each_case
from support.frontend_cluster import cluster
from support.inspecting import Lens
from support.patience import PATIENCE_SECONDS


@each_case("action, state", [("drain", "draining"), ("quarantine", "quarantined")])
async def test_a_hold_with_an_end_ends(tmp_path: Path, action: str, state: str) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker()
        lens, id = Lens(house), f"{worker.endpoint.connection_id():x}"
        held = await lens.post(f"workers/{id}/{action}", {"seconds": 0.3, "reason": "a moment"})
        assert (held.json["state"], held.json["until_ms"] > 0) == (state, True)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (row := (await lens.get("snapshot", views="workers"))["workers"][0])["state"] != "ready":
                assert row["state_until_ms"] == held.json["until_ms"]
                await asyncio.sleep(0.02)
        assert row["state_until_ms"] is None
        assert (await house.client.chat()).status == 200


@each_case("first, second", [("drain", "quarantine"), ("quarantine", "drain")])
async def test_what_is_undone_or_replaced_does_not_come_back(tmp_path: Path, first: str, second: str) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker()
        lens, id = Lens(house), f"{worker.endpoint.connection_id():x}"
        assert house.frontend.parts["inspector"].inspector is not None
        ends = house.frontend.parts["inspector"].inspector.operator._ends
        await lens.post(f"workers/{id}/{first}", {"seconds": 600})
        replaced = await lens.post(f"workers/{id}/{second}", {"seconds": 300})
        assert replaced.json["state"] == {"drain": "draining", "quarantine": "quarantined"}[second]
        assert len(ends) == 1
        undone = await lens.post(f"workers/{id}/undrain")
        assert (undone.json["state"], undone.json["until_ms"], len(ends)) == ("ready", None, 0)
        again = await lens.post(f"workers/{id}/undrain")
        assert (again.status, again.json["state"]) == (200, "ready")
        await lens.post(f"workers/{id}/{first}", {"seconds": 600})
    assert not ends  # the end of the frontend is the end of its timers


class OtherProcesses:
    """What a process shares, and those that it is shared with."""

    def __init__(self) -> None:
        self.shared: dict[str, bytes] = {}
        self.takes: list[Callable[[str, bytes], None]] = []

    async def share(self, key: str, value: bytes) -> None:
        self.shared[key] = value

    def on_shared(self, take: Callable[[str, bytes], None]) -> None:
        self.takes.append(take)
        for key, value in self.shared.items():
            take(key, value)

    def on_asked(self, answer: Callable[[bytes], bytes]) -> None: ...

    async def ask(self, question: bytes) -> tuple[list[bytes], list[str]]:
        return [], []


@each_case("later_seconds, left", [(0, 600), (599, 1), (601, 0)])
async def test_a_process_that_starts_later_keeps_what_is_left_of_a_hold(
    tmp_path: Path, later_seconds: int, left: int
) -> None:
    async with cluster(tmp_path) as house, cluster(tmp_path / "other") as other:
        worker = await house.worker()
        id, peers, began = worker.endpoint.connection_id(), OtherProcesses(), time.time()

        def operator(where: Any, clock: InspectorClock) -> WorkerOperator:
            return WorkerOperator(where.frontend.models, Members(peers, lambda _: None), clock)

        first = operator(house, InspectorClock(wall_clock=lambda: began))
        visitor = Visitor(KeyRole.ADMIN, None)
        await first.act("drain", f"{id:x}", WorkerActionRequest(seconds=600), visitor)
        clock = InspectorClock(wall_clock=lambda: began + later_seconds)
        second = operator(other, clock)
        hold = other.frontend.models.holds.of(id, clock.now())
        assert (None if hold is None else round(hold.seconds or 0)) == (left or None)
        first.close()
        second.close()
