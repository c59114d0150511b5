"""Enums that engines, flags and cards share."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final

from dynamo.errors import InvalidArgument

__all__ = [
    "DisaggregationMode",
    "EmbeddingTransferMode",
    "NativeDisaggregationMode",
    "coerce_disaggregation_mode",
    "native_disaggregation_mode",
    "parse_disaggregation_mode",
]


class DisaggregationMode(Enum):
    """The role of a worker. The value, also `str()`, is the slug that flags and spans use."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"

    def __str__(self) -> str:
        return self.value

    @property
    def discovery_component(self) -> str:
        """Return the component that a worker of this role registers under by default."""
        return "prefill" if self is DisaggregationMode.PREFILL else "backend"


class NativeDisaggregationMode(IntEnum):
    """The low-level spelling of the same four roles (`dynamo._core.backend.DisaggregationMode`)."""

    Aggregated = 1
    Prefill = 2
    Decode = 3
    Encode = 4

    def __str__(self) -> str:
        return DisaggregationMode[self.name.upper()].value


class EmbeddingTransferMode(Enum):
    """How an encoder hands embeddings to the worker that consumes them."""

    LOCAL = "local"
    NIXL_WRITE = "nixl-write"
    NIXL_READ = "nixl-read"
    SHARED_MEMORY = "shared-memory"  # of this system: the native one has no such mode


_SLUGS: Final = {mode.value: mode for mode in DisaggregationMode} | {"aggregated": DisaggregationMode.AGGREGATED}


def parse_disaggregation_mode(text: str) -> DisaggregationMode:
    """Read a slug from a flag or a variable, any case. Raises InvalidArgument listing the four slugs."""
    mode = _SLUGS.get(text.strip().lower())
    if mode is None:
        raise InvalidArgument(
            f"unknown disaggregation mode {text!r}; use one of {', '.join(mode.value for mode in DisaggregationMode)}"
        )
    return mode


def coerce_disaggregation_mode(value: object) -> DisaggregationMode:
    """Accept None (aggregated), our enum, or another system's enum by member name. Raises TypeError otherwise.

    A string is refused on purpose: it would hide that a caller forgot to parse its own flag.
    """
    if value is None:
        return DisaggregationMode.AGGREGATED
    if isinstance(value, DisaggregationMode):
        return value
    if isinstance(value, Enum):
        mode = DisaggregationMode.__members__.get(value.name.upper())
        if mode is not None:
            return mode
    raise TypeError(
        f"disaggregation_mode must be a DisaggregationMode, got {value!r}; "
        "parse text with dynamo.contract.modes.parse_disaggregation_mode"
    )


def native_disaggregation_mode(mode: DisaggregationMode) -> NativeDisaggregationMode:
    """Return the low-level member of the same role."""
    return NativeDisaggregationMode[mode.name.capitalize()]
