"""Tensors of safetensors files, as float32.

The format is read here, in one page, rather than through the `safetensors` package: that one hands bfloat16 to NumPy
only where another package teaches NumPy the type, and the format is a length, a JSON header and raw data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonMapping

Array = npt.NDArray[np.float32]

HEADER_LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies in its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


def read_tensors(path: Path) -> dict[str, Array]:
    """Read every tensor of one file as float32. Raises InvalidArgument naming the file for what is missing or broken."""
    if not path.is_file():
        raise InvalidArgument(f"there is no file {path}")
    tensors = dict(_header(path))
    take = Taker(tensors, path.parent)
    return {name: take(name, *tensor.shape) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Taker:
    """`take(name, *shape)`: one tensor, checked."""

    tensors: Mapping[str, Tensor]
    directory: Path

    def __call__(self, name: str, *shape: int) -> Array:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InvalidArgument(f"{self.directory}: there is no tensor {name}; the model needs it")
        if tensor.shape != shape:
            raise InvalidArgument(
                f"{tensor.path}: {name} has the shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        array = _read(tensor)
        if not np.isfinite(array).all():
            raise InvalidArgument(f"{tensor.path}: {name} holds values that are not finite; the file is broken")
        return array


def _read(tensor: Tensor) -> Array:
    count = math.prod(tensor.shape)
    code = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.dtype]
    with tensor.path.open("rb") as file:
        raw = np.fromfile(file, dtype=code, count=count, offset=tensor.offset)
    if raw.size != count:
        raise InvalidArgument(f"{tensor.path} ended early; copy the file again")
    if tensor.dtype == "BF16":  # the upper half of a float32
        widened: Array = (raw.astype(np.uint32) << 16).view(np.float32)
        return widened.reshape(tensor.shape)
    return raw.astype(np.float32, copy=False).reshape(tensor.shape)


def open_tensors(directory: Path) -> dict[str, Tensor]:
    """Return where every tensor of `model.safetensors`, or of the shards its index lists, lies."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return dict(_header(single))
    if not index.is_file():
        raise InvalidArgument(f"{directory}: there is neither {single.name} nor {index.name}")
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        shards = sorted(set(names.values()))
        strays = [shard for shard in shards if Path(shard).name != shard]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{index} must map tensors to files under `weight_map`: {error!r}") from error
    if strays:
        raise InvalidArgument(f"{index}: {strays[0]!r} is not a file beside it")
    found: dict[str, Tensor] = {}
    for shard in shards:
        if not (directory / shard).is_file():
            raise InvalidArgument(f"{index} names {shard}, which does not exist; fetch the model again")
        found.update((name, tensor) for name, tensor in _header(directory / shard) if names.get(name) == shard)
    return found


def _header(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one file, each checked to lie inside it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        if size < HEADER_LENGTH_BYTES or length > min(size - HEADER_LENGTH_BYTES, MAX_HEADER_BYTES):
            raise InvalidArgument(f"{path} is not a whole safetensors file; copy it again")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = [(name, _entry(path, name, entry, length, size)) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{path} has a broken safetensors header: {error!r}") from error
    yield from entries


def _entry(path: Path, name: str, entry: JsonMapping, header_bytes: int, file_bytes: int) -> Tensor:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    begin, end = entry["data_offsets"]
    offset = HEADER_LENGTH_BYTES + header_bytes
    if dtype not in ITEM_BYTES:
        raise InvalidArgument(f"{path}: {name} is {dtype}; supported are {', '.join(ITEM_BYTES)}")
    if not 0 <= begin <= end or end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise InvalidArgument(f"{path}: {name} is {end - begin} bytes long, its shape {list(shape)} needs another size")
    if offset + end > file_bytes:
        raise InvalidArgument(f"{path} ends before the data of {name}; copy the file again")
    return Tensor(path, dtype, shape, offset + begin)
