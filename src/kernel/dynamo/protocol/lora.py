"""The number of a LoRA adapter, which every system derives from its name in the same way."""

from __future__ import annotations

from typing import Final

from blake3 import blake3

_LOW_31_BITS: Final = 2**31 - 1


def lora_name_to_id(lora_name: str) -> int:
    """Return the id of an adapter: 31 bits of the hash of its name, never 0."""
    return int.from_bytes(blake3(lora_name.encode()).digest(length=8), "big") & _LOW_31_BITS or 1
