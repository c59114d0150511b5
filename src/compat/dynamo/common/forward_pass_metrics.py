"""What one forward pass of an engine computed, and what waited meanwhile: msgpack maps on the event plane."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

__all__ = [
    "FPM_VERSION", "ForwardPassMetrics", "QueuedRequestMetrics", "ScheduledRequestMetrics", "UnsupportedFpmVersionError",
    "WelfordAccumulator", "decode", "encode",
]  # fmt: skip

logger = logging.getLogger(__name__)

FPM_VERSION: Final = 1


class UnsupportedFpmVersionError(Exception):
    """The metrics are of a version that this one cannot read."""


class WelfordAccumulator:
    """The number, the sum and the variance of values that come one by one."""

    def __init__(self) -> None:
        self.n, self.s = 0, 0
        self._mean = self._squares = 0.0

    def add(self, v: int) -> None:
        """Add one value."""
        self.n += 1
        self.s += v
        distance = v - self._mean
        self._mean += distance / self.n
        self._squares += distance * (v - self._mean)

    def variance(self) -> float:
        """Return the variance of the population; 0.0 of none."""
        return self._squares / self.n if self.n else 0.0


class ScheduledRequestMetrics(msgspec.Struct, frozen=True):
    """The requests of this pass."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueuedRequestMetrics(msgspec.Struct, frozen=True):
    """The requests that waited."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class ForwardPassMetrics(msgspec.Struct, frozen=True):
    """One pass of one rank. `counter_id` counts the passes of the rank; `wall_time` is 0 for a rank that is idle."""

    version: int = FPM_VERSION
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0  # seconds
    scheduled_requests: ScheduledRequestMetrics = ScheduledRequestMetrics()
    queued_requests: QueuedRequestMetrics = QueuedRequestMetrics()


_decoder: Final = msgspec.msgpack.Decoder(ForwardPassMetrics)
encode: Final = msgspec.msgpack.Encoder().encode


def decode(data: bytes) -> ForwardPassMetrics | None:
    """Read the metrics of a pass; None, with a warning, for what is none or has another version."""
    try:
        found = _decoder.decode(data)
        if found.version != FPM_VERSION:
            raise UnsupportedFpmVersionError(f"version {found.version}, this one reads {FPM_VERSION}")
    except (msgspec.MsgspecError, UnsupportedFpmVersionError, ValueError, RecursionError) as error:
        logger.warning("forward-pass metrics are not read: %s", error)
        return None
    return found
