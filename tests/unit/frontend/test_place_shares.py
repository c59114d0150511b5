"""The places of a frontend, and the bodies that are on their way, are shared by all projects."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo.frontend.admission.process import Admission
from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.shares import HELD_SHORTLY, Shares
from dynamo.frontend.parts.group.places import Places, SharedAdmission
from dynamo.frontend.parts.keys.part import PlaceShares
from dynamo.protocol.openai.errors import RequestRejected
from support.access import bearer, closed_cluster, key
from support.frontend_cluster import say
from support.patience import PATIENCE_SECONDS


def of_two_projects() -> Shares:
    shares = Shares()
    shares.know_owners(lambda: 2)
    return shares


async def test_one_project_leaves_places_to_the_others(tmp_path: Path) -> None:
    records = key("alice", project="blue"), key("bob", project="blue"), key("carol"), key("dave")
    async with closed_cluster(tmp_path, *records, max_requests_in_flight=16) as house:
        worker = await house.worker()
        worker.script = worker.hold
        admission = house.frontend.admission
        for name in ("alice", "bob") * 7:
            house.client.begin_chat(headers=bearer(name))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while admission.in_flight < 14:
                await asyncio.sleep(0.001)
        refused = await house.client.chat(headers=bearer("bob"))
        assert (refused.status, refused.json["error"]["code"]) == (429, "share_exceeded")
        assert refused.headers["retry-after"] == "1"
        for name, place in (("carol", 15), ("dave", 16)):  # each gets one, to the last of them
            house.client.begin_chat(headers=bearer(name))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while admission.in_flight < place:
                    await asyncio.sleep(0.001)
        assert (await house.client.chat(headers=bearer("carol"))).status == 529
        assert house.frontend.cut() == 16
        async with asyncio.timeout(PATIENCE_SECONDS):
            while admission.in_flight:
                await asyncio.sleep(0.001)
        worker.script = say("hi")
        assert (await house.client.chat(headers=bearer("bob"))).status == 200


async def test_an_admin_sees_what_each_project_has(tmp_path: Path) -> None:
    records = key("alice", project="blue"), key("carol"), key("root", role="admin")
    async with closed_cluster(tmp_path, *records, files_dir=tmp_path / "files", max_requests_in_flight=16) as house:
        worker = await house.worker()
        worker.script = worker.hold
        house.client.begin_chat(headers=bearer("alice"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.started.wait()
        assert (await house.client.get("/admin/shares", **bearer("alice"))).status == 403
        shown = (await house.client.get("/admin/shares", **bearer("root"))).json["data"]
    found = {bound["name"]: bound for bound in shown}
    assert found.keys() == {
        "bodies", "requests in flight", "stored responses", "batches", "batch lines", "input checks", "uploads", "files",
    }  # fmt: skip
    assert found["requests in flight"]["owners"] == [{"owner": "project blue", "used": 1}]
    assert (found["batches"]["limit"], found["batches"]["owner_limit"], found["batches"]["used"]) == (256, 128, 0)


def test_a_request_that_is_refused_leaves_no_place_behind() -> None:
    places = PlaceShares(Admission(8), of_two_projects())
    for _ in range(100):
        places.take("a")
        places.give_back("a")
    assert places._taken.used == 0


def test_the_processes_of_a_group_share_the_places() -> None:
    table = Places.create(4)
    try:
        admissions = [SharedAdmission(64, table, row) for row in range(4)]
        shares = [PlaceShares(admission, of_two_projects()) for admission in admissions]
        taken = 0
        for number in range(100):  # dealt in turns
            try:
                shares[number % 4].take("a")
            except RequestRejected:
                continue
            admissions[number % 4].enter()
            taken += 1
        assert taken == 56  # seven eighths of 64
        shares[0].take("b")
    finally:
        table.close()


def test_the_bodies_of_one_project_leave_room_for_those_of_others() -> None:
    budget = BodyBudget(of_two_projects().bound("bodies", 800, weight=HELD_SHORTLY))
    greedy, other = budget.of("a"), budget.of("b")
    greedy.take(0)
    for _ in range(7):
        greedy.take(100)
    with pytest.raises(RequestRejected, match="its share") as refused:
        greedy.take(1)
    assert refused.value.status == 429
    other.take(100)
    with pytest.raises(RequestRejected, match="exceed the limit") as full:
        other.take(1)
    assert full.value.status == 503
    greedy.give_back(700)
    other.give_back(100)
    other.give_back(0)
    assert budget.used_bytes == 0
