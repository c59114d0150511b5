"""Weights to bfloat16 safetensors, in shards that stay small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_SHARD_BYTES", "to_bfloat16", "write_shards", "write_tensors"]

MAX_SHARD_BYTES: Final = 2_500_000  # a file of a repository, not of a model hub


def write_shards(tensors: Mapping[str, npt.NDArray[np.float32]], directory: Path) -> None:
    """Write `model-....safetensors` and their index; those of an earlier export go."""
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    shards: list[dict[str, npt.NDArray[np.uint16]]] = [{}]
    room = MAX_SHARD_BYTES
    for name, values in sorted(tensors.items()):
        rounded = to_bfloat16(values)
        if rounded.nbytes > room and shards[-1]:
            shards.append({})
            room = MAX_SHARD_BYTES
        shards[-1][name] = rounded
        room -= rounded.nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(shard, directory / file)
        places |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for shard in shards for array in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tensors(tensors: Mapping[str, npt.NDArray[np.float32]], path: Path) -> None:
    """Write one file."""
    _write({name: to_bfloat16(values) for name, values in sorted(tensors.items())}, path)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the upper halves, rounded to the nearest and to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _write(tensors: Mapping[str, npt.NDArray[np.uint16]], path: Path) -> None:
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())
