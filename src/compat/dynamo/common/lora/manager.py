"""Finds adapters for an engine that loads them itself; the routes of a worker (docs/adapters.md) need none of this."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from dynamo.errors import InvalidArgument
from dynamo.runtime.base.settings import SystemSettings
from dynamo.settings.readers import folder
from dynamo.settings.table import declared, setting_of
from dynamo.worker.adapters import adapter_directory

__all__ = ["LoRADownloader", "LoRAInfo", "LoRAManager", "LoRASourceProtocol", "OnceLock", "get_lora_manager"]

CACHE: Final = declared(
    "DYN_LORA_PATH", folder, "Where `dynamo.common.lora` keeps adapters of sources that an engine registers",
    unset=Path("~/.cache/dynamo_loras"), shown="`~/.cache/dynamo_loras`",
)  # fmt: skip
WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "model.lora_weights.npy")

T = TypeVar("T")


class OnceLock(Generic[T]):
    """A value that is made once, at the first use. One that could not be made is tried again."""

    def __init__(self) -> None:
        self._lock, self._made = threading.Lock(), list[T]()

    def get(self) -> T | None:
        return self._made[0] if self._made else None

    def get_or_init(self, init: Callable[[], T]) -> T:
        """Return the value, which `init()` makes."""
        with self._lock:
            if not self._made:
                self._made.append(init())
            return self._made[0]


@dataclass(frozen=True)
class LoRAInfo:
    id: int
    path: str


class LoRASourceProtocol(Protocol):
    """Where adapters of one scheme come from."""

    async def download(self, lora_uri: str, dest_path: Path) -> Path:
        """Put an adapter at `dest_path`; return where it is."""

    async def exists(self, lora_uri: str) -> bool: ...


class LoRADownloader:
    """Finds adapters by `file:///...`, where they are used in place, and `hf://ORGANISATION/NAME[@REVISION]`."""

    def __init__(self, cache_path: str | Path | None = None) -> None:
        """`cache_path` None: DYN_LORA_PATH."""
        self._cache = Path(cache_path or CACHE.value(os.environ)).expanduser()

    async def download_if_needed(self, lora_uri: str) -> str:
        """Return the directory of an adapter. Raises InvalidArgument for another address, and where there is no adapter."""
        found = await adapter_directory({"source": {"uri": lora_uri}})
        if not _is_adapter(found):
            raise InvalidArgument(
                f"{found} is not an adapter: it needs adapter_config.json and one of {', '.join(WEIGHTS)}"
            )
        return str(found)

    def get_cache_path(self, cache_key: str) -> str:
        return str(self._cache / cache_key)

    def is_cached(self, lora_uri: str) -> bool:
        """Return whether an adapter is whole at its place, or in this cache. That of the hub's client does not count."""
        if lora_uri.startswith("file://"):
            return _is_adapter(Path(lora_uri.removeprefix("file://")))
        return self.validate_cached(self.uri_to_cache_key(lora_uri))

    def validate_cached(self, cache_key: str) -> bool:
        return _is_adapter(self._cache / cache_key)

    @staticmethod
    def uri_to_cache_key(uri: str) -> str:
        return re.sub(r"[/\\.]", "_", uri.replace("://", "__"))


class LoRAManager:
    """Fetches adapters, also from sources that an engine registers."""

    def __init__(self, cache_path: Path | None = None) -> None:
        self._downloader = LoRADownloader(cache_path)
        self._sources: dict[str, LoRASourceProtocol] = {}  # one for each that the engine's code names

    def register_custom_source(self, scheme: str, source: LoRASourceProtocol) -> None:
        """Fetch what begins with `scheme://` from `source`."""
        self._sources[scheme] = source

    async def download_lora(self, lora_uri: str) -> dict[str, Any]:
        """Fetch an adapter: {"status": "success", "local_path"}, or {"status": "error", "message"} for any failure."""
        try:
            return {"status": "success", "local_path": await self._fetched(lora_uri)}
        except Exception as error:  # the boundary: becomes the answer
            return {"status": "error", "message": str(error)}

    async def _fetched(self, uri: str) -> str:
        """Return the directory of an adapter. Raises InvalidArgument where there is none, and what its source raises."""
        source = self._sources.get(uri.partition("://")[0])
        if source is None:
            return await self._downloader.download_if_needed(uri)
        if not await source.exists(uri):
            raise InvalidArgument(f"there is no adapter at {uri}")
        place = self._downloader.get_cache_path(self._downloader.uri_to_cache_key(uri))
        return str(await source.download(uri, Path(place)))

    def is_cached(self, lora_uri: str) -> bool:
        return self._downloader.is_cached(lora_uri)


_manager: Final[OnceLock[LoRAManager]] = OnceLock()


def get_lora_manager() -> LoRAManager | None:
    """Return the manager of this process; None unless DYN_LORA_ENABLED is set."""
    is_enabled = setting_of(SystemSettings, "lora_enabled").value(os.environ)
    return _manager.get_or_init(LoRAManager) if is_enabled else None


def _is_adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").is_file() and any((directory / name).is_file() for name in WEIGHTS)
