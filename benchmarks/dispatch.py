"""What the dispatch of one request costs, from `Dispatcher.open` to its end: no socket, no engine, the CPU clock.

    python benchmarks/dispatch.py

Two workers that answer with one item, round-robin. The figure is the least of several repeats, in microseconds per request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Container
from typing import Any, Final, cast

import uvloop

from dynamo.errors import DynamoException
from dynamo.placement import Candidate
from dynamo.placement.policies.round_robin import RoundRobin
from dynamo.router.dispatch.failover import DispatchLimits, DispatchRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stream import Dispatcher
from dynamo.router.workers.pool import ModelPool, WorkerClient
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, StreamItem

ENDPOINT: Final = "ns.c.e"
IDS: Final = (1, 2)
REQUESTS: Final = 2000  # of one repeat


class Stream:
    """Sends one item."""

    item = StreamItem(0, 0, 0, [1], "stop")

    async def next_batch(self) -> list[StreamItem]:
        return [self.item]

    def finish(self) -> None: ...

    def close(self) -> None: ...


class Workers:
    """Two workers."""

    def __init__(self) -> None:
        self.listed = [Candidate(number, ENDPOINT) for number in IDS]
        self.instances = {
            number: Instance(
                namespace="ns", component="c", endpoint="e", instance_id=number, transport={"mem": str(number)}
            )
            for number in IDS
        }

    def instance_ids(self) -> list[int]:
        return [*IDS]

    def candidates(self, *, members: Container[int] | None = None, busy: Collection[int] = ()) -> list[Candidate]:
        return self.listed

    def named(self, instance_id: int) -> Instance:
        return self.instances[instance_id]

    async def open(self, instance: Instance, body: object, context: Context) -> Stream:
        return Stream()

    def record_failure(self, instance: Instance, error: DynamoException) -> bool:
        return False


class Timer:
    """Measures nothing."""

    def routed(self) -> None: ...

    def dispatched(self) -> None: ...

    def arrived(self, *, failed: bool = False) -> None: ...


async def measure(repeats: int) -> float:
    """Return the least CPU of a request, in microseconds."""
    pool = ModelPool("m", {ENDPOINT: cast(WorkerClient, Workers())}, RoundRobin())
    pool.set_members([(ENDPOINT, number) for number in IDS])
    dispatcher, timer, limits = Dispatcher(pool), Timer(), DispatchLimits()
    body: Any = {"token_ids": [1, 2, 3]}
    best = float("inf")
    for _ in range(repeats):
        contexts = [Context("r") for _ in range(REQUESTS)]
        begun = time.process_time()
        for context in contexts:
            request = DispatchRequest(body, body["token_ids"], record=DispatchRecord(), timer=timer, limits=limits)
            stream = dispatcher.open(request, context)
            await stream.next_batch()
            stream.finish()
            stream.close()
        best = min(best, (time.process_time() - begun) / REQUESTS)
    return 1e6 * best


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="CPU of the dispatch of one request")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    print(f"{uvloop.run(measure(args.repeats)):.2f} us of CPU per request")


if __name__ == "__main__":
    main()
