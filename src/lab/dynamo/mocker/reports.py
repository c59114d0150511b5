"""What a mock engine reports to routers: its KV blocks as they change, its load, and the prompts that are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from dynamo.contract.kv_events import ComponentSnapshot, KvEventSource, PushSource, ZmqSource
from dynamo.kv.changes import BlockChange, BlockRecord
from dynamo.mocker.engine_wire import EngineWire
from dynamo.scheduling import BlockRun, EvictedBlocks, PassResult, SchedulerCore

if TYPE_CHECKING:
    from dynamo.runtime.endpoint import Endpoint, EndpointEvents
    from dynamo.worker.kv_publishing.publisher import KvEventPublisher, SnapshotPublisher

ACTIVE_SEQUENCES_TOPIC: Final = "active_sequences_events"
MAX_BLOCKS_PER_EVENT: Final = 128
MAX_EVENTS_PER_MESSAGE: Final = 256


class MockReports:
    """The publishers of one engine, each from the moment when it is attached."""

    def __init__(
        self, cores: Sequence[SchedulerCore], hit_rate: Callable[[], float | None], wires: Sequence[EngineWire]
    ) -> None:
        """`wires`: one for each rank where KV events go through ZMQ sockets of the engine, else none."""
        self._cores = cores
        self._hit_rate = hit_rate
        self._wires = wires
        self._publishers: dict[int, KvEventPublisher] = {}
        self._used: list[int] = [-1] * len(cores)
        self._endpoint: Endpoint | None = None
        self._prompts: EndpointEvents | None = None
        self.snapshots: SnapshotPublisher | None = None

    def sources(self, ports: int | None) -> list[KvEventSource]:
        """Return where each rank's KV events come from; `ports`: the first of the ZMQ ports."""
        if ports is not None:
            return [ZmqSource(f"tcp://127.0.0.1:{ports + rank}", dp_rank=rank) for rank in range(len(self._cores))]
        return [PushSource(partial(self._attach, rank), dp_rank=rank) for rank in range(len(self._cores))]

    def _attach(self, rank: int, publisher: KvEventPublisher) -> None:
        self._publishers[rank] = publisher

    def attach_endpoint(self, endpoint: Endpoint) -> None:
        """Report computed prompts on the endpoint's event plane."""
        self._endpoint = endpoint
        self._prompts = endpoint.event_channel(ACTIVE_SEQUENCES_TOPIC)

    def publish(self, results: Sequence[tuple[int, PassResult]]) -> None:
        """Publish what one pass changed."""
        for rank, result in results:
            if result.events:
                if self._wires:
                    self._wires[rank].publish(result.events)
                elif (publisher := self._publishers.get(rank)) is not None:
                    for tier, events in groupby(result.events, attrgetter("tier")):
                        publisher.publish_changes([change for event in events for change in block_changes(event)], tier)
            if result.first:
                self._publish_prompts(rank, result)
            self._publish_load(rank)

    def _publish_prompts(self, rank: int, result: PassResult) -> None:
        channel, endpoint = self._prompts, self._endpoint
        if channel is None or endpoint is None:
            return
        worker_id = endpoint.connection_id()
        events: list[dict[str, Any]] = [
            {
                "request_id": request.request_id,
                "worker": {"worker_id": worker_id, "dp_rank": rank},
                "data": "MarkPrefillCompleted",
                "router_id": worker_id,
                "lora_name": request.lora_name,
            }
            for request in result.first
        ]
        if endpoint.runtime.event_plane == "nats":
            for event in events:
                channel.publish(event)
            return
        for start in range(0, len(events), MAX_EVENTS_PER_MESSAGE):
            channel.publish({"events": events[start : start + MAX_EVENTS_PER_MESSAGE]})

    def _publish_load(self, rank: int) -> None:
        pool = self._cores[rank].pool
        used = pool.used
        if self.snapshots is not None and used != self._used[rank]:
            self._used[rank] = used
            self.snapshots.publish(
                rank, ComponentSnapshot(used, pool.blocks, used / pool.blocks, rank, self._hit_rate())
            )

    async def close(self) -> None:
        """Leave the event plane and close the sockets; idempotent."""
        prompts, self._prompts = self._prompts, None
        if prompts is not None:
            await prompts.close()
        for wire in self._wires:
            wire.close()


def block_changes(event: BlockRun | EvictedBlocks) -> list[BlockChange]:
    """Return a change of a simulated cache as it is published, in pieces of at most 128 blocks."""
    if isinstance(event, EvictedBlocks):
        names = event.identities
        return [
            {"removed": {"block_hashes": names[start : start + MAX_BLOCKS_PER_EVENT]}}
            for start in range(0, len(names), MAX_BLOCKS_PER_EVENT)
        ]
    parent, names, contents = event.parent, event.identities, event.content
    pieces: list[BlockChange] = []
    for start in range(0, len(names), MAX_BLOCKS_PER_EVENT):
        end = start + MAX_BLOCKS_PER_EVENT
        blocks: list[BlockRecord] = [
            {"block_hash": name, "tokens_hash": content, "mm_extra_info": None}
            for name, content in zip(names[start:end], contents[start:end], strict=True)
        ]
        pieces.append({"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}})
        parent = blocks[-1]["block_hash"]
    return pieces
