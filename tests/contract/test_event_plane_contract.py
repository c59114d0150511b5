"""The promises of `event_plane.base`, held by every plane, each as two processes would have it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo.runtime.calls.event_plane.base import EventScope
from support.event_planes import KINDS, WALL, Counted, World, heard, world
from support.nats_server import NatsServer, shared_nats
from support.patience import PATIENCE_SECONDS

__all__ = ["shared_nats"]

SCOPE = EventScope("ns", "c", "e")


@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.process] if kind == "nats" else []) for kind in KINDS])
async def there(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    server: NatsServer | None = request.getfixturevalue("shared_nats") if request.param == "nats" else None
    async with world(request.param, server.url if server is not None else "") as made:
        yield made


async def test_a_message_is_heard_with_all_it_carries(there: World) -> None:
    speaker, listener = await there.plane(), await there.plane()
    publisher = await speaker.publisher(SCOPE, "kv-events")
    async with listener.subscribe(SCOPE, "kv-events") as events:
        first = await heard(publisher, events)
        assert publisher.publish(b"\x00\xff") == first.sequence + 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            event = await anext(events)
    assert (event.topic, event.publisher_id, event.payload) == ("kv-events", publisher.publisher_id, b"\x00\xff")
    assert (event.sequence, event.missed, event.published_at_ms) == (first.sequence + 1, 0, int(WALL * 1000))


async def test_scopes_and_topics_are_apart_and_each_publisher_counts_for_itself(there: World) -> None:
    speaker, listener = await there.plane(), await there.plane()
    publishers = [
        await speaker.publisher(scope, topic)
        for scope, topic in (
            (SCOPE, "kv-events"),
            (SCOPE, "kv-events"),
            (SCOPE, "kv-events-more"),  # begins the same: a ZMQ filter alone would let it through
            (EventScope("ns", "c"), "kv-events"),
            (EventScope("ns", "c", "e2"), "kv-events"),
            (EventScope("other", "c", "e"), "kv-events"),
        )
    ]
    assert len({publisher.publisher_id for publisher in publishers}) == len(publishers)
    async with listener.subscribe(SCOPE, "kv-events") as events:
        begun = [(await heard(publisher, events)).sequence for publisher in publishers[:2]]
        for publisher in publishers[2:]:
            publisher.publish(b"not for you")
        said = [publishers[0].publish(b"0"), publishers[1].publish(b"1")]
        async with asyncio.timeout(PATIENCE_SECONDS):
            seen = {event.publisher_id: event for event in [await anext(events), await anext(events)]}
    assert said == [begun[0] + 1, begun[1] + 1]
    assert {event.payload for event in seen.values()} == {b"0", b"1"}
    assert all(event.missed == 0 for event in seen.values())


async def test_every_subscriber_hears_and_a_late_publisher_is_found(there: World) -> None:
    speaker, one, two = await there.plane(), await there.plane(), await there.plane()
    async with one.subscribe(SCOPE, "t") as first, two.subscribe(SCOPE, "t") as second:
        publisher = await speaker.publisher(SCOPE, "t")
        await heard(publisher, first)
        last = await heard(publisher, second)
        publisher.publish(b"end")
        async with asyncio.timeout(PATIENCE_SECONDS):
            for events in (first, second):
                event = await anext(events)
                while event.payload != b"end":
                    event = await anext(events)
                assert event.sequence == last.sequence + 1


async def test_a_slow_reader_loses_messages_holds_up_nobody_and_sees_the_gap(there: World) -> None:
    counts = Counted()
    listener = await there.plane(capacity=4, counts=counts)
    speaker = await there.plane(capacity=100)
    publisher = await speaker.publisher(SCOPE, "t")
    async with listener.subscribe(SCOPE, "t") as events:
        begun = await heard(publisher, events)
        for _ in range(50):
            publisher.publish(b"flood")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while counts.found.get("overflowed", 0) < 46:
                await asyncio.sleep(0.005)
            taken = [(await anext(events)).sequence for _ in range(4)]
            publisher.publish(b"late")
            late = await anext(events)
    assert taken == [begun.sequence + n for n in range(1, 5)]
    assert (late.payload, late.missed) == (b"late", 46)
    assert counts.found["missed"] == 46


async def test_publishing_to_nobody_is_fine_and_closing_ends_it(there: World) -> None:
    plane = await there.plane()
    publisher = plane.new_publisher(SCOPE, "t")
    assert [publisher.publish(b"x") for _ in range(3)] == [0, 1, 2]
    await publisher.close()
    await publisher.close()
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish(b"x")


async def test_closing_a_plane_ends_its_subscriptions(there: World) -> None:
    plane = await there.plane()
    async with plane.subscribe(SCOPE, "t") as events:
        waiting = asyncio.ensure_future(anext(events, None))
        await asyncio.sleep(0)
        await plane.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await waiting is None
    with pytest.raises(RuntimeError, match="closed"):
        plane.new_publisher(SCOPE, "t")


async def test_a_publisher_that_comes_again_is_another_one_without_a_gap(there: World) -> None:
    speaker, listener = await there.plane(), await there.plane()
    async with listener.subscribe(SCOPE, "t") as events:
        before = await speaker.publisher(SCOPE, "t")
        await heard(before, events)
        await before.close()
        after = await speaker.publisher(SCOPE, "t")
        event = await heard(after, events)
    assert event.publisher_id == after.publisher_id != before.publisher_id
    assert event.missed == 0
