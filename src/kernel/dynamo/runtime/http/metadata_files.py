"""The files of model cards that a status server hands out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

__all__ = ["METADATA_PREFIX", "MetadataFiles"]

MAX_FILES: Final = 4096
METADATA_PREFIX: Final = "/v1/metadata/"


class MetadataFiles:
    """Files by URL path. Only these very files are reachable: a path is looked up, never resolved."""

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}

    def add(
        self, namespace: str, component: str, endpoint: str, slug: str, suffix: str, files: Mapping[str, Path]
    ) -> dict[str, str]:
        """Serve a model card's files, by name, and return the path part of each one's URL. Raises ValueError for too many.

        `suffix` is `_base` or the LoRA's.
        """
        folder = "/".join(quote(part, safe="") for part in (namespace, component, endpoint, slug, suffix))
        paths = {name: f"{METADATA_PREFIX}{folder}/{quote(name, safe='')}" for name in files}
        if len(self._files.keys() | set(paths.values())) > MAX_FILES:
            raise ValueError(f"more than {MAX_FILES} model card files")
        for name, file in files.items():
            self._files[paths[name]] = Path(file)
        return paths

    def remove(self, namespace: str, component: str, endpoint: str, slug: str, suffix: str) -> None:
        """Withdraw a model card's files; absent is fine."""
        folder = "/".join(quote(part, safe="") for part in (namespace, component, endpoint, slug, suffix))
        for path in [path for path in self._files if path.startswith(f"{METADATA_PREFIX}{folder}/")]:
            del self._files[path]

    def find(self, path: str) -> Path | None:
        """Return the file of a URL path, whichever of its characters are percent-encoded."""
        return self._files.get(path) or self._files.get(_canonical(path))


def _canonical(path: str) -> str:
    return "/".join(quote(unquote(part), safe="") for part in path.split("/"))
