"""The drain of a worker by an operator: its table, its order, and what may come between its steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.runtime.http.engine_routes import EngineRoutes
from dynamo.worker import drain as drain_module
from dynamo.worker.drain import DRAIN_TABLE, DrainEvent, DrainRefused, DrainState, WorkerDrain
from dynamo.worker.instance_record import Hold
from dynamo.worker.lifecycle import AdminGate
from support.instance_record import WrittenRecord
from support.patience import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "POLL_SECONDS", 0.005)


class Served(WrittenRecord):
    """An endpoint with so many unfinished requests."""

    unfinished = 0

    async def wait_idle(self, timeout: float) -> bool:
        await asyncio.sleep(0 if not self.unfinished else timeout)
        return not self.unfinished

    def stop_accepting(self) -> None:
        self.log.append("decline")

    async def accept_again(self) -> None:
        self.log.append("accept")


class Engine:
    """An engine whose peers are done when it says so."""

    def __init__(self, answer: bool | Exception | None = None) -> None:
        self.answer = answer

    async def is_quiescent(self) -> bool | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Fixture:
    def __init__(self, engine: Engine | None = None, *, is_prefill: bool = False, grace_seconds: float = 0.0) -> None:
        self.served, self.engine, self.gate = Served([]), engine or Engine(), AdminGate.OPEN
        self.drain = WorkerDrain(self.engine, lambda: self.gate, is_prefill=is_prefill, grace_seconds=grace_seconds)
        self.drain.attach(self.served)

    async def reaches(self, **members: Any) -> None:
        """Return when the status has these members."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not members.items() <= self.drain.status().items():
                await asyncio.sleep(0.002)


def test_every_state_has_a_row_and_nothing_leaves_the_stop() -> None:
    assert set(DRAIN_TABLE) == set(DrainState)
    assert DRAIN_TABLE[DrainState.STOPPING] == {}
    for state in set(DrainState) - {DrainState.STOPPING}:
        assert DRAIN_TABLE[state][DrainEvent.STOP] is DrainState.STOPPING
    assert [state for state, row in DRAIN_TABLE.items() if DrainEvent.EMPTIED in row] == [DrainState.DRAINING]


async def test_before_a_drain_the_worker_serves() -> None:
    assert Fixture().drain.status() == {
        "state": "serving",
        "inflight_requests": 0,
        "kv_transfers": "not_applicable",
        "safe_to_delete": False,
        "discovery_registered": True,
    }


async def test_a_drain_leaves_discovery_then_declines_then_waits_for_the_last_request() -> None:
    it = Fixture()
    it.served.unfinished = 2
    answer = await it.drain.drain({})
    assert (answer["state"], answer["discovery_registered"], answer["safe_to_delete"]) == ("draining", False, False)
    assert it.served.log[0] == "withdraw"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while it.served.log != ["withdraw", "decline"]:
            await asyncio.sleep(0.002)
    for left in (2, 1):
        it.served.unfinished = left
        for _ in range(3):
            await asyncio.sleep(0.005)
        assert it.drain.status()["inflight_requests"] == left
        assert not it.drain.status()["safe_to_delete"]
    it.served.unfinished = 0
    await it.reaches(state="drained", safe_to_delete=True, inflight_requests=0)


async def test_requests_are_served_for_the_grace() -> None:
    it = Fixture(grace_seconds=3600)
    await it.drain.drain({})
    await asyncio.sleep(0.02)
    assert it.served.log == ["withdraw"]
    assert it.drain.state is DrainState.DRAINING
    await it.drain.close()


async def test_a_second_drain_answers_the_status_and_does_nothing() -> None:
    it = Fixture()
    await it.drain.drain({})
    await it.reaches(state="drained")
    assert (await it.drain.drain({}))["state"] == "drained"
    assert it.served.log.count("withdraw") == 1


async def test_a_client_that_hangs_up_does_not_strand_a_drain() -> None:
    it = Fixture()
    it.served.hold = asyncio.Event()
    call = asyncio.ensure_future(it.drain.drain({}))
    await asyncio.sleep(0.005)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    it.served.hold.set()
    await it.reaches(state="drained", discovery_registered=False)


async def test_a_drain_that_cannot_leave_discovery_is_undone() -> None:
    it = Fixture()
    it.served.failure = OSError("the store is away")
    with pytest.raises(DrainRefused, match="failed to unregister worker from discovery: the store is away"):
        await it.drain.drain({})
    status = it.drain.status()
    assert (status["state"], status["discovery_registered"]) == ("serving", True)
    assert "the store is away" in status["last_error"]
    it.served.failure = None
    assert "last_error" not in await it.drain.drain({})


