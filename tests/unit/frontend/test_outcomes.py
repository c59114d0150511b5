"""Each request has one end, and each listener gets it once: answered, refused at the door, failed, or left by its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.pipeline.exchange import Exchange, PartSlot
from dynamo.frontend.pipeline.outcome import Outcome, Reached, RequestListener
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.sink import OpenAnswer
from dynamo.protocol.openai.errors import RequestRejected
from support.frontend_cluster import Cluster, cluster, fail, say

NOTE: PartSlot[str] = PartSlot("note of a test")


class Notes(RequestListener):
    """Keeps the facts of each end, and may refuse a request at any of the hooks."""

    def __init__(self) -> None:
        self.ends: list[tuple[Reached, int, str]] = []
        self.outputs: list[int] = []
        self.refuses = ""

    def arrived(self, exchange: Exchange) -> None:
        self._refuse("arrived")

    def began(self, exchange: Exchange, resolved: Resolved) -> None:
        exchange.keep(NOTE, resolved.model.name)
        self._refuse("began")

    def planned(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> None:
        self._refuse("planned")

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        self.ends.append((outcome.reached, outcome.status, outcome.error_type))
        self.outputs.append(outcome.usage.output_tokens)
        assert exchange.of(NOTE) == ("m" if outcome.reached >= Reached.RESOLVED else None)

    def _refuse(self, hook: str) -> None:
        if self.refuses == hook:
            raise RequestRejected(429, f"not at {hook}")


class Broken(RequestListener):
    """A listener that fails."""

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        raise RuntimeError("broken")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, max_requests_in_flight=1) as found:
        yield found


@pytest.fixture
def notes(house: Cluster) -> Notes:
    made = Notes()
    house.frontend.pipeline.hooks.add(made)
    return made


async def test_only_hooks_that_a_part_has_are_called(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        hooks = found.frontend.pipeline.hooks
        owners = {
            hook: [type(call.__self__).__name__ for call in getattr(hooks, hook)]
            for hook in ("arrived", "began", "planned", "ended")
        }
    assert owners["began"] == owners["planned"] == []
    assert owners["arrived"] == ["Recording"]
    assert owners["ended"] == ["RequestCounts", "RequestLog", "Recording", "Inspector"]  # no part that forwards it


async def test_an_answer_is_one_outcome(house: Cluster, notes: Notes) -> None:
    await house.worker(say("hel", "lo"))
    await house.client.chat()
    await house.client.chat(stream=True)
    assert notes.ends == [(Reached.ADMITTED, 200, "")] * 2
    assert notes.outputs == [5, 5]


async def test_what_is_refused_at_the_door_is_one_outcome(house: Cluster, notes: Notes) -> None:
    worker = await house.worker()
    await house.client.call("POST", "/v1/chat/completions", b"{}", headers={"content-type": "text/html"})
    assert notes.ends.pop() == (Reached.DOOR, 415, "validation")
    worker.script = worker.hold
    first = house.client.begin_chat("hi")
    await worker.started.wait()
    await house.client.chat()
    assert notes.ends.pop() == (Reached.DOOR, 529, "overload")
    first.disconnect()
    await first.done()
    assert notes.ends == [(Reached.ADMITTED, 499, "cancelled")]


async def test_a_broken_rule_and_an_unknown_model_are_one_outcome_each(house: Cluster, notes: Notes) -> None:
    await house.worker(say("a"))
    await house.client.chat(temperature=9)
    await house.client.chat(model="other")
    assert notes.ends == [(Reached.READ, 400, "validation"), (Reached.READ, 404, "not_found")]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_is_recorded_also_where_its_task_is_cancelled_behind_its_last_bytes(
    house: Cluster, notes: Notes, streams: bool
) -> None:
    await house.worker(say("hel", "lo"))
    call = house.client.begin_chat(stream=streams)
    await call.until(lambda call: call.is_complete)
    recorded_at_the_end = len(notes.ends)
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.done()
    assert (recorded_at_the_end, notes.ends) == (0, [(Reached.ADMITTED, 200, "")])
    assert house.frontend.admission.in_flight == 0


@pytest.mark.parametrize("after", [(), ("some",)])
async def test_a_failure_is_one_outcome_whether_the_stream_has_begun(
    house: Cluster, notes: Notes, after: tuple[str, ...]
) -> None:
    await house.worker(fail(InvalidArgument("no"), after=after))
    await house.client.chat(stream=True)
    assert notes.ends == [(Reached.ADMITTED, 400, "validation")]
    assert house.frontend.admission.in_flight == 0


@pytest.mark.parametrize(
    ("hook", "reached"), [("arrived", Reached.DOOR), ("began", Reached.RESOLVED), ("planned", Reached.ADMITTED)]
)
async def test_a_listener_may_refuse_a_request(house: Cluster, notes: Notes, hook: str, reached: Reached) -> None:
    await house.worker(say("a"))
    notes.refuses = hook
    answer = await house.client.chat()
    assert (answer.status, notes.ends) == (429, [(reached, 429, "validation")])
    notes.refuses = ""
    assert (await house.client.chat()).status == 200


async def test_a_listener_that_fails_costs_neither_the_others_nor_the_client_theirs(house: Cluster) -> None:
    notes = Notes()
    house.frontend.pipeline.hooks.add(Broken())
    house.frontend.pipeline.hooks.add(notes)
    await house.worker(say("a"))
    assert (await house.client.chat()).status == 200
    assert notes.ends == [(Reached.ADMITTED, 200, "")]


async def test_a_hook_that_a_listener_does_not_define_is_not_called(house: Cluster) -> None:
    hooks = house.frontend.pipeline.hooks
    before = len(hooks.arrived), len(hooks.began), len(hooks.planned), len(hooks.ended)
    hooks.add(Broken())
    assert (len(hooks.arrived), len(hooks.began), len(hooks.planned), len(hooks.ended)) == (*before[:3], before[3] + 1)


async def test_no_place_is_lost_where_giving_back_another_one_fails(
    house: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await house.worker(say("a"))

    def broken(_self: OpenAnswer) -> None:
        raise RuntimeError("broken at the end")

    with monkeypatch.context() as patched:
        patched.setattr(OpenAnswer, "close", broken)
        with pytest.raises(RuntimeError, match="broken at the end"):
            await house.client.chat("hi")
    (model,) = house.frontend.models.served()
    assert (house.frontend.admission.in_flight, model.admission.in_flight, len(house.frontend.pipeline.register)) == (
        0,
        0,
        0,
    )
    assert (await house.client.chat("hi")).status == 200
