"""What a mock engine reports to routers: its KV blocks as they change, its load, and the prompts that are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from dynamo.contract.kv_events import ComponentSnapshot, KvEventSource, PushSource, ZmqSource
from dynamo.kv.changes import BlockChange, BlockRecord
from dynamo.mocker.engine_wire import EngineWire
from dynamo.runtime.observe.metrics import Family, MetricsRegistry
from dynamo.scheduling import BlockRun, EvictedBlocks, PassResult, ScheduledRequest, SchedulerCore

if TYPE_CHECKING:
    from dynamo.runtime.endpoint import Endpoint, EndpointEvents
    from dynamo.worker.kv_publishing.publisher import KvEventPublisher, SnapshotPublisher


# Metrics under the names that the simulated engine has them, so that dashboards made for it show the mock engine.

BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
LABELS: Final = ("model_name",)

RUNNING: Final = Family("num_requests_running", "gauge", "Requests that run; for sglang `num_running_reqs`", LABELS)
WAITING: Final = Family("num_requests_waiting", "gauge", "Requests that wait; for sglang `num_queue_reqs`", LABELS)
CACHE_USAGE: Final = Family(
    "kv_cache_usage_perc", "gauge", "Part of the cache that running requests use, 0 to 1 (vllm, trtllm)", LABELS
)
OLD_CACHE_USAGE: Final = Family("gpu_cache_usage_perc", "gauge", "The same under its old name (vllm, trtllm)", LABELS)
PREEMPTIONS: Final = Family(
    "num_preemptions_total", "counter", "Running requests that lost their blocks (vllm, trtllm)", LABELS
)
HIT_RATE: Final = Family(
    "cache_hit_rate", "gauge", "Part of the prompt tokens that were cached, 0 to 1 (sglang)", LABELS
)
REQUESTS: Final = Family("num_requests_total", "counter", "Requests that got their first token (sglang)", LABELS)
FIRST_TOKEN: Final = Family(
    "time_to_first_token_seconds", "histogram", "From the request to its first token", LABELS, BUCKETS
)
BETWEEN_TOKENS: Final = Family(
    "inter_token_latency_seconds", "histogram", "Between two tokens of a request", LABELS, BUCKETS
)
WHOLE: Final = Family("e2e_request_latency_seconds", "histogram", "From the request to its last token", LABELS, BUCKETS)
FAMILIES: Final = (
    RUNNING, WAITING, CACHE_USAGE, OLD_CACHE_USAGE, PREEMPTIONS, HIT_RATE, REQUESTS, FIRST_TOKEN, BETWEEN_TOKENS, WHOLE,
)  # fmt: skip
_SGLANG_NAMES: Final = {RUNNING: "num_running_reqs", WAITING: "num_queue_reqs"}


class MockMetrics:
    """The metrics of one mock engine, all its ranks together."""

    def __init__(self, backend: str, model_name: str, cores: Sequence[SchedulerCore]) -> None:
        self._registry = registry = MetricsRegistry()
        self._cores = cores
        self._prompt_tokens = self._cached_tokens = 0
        labels = (("model_name", model_name),)
        is_sglang = backend == "sglang"

        def named(family: Family) -> Family:
            name = _SGLANG_NAMES.get(family, family.name) if is_sglang else family.name
            return replace(family, name=f"{backend}:{name}")

        named(RUNNING).gauge(registry, labels).read_from(lambda: sum(len(core.running) for core in cores))
        named(WAITING).gauge(registry, labels).read_from(lambda: sum(len(core.waiting) for core in cores))
        if is_sglang:
            named(HIT_RATE).gauge(registry, labels).read_from(lambda: self.hit_rate or 0.0)
        else:
            for family in (CACHE_USAGE, OLD_CACHE_USAGE):
                named(family).gauge(registry, labels).read_from(self._usage)
        self._requests = named(REQUESTS).counter(registry, labels) if is_sglang else None
        self._preemptions = None if is_sglang else named(PREEMPTIONS).counter(registry, labels)
        self.first_token, self.between_tokens, self.whole = (
            named(family).histogram(registry, labels) for family in (FIRST_TOKEN, BETWEEN_TOKENS, WHOLE)
        )

    @property
    def hit_rate(self) -> float | None:
        """The part of all prompt tokens that were cached; None: no prompt was computed yet."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None

    def on_first_token(self, request: ScheduledRequest) -> None:
        """Count a request whose prompt was computed."""
        self._prompt_tokens += request.prompt_tokens
        self._cached_tokens += max(0, request.cached_tokens)
        if self._requests is not None:
            self._requests.inc()

    def on_pass(self) -> None:
        """Count what happened since the last pass."""
        if self._preemptions is not None:
            self._preemptions.inc(sum(core.preemptions for core in self._cores) - self._preemptions.value)

    def text(self) -> str:
        """Return the exposition of a scrape."""
        return self._registry.expose().decode()

    def _usage(self) -> float:
        return sum(core.pool.used for core in self._cores) / sum(core.pool.blocks for core in self._cores)


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
        events: list[dict[str, object]] = [
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