@pytest.mark.parametrize("when", ["draining", "drained"])
async def test_a_resumed_worker_serves_and_is_never_safe_to_delete(when: str) -> None:
    it = Fixture()
    it.served.unfinished = when == "draining"
    await it.drain.drain({})
    await it.reaches(state=when)
    answer = await it.drain.resume({})
    assert (answer["state"], answer["discovery_registered"], answer["safe_to_delete"]) == ("serving", True, False)
    assert it.served.log[-2:] == ["advertise", "accept"]
    it.served.unfinished = 0
    for _ in range(5):
        await asyncio.sleep(0.005)
    assert it.drain.state is DrainState.SERVING
    assert (await it.drain.resume({}))["state"] == "serving"


async def test_where_discovery_does_not_take_it_back_the_drain_goes_on() -> None:
    it = Fixture()
    it.served.unfinished = 1
    await it.drain.drain({})
    it.served.failure = OSError("the store is away")
    with pytest.raises(DrainRefused, match="failed to re-register worker in discovery: the store is away"):
        await it.drain.resume({})
    assert not it.drain.status()["discovery_registered"]
    it.served.unfinished = 0
    await it.reaches(state="drained", safe_to_delete=True)
    it.served.failure = None
    assert "last_error" not in await it.drain.resume({})


@pytest.mark.parametrize(
    ("answer", "transfers"), [(False, "pending"), (None, "unknown"), (RuntimeError("broken"), "unknown")]
)
async def test_a_prefill_worker_is_safe_only_when_its_engine_says_that_no_peer_pulls(
    answer: bool | Exception | None, transfers: str
) -> None:
    it = Fixture(Engine(answer), is_prefill=True)
    assert it.drain.status()["kv_transfers"] == "unknown"
    await it.drain.drain({})
    await it.reaches(kv_transfers=transfers, state="draining")
    for _ in range(3):
        await asyncio.sleep(0.005)
    assert it.drain.state is DrainState.DRAINING
    assert ("broken" in it.drain.status().get("last_error", "")) == isinstance(answer, Exception)
    it.engine.answer = True
    await it.reaches(kv_transfers="complete", state="drained", safe_to_delete=True)


async def test_an_engine_that_sleeps_stays_out_of_discovery_when_its_worker_is_resumed() -> None:
    it = Fixture()
    await it.drain.record.hold(Hold.PAUSED)
    await it.drain.drain({})
    await it.reaches(state="drained")
    assert not (await it.drain.resume({}))["discovery_registered"]
    assert "advertise" not in it.served.log
    await it.drain.record.release(Hold.PAUSED)
    assert it.served.log[-1] == "advertise"


async def test_an_engine_that_wakes_up_does_not_bring_a_drained_worker_back() -> None:
    it = Fixture()
    await it.drain.record.hold(Hold.PAUSED)
    await it.drain.drain({})
    await it.drain.record.release(Hold.PAUSED)
    assert "advertise" not in it.served.log
    assert not it.drain.status()["discovery_registered"]
    await it.drain.close()


async def test_after_a_stop_nothing_is_changed() -> None:
    it = Fixture()
    it.served.unfinished = 1
    await it.drain.drain({})
    assert await it.drain.close() is DrainState.DRAINING
    it.served.unfinished = 0
    for call in (it.drain.drain, it.drain.resume):
        with pytest.raises(DrainRefused, match="worker shutdown is already in progress"):
            await call({})
    status = it.drain.status()
    assert (status["state"], status["safe_to_delete"]) == ("stopping", False)
    assert await it.drain.close() is DrainState.STOPPING


async def test_a_stop_while_discovery_is_written_answers_the_drain() -> None:
    it = Fixture()
    it.served.hold = asyncio.Event()
    call = asyncio.ensure_future(it.drain.drain({}))
    await asyncio.sleep(0.005)
    closing = asyncio.ensure_future(it.drain.close())
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert (await call)["state"] == "stopping"
        it.served.hold.set()
        await closing


@pytest.mark.parametrize("body", [[], "drain", 1, None])
async def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    it = Fixture()
    with pytest.raises(DrainRefused, match="must be a JSON object"):
        await it.drain.drain(body)
    assert it.served.log == []


async def test_a_worker_that_starts_cannot_be_drained() -> None:
    it = Fixture()
    it.gate = AdminGate.STARTING
    with pytest.raises(DrainRefused, match="the worker is starting"):
        await it.drain.drain({})


async def test_the_three_routes_have_one_method_each_and_cannot_be_taken() -> None:
    routes = EngineRoutes(depth_limit=8, refused=lambda _limit: None)
    for name, (method, callback) in Fixture().drain.routes().items():
        with pytest.raises(ValueError, match="the worker's own"):
            routes.register(name, callback)
        routes.register_reserved(name, method, callback)
        assert (await routes.call(method, name, b"")).status == 200
        assert (await routes.call("GET" if method == "POST" else "POST", name, b"")).status == 405
