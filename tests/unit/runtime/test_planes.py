"""The tables of planes, and the life of a runtime."""

from __future__ import annotations

import asyncio
import itertools
import logging
import tomllib
from pathlib import Path

import pytest

from dynamo.errors import CannotConnect
from dynamo.runtime.base.settings import DISCOVERY_BACKENDS
from dynamo.runtime.lifecycle import TRANSITIONS, RuntimeEvent, RuntimeLife, RuntimeState
from dynamo.runtime.planes import DISCOVERY, EVENTS, REQUEST_CLIENTS, REQUEST_SERVERS, choose_planes
from support.cases import each_case

ROOT = Path(__file__).parents[3]


def test_every_extra_that_a_plane_needs_is_one_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    tables = (DISCOVERY, EVENTS, REQUEST_CLIENTS, REQUEST_SERVERS)
    needed = {factory.extra for table in tables for factory in table.values() if factory.extra is not None}
    assert needed == {"etcd", "kubernetes", "nats"}
    assert needed <= extras.keys()


def test_the_names_of_the_flags_are_those_of_the_tables() -> None:
    assert ("auto", *DISCOVERY) == DISCOVERY_BACKENDS


@pytest.mark.parametrize(
    ("asked", "found"), [(("mem", None), "mem"), (("tcp", None), "zmq"), (("MEM", "Nats"), "nats")]
)
def test_events_go_the_way_of_requests_unless_a_plane_is_named(asked: tuple[str, str | None], found: str) -> None:
    assert choose_planes("file", asked[0], None, asked[1]).events == found


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("pigeon", None, None), "unknown request plane 'pigeon'"),
        (("tcp", None, "smoke"), "unknown event plane 'smoke'"),
    ],
)
def test_an_unknown_name_is_a_value_error(names: tuple[str, str | None, str | None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_planes("file", *names)


def test_a_plane_that_is_not_built_cannot_be_connected() -> None:
    with pytest.raises(CannotConnect, match="quic response plane is not built"):
        choose_planes("file", "tcp", "quic", None)


def test_every_state_has_a_row_and_only_the_last_has_none_to_leave_by() -> None:
    assert TRANSITIONS.keys() == set(RuntimeState)
    assert [state for state, row in TRANSITIONS.items() if not row] == [RuntimeState.CLOSED]


@each_case("events", list(itertools.product(RuntimeEvent, repeat=4)))
async def test_whatever_happens_a_runtime_only_goes_on(events: tuple[RuntimeEvent, ...]) -> None:
    life = RuntimeLife()
    order = list(RuntimeState)
    for event in events:
        before = life.state
        moved = life.apply(event)
        assert moved == (event in TRANSITIONS[before])
        assert order.index(life.state) >= order.index(before)
    closed = asyncio.ensure_future(life.wait_closed())
    await asyncio.sleep(0)
    assert closed.done() == (life.state is RuntimeState.CLOSED)
    closed.cancel()


async def test_a_runtime_is_released_by_its_last_holder(caplog: pytest.LogCaptureFixture) -> None:
    life = RuntimeLife()
    one, two = life.hold(), life.hold()
    waiting = asyncio.ensure_future(life.wait_released(600.0))
    one()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    two()
    await waiting
    assert caplog.records == []


async def test_a_holder_that_stays_is_named_and_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    life = RuntimeLife()
    life.hold()
    with caplog.at_level(logging.WARNING):
        await life.wait_released(0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "1 workers still hold the runtime; disconnecting all the same"
    ]
