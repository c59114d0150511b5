"""The profile of an engine: how long its passes take and how much it holds, as a JSON file. Pure but for the file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from dynamo.cli.usage import UsageError
from dynamo.errors import InvalidArgument
from dynamo.mocker.timing import LEAST_DECODE_MS, PolynomialTiming
from dynamo.scheduling import PassTiming, SchedulerOptions

MOCKER: Final = "mocker"
BEYOND: Final = 1.25  # of the largest measured value; further out a line is only a guess

Points = Sequence[tuple[float, float]]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One replica of an engine. Times are milliseconds, lengths are tokens."""

    name: str
    times: Literal["mocker", "measured"]
    """`mocker`: the mocker's own formulas; `measured`: the two curves."""
    kv_blocks: int
    block_size: int
    max_batched_tokens: int
    max_sequences: int
    prefill: tuple[tuple[int, float], ...] = ()
    """(prompt tokens that a pass computes, its time)"""
    decode: tuple[tuple[int, int, float], ...] = ()
    """(sequences, tokens of context of each, the time of one step)"""
    overhead_ms: float = 0.0
    """From the client to the engine and back: added to the time to first token."""
    transfer_ms_per_1k_tokens: float = 0.0
    """A prompt's way from a prefill worker to a decode worker."""
    scheduler: str = "vllm"
    max_model_len: int | None = None
    speedup_ratio: float = 1.0
    """Divides the times of passes: what an engine so many times as fast would do."""
    comment: str = ""

    def check(self) -> None:
        """Raise InvalidArgument, naming the member."""
        for name in ("kv_blocks", "block_size", "max_batched_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("overhead_ms", "transfer_ms_per_1k_tokens"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidArgument(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 < self.speedup_ratio < float("inf"):
            raise InvalidArgument(f"speedup_ratio must be above 0, got {self.speedup_ratio}")
        if self.times == MOCKER and (self.prefill or self.decode):
            raise InvalidArgument('prefill and decode belong to times "measured"')
        if self.times != MOCKER:
            self._check_curves()
        self.options()

    def _check_curves(self) -> None:
        if not self.prefill or not self.decode:
            raise InvalidArgument('times "measured" needs both curves, prefill and decode')
        for name, row in (*(("prefill", row) for row in self.prefill), *(("decode", row) for row in self.decode)):
            if not all(0 < value < float("inf") for value in row):
                raise InvalidArgument(f"{name}: every value must be above 0, got {list(row)}")
        for name, keys in (
            ("prefill", [row[0] for row in self.prefill]),
            ("decode", [row[:2] for row in self.decode]),
        ):
            if keys != sorted(set(keys)):  # type: ignore[type-var]
                raise InvalidArgument(f"{name}: the rows must rise, none twice")

    def options(self) -> SchedulerOptions:
        """Return the simulated engine. Raises InvalidArgument."""
        return SchedulerOptions(
            backend=self.scheduler,
            num_gpu_blocks=self.kv_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_sequences,
            max_num_batched_tokens=self.max_batched_tokens,
            speedup_ratio=self.speedup_ratio,
        )

    def timing(self) -> PassTiming:
        """Return how long its passes take."""
        return PolynomialTiming() if self.times == MOCKER else CurveTiming(self)


class CurveTiming:
    """Times by interpolation in measured curves: below the first point as there, beyond the last one on the last line."""

    def __init__(self, profile: Profile) -> None:
        self._prefill: Points = profile.prefill
        contexts: dict[int, list[tuple[float, float]]] = {}
        for sequences, context, milliseconds in profile.decode:
            contexts.setdefault(sequences, []).append((context, milliseconds))
        self._decode = dict(_with_slopes(contexts))
        self._most = (self._prefill[-1][0], max(contexts), max(row[1] for row in profile.decode))
        self.is_beyond = False
        """Whether a time was needed that is far outside of what was measured."""

    def prefill_ms(self, requests: int, mean_input: int, mean_prefix: int) -> float:
        tokens = requests * (mean_input - mean_prefix)
        if tokens <= 0:
            return 0.0
        self.is_beyond |= tokens > BEYOND * self._most[0]
        return max(0.0, _on_line(self._prefill, tokens))

    def decode_ms(self, active_tokens: int, mean_context: int, total_tokens: int) -> float:
        sequences = active_tokens / max(1, mean_context)
        self.is_beyond |= sequences > BEYOND * self._most[1] or mean_context > BEYOND * self._most[2]
        rows = [(count, _on_line(curve, mean_context)) for count, curve in self._decode.items()]
        return max(LEAST_DECODE_MS, _on_line(rows, sequences))


def _with_slopes(rows: Mapping[int, list[tuple[float, float]]]) -> Iterator[tuple[int, Points]]:
    """Give a row of one point the slope of the row before it: each sequence has as much more context to read there."""
    steeper = 0.0  # ms for a token of context of one sequence
    for sequences, row in rows.items():
        if len(row) == 1:
            context, milliseconds = row[0]
            row = [*row, (2 * context, milliseconds + steeper * sequences * context)]
        (left, low), (right, high) = row[0], row[-1]
        steeper = max(0.0, high - low) / (right - left) / sequences
        yield sequences, row


def _on_line(points: Points, at: float) -> float:
    """Interpolate; `points` rise."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    number = min(bisect_right(points, at, key=lambda point: point[0]), len(points) - 1)
    (left, low), (right, high) = points[number - 1], points[number]
    return low + (high - low) * (at - left) / (right - left)


BUILT_IN: Final = Profile(
    name=MOCKER,
    times="mocker",
    kv_blocks=16384,
    block_size=64,
    max_batched_tokens=8192,
    max_sequences=256,
)


def read_profile(given: str) -> Profile:
    """Read a profile from a file, or return the built-in one. Raises UsageError naming --profile."""
    if given == MOCKER:
        return BUILT_IN
    path = Path(given)
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
        profile.check()
    except OSError as error:
        raise UsageError(f"--profile: cannot read {given}: {error.strerror} (or {MOCKER}, which is built in)") from None
    except (msgspec.MsgspecError, InvalidArgument) as error:
        raise UsageError(f"--profile: {given}: {error}") from None
    return profile


def profile_text(profile: Profile) -> str:
    """Return a profile as it stands in a file."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1).decode() + "\n"
