"""The media part of a model card: what the frontend decodes for the worker, and how it may fetch.

Both are plain JSON objects with short ways to fill them; a card carries them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

_OPTIONS: Final[Mapping[str, frozenset[str]]] = {
    "image": frozenset({"limits"}),
    "video": frozenset({"fps", "num_frames", "max_frames", "strict", "limits"}),
    "audio": frozenset({"limits"}),
}
_LIMITS: Final = frozenset({"max_image_width", "max_image_height", "max_alloc"})


def _checked(kind: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    found = dict(options or {})
    limits = found.get("limits") or {}
    unknown = sorted((found.keys() - _OPTIONS[kind]) | (limits.keys() - _LIMITS))
    if unknown:
        raise ValueError(f"the decoder of {kind} has no option {', '.join(map(repr, unknown))}")
    return found


class MediaDecoder(dict[str, Any]):
    """The kinds of media that are decoded before the worker sees them, each with its options."""

    def enable_image(self, decoder_options: Mapping[str, Any] | None = None) -> None:
        """Decode images. Raises ValueError for an option that there is not."""
        self["image"] = _checked("image", decoder_options)

    def enable_video(self, decoder_options: Mapping[str, Any] | None = None) -> None:
        """Decode videos. Raises ValueError for an option that there is not."""
        self["video"] = _checked("video", decoder_options)

    def enable_audio(self, decoder_options: Mapping[str, Any] | None = None) -> None:
        """Decode audio. Raises ValueError for an option that there is not."""
        self["audio"] = _checked("audio", decoder_options)


class MediaFetcher(dict[str, Any]):
    """How media that a request names by URL are fetched."""

    def user_agent(self, user_agent: str) -> None:
        """Set the User-Agent header of a fetch."""
        self["user_agent"] = user_agent

    def timeout_ms(self, timeout_ms: int) -> None:
        """Limit one fetch, in milliseconds. Raises ValueError below 1."""
        if timeout_ms < 1:
            raise ValueError(f"timeout_ms must be at least 1, got {timeout_ms}")
        self["timeout"] = {"secs": timeout_ms // 1000, "nanos": timeout_ms % 1000 * 1_000_000}

    def allow_direct_ip(self, allow: bool) -> None:
        """Set whether a URL may name an address instead of a host."""
        self["allow_direct_ip"] = allow

    def allow_direct_port(self, allow: bool) -> None:
        """Set whether a URL may name a port."""
        self["allow_direct_port"] = allow

    def allow_private_ips(self, allow: bool) -> None:
        """Set whether a host may have an address of a private network."""
        self["allow_private_ips"] = allow

    def allowed_media_domains(self, domains: Iterable[str]) -> None:
        """Set the only hosts that media may be fetched from."""
        self["allowed_media_domains"] = sorted(set(domains))
