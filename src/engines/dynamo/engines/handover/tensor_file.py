"""One tensor in the form of a safetensors file: a length, a header in JSON, the bytes."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from dynamo.engines.handover.tensors import TYPES, RawTensor, type_of
from dynamo.errors import InvalidArgument

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 1 << 20  # of one tensor it has a hundred
ALIGNMENT: Final = 8  # of the data, so that they can be used where they lie
_NAMES: Final = {kind.code: name for name, kind in TYPES.items()}

Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[Size]
    data_offsets: tuple[Size, Size]


def pack_tensor(key: str, raw: RawTensor) -> tuple[bytes, memoryview]:
    """Return the two pieces of a file that holds a tensor under `key`."""
    entry = _Entry(type_of(raw.dtype).code, list(raw.shape), (0, raw.data.nbytes))
    header = msgspec.json.encode({key: entry})
    header += b" " * (-len(header) % ALIGNMENT)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header, raw.data


def unpack_tensor(key: str, file: memoryview) -> RawTensor:
    """Return the tensor under `key`, over the bytes of the file. Raises InvalidArgument for another content."""
    length = int.from_bytes(file[:LENGTH_BYTES], "little")
    if file.nbytes < LENGTH_BYTES or length > min(file.nbytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise InvalidArgument("the file of a tensor has no whole safetensors header")
    data = file[LENGTH_BYTES + length :]
    try:
        header = msgspec.json.decode(file[LENGTH_BYTES : LENGTH_BYTES + length], type=dict[str, msgspec.Raw])
        if key not in header:
            raise InvalidArgument(f"the file of a tensor has none under {key!r}")
        entry = msgspec.json.decode(header[key], type=_Entry)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the file of a tensor has a broken safetensors header: {error}") from error
    begin, end = entry.data_offsets
    if entry.dtype not in _NAMES or not begin <= end <= data.nbytes:
        raise InvalidArgument(f"the file of a tensor ends before its data, or has numbers of {entry.dtype!r}")
    return RawTensor(_NAMES[entry.dtype], tuple(entry.shape), data[begin:end])
