"""Questions to event sources: how many clients there are for them, and until when."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo.errors import WorkerUnavailable
from dynamo.kv.overlap import WorkerRank
from dynamo.router.kv_events.feed import SourceRecords
from dynamo.router.kv_events.sources import UNANSWERED, RecoveryTarget, SourceClients


class Clients:
    """An endpoint at which no instance answers, and the clients that were made for it."""

    def __init__(self) -> None:
        self.made: list[Clients.Client] = []

    class Client:
        is_closed = False

        def named(self, instance_id: int) -> int:
            return instance_id

        async def open(self, instance: int, body: object, context: object) -> Any:
            raise WorkerUnavailable(f"{instance}")

        async def close(self) -> None:
            self.is_closed = True

    def endpoint(self, path: str) -> Clients:
        return self

    async def client(self) -> Client:
        self.made.append(made := self.Client())
        await asyncio.sleep(0)  # as a look at discovery
        return made

    @property
    def left(self) -> int:
        return sum(not each.is_closed for each in self.made)


async def ask(sources: SourceClients, number: int) -> None:
    try:
        await sources.request(WorkerRank(number), target(number), None)
    except UNANSWERED:
        return


def target(number: int) -> RecoveryTarget:
    return RecoveryTarget("ns", "c", "one_name_for_all", number)


async def test_workers_that_share_the_name_of_their_source_are_asked_through_one_client() -> None:
    clients = Clients()
    sources = SourceClients(clients)  # type: ignore[arg-type]
    await asyncio.gather(*(ask(sources, number) for number in range(8)))
    assert clients.left == 1
    await sources.leave(target(1))  # the last one of that name: see the next test
    assert clients.left == 0


def test_a_name_of_sources_is_known_until_the_last_of_them_has_left() -> None:
    records = SourceRecords()
    for number in (1, 2):
        assert records.put(str(number), WorkerRank(number), target(number))
    assert records.put("1", WorkerRank(1), target(1))  # the same record again
    assert records.pop("1") == (WorkerRank(1), target(1))
    assert records.has_path(target(1))
    assert (records.targets(WorkerRank(1)), records.targets(WorkerRank(2))) == ((), (target(2),))
    records.pop("2")
    assert not records.has_path(target(2))
    assert records.pop("2") is None
