"""What an engine knows of a choice beside its text (hidden states, routed experts), as one compressed file. No I/O."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

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
