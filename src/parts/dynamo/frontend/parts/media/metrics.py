"""What is counted of the media of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.protocol.openai.shapes import MediaPart
from dynamo.runtime.observe.metrics import Family

_PART_BUCKETS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_IMAGE_TOKEN_BUCKETS: Final = (0.0, *(float(4**exponent) for exponent in range(2, 9)))

FAMILIES: Final = (
    Family("images_per_request", "histogram", "Images of a request that has [media](media.md)", buckets=_PART_BUCKETS),
    Family("videos_per_request", "histogram", "Videos of such a request", buckets=_PART_BUCKETS),
    Family("audio_per_request", "histogram", "Sounds of such a request", buckets=_PART_BUCKETS),
    Family(
        "image_tokens_per_request",
        "histogram",
        "Tokens that the images of such a request become; 0 where that is not known",
        buckets=_IMAGE_TOKEN_BUCKETS,
    ),
    Family(
        "media_fetches_total",
        "counter",
        "Parts of media that a URL names; `outcome` is `fetched`, `cached`, `shared` (another request was fetching it) or `refused` (also of data URLs)",
        ("outcome",),
    ),
    Family("media_cache_bytes", "gauge", "What was fetched and is kept for the next request with the same URL"),
    Family("media_cache_entries", "gauge", "Contents that are kept so"),
    Family("media_held_bytes", "gauge", "What the media of all requests in flight take (`DYN_MM_MAX_HELD_MB`)"),
)


FetchOutcome = Literal["fetched", "cached", "shared"]
"""`fetched`; `cached`: it was fetched a moment ago; `shared`: another request was just fetching it."""

_PARTS: Final = (("image", "images_per_request"), ("video", "videos_per_request"), ("audio", "audio_per_request"))


class MediaMetrics:
    """Observed once for each request with media; requests of text cost nothing here."""

    def __init__(self, families: FrontendFamilies) -> None:
        families = families.of(FAMILIES)
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
