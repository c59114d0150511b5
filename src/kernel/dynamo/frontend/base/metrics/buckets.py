"""The buckets of a frontend's histograms, and the settings that change them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from dynamo.runtime.base.settings import env_float, env_int

MAX_BUCKETS: Final = 64  # a histogram is scraped whole; more buckets than this add no information


def log_buckets(minimum: float, maximum: float, count: int) -> tuple[float, ...]:
    """Return `count` upper bounds, log-spaced from `minimum` to `maximum`, to two significant digits, the first one replaced by 0.

    Raises ValueError unless 0 < minimum < maximum and 2 <= count <= 64.
    """
    if not 0 < minimum < maximum or not 2 <= count <= MAX_BUCKETS:
        raise ValueError(f"need 0 < min < max and 2 <= count <= {MAX_BUCKETS}, got {minimum}, {maximum}, {count}")
    ratio = math.log(maximum / minimum) / (count - 1)
    bounds = {_two_digits(minimum * math.exp(ratio * step)) for step in range(1, count)}
    return (0.0, *sorted(bounds))


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


LOG_BUCKETS: Final[Mapping[str, tuple[float, float, int]]] = {
    "REQUEST_DURATION": (1, 512, 10),
    "INPUT_SEQUENCE_TOKENS": (50, 128_000, 12),
    "CACHED_TOKENS": (50, 128_000, 12),
    "OUTPUT_SEQUENCE_TOKENS": (50, 32_000, 10),
    "TTFT": (0.001, 480, 18),
    "ITL": (0.001, 80, 20),
}


def check_buckets(env: Mapping[str, str]) -> None:
    """Check the `DYN_HISTOGRAM_*` settings. Raises ValueError naming the variables of a setting that makes no valid buckets."""
    for name in LOG_BUCKETS:
        buckets_of(name, env)


def buckets_of(name: str, env: Mapping[str, str]) -> tuple[float, ...]:
    """Return the buckets of one of `LOG_BUCKETS`. Raises ValueError naming the variables that make none."""
    low, high, count = LOG_BUCKETS[name]
    prefix = f"DYN_HISTOGRAM_{name}"
    chosen = (
        env_float(f"{prefix}_MIN", low, env=env),
        env_float(f"{prefix}_MAX", high, env=env),
        env_int(f"{prefix}_COUNT", count, env=env),
    )
    try:
        return log_buckets(*chosen)
    except ValueError as error:
        raise ValueError(f"{prefix}_MIN, _MAX, _COUNT: {error}") from None
