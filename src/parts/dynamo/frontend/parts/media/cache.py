"""What was fetched a moment ago: contents by their digest, and which URL had which content."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from dynamo.frontend.parts.media.content import Media

MAX_URLS: Final = 4096
_MAX_AGE: Final = re.compile(r"(?:^|[\s,])(?:s-maxage|max-age)\s*=\s*\"?(\d{1,9})", re.IGNORECASE)
_NOT_KEPT: Final = re.compile(r"\b(?:no-store|no-cache|private)\b", re.IGNORECASE)


class MediaCache:
    """Least recently used first out, by bytes. Two URLs with one content share it."""

    def __init__(self, max_bytes: int, max_seconds: float, clock: Callable[[], float]) -> None:
        self._max_bytes, self._max_seconds, self._clock = max_bytes, max_seconds, clock
        self._contents: OrderedDict[bytes, Media] = OrderedDict()
        self._urls: OrderedDict[Hashable, tuple[bytes, float]] = OrderedDict()  # key -> digest, fresh until
        self.bytes = 0

    def __len__(self) -> int:
        """Return how many contents are kept."""
        return len(self._contents)

    def find(self, key: Hashable) -> Media | None:
        """Return the content of a URL that is still fresh."""
        known = self._urls.get(key)
        if known is None:
            return None
        digest, until = known
        media = self._contents.get(digest)
        if media is None or self._clock() >= until:
            del self._urls[key]
            return None
        self._urls.move_to_end(key)
        self._contents.move_to_end(digest)
        return media

    def add(self, key: Hashable, media: Media, cache_control: str) -> Media:
        """Keep a content that was fetched just now; return the one that is kept where it was known already."""
        media = self._contents.get(media.digest, media)
        seconds = min(self._max_seconds, _fresh_seconds(cache_control, self._max_seconds))
        if seconds <= 0 or len(media.url) > self._max_bytes:
            return media
        self._urls[key] = media.digest, self._clock() + seconds
        self._urls.move_to_end(key)
        if len(self._urls) > MAX_URLS:
            self._urls.popitem(last=False)
        if media.digest not in self._contents:
            self._contents[media.digest] = media
            self.bytes += len(media.url)
        self._contents.move_to_end(media.digest)
        while self.bytes > self._max_bytes:
            _, dropped = self._contents.popitem(last=False)
            self.bytes -= len(dropped.url)
        return media


def _fresh_seconds(cache_control: str, default: float) -> float:
    """Return how long a server lets its answer be kept; `default` where it sets nothing."""
    if not cache_control:
        return default
    if _NOT_KEPT.search(cache_control):
        return 0.0
    found = _MAX_AGE.search(cache_control)
    return default if found is None else float(found[1])
