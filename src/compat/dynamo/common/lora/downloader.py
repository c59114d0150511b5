"""The cache of adapters on this machine: where each one lies, and whether it is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from dynamo.errors import InvalidArgument
from dynamo.settings.readers import folder
from dynamo.settings.table import declared
from dynamo.worker.adapters import adapter_directory

__all__ = ["LoRADownloader"]

CACHE: Final = declared(
    "DYN_LORA_PATH", folder, "Where `dynamo.common.lora` keeps adapters of sources that an engine registers",
    unset=Path("~/.cache/dynamo_loras"), shown="`~/.cache/dynamo_loras`",
)  # fmt: skip

DESCRIPTION: Final = "adapter_config.json"
WEIGHT_FILES: Final = frozenset({"adapter_model.safetensors", "adapter_model.bin", "model.lora_weights.npy"})

_KEY_CHARACTERS: Final = str.maketrans("/\\.", "___")


class LoRADownloader:
    """Brings adapters to this machine: a directory stays where it is, an adapter of the hub is in the cache of its client."""

    __slots__ = ("_root",)

    def __init__(self, cache_path: str | Path | None = None) -> None:
        """`cache_path`: the cache, instead of DYN_LORA_PATH."""
        root = CACHE.value(os.environ) if cache_path is None else Path(cache_path)
        self._root = root.expanduser()

    @staticmethod
    def uri_to_cache_key(uri: str) -> str:
        """Return the name of an adapter's directory in the cache."""
        scheme, separator, rest = uri.partition("://")
        return f"{scheme}__{rest}".translate(_KEY_CHARACTERS) if separator else scheme.translate(_KEY_CHARACTERS)

    def get_cache_path(self, cache_key: str) -> str:
        """Return where the cache has, or would have, the adapter of a key."""
        return os.fspath(self._root / cache_key)

    def validate_cached(self, cache_key: str) -> bool:
        """Return whether the cache has all files of an adapter."""
        return is_whole(self._root / cache_key)

    def is_cached(self, uri: str) -> bool:
        """Return whether an adapter can be loaded without a download, as far as it can be seen here.

        What the cache of the hub's client has does not count.
        """
        parts = urlsplit(uri)
        return (
            is_whole(Path(unquote(parts.path)))
            if parts.scheme == "file"
            else self.validate_cached(self.uri_to_cache_key(uri))
        )

    async def download_if_needed(self, uri: str) -> str:
        """Return the directory of an adapter: `file:///DIRECTORY` or `hf://ORGANISATION/NAME[@REVISION]`.

        Raises InvalidArgument for another kind of address and for a directory without an adapter, and CannotConnect where
        the hub does not give it.
        """
        directory = await adapter_directory({"source": {"uri": uri}})
        check_whole(directory)
        return os.fspath(directory)


def is_whole(directory: Path) -> bool:
    """Return whether a directory has the description of an adapter and its weights."""
    try:
        files = {entry.name for entry in os.scandir(directory) if entry.is_file()}
    except OSError:  # it does not exist, or cannot be read
        return False
    return DESCRIPTION in files and not WEIGHT_FILES.isdisjoint(files)


def check_whole(directory: Path) -> None:
    """Raise InvalidArgument where files of an adapter are missing."""
    if not is_whole(directory):
        expected = " or ".join(sorted(WEIGHT_FILES))
        raise InvalidArgument(f"no adapter in {directory}: {DESCRIPTION} and {expected} are expected")
