"""A tensor as bytes with a type and a shape: one of torch, one of NumPy, or any buffer.

Neither library is needed: torch is used for tensors of torch only, and NumPy to give back what Python has no format for.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dynamo.errors import InvalidArgument

MAX_DIMENSIONS: Final = 16
TORCH: Final = "torch."  # before the name of a type of torch, as `str(tensor.dtype)` has it


class TensorType(NamedTuple):
    """How a type of numbers is stored."""

    code: str  # in safetensors files
    item_bytes: int
    format: str  # of a memoryview; "": Python has none


TYPES: Final = {
    "float64": TensorType("F64", 8, "d"),
    "float32": TensorType("F32", 4, "f"),
    "float16": TensorType("F16", 2, ""),
    "bfloat16": TensorType("BF16", 2, ""),
    "int64": TensorType("I64", 8, "q"),
    "int32": TensorType("I32", 4, "i"),
    "int16": TensorType("I16", 2, "h"),
    "int8": TensorType("I8", 1, "b"),
    "uint64": TensorType("U64", 8, "Q"),
    "uint32": TensorType("U32", 4, "I"),
    "uint16": TensorType("U16", 2, "H"),
    "uint8": TensorType("U8", 1, "B"),
    "bool": TensorType("BOOL", 1, "?"),
}
_KINDS: Final = {**dict.fromkeys("bhilqn", "int"), **dict.fromkeys("BHILQN", "uint"), **dict.fromkeys("efd", "float")}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes, in the order of C."""

    dtype: str  # a name of `TYPES`, after `torch.` for a tensor of torch
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        """Raises InvalidArgument where type, shape and bytes do not fit together."""
        kind = type_of(self.dtype)
        if len(self.shape) > MAX_DIMENSIONS or any(type(side) is not int or side < 0 for side in self.shape):
            raise InvalidArgument(f"{list(self.shape)[:MAX_DIMENSIONS]} is not the shape of a tensor")
        expected = math.prod(self.shape) * kind.item_bytes
        if expected != self.data.nbytes:
            raise InvalidArgument(
                f"a tensor of {self.dtype} {list(self.shape)} is {expected} bytes long, got {self.data.nbytes}"
            )


def type_of(dtype: str) -> TensorType:
    """Return how a type is stored. Raises InvalidArgument for an unknown name."""
    found = TYPES.get(dtype.removeprefix(TORCH))
    if found is None:
        raise InvalidArgument(f"tensors of {dtype!r} are not handed over; the types are {', '.join(TYPES)}")
    return found


def raw_tensor(tensor: Any) -> RawTensor:
    """Return a tensor of torch, an array, or a buffer, as bytes; without a copy where it lies in memory as a whole.

    Raises InvalidArgument for any other object, and for numbers of an unknown type.
    """
    torch = sys.modules.get("torch")  # a tensor of torch exists only where torch is loaded
    if torch is not None and isinstance(tensor, torch.Tensor):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
        return RawTensor(str(tensor.dtype), tuple(tensor.shape), data)
    try:
        view = memoryview(tensor)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(
            f"a tensor must be of torch, of NumPy or a buffer, got {type(tensor).__name__}: {error}"
        ) from error
    shape = tuple(view.shape or ())
    if view.nbytes == 0:
        return RawTensor(_name_of(view), shape, memoryview(b""))
    whole = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
    return RawTensor(_name_of(view), shape, whole)


def _name_of(view: memoryview) -> str:
    format = view.format.removeprefix("@")
    if format.startswith("<") and sys.byteorder == "little":
        format = format[1:]
    if format == "?":
        return "bool"
    if (kind := _KINDS.get(format)) is None:
        raise InvalidArgument(f"numbers of the format {view.format!r} are not handed over")
    return f"{kind}{view.itemsize * 8}"


def restored_tensor(raw: RawTensor) -> Any:
    """Return a tensor over the bytes: of torch where it was one and torch is installed, else of NumPy, else a memoryview.

    Raises InvalidArgument for a type that needs a library which is not installed.
    """
    name, shape = raw.dtype.removeprefix(TORCH), raw.shape
    torch = _installed("torch") if raw.dtype.startswith(TORCH) else None
    if torch is not None:
        if raw.data.nbytes == 0:
            return torch.empty(shape, dtype=getattr(torch, name))
        return torch.frombuffer(raw.data, dtype=getattr(torch, name)).reshape(shape)
    if name == "bfloat16":
        raise InvalidArgument("a tensor of bfloat16 was handed over, and torch is not installed here")
    numpy = _installed("numpy")
    if numpy is not None:
        return numpy.frombuffer(raw.data, dtype=name).reshape(shape)
    return _as_view(raw.data, type_of(name).format, shape)


def _as_view(data: memoryview, format: str, shape: Sequence[int]) -> memoryview:
    if not format:
        raise InvalidArgument("a tensor of float16 was handed over, and NumPy is not installed here")
    if data.nbytes == 0:
        return data
    cast: Any = data.cast  # its declaration has each format alone
    found: memoryview = cast(format, shape)
    return found


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
