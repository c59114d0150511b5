"""What event sources cost a router while nothing happens: `python benchmarks/idle_sources.py`.

A process of its own holds the publishers, each with one block and a recovery endpoint. Prints the CPU time that following
them takes per second, and how often the feed is called.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path

from dynamo.kv.events import RouterEvent
from dynamo.kv.index import PrefixIndex
from dynamo.router import KvEventFeed
from dynamo.runtime.base.settings import EventPlaneSettings, RuntimeSettings
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.worker.kv_publishing.publisher import KvEventPublisher
from dynamo.worker.kv_publishing.recovery import KvRecovery

PATH = "bench.backend.generate"
LOCAL = RuntimeSettings(events=EventPlaneSettings(host="127.0.0.1"))


class CountedIndex(PrefixIndex):
    """An index that counts its calls."""

    calls = 0

    def apply(self, event: RouterEvent) -> str:
        self.calls += 1
        return super().apply(event)


async def publish(store: Path, sources: int) -> None:
    """Hold the publishers until the process is ended."""
    async with DistributedRuntime(None, None, "tcp", discovery=FileDiscovery(store), settings=LOCAL) as runtime:
        endpoint = runtime.endpoint(PATH)
        for rank in range(sources):
            channel = endpoint.event_channel("kv-events")
            publisher = KvEventPublisher(endpoint, kv_block_size=1, dp_rank=rank, channel=channel)
            publisher.publish_stored([rank], [1], [rank + 1])
            await KvRecovery.begin(endpoint, publisher, channel.publisher_id)
        await asyncio.Event().wait()


def run_publishers(store: Path, sources: int) -> None:
    asyncio.run(publish(store, sources))


async def follow(store: Path, sources: int, seconds: float) -> None:
    """Follow them, wait until everything is known, and count from then on."""
    async with DistributedRuntime(None, None, "tcp", discovery=FileDiscovery(store), settings=LOCAL) as runtime:
        index = CountedIndex()

        async def cpu_per_second() -> float:
            begun, at = time.process_time(), time.monotonic()
            await asyncio.sleep(seconds)
            return (time.process_time() - begun) / (time.monotonic() - at) * 1000

        without = await cpu_per_second()
        async with KvEventFeed(runtime.endpoint(PATH), index):
            while index.blocks() < sources:
                await asyncio.sleep(0.1)
            await asyncio.sleep(2.0)  # the quick repetitions are over
            calls = index.calls
            used = await cpu_per_second()
            print(
                f"{sources} idle sources: {used:.2f} ms of CPU per second, {without:.2f} without a feed,"
                f" {index.calls - calls} events applied in {seconds:g} s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(
            target=run_publishers, args=(Path(folder), options.sources), daemon=True
        )
        process.start()
        asyncio.run(follow(Path(folder), options.sources, options.seconds))
        process.kill()
        process.join()


if __name__ == "__main__":
    main()
