from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from dynamo.errors import Overloaded
from dynamo.frontend.admission.process import NotReady, Stage
from dynamo.frontend.args import parse_args
from dynamo.frontend.parts.group.messages import (
    Gather,
    Gathered,
    Message,
    Ready,
    Share,
    Shared,
    Snapshot,
    Standing,
    Take,
    read,
    write,
)
from dynamo.frontend.parts.group.places import Field, Places, SharedAdmission
from support.cases import each_case
from support.patience import PATIENCE_SECONDS


@pytest.fixture
def places() -> Iterator[Places]:
    table = Places.create(3)
    yield table
    table.close()


def test_every_process_sees_the_places_that_another_one_takes(places: Places) -> None:
    processes = [SharedAdmission(4, places, row) for row in range(3)]
    for row in (0, 0, 1, 2):
        processes[row].enter()
    for full in processes:
        with pytest.raises(Overloaded):
            full.enter()
    processes[1].leave()
    processes[2].enter()
    assert places.total(Field.IN_FLIGHT) == 4


def test_a_process_that_died_gives_its_places_back(places: Places) -> None:
    dead, alive = SharedAdmission(1, places, 0), SharedAdmission(1, places, 1)
    dead.enter()
    places.clear(0)
    alive.enter()
    assert alive.in_flight == places.total(Field.IN_FLIGHT) == 1


def test_draining_is_the_business_of_each_process(places: Places) -> None:
    one, other = SharedAdmission(1, places, 0), SharedAdmission(1, places, 1)
    one.move(Stage.DRAINING)
    with pytest.raises(NotReady):
        one.enter()
    other.enter()


@each_case(
    "message",
    [
        Ready(),
        Gather(1, b"own"),
        Gathered(2, [b"a", b""]),
        Take(3),
        Snapshot(4, b"\x00" * 100_000),
        Share(5, "k", b"v"),
        Shared(6),
        Standing(1, 2),
    ],
)
async def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    arrived: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set_result(await read(reader))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        write(writer, message)
        assert await asyncio.wait_for(arrived, PATIENCE_SECONDS) == message
        assert await read(reader) is None  # the other end has left
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("flags", [["--workers", "0"], ["--workers", "65"], ["--workers", "two"]])
def test_a_number_of_processes_that_cannot_be_is_an_error_of_use(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_args(flags, env={})
    assert left.value.code == 2
    assert "--workers" in capsys.readouterr().err


def test_the_number_of_processes_has_a_variable() -> None:
    assert parse_args([], env={"DYN_FRONTEND_WORKERS": "3"}).workers == 3
    assert parse_args([], env={}).workers == 1
