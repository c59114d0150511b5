"""Questions to event sources: how many clients there are for them, and until when."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo.errors import WorkerUnavailable
from dynamo.kv.overlap import WorkerRank
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
    await sources.leave(target(1), {target(2)})
    assert clients.left == 1  # the others are asked through it
    await sources.leave(target(2), set())
    assert clients.left == 0
