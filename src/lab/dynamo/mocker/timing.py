"""How long a pass takes: polynomials by default, fixed times, or the measurements of a profiler.

prefill(n) = 4.209989e-07 n^2 + 1.518344e-02 n + 16.50142 ms     n: prompt tokens that the pass computes
decode(p)  = max(1, -25.74 p^2 + 54.01 p + 5.74) ms              p: the part of the cache that decoding requests use

The measurements are an NPZ file with tables that are interpolated:

    prefill_isl, prefill_ttft_ms                                    one dimension, linear
    decode_active_kv_tokens, decode_context_length, decode_itl      two axes and a table, bilinear

A directory is a profiler's result: `selected_prefill_interpolation/raw_data.npz` and
`selected_decode_interpolation/raw_data.npz` beside each other, with the same arrays between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.settings.extras import install_command

if TYPE_CHECKING:
    import numpy as np

LEAST_DECODE_MS: Final = 1.0


class PolynomialTiming:
    """The default: what one 8-billion-parameter model takes on one accelerator of its time, as polynomials."""

    def prefill_ms(self, requests: int, mean_input: int, mean_prefix: int) -> float:
        tokens = requests * (mean_input - mean_prefix)
        if tokens <= 0:
            return 0.0
        return 4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 16.50142

    def decode_ms(self, active_tokens: int, mean_context: int, total_tokens: int) -> float:
        part = min(1.0, active_tokens / total_tokens)
        return max(LEAST_DECODE_MS, -25.74 * part * part + 54.01 * part + 5.74)


@dataclass(frozen=True, slots=True)
class FixedTiming:
    """The same times whatever the pass does: one for a pass with prompt tokens, and one for a pass that decodes."""

    prefill: float
    decode: float

    def __post_init__(self) -> None:
        for name, value in (("prefill_ms", self.prefill), ("decode_ms", self.decode)):
            if not 0 <= value < float("inf"):
                raise InvalidArgument(f"timing_model.{name} must be a finite number of at least 0, got {value}")

    def prefill_ms(self, requests: int, mean_input: int, mean_prefix: int) -> float:
        return self.prefill

    def decode_ms(self, active_tokens: int, mean_context: int, total_tokens: int) -> float:
        return self.decode


_PREFILL: Final = ("prefill_isl", "prefill_ttft_ms")
_DECODE: Final = ("decode_active_kv_tokens", "decode_context_length", "decode_itl")
_FORMS: Final = (
    "a profile is an NPZ file with prefill_isl, prefill_ttft_ms, decode_active_kv_tokens, decode_context_length and "
    "decode_itl, or a directory with selected_prefill_interpolation/raw_data.npz and "
    "selected_decode_interpolation/raw_data.npz, or one with prefill_raw_data.json and decode_raw_data.json"
)


class ProfileTiming:
    """Times by interpolation; outside the measured grid they are 0, and a decode step at least 1 ms."""

    def __init__(
        self,
        prefill: tuple[Sequence[float], Sequence[float]],
        decode: tuple[Sequence[float], Sequence[float], Sequence[Sequence[float]]],
    ) -> None:
        """`prefill`: tokens and times. `decode`: active tokens, context lengths, and a row of times for each of the first."""
        self._prefill = prefill
        self._decode = decode

    def prefill_ms(self, requests: int, mean_input: int, mean_prefix: int) -> float:
        tokens = requests * (mean_input - mean_prefix)
        axis, times = self._prefill
        place = _place(axis, tokens)
        if tokens <= 0 or place is None:
            return 0.0
        number, part = place
        return max(0.0, times[number] + part * (times[number + 1] - times[number]))

    def decode_ms(self, active_tokens: int, mean_context: int, total_tokens: int) -> float:
        active, contexts, times = self._decode
        row, column = _place(active, active_tokens), _place(contexts, mean_context)
        if row is None or column is None:
            return LEAST_DECODE_MS
        (i, down), (j, right) = row, column
        above = times[i][j] + right * (times[i][j + 1] - times[i][j])
        below = times[i + 1][j] + right * (times[i + 1][j + 1] - times[i + 1][j])
        return max(LEAST_DECODE_MS, above + down * (below - above))


def _place(axis: Sequence[float], value: float) -> tuple[int, float] | None:
    """Return (number of the interval, part of it before `value`); None outside the axis."""
    if not axis[0] <= value <= axis[-1]:
        return None
    number = min(bisect_right(axis, value), len(axis) - 1) - 1
    return number, (value - axis[number]) / (axis[number + 1] - axis[number])


def read_profile(path: Path) -> ProfileTiming:
    """Read a profile; blocking. Raises InvalidArgument that lists the accepted forms."""
    try:
        import numpy as np
    except ImportError as error:
        raise InvalidArgument(f"timing from a profile needs NumPy: {install_command('reference')}") from error
    halves = [path / f"selected_{half}_interpolation" / "raw_data.npz" for half in ("prefill", "decode")]
    if path.is_dir() and (path / "prefill_raw_data.json").is_file() and not halves[0].is_file():
        raise InvalidArgument(f"{path}: profiles in the form prefill_raw_data.json are not built in this version")
    files = halves if path.is_dir() else [path]
    arrays: JsonObject = {}
    try:
        for file in files:
            with np.load(file, allow_pickle=False) as loaded:
                if isinstance(loaded, np.ndarray):
                    raise InvalidArgument(f"{file} holds one array without a name; {_FORMS}")
                arrays |= {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"profile {path} cannot be read ({error}); {_FORMS}") from error
    return _timing(arrays, path)


def _timing(arrays: Mapping[str, np.ndarray[Any, Any]], path: Path) -> ProfileTiming:
    for name in (*_PREFILL, *_DECODE):
        if name not in arrays:
            raise InvalidArgument(f"profile {path} has no array {name}; {_FORMS}")
    lengths, ttfts = (arrays[name] for name in _PREFILL)
    active, contexts, itls = (arrays[name] for name in _DECODE)
    if lengths.ndim != 1 or lengths.shape != ttfts.shape or active.ndim != 1 or contexts.ndim != 1:
        raise InvalidArgument(
            f"profile {path}: the axes must have one dimension, and prefill_ttft_ms that of prefill_isl"
        )
    if itls.shape != (len(active), len(contexts)):
        raise InvalidArgument(
            f"profile {path}: decode_itl must have the shape {(len(active), len(contexts))}, got {itls.shape}"
        )
    for name in (_PREFILL[0], *_DECODE[:2]):
        axis = arrays[name]
        if len(axis) < 2 or not bool((axis[1:] > axis[:-1]).all()):
            raise InvalidArgument(f"profile {path}: {name} must grow, and have at least two values")
    for name in (_PREFILL[1], _DECODE[2]):
        if not bool((abs(arrays[name]) < float("inf")).all()):
            raise InvalidArgument(f"profile {path}: {name} must be finite")
    return ProfileTiming((lengths.tolist(), ttfts.tolist()), (active.tolist(), contexts.tolist(), itls.tolist()))
