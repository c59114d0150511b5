"""Writes what an engine knows of a choice beside its answer (hidden states, routed experts) to a place that the request names.

The place comes from the client: an engine that uses this decides which places it accepts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec

__all__ = ["MetadataUploader"]

BLOCK_BYTES: Final = 128 * 1024  # the most that a block of Zstandard holds


@dataclass(frozen=True)
class MetadataUploader:
    """A directory: a path, a `file://` address, or any that fsspec knows."""

    url: str

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any] | None) -> Self | None:
        """Read the settings of a request; None where it has none. Raises ValueError naming the member that is wrong."""
        if settings is None:
            return None
        if not isinstance(settings, Mapping):
            raise ValueError("metadata_upload must be an object")
        if unknown := [name for name in settings if name != "url"]:
            raise ValueError(f"metadata_upload.{unknown[0]} is not supported")
        url = settings.get("url")
        if not isinstance(url, str) or not url.strip():
            wrong = (
                "is required" if url is None else "must not be empty" if isinstance(url, str) else "must be a string"
            )
            raise ValueError(f"metadata_upload.url {wrong}")
        return cls(url.strip())

    @classmethod
    def from_backend_request(cls, request: Mapping[str, Any]) -> Self | None:
        """Read a worker's request: `nvext.metadata_upload`, else `extra_args.nvext.metadata_upload`."""
        extra = request.get("extra_args")
        for holder in (request, extra):
            extension = holder.get("nvext") if isinstance(holder, Mapping) else None
            if isinstance(extension, Mapping) and extension.get("metadata_upload") is not None:
                return cls.from_settings(extension["metadata_upload"])
        return None

    async def upload_choice(self, choice_index: int, metadata: Mapping[str, Any]) -> None:
        """Write `choice_INDEX.msgpack.zst`; nothing for empty metadata. Arrays of NumPy and torch are written with their bytes."""
        if metadata:
            await asyncio.to_thread(self._write, f"choice_{choice_index}.msgpack.zst", metadata)

    def _write(self, name: str, metadata: Mapping[str, Any]) -> None:
        content = {"schema_version": 1, "metadata": metadata}
        data = _compressed(msgspec.msgpack.encode(content, enc_hook=_array))
        if "://" not in self.url or self.url.startswith("file://"):
            directory = Path(self.url.removeprefix("file://"))
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
            return
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError(
                f"metadata_upload.url {self.url!r} needs a package: pip install fsspec ({error})"
            ) from error
        files, directory = url_to_fs(self.url)
        files.makedirs(directory, exist_ok=True)
        files.pipe_file(f"{directory}/{name}", data)


def _array(value: Any) -> dict[str, Any]:
    """Return an array as a map. Raises TypeError for anything else, and for an array of objects."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # NumPy has no bfloat16
        dtype, data, kind = str(value.dtype).removeprefix("torch."), flat.numpy().tobytes(), "tensor"
    elif type(value).__module__ == "numpy" and not value.dtype.hasobject:
        dtype, data, kind = str(value.dtype), value.tobytes(), "ndarray"
    else:
        raise TypeError(f"metadata of type {type(value).__name__} cannot be written")
    return {"type": kind, "dtype": dtype, "shape": list(value.shape), "data": data}


def _compressed(data: bytes) -> bytes:
    """Return a Zstandard frame (RFC 8878) of the data, which is not compressed where the package zstandard is missing."""
    with suppress(ImportError):
        import zstandard

        return bytes(zstandard.ZstdCompressor().compress(data))
    frame = bytearray(b"\x28\xb5\x2f\xfd\xe0" + len(data).to_bytes(8, "little"))
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        is_last = start + BLOCK_BYTES >= len(data)
        frame += (len(block) << 3 | is_last).to_bytes(3, "little") + block
    return bytes(frame)
