"""What media of requests may cost, and where they may come from: the frontend's settings and the rules of one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.settings.readers import SettingReader, integer, mebibytes, number, one_of, seconds, switch, text
from dynamo.settings.table import setting

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
_GROUP: Final = "media"
_DEFAULT_AGENT: Final = "dynamo-ai/dynamo"
DEFAULT_TIMEOUT_SECONDS: Final = 30.0
MAX_TIMEOUT_SECONDS: Final = 300.0  # whatever a card sets: each fetch holds one of a few places

_megapixels: Final[SettingReader[int]] = integer(1, times=1_000_000, unit="Mpx")
_gibibytes: Final[SettingReader[int]] = SettingReader(
    lambda given: int(number(0).parse(given) * GIB), show=lambda value: f"{value / GIB:g}", unit="GiB", metavar="N"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Bounds on what the media of requests may take. Sizes in bytes, times in seconds."""

    # fmt: off
    fetch: str = setting("frontend", "DYN_MEDIA_FETCH", one_of("frontend", "worker", metavar="WHERE"),
        "Who fetches the media that a request names by URL: `frontend` (workers get the content and need no network) or "
        "`worker` (it gets the URL, which is checked as far as that is possible without fetching). See [media](media.md)",
        flag="--media-fetch", group=_GROUP)
    allow_internal: bool = setting(False, "DYN_MM_ALLOW_INTERNAL", switch,
        "Media may be fetched from private addresses, by address instead of name, and from any port")
    local_path: str | None = setting(None, "DYN_MM_LOCAL_PATH", text,
        "Directory below which `file:` URLs of media may read; unset: none is read")
    data_url_bytes: int = setting(16 * MIB, "DYN_MM_MAX_DATA_URL_MB", mebibytes,
        "Size of one `data:` URL; more is a 400")
    file_bytes: int = setting(64 * MIB, "DYN_MM_MAX_FILE_SIZE_MB", mebibytes,
        "Size of one part of media that is fetched or read; more is a 400")
    request_bytes: int = setting(64 * MIB, "DYN_MM_MAX_REQUEST_MB", mebibytes,
        "Size of all media of a request together; more is a 400")
    parts: int = setting(32, "DYN_MM_MAX_PARTS", integer(0),
        "Parts of media in one request; more is a 400")
    # Of a decoded image each megapixel takes 3 MB.
    pixels: int = setting(64_000_000, "DYN_MM_MAX_IMAGE_MPIXELS", _megapixels,
        "Width times height of an image, as its header says; more is a 400")
    image_form_bytes: int = setting(50 * MIB, "DYN_HTTP_IMAGE_FORM_LIMIT_MB", mebibytes,
        "Size of a form with pictures (`/v1/images/edits`, `/v1/videos`); more is a 413")
    sound_form_bytes: int = setting(25 * MIB, "DYN_HTTP_AUDIO_FORM_LIMIT_MB", mebibytes,
        "Size of a form with sound (`/v1/audio/transcriptions`, `/v1/audio/translations`); more is a 413")
    store_dir: Path | None = setting(None, "DYN_MEDIA_STORE", SettingReader(Path, metavar="DIR"),
        "Directory in which pictures and videos that models make are kept for a while: then answers hold links, and "
        "`/v1/videos/{id}` finds them. Unset: they are in the answers only. See [made media](made-media.md)",
        flag="--media-store", group=_GROUP)
    store_seconds: float = setting(86_400.0, "DYN_MEDIA_STORE_SECS", seconds(1),
        "How long they are kept")
    store_bytes: int = setting(10 * GIB, "DYN_MEDIA_STORE_MB", mebibytes,
        "How much is kept; the oldest goes first")
    link_prefix: str | None = setting(None, "DYN_MEDIA_OUTPUT_HTTP_URL", text,
        "What links to them begin with, for example `https://api.example.com`. Unset: `http://` and the host that the "
        "client asked")
    concurrent_fetches: int = setting(64, "DYN_MM_CONCURRENT_FETCHES", integer(1),
        "Fetches of media at once; others wait")
    held_bytes: int = setting(GIB, "DYN_MM_MAX_HELD_MB", mebibytes,
        "Size of the media of all requests in flight together; more is declined with 529")
    cache_bytes: int = setting(64 * MIB, "DYN_MULTIMODAL_LOADER_CACHE_GB", _gibibytes,
        "How much of what was fetched is kept for the next request with the same URL; 0: nothing")
    url_seconds: float = setting(60.0, "DYN_MM_URL_CACHE_SECS", seconds(),
        "How long a URL is not fetched again; less where its server says so (`Cache-Control`)")
    # fmt: on


@dataclass(frozen=True, slots=True)
class FetchRules:
    """What holds for the fetches of one model: the card's `media_fetcher`, and what the operator allows."""

    user_agent: str = _DEFAULT_AGENT
    allow_direct_ip: bool = False
    allow_direct_port: bool = False
    allow_private_ips: bool = False
    allowed_domains: frozenset[str] | None = None  # None: any
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS

    @classmethod
    def of(cls, fetcher: object, *, allow_internal: bool) -> FetchRules:
        """Read the card's `media_fetcher`. A member of another type than it should have is the strict default."""
        card: Mapping[str, object] = fetcher if isinstance(fetcher, Mapping) else {}
        agent, domains = card.get("user_agent"), card.get("allowed_media_domains")
        is_agent = isinstance(agent, str) and 0 < len(agent) <= 200 and agent.isascii() and agent.isprintable()
        return cls(
            agent if isinstance(agent, str) and is_agent else _DEFAULT_AGENT,
            allow_internal or card.get("allow_direct_ip") is True,
            allow_internal or card.get("allow_direct_port") is True,
            allow_internal or card.get("allow_private_ips") is True,
            _domains(domains),
            _timeout(card),
        )


def _domains(given: object) -> frozenset[str] | None:
    if given is None:
        return None
    listed = given if isinstance(given, list | tuple | set | frozenset) else ()  # unreadable: no host is allowed
    return frozenset(each.lower().rstrip(".") for each in listed if isinstance(each, str))


def _timeout(card: Mapping[str, object]) -> float:
    """Return the limit of one fetch: `{"secs", "nanos"}` as cards write it, or milliseconds."""
    found = card.get("timeout")
    if isinstance(found, Mapping):
        whole, rest = found.get("secs", 0), found.get("nanos", 0)
        if isinstance(whole, int) and isinstance(rest, int):
            return min(max(whole + rest / 1e9, 0.001), MAX_TIMEOUT_SECONDS)
    milliseconds = card.get("timeout_ms")
    if isinstance(milliseconds, int) and milliseconds > 0:
        return min(milliseconds / 1000, MAX_TIMEOUT_SECONDS)
    return DEFAULT_TIMEOUT_SECONDS
