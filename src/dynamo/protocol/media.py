"""What a model card says about media: what the frontend decodes for the worker, and how it may fetch.

Both are plain JSON objects with short ways to fill them; a card carries them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["MediaDecoder", "MediaFetcher"]


class MediaDecoder(dict[str, Any]):
    """The kinds of media that are decoded before the worker sees them, each with its options."""

    def enable_image(self, options: Mapping[str, Any] | None = None) -> None:
        self["image"] = dict(options or {})

    def enable_video(self, options: Mapping[str, Any] | None = None) -> None:
        self["video"] = dict(options or {})

    def enable_audio(self, options: Mapping[str, Any] | None = None) -> None:
        self["audio"] = dict(options or {})


class MediaFetcher(dict[str, Any]):
    """How media that a request names by URL are fetched."""

    def user_agent(self, value: str) -> None:
        self["user_agent"] = value

    def timeout_ms(self, value: int) -> None:
        """Milliseconds for one fetch. Raises ValueError below 1."""
        if value < 1:
            raise ValueError(f"timeout_ms must be at least 1, got {value}")
        self["timeout_ms"] = value

    def allow_direct_ip(self, value: bool) -> None:
        """Whether a URL may name an address instead of a host."""
        self["allow_direct_ip"] = value

    def allow_direct_port(self, value: bool) -> None:
        """Whether a URL may name a port."""
        self["allow_direct_port"] = value

    def allowed_media_domains(self, values: Iterable[str]) -> None:
        """Only these hosts may be asked."""
        self["allowed_media_domains"] = sorted(set(values))
