"""Adapters by their URI: from the addresses that are known, and from sources that an engine adds."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from dynamo.common.lora.downloader import LoRADownloader, check_whole
from dynamo.common.lora.once_lock import OnceLock
from dynamo.errors import InvalidArgument
from dynamo.runtime.base.settings import SystemSettings
from dynamo.settings.table import setting_of

__all__ = ["LoRAInfo", "LoRAManager", "LoRASourceProtocol", "get_lora_manager"]

logger = logging.getLogger(__name__)


class LoRAInfo(NamedTuple):
    """An adapter as an engine knows it: its number, and its directory."""

    id: int
    path: str


class LoRASourceProtocol(Protocol):
    """Gives the adapters of one URI scheme."""

    async def exists(self, uri: str) -> bool:
        """Return whether there is such an adapter."""
        ...

    async def download(self, uri: str, dest: Path) -> Path:
        """Write an adapter to `dest`, a directory that need not exist yet; return its directory."""
        ...


class LoRAManager:
    """Gives the directory of an adapter. What a registered source gave is kept in the cache, and not downloaded again."""

    __slots__ = ("_by_scheme", "_cache", "_turn")

    def __init__(self, cache_path: Path | None = None) -> None:
        """`cache_path`: as of `LoRADownloader`."""
        self._cache = LoRADownloader(cache_path)
        self._by_scheme: dict[str, LoRASourceProtocol] = {}  # bounded by what the engine's code registers
        self._turn = asyncio.Lock()  # two downloads of one adapter would write the same files

    def register_custom_source(self, scheme: str, source: LoRASourceProtocol) -> None:
        """Let a source give every adapter whose URI begins with `scheme://`, also one of a known scheme."""
        self._by_scheme[scheme] = source

    def is_cached(self, uri: str) -> bool:
        """Return whether an adapter is on this machine. See `LoRADownloader.is_cached`."""
        return self._cache.is_cached(uri)

    async def download_lora(self, uri: str) -> dict[str, Any]:
        """Return `{"status": "success", "local_path": directory}`; of a failure `{"status": "error", "message": reason}`."""
        source = self._by_scheme.get(uri.split("://", 1)[0])
        try:
            if source is None:
                directory = await self._cache.download_if_needed(uri)
            else:
                async with self._turn:
                    directory = await self._from_source(source, uri)
        except Exception as error:  # of a source that is not ours: the answer is the boundary
            logger.warning("the adapter %s cannot be had: %s", uri, error)
            return {"status": "error", "message": str(error) or type(error).__name__}
        return {"status": "success", "local_path": directory}

    async def _from_source(self, source: LoRASourceProtocol, uri: str) -> str:
        """Return the directory of an adapter of a registered source. Raises what the source raises, and InvalidArgument."""
        key = self._cache.uri_to_cache_key(uri)
        place = self._cache.get_cache_path(key)
        if self._cache.validate_cached(key):
            return place
        if not await source.exists(uri):
            raise InvalidArgument(f"its source has no adapter {uri}")
        found = await source.download(uri, Path(place))
        await asyncio.to_thread(check_whole, found)
        return os.fspath(found)


_OF_THIS_PROCESS: Final[OnceLock[LoRAManager]] = OnceLock()


def get_lora_manager() -> LoRAManager | None:
    """Return the one manager of this process; None where DYN_LORA_ENABLED does not switch adapters on."""
    if not setting_of(SystemSettings, "lora_enabled").value(os.environ):
        return None
    return _OF_THIS_PROCESS.get_or_init(LoRAManager)
