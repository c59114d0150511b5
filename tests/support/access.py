"""Key files for tests, and a frontend whose routes need keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from dynamo.frontend.parts.keys.rules.key_file import key_toml
from dynamo.frontend.parts.keys.rules.key_text import hash_of
from dynamo.frontend.parts.keys.rules.records import KeyRecord
from support.frontend_cluster import Cluster, cluster


def secret_of(id: str) -> str:
    """The key of a record that `key` made."""
    return f"dyn-{id}.{'s3cr3t-' * 6}x"


def key(id: str, **members: Any) -> KeyRecord:
    """A record from plain values, as a file has them."""
    return msgspec.convert({"id": id, "hash": hash_of(secret_of(id).encode()), **members}, KeyRecord)


def bearer(id: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret_of(id)}"}


def write_keys(path: Path, *records: KeyRecord, more: str = "") -> Path:
    """Write a key file as commands do: beside it, then renamed."""
    text = "\n".join(map(key_toml, records)) or "keys = []\n"
    beside = path.with_suffix(".new")
    beside.write_text(f"{text}\n{more}", encoding="utf-8")
    beside.replace(path)
    return path


@asynccontextmanager
async def closed_cluster(
    tmp_path: Path, *records: KeyRecord, more: str = "", **settings: Any
) -> AsyncIterator[Cluster]:
    """A cluster whose frontend has these keys, in `keys.toml`."""
    path = write_keys(tmp_path / "keys.toml", *records, more=more)
    async with cluster(tmp_path, keys_file=str(path), **settings) as found:
        yield found
