"""`FpmDirectPublisher`, `FpmEventRelay` and `FpmEventSubscriber` over the event plane."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq

from dynamo.bindings import forward_pass
from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics, decode, encode
from dynamo.llm import FpmDirectPublisher, FpmEventRelay, FpmEventSubscriber
from dynamo.runtime import Endpoint
from support.frontend_cluster import memory_runtime
from support.patience import PATIENCE_SECONDS
from support.processes import until

PASS: dict[str, Any] = {
    "scheduled_num_prefill_requests": 1, "scheduled_sum_prefill_tokens": 2, "scheduled_sum_prefill_kv_tokens": 3,
    "scheduled_num_decode_requests": 4, "scheduled_sum_decode_kv_tokens": 5, "queued_num_prefill_requests": 6,
    "queued_sum_prefill_tokens": 7, "queued_num_decode_requests": 8, "queued_sum_decode_kv_tokens": 9, "wall_time_secs": 0.5,
}  # fmt: skip


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with memory_runtime() as runtime:
        yield runtime.endpoint("ns.backend.generate")


@pytest.fixture
def long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "HEARTBEAT_SECONDS", 2 * PATIENCE_SECONDS)


async def received(subscriber: FpmEventSubscriber) -> ForwardPassMetrics | None:
    data = await asyncio.wait_for(asyncio.to_thread(subscriber.recv), PATIENCE_SECONDS)
    return None if data is None else decode(data)


def blocking_the_loop(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def listening(subscriber: FpmEventSubscriber) -> asyncio.Task[Any]:
    """Begin to receive; returns once the plane is subscribed to."""
    receiving = asyncio.create_task(received(subscriber))
    await until(lambda: subscriber._opened is not None)
    assert subscriber._opened is not None
    await subscriber._opened.value()
    return receiving


@pytest.mark.usefixtures("long_silence")
async def test_a_pass_reaches_a_subscriber_with_the_number_of_its_rank(endpoint: Endpoint) -> None:
    subscriber = FpmEventSubscriber(endpoint)
    first = await listening(subscriber)
    publisher = FpmDirectPublisher(endpoint, "w", dp_size=2)
    await asyncio.to_thread(publisher.publish, dp_rank=1, **PASS)
    publisher.publish(dp_rank=0, **PASS)
    publisher.publish(dp_rank=1, **PASS)
    found = [await first, await received(subscriber), await received(subscriber)]
    assert [(each.worker_id, each.dp_rank, each.counter_id) for each in found if each] == [
        ("w", 1, 1),
        ("w", 0, 1),
        ("w", 1, 2),
    ]
    assert msgspec.to_builtins(found[0]) == {
        "version": 1, "worker_id": "w", "dp_rank": 1, "counter_id": 1, "wall_time": 0.5,
        "scheduled_requests": {
            "num_prefill_requests": 1, "sum_prefill_tokens": 2, "var_prefill_length": 0.0, "sum_prefill_kv_tokens": 3,
            "num_decode_requests": 4, "sum_decode_kv_tokens": 5, "var_decode_kv_tokens": 0.0,
        },
        "queued_requests": {
            "num_prefill_requests": 6, "sum_prefill_tokens": 7, "var_prefill_length": 0.0,
            "num_decode_requests": 8, "sum_decode_kv_tokens": 9, "var_decode_kv_tokens": 0.0,
        },
    }  # fmt: skip
    wrong = "dp_rank 5 out of range; FpmDirectPublisher was constructed with dp_size=2"
    with pytest.raises(RuntimeError, match=f"^{wrong}$"):
        publisher.publish(dp_rank=5, **PASS)
    with pytest.raises(ValueError, match="dp_size"):
        FpmDirectPublisher(endpoint, "w", 0)


async def test_a_silent_rank_sends_empty_passes(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "HEARTBEAT_SECONDS", 0.01)
    async with endpoint.runtime.events.subscribe(endpoint.event_scope, "forward-pass-metrics") as events:
        publisher = FpmDirectPublisher(endpoint, "w")
        for number in (1, 2):
            event = await asyncio.wait_for(anext(events), PATIENCE_SECONDS)
            assert event.payload == encode(ForwardPassMetrics(worker_id="w", counter_id=number))
        publisher.shutdown()
        publisher.shutdown()


@pytest.mark.usefixtures("long_silence")
async def test_what_a_blocked_loop_cannot_send_is_bounded_and_the_newest_stays(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_pass, "MAX_WAITING", 3)
    subscriber, publisher = FpmEventSubscriber(endpoint), FpmDirectPublisher(endpoint, "w")
    first = await listening(subscriber)
    blocking_the_loop(lambda: [publisher.publish(dp_rank=0, **PASS) for _ in range(10)])
    found = [await first, await received(subscriber), await received(subscriber)]
    assert [each.counter_id for each in found if each] == [8, 9, 10]


async def test_a_subscriber_that_is_shut_down_receives_nothing_more(endpoint: Endpoint) -> None:
    subscriber = FpmEventSubscriber(endpoint)
    receiving = await listening(subscriber)
    await asyncio.to_thread(subscriber.shutdown)
    assert [await receiving, await received(subscriber)] == [None, None]
    ended = FpmEventSubscriber(endpoint)
    ended.shutdown()  # nothing has begun
    with pytest.raises(RuntimeError, match="call it in a thread"):
        ended.recv()


async def test_a_runtime_that_ends_ends_its_subscribers() -> None:
    async with memory_runtime() as runtime:
        receiving = await listening(subscriber := FpmEventSubscriber(runtime.endpoint("ns.backend.generate")))
    assert [await receiving, await received(subscriber)] == [None, None]


async def test_what_is_collected_holds_no_publisher(endpoint: Endpoint) -> None:
    publisher = FpmDirectPublisher(endpoint, "w")
    held = publisher._opened
    assert held is not None
    await held.value()
    del publisher
    gc.collect()
    await until(lambda: held._task is not None and held._task.done())


async def test_what_is_ended_before_it_began_keeps_no_caller_waiting(endpoint: Endpoint) -> None:
    made: list[FpmDirectPublisher] = []
    blocking_the_loop(lambda: made.append(FpmDirectPublisher(endpoint, "w")) or made[0].shutdown())
    held = made[0]._opened
    assert held is not None
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.wait_for(held.value(), PATIENCE_SECONDS)


async def test_a_relay_publishes_what_an_engine_sends(endpoint: Endpoint) -> None:
    subscriber = FpmEventSubscriber(endpoint)
    receiving = await listening(subscriber)
    context = zmq.Context()
    engine = context.socket(zmq.XPUB)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    relay = FpmEventRelay(endpoint, f"tcp://127.0.0.1:{port}")
    try:
        assert await asyncio.to_thread(engine.poll, int(PATIENCE_SECONDS * 1000))  # the relay's subscription
        sent = ForwardPassMetrics(worker_id="e", counter_id=3, scheduled_requests=ScheduledRequestMetrics(1))
        for parts in ([b"noise"], [b"", b"short", b""], [b"", (7).to_bytes(8, "big"), encode(sent)]):
            engine.send_multipart(parts)
        assert await receiving == sent
    finally:
        relay.shutdown()
        engine.close(linger=0)
        context.term()
    with pytest.raises(ValueError, match="must be an address"):
        FpmEventRelay(endpoint, "20380")


async def put_card(endpoint: Endpoint, instance: str, card: bytes) -> None:
    key = f"v1/mdc/{endpoint.namespace}/{endpoint.component}/{endpoint.name}/{instance}"
    await endpoint.runtime.discovery.put(key, card)


async def test_tracking_keeps_the_last_pass_of_each_rank_of_registered_workers(endpoint: Endpoint) -> None:
    subscriber = FpmEventSubscriber(endpoint)
    with pytest.raises(RuntimeError, match=r"^start_tracking\(\) has not been called$"):
        subscriber.get_recent_stats()
    await put_card(endpoint, "not a number", b"{}")
    await put_card(endpoint, "ff", b"[1]")
    subscriber.start_tracking()
    subscriber.start_tracking()
    with pytest.raises(RuntimeError, match=r"^Cannot call recv\(\) after start_tracking\(\)$"):
        subscriber.recv()
    await endpoint.publish_model({"display_name": "m"})
    await endpoint.publish_model({"display_name": "adapter"}, "slug")
    worker = str(endpoint.connection_id())
    await until(lambda: bool(subscriber.get_model_cards()))
    assert subscriber.get_model_cards() == {worker: '{"display_name":"m"}'}
    channel = endpoint.runtime.events.new_publisher(endpoint.event_scope, "forward-pass-metrics")
    sent = [
        encode(ForwardPassMetrics(worker_id=name, dp_rank=rank, counter_id=number))
        for name, rank, number in (("stranger", 0, 1), (worker, 0, 1), (worker, 0, 2), (worker, 1, 1))
    ]
    for payload in (b"\xc1", *sent):
        channel.publish(payload)
    await until(lambda: (worker, 1) in subscriber.get_recent_stats())
    assert subscriber.get_recent_stats() == {(worker, 0): sent[2], (worker, 1): sent[3]}
    await endpoint.withdraw_model("slug")
    await endpoint.withdraw_model()
    await until(lambda: not subscriber.get_model_cards())
    assert subscriber.get_recent_stats() == {}
    subscriber.shutdown()
