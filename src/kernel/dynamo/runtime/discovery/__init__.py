"""Discovery: records under a lease, and a watch without a gap. `base.py` holds the promises, one file each backend."""

from dynamo.runtime.discovery.base import (
    EVENT_CHANNELS,
    EVENT_SOURCES,
    INSTANCES,
    LEASE_TTL_SECONDS,
    MODEL_CARDS,
    Change,
    Delete,
    Discovery,
    Put,
    matches,
)
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub, shared_hub

__all__ = [
    "EVENT_CHANNELS",
    "EVENT_SOURCES",
    "INSTANCES",
    "LEASE_TTL_SECONDS",
    "MODEL_CARDS",
    "Change",
    "Delete",
    "Discovery",
    "FileDiscovery",
    "MemoryDiscovery",
    "MemoryHub",
    "Put",
    "matches",
    "shared_hub",
]
