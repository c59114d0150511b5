from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.worker import controls
from dynamo.worker.controls import (
    PAUSING_CONTROLS,
    RESUMING_CONTROLS,
    AdminRoutes,
    RlDirectory,
    checked_names,
    rl_endpoint_name,
)
from dynamo.worker.instance_record import GuardedRecord
from dynamo.worker.lifecycle import AdminGate
from support.cases import each_case
from support.instance_record import WrittenRecord


class Engine:
    """Answers what it is told to; writes down what it is asked."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.answers: dict[str, Any] = {}
        self.blocks: dict[str, asyncio.Event] = {}
        self.entered = asyncio.Event()

    async def engine_control(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self.log.append(name)
        self.entered.set()
        if name in self.blocks:
            await self.blocks[name].wait()
        answer = self.answers.get(name, {"status": "ok", "echo": body})
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine_update = engine_control


class Fixture:
    def __init__(self, **engine_hooks: Callable[..., Any]) -> None:
        self.log: list[str] = []
        self.engine = Engine(self.log)
        for name, hook in engine_hooks.items():
            setattr(self.engine, name, hook)
        self.record = WrittenRecord(self.log)
        self.gate = AdminGate.OPEN
        self.taints: list[str] | None = None
        self.guarded = GuardedRecord(lambda: self.gate)
        self.admin = AdminRoutes(
            self.engine,
            controls=[*PAUSING_CONTROLS, *RESUMING_CONTROLS, "start_profile"],
            updates=["weights"],
            record=self.guarded,
            set_taints=self._set_taints,
        )
        self.guarded.attach(self.record)
        self.routes = self.admin.routes()

    async def _set_taints(self, taints: list[str]) -> None:
        self.taints = taints

    async def control(self, name: str, body: Any = None) -> dict[str, Any]:
        return await self.routes[f"control/{name}"]({} if body is None else body)


def test_every_advertised_name_and_the_taints_have_a_route() -> None:
    routes = set(Fixture().routes)
    assert {"control/sleep", "control/start_profile", "update/weights", "update/model_taints"} <= routes
    assert len(routes) == len(PAUSING_CONTROLS) + len(RESUMING_CONTROLS) + 3


@pytest.mark.parametrize("name", sorted(PAUSING_CONTROLS))
async def test_a_pausing_control_leaves_discovery_first(name: str) -> None:
    it = Fixture()
    assert await it.control(name, {"level": 1}) == {"status": "ok", "echo": {"level": 1}}
    assert it.log == ["withdraw", name]


@pytest.mark.parametrize("name", sorted(RESUMING_CONTROLS))
async def test_a_resuming_control_returns_to_discovery_afterwards(name: str) -> None:
    it = Fixture()
    await it.control(name)
    assert it.log == [name, "advertise"]


@pytest.mark.parametrize("kind", ["control/start_profile", "update/weights"])
async def test_everything_else_leaves_discovery_alone(kind: str) -> None:
    it = Fixture()
    assert await it.routes[kind]({"a": 1}) == {"status": "ok", "echo": {"a": 1}}
    assert it.log == [kind.rpartition("/")[2]]


async def test_when_unregistering_fails_the_engine_is_not_touched() -> None:
    it = Fixture()
    it.record.failure = RuntimeError("store is away")
    answer = await it.control("sleep")
    assert answer["status"] == "error"
    assert "store is away" in answer["message"]
    assert it.log == []


@pytest.mark.parametrize(
    "answer",
    [{"status": "Error"}, {"success": False}, {"status": "ok", "is_sleeping": True}],
    ids=["status", "success", "still asleep"],
)
async def test_an_engine_that_did_not_wake_up_is_not_advertised(answer: dict[str, Any]) -> None:
    it = Fixture()
    it.engine.answers["wake_up"] = answer
    assert await it.control("wake_up") == answer
    assert it.log == ["wake_up"]


@each_case("answer", [{"is_sleeping": False}, {"success": True}, {}, {"is_sleeping": 1}])
async def test_an_engine_that_did_wake_up_is(answer: dict[str, Any]) -> None:
    it = Fixture()
    it.engine.answers["wake_up"] = answer
    await it.control("wake_up")
    assert it.log == ["wake_up", "advertise"]


async def test_a_failed_return_to_discovery_says_retry() -> None:
    it = Fixture()
    it.record.failure = RuntimeError("store is away")
    answer = await it.control("wake_up")
    assert answer["status"] == "error"
    assert "retry" in answer["message"]


@pytest.mark.parametrize(
    "failure", [RuntimeError("no"), {"status": "error", "message": "no"}], ids=["raises", "answers"]
)
async def test_an_engine_that_fails_to_sleep_stays_unregistered(failure: Any, caplog: pytest.LogCaptureFixture) -> None:
    it = Fixture()
    it.engine.answers["sleep"] = failure
    if isinstance(failure, Exception):
        with pytest.raises(RuntimeError, match="no"):  # the status server makes it a 500
            await it.control("sleep")
    else:
        assert await it.control("sleep") == failure
    assert it.log == ["withdraw", "sleep"]
    assert "stays unregistered" in caplog.text


@each_case("body", [[], "x", 1, None, True])
@each_case("kind", ["control", "update"])
async def test_a_body_that_is_no_object_touches_nothing(kind: str, body: Any) -> None:
    it = Fixture()
    name = "sleep" if kind == "control" else "weights"
    assert await it.routes[f"{kind}/{name}"](body) == {
        "status": "error",
        "message": f"engine {kind} request body must be a JSON object",
    }
    assert it.log == []


@each_case(("gate", "word"), [(AdminGate.STARTING, "starting"), (AdminGate.CLOSED, "shutting down")])
@each_case("route", ["control/sleep", "control/start_profile", "update/weights", "update/model_taints"])
async def test_a_closed_gate_refuses_every_route(gate: AdminGate, word: str, route: str) -> None:
    it = Fixture()
    it.gate = gate
    assert await it.routes[route]({}) == {
        "status": "error",
        "message": f"engine administrative routes are unavailable while the worker is {word}",
    }
    assert it.log == []


async def test_a_validation_hook_answers_before_anything_is_touched() -> None:
    async def validate(name: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return {"status": "error", "message": "level?"} if "level" not in body else None

    it = Fixture(validate_engine_control=validate)
    assert (await it.control("sleep"))["message"] == "level?"
    assert it.log == []
    await it.control("sleep", {"level": 1})
    assert it.log == ["withdraw", "sleep"]


async def test_discovery_changing_controls_wait_for_each_other_and_direct_ones_do_not() -> None:
    it = Fixture()
    it.engine.blocks["sleep"] = asyncio.Event()
    sleeping = asyncio.create_task(it.control("sleep"))
    await it.engine.entered.wait()
    waking = asyncio.create_task(it.control("wake_up"))
    await it.control("start_profile")
    assert it.log == ["withdraw", "sleep", "start_profile"]
    it.engine.blocks["sleep"].set()
    await asyncio.gather(sleeping, waking)
    assert it.log == ["withdraw", "sleep", "start_profile", "wake_up", "advertise"]


async def test_closing_answers_calls_in_flight_and_they_cannot_come_back_to_discovery() -> None:
    it = Fixture()
    it.engine.blocks["wake_up"] = asyncio.Event()
    waking = asyncio.create_task(it.control("wake_up"))
    await it.engine.entered.wait()
    it.gate = AdminGate.CLOSED
    await it.admin.close()
    assert "shutting down" in (await waking)["message"]
    it.engine.blocks["wake_up"].set()
    await asyncio.sleep(0)
    assert it.log == ["wake_up"]
    assert "shutting down" in (await it.control("wake_up"))["message"]
    await it.admin.close()


async def test_an_advertisement_under_way_lands_before_the_close_returns() -> None:
    it = Fixture()
    it.record.hold = asyncio.Event()
    waking = asyncio.create_task(it.control("wake_up"))
    while "wake_up" not in it.log or not it.admin._record._lock.locked():
        await asyncio.sleep(0)
    closing = asyncio.create_task(it.admin.close())
    await asyncio.sleep(0)
    assert not closing.done()
    it.record.hold.set()
    await closing
    it.log.append("final withdraw")
    await waking
    assert it.log == ["wake_up", "advertise", "final withdraw"]


async def test_a_control_that_swallows_its_cancellation_neither_blocks_the_close_nor_returns_to_discovery(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(controls, "CANCEL_SECONDS", 0.02)
    it = Fixture()
    release, entered = asyncio.Event(), asyncio.Event()

    async def stubborn(name: str, body: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return {"status": "ok"}

    it.engine.engine_control = stubborn  # type: ignore[method-assign]
    waking = asyncio.create_task(it.control("wake_up"))
    await entered.wait()
    await it.admin.close()
    assert "ignores its cancellation" in caplog.text
    release.set()
    assert "shutting down" in (await waking)["message"]
    assert it.log == []


async def test_a_caller_that_leaves_takes_its_control_along() -> None:
    it = Fixture()
    it.engine.blocks["start_profile"] = asyncio.Event()
    calling = asyncio.create_task(it.control("start_profile"))
    await it.engine.entered.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert not it.admin._running


async def test_taints_are_sorted_and_never_reach_the_engine() -> None:
    it = Fixture()
    assert await it.routes["update/model_taints"]({"taints": ["b", "a", "b"]}) == {"status": "ok", "taints": ["a", "b"]}
    assert it.taints == ["a", "b"]
    for body, sentence in (
        ({"taints": ["dynamo.topology/zone"]}, "dynamo.topology/"),
        ({}, "must be a list of strings"),
        ([], "must be a JSON object"),
    ):
        with pytest.raises(InvalidArgument, match=sentence):
            await it.routes["update/model_taints"](body)
    assert it.taints == ["a", "b"]
    assert it.log == []


@each_case(
    ("kind", "names"),
    [("update", {"model_taints"}), ("control", {1}), ("control", {""}), ("control", {"a/b"}), ("control", "sleep")],
)
def test_bad_names_fail_the_start_up(kind: str, names: object) -> None:
    with pytest.raises(InvalidArgument, match=f"supported_{kind}s"):
        checked_names(kind, names)


def test_names_are_sorted_and_unique() -> None:
    assert checked_names("control", ["b", "a", "b"]) == ["a", "b"]


@pytest.mark.parametrize("value", ["generate", "a.b", "a b"])
def test_the_rl_endpoint_has_a_name_of_its_own(value: str) -> None:
    with pytest.raises(InvalidArgument, match="DYN_RL_ENDPOINT"):
        rl_endpoint_name("generate", env={"DYN_RL_ENDPOINT": value})
    assert rl_endpoint_name("generate", env={}) == "rl"


class Sink:
    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []

    def send_object(self, envelope: dict[str, Any]) -> None:
        self.objects.append(envelope["data"])


async def test_the_rl_directory_lists_the_routes() -> None:
    sink = Sink()
    served = ["control/refused", "drain", "pause_generation", "resume", "status", "update/weights"]
    directory = RlDirectory("http://h:1", ["update/weights", "control/sleep"], lambda: served)
    await directory.handle({"method": "routes"}, Context(), sink)  # type: ignore[arg-type]
    await directory.handle({"method": "x"}, Context(), sink)  # type: ignore[arg-type]
    assert sink.objects[0] == {
        "status": "ok",
        "base_url": "http://h:1",
        "routes": ["/engine/control/sleep", "/engine/pause_generation", "/engine/update/weights"],
    }
    assert sink.objects[1]["status"] == "error"
