"""Decoded pixels in shared memory, under a descriptor of this system: a slot `{"Decoded": {...}}` of `multi_modal_data`.

The native descriptor names memory by NIXL's metadata (`nixl_metadata`, `nixl_descriptor`), which is not built. Everything beside
it is as there: shape, type, metadata, and the hash of the content.
"""

from __future__ import annotations

import secrets
from asyncio import to_thread
from collections.abc import Mapping
from itertools import count
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from dynamo.common.multimodal.embedding_transfer import SharedMemoryHandle
from dynamo.engines.handover import (
    HOLD_SECONDS,
    MAX_BYTES,
    HeldFiles,
    Leftovers,
    RawTensor,
    TakenFile,
    raw_tensor,
    restored_tensor,
    sender_id,
    shared_memory_directory,
)
from dynamo.errors import InvalidArgument

PREFIX: Final = "dynamo_pixels."
SLOT: Final = "Decoded"
_UINT8: Final = "UINT8"
_COLOURS: Final = {1: "L", 3: "RGB"}


class DecodedImage(msgspec.Struct, frozen=True):
    """What a slot holds."""

    shared_memory: SharedMemoryHandle
    shape: list[int]
    dtype: str
    metadata: dict[str, dict[str, str]]
    content_hash: str


class DecodedPixels(NamedTuple):
    """A picture that was read: an array of height, width and colours, of unsigned bytes."""

    pixels: Any
    metadata: dict[str, str]
    content_hash: str


def decoded_content_hash(raw: RawTensor) -> str:
    """Return the hash of decoded pixels, 16 hex digits: over the rank, each side, the number of the type, and the bytes."""
    found = xxhash.xxh3_64()
    for number in (len(raw.shape), *raw.shape):
        found.update(number.to_bytes(8, "little"))
    found.update(b"\0")  # of unsigned bytes
    found.update(raw.data)
    return found.hexdigest()


class DecodedMediaWriter:
    """Writes pictures for workers on the same machine, each of which one worker reads once."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, hold_seconds: float = HOLD_SECONDS) -> None:
        """`max_bytes` bounds what waits to be read, `hold_seconds` for how long."""
        directory = shared_memory_directory()
        self._leftovers = Leftovers(directory, PREFIX)
        self._leftovers.sweep()
        self._files = HeldFiles(directory, PREFIX + sender_id(), max_bytes=max_bytes, hold_seconds=hold_seconds)
        self._numbers = count()

    @property
    def waiting(self) -> int:
        """How many pictures no worker has read yet."""
        return len(self._files.waiting())

    async def write(self, pixels: Any, *, format: str) -> dict[str, Any]:
        """Write a picture of height, width and 1 to 4 colours without its alpha, and return its slot of `multi_modal_data`.

        Raises InvalidArgument for anything else and above the bound, and Overloaded while too much waits.
        """
        self._leftovers.sweep_at_times()
        raw = await to_thread(_without_alpha, raw_tensor(pixels))
        name = f"{self._files.stem}_{next(self._numbers)}.{secrets.token_hex(4)}"
        await self._files.put(name, (raw.data,))
        metadata = {"Image": {"format": format, "color_type": _COLOURS[raw.shape[2]], "layout": "HWC"}}
        handle = SharedMemoryHandle(name, raw.data.nbytes)
        found = DecodedImage(handle, list(raw.shape), _UINT8, metadata, await to_thread(decoded_content_hash, raw))
        return {SLOT: msgspec.to_builtins(found)}

    async def aclose(self, wait_seconds: float = 2.0) -> None:
        """Give readers a moment to take what waits, and remove the rest."""
        await self._files.aclose(wait_seconds)


def _without_alpha(raw: RawTensor) -> RawTensor:
    if raw.dtype.removeprefix("torch.") != "uint8" or len(raw.shape) != 3 or not 1 <= raw.shape[2] <= 4:
        raise InvalidArgument(
            f"decoded pixels are unsigned bytes of height, width and 1 to 4 colours, got {raw.dtype} {list(raw.shape)}"
        )
    height, width, channels = raw.shape
    if channels in _COLOURS:
        return raw
    left = channels - 1
    opaque = bytearray(height * width * left)
    for place in range(left):
        opaque[place::left] = raw.data[place::channels]
    return RawTensor(raw.dtype, (height, width, left), memoryview(opaque))


async def read_decoded_media(slot: Mapping[str, Any], *, max_bytes: int = MAX_BYTES) -> DecodedPixels:
    """Return the picture of a slot, which is removed from shared memory.

    Raises InvalidArgument for a slot of another form, and where the content is not what the slot describes; Disconnected
    where it is gone.
    """
    try:
        found = msgspec.convert(slot.get(SLOT), DecodedImage)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"a slot of decoded pixels is wrong: {error}") from error
    name = found.shared_memory.name
    if not name.startswith(PREFIX) or "/" in name or name.endswith(".lock"):
        raise InvalidArgument("a slot of decoded pixels names shared memory of another kind")
    path = shared_memory_directory() / name
    taken = await to_thread(TakenFile.open, path, max_bytes=max_bytes, maps=True)
    raw = RawTensor("uint8", tuple(found.shape), taken.data)
    if found.dtype != _UINT8 or await to_thread(decoded_content_hash, raw) != found.content_hash:
        raise InvalidArgument(f"{name} does not hold the picture that its slot describes")
    return DecodedPixels(restored_tensor(raw), found.metadata.get("Image", {}), found.content_hash)
