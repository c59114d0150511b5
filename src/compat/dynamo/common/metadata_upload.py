"""Puts the metadata of choices (hidden states, routed experts) where the request that they belong to names it: a file for each.

The address is the client's: an engine that uses this has to decide which addresses it accepts.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

import msgspec

__all__ = ["MetadataUploader"]

MEMBER: Final = "metadata_upload"


@dataclass(frozen=True, slots=True)
class MetadataUploader:
    """Where metadata go: a folder of this machine (a path or `file://`), or an address of a kind that fsspec knows."""

    url: str

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any] | None) -> Self | None:
        """Return the uploader that `{"url": ADDRESS}` means; None for None. Raises ValueError that names the member."""
        return None if settings is None else cls(_checked_url(settings))

    @classmethod
    def from_backend_request(cls, request: Mapping[str, Any]) -> Self | None:
        """Return the uploader of a worker's request, None where it names no address; errors as of `from_settings`.

        `nvext.metadata_upload` comes before `extra_args.nvext.metadata_upload`.
        """
        own = _member(_member(request, "nvext"), MEMBER)
        further = _member(_member(_member(request, "extra_args"), "nvext"), MEMBER)
        return cls.from_settings(further if own is None else own)

    async def upload_choice(self, choice_index: int, metadata: Mapping[str, Any]) -> None:
        """Write the file of one choice, `choice_INDEX.msgpack.zst`; without metadata there is none.

        Raises TypeError for a value that a file cannot hold, ImportError where fsspec is needed and missing, and what the
        file system raises.
        """
        if not metadata:
            return
        await asyncio.to_thread(lambda: _write(self.url, file_name(choice_index), file_content(metadata)))


def _checked_url(settings: object) -> str:
    if not isinstance(settings, Mapping):
        raise ValueError(f"{MEMBER} must be an object")
    for name in settings:
        if name != "url":
            raise ValueError(f"{MEMBER}.{name} is not supported")
    match settings.get("url"):
        case None:
            raise ValueError(f"{MEMBER}.url is required")
        case str(text):
            if address := text.strip():
                return address
            raise ValueError(f"{MEMBER}.url must not be empty")
        case _:
            raise ValueError(f"{MEMBER}.url must be a string")


def _member(holder: object, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else None


def _write(url: str, name: str, content: bytes) -> None:
    parts = urlsplit(url)
    if "://" not in url:
        _write_local(Path(url), name, content)
    elif parts.scheme == "file":
        _write_local(Path(unquote(parts.path)), name, content)
    else:
        _write_remote(url, name, content)


def _write_local(folder: Path, name: str, content: bytes) -> None:
    """Write a file whole or not at all, so that a reader of the folder never meets half of one."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}.{os.getpid()}"
    try:
        partial.write_bytes(content)
        partial.replace(folder / name)
    finally:
        partial.unlink(missing_ok=True)


def _write_remote(url: str, name: str, content: bytes) -> None:
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(
            f"fsspec is not installed, and {MEMBER}.url {url!r} is no folder of this machine: pip install fsspec"
        ) from error
    with fsspec.open(f"{url.rstrip('/')}/{name}", "wb") as file:
        file.write(content)


# What an engine knows of a choice beside its text (hidden states, routed experts), as one compressed file.

SCHEMA_VERSION: Final = 1

_ZSTD_MAGIC: Final = 0xFD2FB528
_ONE_SEGMENT: Final = 0xE0  # of a frame: all of its content is one segment, whose size follows in eight bytes
_BLOCK: Final = 128 * 1024  # no block of a frame has more content


def file_name(choice_index: int) -> str:
    """Return the name of the file of a choice."""
    return f"choice_{choice_index}.msgpack.zst"


def file_content(metadata: Mapping[str, Any]) -> bytes:
    """Return the file of a choice. Raises TypeError for a value that is neither plain nor an array of numbers."""
    packed = msgspec.msgpack.encode({"schema_version": SCHEMA_VERSION, "metadata": metadata}, enc_hook=_as_map)
    try:
        import zstandard
    except ImportError:
        return _stored_frame(packed)
    return bytes(zstandard.compress(packed))


def _as_map(value: Any) -> dict[str, Any]:
    """Return an array of NumPy (`ndarray`) or torch (`tensor`) with its elements as they lie in memory, in C order."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # whose array it is, is loaded
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return _map("ndarray", value.dtype.name, value.shape, value.tobytes())
    if torch is not None and isinstance(value, torch.Tensor):
        elements = value.detach().to("cpu").contiguous().flatten().view(torch.uint8)  # NumPy lacks some types of torch
        return _map("tensor", str(value.dtype).rpartition(".")[2], value.shape, bytes(elements.numpy()))
    raise TypeError(f"no file of metadata can hold a {type(value).__qualname__}")


def _map(kind: str, dtype: str, shape: tuple[int, ...], data: bytes) -> dict[str, Any]:
    return {"type": kind, "dtype": dtype, "shape": list(shape), "data": data}


def _stored_frame(content: bytes) -> bytes:
    """Return content as a Zstandard frame of raw blocks (RFC 8878, 3.1.1): any reader takes it, and it is not smaller."""
    frame = [struct.pack("<IBQ", _ZSTD_MAGIC, _ONE_SEGMENT, len(content))]
    for start in range(0, len(content), _BLOCK):
        block = content[start : start + _BLOCK]
        is_last = int(start + len(block) == len(content))
        frame += (struct.pack("<I", len(block) * 8 + is_last)[:3], block)  # three bytes: size, type 0 (raw), last
    return b"".join(frame)
