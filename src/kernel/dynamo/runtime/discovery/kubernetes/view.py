"""What the watchers of the Kubernetes store see: the records of all resources whose pods are ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo.runtime.discovery.base import Change, matches
from dynamo.runtime.discovery.feed import ChangeFeed
from dynamo.runtime.discovery.kubernetes.collection import FollowedCollection
from dynamo.runtime.discovery.kubernetes.health import KubernetesHealth
from dynamo.runtime.discovery.kubernetes.records import records_of
from dynamo.runtime.discovery.last_view import LastView

Ready = Callable[[Any], set[str]]
"""From the objects of the readiness collection to the names of the resources that are ready."""


class KubernetesView:
    """Sends each watcher the difference from what it received last."""

    def __init__(
        self,
        resources: FollowedCollection,
        readiness: FollowedCollection,
        ready: Ready,
        health: KubernetesHealth,
        *,
        debounce_seconds: float,
    ) -> None:
        self._resources = resources
        self._readiness = readiness
        self._ready = ready
        self._health = health
        self._debounce_seconds = debounce_seconds
        self._view = LastView()
        self._feeds: dict[ChangeFeed, str] = {}  # -> its prefix
        self._publish_timer: asyncio.TimerHandle | None = None
        self._settle_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def read(self, prefix: str) -> dict[str, bytes]:
        """Return what was published last, sorted by key."""
        return self._view.read(prefix)

    def subscribe(self, feed: ChangeFeed, prefix: str) -> None:
        """Give `feed` the snapshot, and every change from here on."""
        feed.open(self._view.read(prefix))
        self._feeds[feed] = prefix

    def unsubscribe(self, feed: ChangeFeed) -> None:
        """Give `feed` nothing more; idempotent."""
        self._feeds.pop(feed, None)

    def publish_soon(self) -> None:
        """Publish within the debounce time, together with what else changes until then."""
        if self._publish_timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._publish_timer = loop.call_later(self._debounce_seconds, self.publish)

    def publish(self) -> None:
        """Send watchers the difference from the last view they received."""
        if self._publish_timer is not None:
            self._publish_timer.cancel()
            self._publish_timer = None
        ready = self._ready(self._readiness.objects.values())
        records: dict[str, bytes] = {}
        for name in sorted(self._resources.objects):
            if name in ready:
                records.update(records_of(self._resources.objects[name]))
        self._view.doubt(self._health.doubt_until)
        self._tell(self._view.resync(records, _now()))

    def _settle(self) -> None:
        self._view.doubt(self._health.doubt_until)
        self._tell(self._view.settle(_now()))

    def _tell(self, changes: list[Change]) -> None:
        if changes:
            for feed, prefix in self._feeds.items():
                if wanted := [change for change in changes if matches(prefix, change.key)]:
                    feed.post(wanted)
        if self._settle_timer is not None:
            self._settle_timer.cancel()
            self._settle_timer = None
        if (at := self._view.settles_at) is not None and not self._closed:
            self._settle_timer = asyncio.get_running_loop().call_at(at, self._settle)

    def stop(self) -> None:
        """Set no timer any more."""
        self._closed = True
        for timer in (self._publish_timer, self._settle_timer):
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """End every watch."""
        for feed in self._feeds:
            feed.close()
        self._feeds.clear()


def _now() -> float:
    return asyncio.get_running_loop().time()
