"""The line that lives while a load runs; only on a terminal."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self, TextIO

from dynamo.cli.bench.load import Load
from dynamo.cli.bench.samples import Recorder
from dynamo.cli.bench.schedule import Shape

__all__ = ["Progress", "progress_text"]

EVERY_SECONDS: Final = 0.5
_CLEAR: Final = "\r\x1b[K"


class Progress:
    """Shows `load` on `stream` inside a `with` block."""

    def __init__(self, load: Load, shape: Shape, stream: TextIO) -> None:
        self._load, self._shape, self._stream = load, shape, stream
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._timer = self._loop.call_later(EVERY_SECONDS, self._show)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._write(_CLEAR)

    def _show(self) -> None:
        text = progress_text(self._load.recorder, self._shape, self._load.elapsed, self._load.in_flight)
        self._write(_CLEAR + text)
        self._timer = self._loop.call_later(EVERY_SECONDS, self._show)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal has gone; the run has not
            self._timer = None


def progress_text(recorder: Recorder, shape: Shape, elapsed: float, in_flight: int) -> str:
    """Format the progress as one line of at most about 100 characters."""
    elapsed = max(elapsed, 1e-9)
    total = f"/{shape.requests:,}" if shape.requests else ""
    time = f"{elapsed:.0f}/{shape.seconds:g} s" if shape.seconds else f"{elapsed:.0f} s"
    line = (
        f"{time}  {recorder.answered:,}{total} answered  {in_flight:,} in flight  "
        f"{recorder.answered / elapsed:,.1f} req/s  {max(recorder.output_tokens, recorder.text_events) / elapsed:,.0f} tokens/s"
    )
    if recorder.first_token.count:
        line += f"  TTFT {1e3 * recorder.first_token.quantile(0.5):.0f} ms"
    return line + (f"  {recorder.failed:,} failed" if recorder.failed else "")
