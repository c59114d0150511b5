"""The places of a frontend, and the bodies that are on their way, are shared by all projects."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo.frontend.admission.model import AdmissionPolicy, ModelAdmission, Reason, RequestLimit, Shed, Urgency
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
        "fetched media",
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


# -- the places of a model -----------------------------------------------------------------------------------------------


def model_of(shares: Shares, limit: str | None = None, *, age: float | None = None) -> ModelAdmission:
    made = ModelAdmission(
        "m", AdmissionPolicy(None if limit is None else RequestLimit.parse(limit), age, shares=shares)
    )
    made.set_capacity(None)
    return made


def admitted(model: ModelAdmission, owner: str | None, count: int, now: float = 0.0) -> tuple[int, Reason | None]:
    """How many of as many requests get a place, and why the next one gets none."""
    for number in range(count):
        try:
            model.enter(Urgency.HIGH, now, owner)
        except Shed as refused:
            return number, refused.reason
    return count, None


def test_one_owner_leaves_places_of_a_model_to_the_others() -> None:
    model = model_of(of_two_projects(), "16")
    assert admitted(model, "greedy", 20) == (14, Reason.SHARE)
    assert admitted(model, "other", 3) == (1, Reason.SHARE)
    assert admitted(model, "third", 2) == (1, Reason.PLACES)


@pytest.mark.parametrize(("shares", "owner"), [(Shares(), "only"), (of_two_projects(), None)])
def test_one_owner_alone_and_requests_without_a_key_have_all_places(shares: Shares, owner: str | None) -> None:
    assert admitted(model_of(shares, "16"), owner, 20) == (16, Reason.PLACES)


def test_an_old_queue_refuses_the_owner_whose_requests_make_it_old() -> None:
    model = model_of(of_two_projects(), age=10.0)
    first = model.enter(Urgency.NORMAL, 0.0, "greedy")
    assert model.rejection_reason(Urgency.NORMAL, 10.1, "greedy") is Reason.QUEUE_AGE
    assert model.rejection_reason(Urgency.NORMAL, 10.1) is Reason.QUEUE_AGE
    assert model.rejection_reason(Urgency.NORMAL, 10.1, "other") is None
    model.enter(Urgency.NORMAL, 10.1, "other")
    assert model.rejection_reason(Urgency.NORMAL, 20.2, "other") is Reason.QUEUE_AGE
    first.begun(20.2)
    assert model.rejection_reason(Urgency.NORMAL, 20.2, "greedy") is None


def test_places_of_a_model_that_come_back_are_the_owners_no_more() -> None:
    model = model_of(of_two_projects(), "16")
    for _ in range(100):
        model.enter(Urgency.NORMAL, 0.0, "a").leave()
    assert (model.owners.used, model.in_flight) == (0, 0)
    assert admitted(model, "a", 20) == (14, Reason.SHARE)


async def test_a_project_that_has_its_share_of_a_model_gets_a_429_and_an_admin_sees_it(tmp_path: Path) -> None:
    records = key("alice", project="blue"), key("carol"), key("root", role="admin")
    limit = RequestLimit.parse("4")
    async with closed_cluster(tmp_path, *records, max_requests_per_model=limit) as house:
        worker = await house.worker()
        worker.script = worker.hold
        (model,) = house.frontend.models.served()
        for place in (1, 2, 3):
            house.client.begin_chat(headers=bearer("alice"))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while model.admission.in_flight < place:
                    await asyncio.sleep(0.001)
        refused = await house.client.chat(headers=bearer("alice"))
        assert (refused.status, refused.json["error"]["code"]) == (429, "share_exceeded")
        assert house.metric("dynamo_frontend_model_shed_total", model="m", reason="share") == 1
        house.client.begin_chat(headers=bearer("carol"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while model.admission.in_flight < 4:
                await asyncio.sleep(0.001)
        shown = (await house.client.get("/admin/shares", **bearer("root"))).json["data"]
        (places,) = [bound for bound in shown if bound["name"] == "requests in flight of m"]
        assert (places["limit"], places["used"], places["owner_limit"]) == (4, 4, 3)
        assert places["owners"][0] == {"owner": "project blue", "used": 3}
        assert house.frontend.cut() == 4
