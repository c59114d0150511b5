"""What is counted of the media of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.protocol.openai.shapes import MediaPart

__all__ = ["FetchOutcome", "MediaMetrics"]

FetchOutcome = Literal["fetched", "cached", "shared"]
"""`fetched`; `cached`: it was fetched a moment ago; `shared`: another request was just fetching it."""

_PARTS: Final = (("image", "images_per_request"), ("video", "videos_per_request"), ("audio", "audio_per_request"))


class MediaMetrics:
    """Observed once for each request with media; requests of text cost nothing here."""

    def __init__(self, families: FrontendFamilies) -> None:
        by_name, registry = families.by_name, families.registry
        self._parts = [(kind, by_name[name].histogram(registry)) for kind, name in _PARTS]
        self._tokens = by_name["image_tokens_per_request"].histogram(registry)
        self._fetches = families.counters("media_fetches_total")
        self._kept = families.gauge("media_cache_bytes"), families.gauge("media_cache_entries")
        self._held = families.gauge("media_held_bytes")

    def observe(self, parts: Sequence[MediaPart], image_tokens: int) -> None:
        """Count the parts of a request, and the tokens of its images."""
        for kind, histogram in self._parts:
            histogram.observe(sum(part.kind == kind for part in parts))
        self._tokens.observe(image_tokens)

    def kept(self, size: int, entries: int) -> None:
        """Note what the cache holds."""
        self._kept[0].set(size)
        self._kept[1].set(entries)

    def held(self, size: int) -> None:
        """Note what the requests in flight hold."""
        self._held.set(size)

    def fetched(self, outcome: FetchOutcome) -> None:
        """Count a part that was named by a URL."""
        self._fetches.labels(outcome).inc()

    def refused(self) -> None:
        """Count a part that was refused."""
        self._fetches.labels("refused").inc()
