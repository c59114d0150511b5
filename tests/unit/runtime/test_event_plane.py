"""The promises of `event_plane.base`, held by the memory plane."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from dynamo.runtime.calls.event_plane import Event, EventScope, MemoryEventPlane, SequenceWatch

SCOPE = EventScope("ns", "c", "e")


@pytest.fixture
async def plane() -> AsyncIterator[MemoryEventPlane]:
    opened = MemoryEventPlane(rng=random.Random(1), wall=lambda: 1_700_000_000.5, max_queued=4)
    yield opened
    await opened.close()


async def test_a_message_reaches_every_subscriber_of_its_scope_and_topic(plane: MemoryEventPlane) -> None:
    publisher = await plane.publisher(SCOPE, "kv-events")
    async with (
        plane.subscribe(SCOPE, "kv-events") as one,
        plane.subscribe(SCOPE, "kv-events") as two,
        plane.subscribe(SCOPE, "kv_metrics") as other_topic,
        plane.subscribe(EventScope("ns", "c"), "kv-events") as other_scope,
    ):
        assert publisher.publish(b"a") == 0
        expected = Event("kv-events", publisher.publisher_id, 0, 1_700_000_000_500, b"a")
        assert await anext(one) == expected
        assert await anext(two) == expected
        await plane.close()
        for silent in (other_topic, other_scope):
            with pytest.raises(StopAsyncIteration):
                await anext(silent)


async def test_each_publisher_counts_for_itself_from_zero(plane: MemoryEventPlane) -> None:
    first, second = await plane.publisher(SCOPE, "t"), await plane.publisher(SCOPE, "t")
    async with plane.subscribe(SCOPE, "t") as events:
        assert [first.publish(b""), first.publish(b""), second.publish(b"")] == [0, 1, 0]
        seen = [await anext(events) for _ in range(3)]
    assert [(e.publisher_id, e.sequence, e.missed) for e in seen] == [
        (first.publisher_id, 0, 0),
        (first.publisher_id, 1, 0),
        (second.publisher_id, 0, 0),
    ]
    assert first.publisher_id != second.publisher_id
    assert max(first.publisher_id, second.publisher_id) < 2**53


async def test_what_a_full_queue_dropped_shows_as_missed(plane: MemoryEventPlane) -> None:
    publisher = await plane.publisher(SCOPE, "t")
    async with plane.subscribe(SCOPE, "t") as events:
        for _ in range(7):
            publisher.publish(b"x")  # the reader takes 4
        assert [(await anext(events)).sequence for _ in range(4)] == [0, 1, 2, 3]
        publisher.publish(b"y")
        late = await anext(events)
    assert (late.sequence, late.missed, late.payload) == (7, 3, b"y")


async def test_publishing_to_nobody_is_fine_and_closing_ends_it(plane: MemoryEventPlane) -> None:
    publisher = await plane.publisher(SCOPE, "t")
    publisher.publish(b"x")
    await publisher.close()
    await publisher.close()
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish(b"x")


def test_a_sequence_tells_gaps_repeats_and_strangers() -> None:
    watch = SequenceWatch(max_publishers=2)
    assert [watch.admit(1, n) for n in (5, 6, 9, 9, 3, 10)] == [0, 0, 2, None, None, 0]
    assert watch.admit(2, 0) == 0
    assert watch.admit(3, 100) == 0  # publisher 1 is forgotten for it
    assert watch.admit(1, 50) == 0


@pytest.mark.parametrize(
    ("scope", "path", "record"),
    [
        (EventScope("ns"), "namespace/ns", {"kind": "namespace", "name": "ns"}),
        (
            EventScope("ns", "c"),
            "namespace/ns/component/c",
            {"kind": "component", "namespace": "ns", "component": "c"},
        ),
        (
            SCOPE,
            "namespace/ns/component/c/endpoint/e",
            {"kind": "endpoint", "endpoint": {"namespace": "ns", "component": "c", "name": "e"}},
        ),
    ],
)
def test_a_scope_is_written_as_the_native_system_writes_it(scope: EventScope, path: str, record: object) -> None:
    assert scope.path == path
    assert scope.subject == path.replace("/", ".")
    assert scope.to_json() == record


def test_channel_keys_are_percent_encoded_by_segment() -> None:
    assert EventScope("a.b", "c d").channel_key("kv_metrics", 255) == (
        "namespace/a%2Eb/component/c%20d/topic/kv_metrics/ff"
    )
    with pytest.raises(ValueError, match="component"):
        EventScope("ns", endpoint="e")
