import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.kv import block_hashes
from dynamo.kv.engine_events import Cleared, Removed, Stored
from dynamo.kv.hashing import media_pad_token
from dynamo.testing.simulation.loop import run_virtual
from dynamo.worker.kv_publishing.outbox import OUTBOX_MESSAGES
from dynamo.worker.kv_publishing.publisher import (
    ComponentSnapshot,
    KvEventPublisher,
    PushSource,
    SnapshotPublisher,
    WorkerMetricsPublisher,
    ZmqSource,
)
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

WORKER = 2**63 + 5
TOKENS = list(range(1, 33))


class Channel:
    """A topic that keeps what it was given."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.failures = 0

    def publish(self, payload: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the plane is down")
        self.messages.append(payload)


class Endpoint:
    def __init__(self) -> None:
        self.channels: dict[str, Channel] = {}

    def connection_id(self) -> int:
        return WORKER

    def event_channel(self, topic: str) -> Channel:
        return self.channels.setdefault(topic, Channel())


async def publisher(**options: Any) -> tuple[KvEventPublisher, Channel]:
    channel = Channel()
    return KvEventPublisher(Endpoint(), kv_block_size=16, channel=channel, **options), channel


async def settle() -> None:
    """Let what other threads scheduled run."""
    for _ in range(3):
        await asyncio.sleep(0)


# -- declarations -----------------------------------------------------------------------------------------------------


def test_declarations_keep_their_positions() -> None:
    snapshot = ComponentSnapshot(6, 10, 0.6, 1)
    assert (snapshot.kv_used_blocks, snapshot.kv_total_blocks, snapshot.gpu_cache_usage) == (6, 10, 0.6)
    assert (snapshot.dp_rank, snapshot.kv_cache_hit_rate) == (1, None)
    assert ZmqSource("tcp://a", "kv", 2) == ZmqSource(endpoint="tcp://a", topic="kv", dp_rank=2)
    ready = lambda publisher: None  # noqa: E731
    assert PushSource(ready, 1) == PushSource(on_ready=ready, dp_rank=1)
    with pytest.raises(AttributeError):
        ZmqSource("tcp://a").dp_rank = 1  # type: ignore[misc]


# -- KV events --------------------------------------------------------------------------------------------------------


async def test_stored_and_removed_blocks_have_the_native_shape() -> None:
    events, channel = await publisher(dp_rank=3)
    events.publish_stored(TOKENS, [16, 16], [-1, 7], parent_hash=9)
    events.publish_removed([-1])
    await settle()
    common = {"worker_id": WORKER, "storage_tier": "device", "residency_domain": "worker"}
    local = block_hashes(TOKENS, 16)
    stored = {
        "parent_hash": 9,
        "start_position": None,
        "blocks": [
            {"block_hash": 2**64 - 1, "tokens_hash": local[0], "mm_extra_info": None},
            {"block_hash": 7, "tokens_hash": local[1], "mm_extra_info": None},
        ],
    }
    assert channel.messages == [
        [{**common, "event": {"event_id": 1, "data": {"stored": stored}, "dp_rank": 3}}],
        [{**common, "event": {"event_id": 2, "data": {"removed": {"block_hashes": [2**64 - 1]}}, "dp_rank": 3}}],
    ]


async def test_an_endpoints_own_topic_and_id_are_the_default() -> None:
    endpoint = Endpoint()
    events = KvEventPublisher(endpoint, kv_block_size=4)
    events.publish_removed([1])
    await settle()
    assert endpoint.channels["kv-events"].messages[0][0]["worker_id"] == WORKER
    other = KvEventPublisher(endpoint, 5, 4)
    other.publish_removed([1])
    await settle()
    assert endpoint.channels["kv-events"].messages[1][0]["worker_id"] == 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lora_name": "a"}, block_hashes(TOKENS, 16, lora_name="a")),
        ({"cache_salt": "a"}, block_hashes(TOKENS, 16, cache_salt="a")),
        (
            {"block_mm_infos": [{"mm_objects": [{"mm_hash": 7, "offsets": [[0, 3]]}]}, None]},
            block_hashes(TOKENS, 16, mm_hashes={0: [7]}),
        ),
    ],
)
async def test_what_keeps_blocks_apart_is_in_their_hash(options: dict[str, Any], expected: list[int]) -> None:
    events, channel = await publisher()
    events.publish_stored(TOKENS, [16, 16], [1, 2], **options)
    await settle()
    blocks = channel.messages[0][0]["event"]["data"]["stored"]["blocks"]
    assert [block["tokens_hash"] for block in blocks] == expected
    assert [block["mm_extra_info"] for block in blocks] == options.get("block_mm_infos", [None, None])


async def test_an_engine_with_an_image_token_publishes_blocks_as_routers_hash_prompts_with_images() -> None:
    channel = Channel()
    events = KvEventPublisher(Endpoint(), kv_block_size=4, image_token_id=99, channel=channel)
    info = {"mm_objects": [{"mm_hash": 7, "offsets": []}]}
    events.publish_stored([1, 99, 99, 99, 99, 2, 3, 4], [4, 4], [1, 2], block_mm_infos=[info, info])
    events.publish_stored([5, 6, 7, 99], [4], [3], 2)
    await settle()
    stored = [each["event"]["data"]["stored"]["blocks"] for message in channel.messages for each in message]
    pad = media_pad_token(7)
    assert [block["tokens_hash"] for blocks in stored for block in blocks] == [
        *block_hashes([1, pad, pad, pad, pad, 2, 3, 4], 4),
        *block_hashes([5, 6, 7, 99], 4),
    ]


async def test_an_eagle_block_covers_the_token_after_it() -> None:
    events, channel = await publisher()
    events.publish_stored(TOKENS[:17], [16], [1], is_eagle=True)
    await settle()
    block = channel.messages[0][0]["event"]["data"]["stored"]["blocks"][0]
    assert block["tokens_hash"] == block_hashes(TOKENS[:17], 16, eagle=True)[0]


@each_case(
    ("arguments", "said"),
    [
        ((TOKENS, [16], [1, 2]), "num_block_tokens"),
        ((TOKENS[:20], [16, 16], [1, 2]), "token_ids"),
        ((TOKENS, [16], [2**64]), "64 bits"),
        ((TOKENS, [16], [1], 2**64), "64 bits"),
        ((TOKENS, [16], [1], None, [None, None]), "block_mm_infos"),
    ],
)
async def test_blocks_that_do_not_fit_together_are_refused(arguments: tuple[Any, ...], said: str) -> None:
    events, channel = await publisher()
    with pytest.raises(ValueError, match=said):
        events.publish_stored(*arguments)
    await settle()
    assert channel.messages == []


async def test_a_batch_is_one_message_in_order() -> None:
    events, channel = await publisher()
    events.publish_batch(
        [
            {"type": "stored", "token_ids": TOKENS, "num_block_tokens": [16, 16], "block_hashes": [1, 2]},
            {"type": "removed", "block_hashes": [1]},
        ]
    )
    await settle()
    (message,) = channel.messages
    assert [list(entry["event"]["data"]) for entry in message] == [["stored"], ["removed"]]
    assert [entry["event"]["event_id"] for entry in message] == [1, 2]


@each_case(
    "bad",
    [
        {"type": "cleared"},
        {"type": "removed"},
        {"type": "removed", "block_hashes": ["x"]},
        {"type": "removed", "block_hashes": [2**64]},
        {"type": "stored", "token_ids": [1]},
        {"type": "stored", "token_ids": [1], "num_block_tokens": [16], "block_hashes": [1]},
        {"type": "stored", "colour": "red"},
    ],
)
async def test_one_bad_event_in_a_batch_publishes_nothing(bad: dict[str, Any]) -> None:
    events, channel = await publisher()
    with pytest.raises(ValueError, match=r"events\[1\]"):
        events.publish_batch([{"type": "removed", "block_hashes": [1]}, bad])
    await settle()
    assert channel.messages == []
    events.publish_removed([1])
    await settle()
    assert channel.messages[0][0]["event"]["event_id"] == 1


async def test_blocks_of_another_size_end_the_event_with_at_most_three_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, channel = await publisher()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            events.publish_stored(TOKENS, [16, 8], [1, 2])
    await settle()
    assert [len(m[0]["event"]["data"]["stored"]["blocks"]) for m in channel.messages] == [1] * 5
    assert len([r for r in caplog.records if "8 tokens" in r.message]) == 3
    events.publish_stored(TOKENS, [8, 16], [1, 2])
    await settle()
    assert len(channel.messages) == 5


@given(count=st.integers(1, 600))
async def test_long_lists_are_cut_at_128_and_stay_chained(count: int) -> None:
    channel = Channel()
    events = KvEventPublisher(Endpoint(), kv_block_size=1, channel=channel)
    events.publish_stored(list(range(count)), [1] * count, list(range(1, count + 1)), parent_hash=0)
    events.publish_removed(list(range(1, count + 1)))
    await settle()
    data = [entry["event"]["data"] for message in channel.messages for entry in message]
    stored = [entry["stored"] for entry in data if "stored" in entry]
    assert all(len(entry["blocks"]) <= 128 for entry in stored)
    assert [block["block_hash"] for entry in stored for block in entry["blocks"]] == list(range(1, count + 1))
    assert [entry["parent_hash"] for entry in stored] == list(range(0, count, 128))
    assert [h for entry in data if "removed" in entry for h in entry["removed"]["block_hashes"]] == list(
        range(1, count + 1)
    )


async def test_one_broken_event_of_an_engine_publishes_none_of_its_message() -> None:
    events, channel = await publisher()
    good = Stored([1], None, TOKENS[:16], 16)
    with pytest.raises(ValueError, match="token_ids"):
        events.take_engine_events([good, Stored([2, 3], 1, TOKENS[:16], 16)])
    events.take_engine_events([good, Removed([1]), Cleared()])
    await settle()
    assert [[event["event"]["event_id"] for event in message] for message in channel.messages] == [[1, 2, 3]]


async def test_events_of_many_threads_arrive_in_the_order_of_their_ids() -> None:
    events, channel = await publisher()

    def push() -> None:
        for number in range(50):
            events.publish_removed([number])

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await settle()
    assert [message[0]["event"]["event_id"] for message in channel.messages] == list(range(1, 201))


async def test_a_blocked_loop_loses_the_newest_messages_and_the_gap_shows(caplog: pytest.LogCaptureFixture) -> None:
    events, channel = await publisher()
    with caplog.at_level(logging.WARNING):
        for _ in range(OUTBOX_MESSAGES + 3):
            events.publish_removed([1])
    assert events.dropped_messages == 3
    assert len(caplog.records) == 1
    await settle()
    assert len(channel.messages) == OUTBOX_MESSAGES
    events.publish_removed([1])
    await settle()
    assert channel.messages[-1][0]["event"]["event_id"] == OUTBOX_MESSAGES + 4


async def test_a_plane_that_fails_costs_one_message(caplog: pytest.LogCaptureFixture) -> None:
    events, channel = await publisher()
    channel.failures = 1
    events.publish_removed([1])
    events.publish_removed([2])
    await settle()
    assert [message[0]["event"]["event_id"] for message in channel.messages] == [2]
    assert "the plane is down" in caplog.text


async def test_nothing_is_published_after_shutdown() -> None:
    events, channel = await publisher()
    events.publish_removed([1])
    events.shutdown()
    events.shutdown()
    events.publish_removed([2])
    await settle()
    assert channel.messages == []


def test_an_engine_thread_may_outlive_the_loop() -> None:
    async def build() -> KvEventPublisher:
        return (await publisher())[0]

    events = asyncio.run(build())
    events.publish_removed([1])
    events.publish_removed([2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_block_size": 0}, "kv_block_size"),
        ({"kv_block_size": 16, "batching_timeout_ms": 15_001}, "batching_timeout_ms"),
        ({"kv_block_size": 16, "batching_timeout_ms": -1}, "batching_timeout_ms"),
    ],
)
async def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        KvEventPublisher(Endpoint(), channel=Channel(), **options)


# -- load -------------------------------------------------------------------------------------------------------------


async def test_loads_are_sent_on_change_and_the_latest_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.worker.kv_publishing.load.LOAD_INTERVAL_SECONDS", 0.01)
    endpoint = Endpoint()
    metrics = WorkerMetricsPublisher()
    metrics.publish(kv_used_blocks=1)  # before there is a plane: kept
    await metrics.create_endpoint(endpoint)
    messages = endpoint.channels["kv_metrics"].messages
    assert messages == [
        {
            "worker_id": WORKER,
            "dp_rank": 0,
            "active_decode_blocks": None,
            "active_prefill_tokens": None,
            "kv_used_blocks": 1,
        }
    ]
    for used in (2, 3, 4):
        metrics.publish(0, kv_used_blocks=used)
    metrics.publish(1, active_decode_blocks=8)
    metrics.publish(1, active_decode_blocks=8)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(messages) < 3:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)  # several intervals in which nothing changes
    assert [(m["dp_rank"], m["kv_used_blocks"], m["active_decode_blocks"]) for m in messages[1:]] == [
        (0, 4, None),
        (1, None, 8),
    ]
    metrics.close()
    metrics.publish(0, kv_used_blocks=9)
    await asyncio.sleep(0.02)
    assert len(messages) == 3


def test_an_idle_worker_repeats_its_load_for_subscribers_that_come_late() -> None:
    async def main() -> list[tuple[float, int, int]]:
        metrics, endpoint = WorkerMetricsPublisher(), Endpoint()
        loop = asyncio.get_running_loop()
        began = loop.time()
        metrics.publish(0, kv_used_blocks=3)
        metrics.publish(1, kv_used_blocks=4)
        await metrics.create_endpoint(endpoint)
        messages = endpoint.channels["kv_metrics"].messages
        seen = []
        for _ in range(2):
            seen += [(round(loop.time() - began, 1), m["dp_rank"], m["kv_used_blocks"]) for m in messages]
            messages.clear()
            while not messages:
                await asyncio.sleep(0.05)
        metrics.close()
        messages.clear()
        await asyncio.sleep(60.0)
        return [*seen, *messages]

    assert run_virtual(main()) == [(0.0, 0, 3), (0.0, 1, 4), (2.6, 0, 3), (2.6, 1, 4)]


async def test_figures_of_two_sources_are_one_record() -> None:
    endpoint = Endpoint()
    metrics = WorkerMetricsPublisher()
    await metrics.create_endpoint(endpoint)
    metrics.update(0, kv_used_blocks=7)
    metrics.update(0, active_decode_blocks=5, active_prefill_tokens=300)
    await settle()
    (message,) = endpoint.channels["kv_metrics"].messages
    assert {name: message[name] for name in message if name != "worker_id"} == {
        "dp_rank": 0,
        "active_decode_blocks": 5,
        "active_prefill_tokens": 300,
        "kv_used_blocks": 7,
    }
    metrics.close()


async def test_a_load_after_a_quiet_time_is_sent_at_once() -> None:
    endpoint = Endpoint()
    metrics = WorkerMetricsPublisher()
    await metrics.create_endpoint(endpoint)
    await asyncio.to_thread(metrics.publish, 2, 5, 6)
    await settle()
    (message,) = endpoint.channels["kv_metrics"].messages
    assert (message["dp_rank"], message["active_decode_blocks"], message["kv_used_blocks"]) == (2, 5, 6)
    metrics.close()


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_written_for_the_rank_of_the_argument() -> None:
    gauges: list[Any] = []
    loads: list[tuple[int, int]] = []
    snapshots = SnapshotPublisher(
        lambda rank, snapshot: gauges.append((rank, snapshot)) is None, lambda rank, used: loads.append((rank, used))
    )
    snapshot = ComponentSnapshot(6, 10, 0.6, 7)
    snapshots.publish(1, snapshot)
    assert gauges == [(1, snapshot)]
    assert loads == [(1, 6)]


def test_an_undeclared_rank_reaches_neither_gauge_nor_router() -> None:
    loads: list[Any] = []
    SnapshotPublisher(lambda rank, snapshot: False, lambda *load: loads.append(load)).publish(
        7, ComponentSnapshot(1, 2, 0.5, 7)
    )
    assert loads == []


def test_without_a_router_the_gauges_are_written_all_the_same() -> None:
    SnapshotPublisher(lambda rank, snapshot: True).publish(0, SimpleNamespace(kv_used_blocks=1))  # type: ignore[arg-type]


def test_a_router_that_cannot_be_told_is_one_warning_per_rank(caplog: pytest.LogCaptureFixture) -> None:
    def fail(rank: int, used: int) -> None:
        raise ConnectionError("no router")

    snapshots = SnapshotPublisher(lambda rank, snapshot: True, fail)
    with caplog.at_level(logging.DEBUG):
        for rank in (0, 0, 1, 0):
            snapshots.publish(rank, ComponentSnapshot(1, 2, 0.5, rank))
    assert [record.levelno for record in caplog.records] == [
        logging.WARNING,
        logging.DEBUG,
        logging.WARNING,
        logging.DEBUG,
    ]
