"""Where responses are kept, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from dynamo.settings.readers import (
    SettingReader,
    integer,
    mebibytes,
    seconds,
)
from dynamo.settings.table import setting

MIB: Final = 1024 * 1024


_REQUESTS: Final = "requests"


IN_MEMORY: Final = "memory"
OFF: Final = "off"
SQLITE: Final = "sqlite:"


class StoreLimits(Struct, frozen=True):
    """How much is kept. What was used longest ago goes first."""

    entries: int
    bytes: int
    ttl_seconds: float


def read_store_place(given: str) -> str:
    """Check where responses are to be kept. Raises ValueError."""
    if given in (IN_MEMORY, OFF) or (given.startswith(SQLITE) and given != SQLITE):
        return given
    raise ValueError(f"{given!r} is not {IN_MEMORY}, {OFF} or {SQLITE}FILE")


@dataclass(frozen=True, kw_only=True)
class StoredResponseSettings:
    """Where, how many and how long."""

    # fmt: off
    responses_store: str = setting(IN_MEMORY, "DYN_RESPONSES_STORE", SettingReader(read_store_place, metavar="PLACE"),
        "Where [responses are kept](responses.md#stored-responses): `memory`, `off`, or `sqlite:FILE`, which several "
        "processes of a machine share. With `--workers` above 1 `memory` is `off`",
        flag="--responses-store", group=_REQUESTS)
    responses_store_entries: int = setting(10_000, "DYN_RESPONSES_STORE_ENTRIES", integer(1),
        "How many responses are kept at most; the one that was used longest ago goes first")
    responses_store_bytes: int = setting(256 * MIB, "DYN_RESPONSES_STORE_MB", mebibytes,
        "How much they may take, their inputs included")
    responses_store_ttl_seconds: float = setting(86_400.0, "DYN_RESPONSES_STORE_TTL_SECS", seconds(1),
        "How long a response is kept without being used")
    # fmt: on

    @property
    def response_limits(self) -> StoreLimits:
        """How much of the Responses API is kept."""
        return StoreLimits(self.responses_store_entries, self.responses_store_bytes, self.responses_store_ttl_seconds)

    @property
    def stores_responses(self) -> bool:
        """Whether responses are to be kept anywhere."""
        return self.responses_store != OFF
