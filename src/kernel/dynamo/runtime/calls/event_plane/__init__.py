"""Events: at most once, numbered, gaps that show. `base.py` holds the promises, one file each plane."""

from dynamo.runtime.calls.event_plane.base import (
    Event,
    EventCounts,
    EventPlane,
    EventPublisher,
    EventScope,
    SequenceWatch,
)
from dynamo.runtime.calls.event_plane.memory import MemoryEventPlane, shared_event_plane

__all__ = [
    "Event",
    "EventCounts",
    "EventPlane",
    "EventPublisher",
    "EventScope",
    "MemoryEventPlane",
    "SequenceWatch",
    "shared_event_plane",
]
