"""Figures as a terminal shows them: ages, counts, shares, bars, sparklines. What is not known is `-`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

UNKNOWN: Final = "-"
_STEPS: Final = "▁▂▃▄▅▆▇█"
_UNITS: Final = ((86_400.0, "d"), (3600.0, "h"), (60.0, "m"))


def age(seconds: float | None) -> str:
    """Return a duration in its largest whole unit: 41s, 12m, 3h, 2d."""
    if seconds is None:
        return UNKNOWN
    seconds = max(0.0, seconds)
    for size, unit in _UNITS:
        if seconds >= size * (2 if unit == "m" else 1):  # 90s is more precise than 1m
            return f"{seconds / size:.0f}{unit}" if seconds < size * 1000 else f"{count(seconds / size)}{unit}"
    return f"{seconds:.0f}s"


def exact(seconds: float | None) -> str:
    """Return a short duration with its fractions: 0.2ms, 84ms, 1.61s, 36.4s; a long one as `age` does."""
    if seconds is None:
        return UNKNOWN
    seconds = max(0.0, seconds)
    if seconds < 0.001:
        return "0ms" if seconds == 0 else f"{seconds * 1000:.1f}ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if seconds < 99.95 else age(seconds)


def milliseconds(seconds: float | None) -> str:
    """Return a duration as a bare number of milliseconds."""
    return UNKNOWN if seconds is None else count(seconds * 1000)


def count(number: float | None) -> str:
    """Return a whole number with commas, a large one shortened: 6,210, 1.2M."""
    if number is None:
        return UNKNOWN
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(number) >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:,.0f}"


def short(number: float | None) -> str:
    """Return a round number as a person writes it: 4k, 128k; else as `count` does."""
    if number is not None and number >= 1000 and number % 1024 == 0:
        return f"{number / 1024:,.0f}k"
    return count(number)


def per_second(rate: float | None) -> str:
    """Return a rate: one digit behind the point while it is small."""
    if rate is None:
        return UNKNOWN
    return f"{rate:.1f}" if 0 < abs(rate) < 99.95 else count(rate)


def percent(share: float | None) -> str:
    """Return a share as a whole number of percent; a small one keeps its digits."""
    if share is None:
        return UNKNOWN
    value = 100 * share
    return f"{value:.0f}" if value >= 9.95 or value == 0 else f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def bytes_of(number: int | None) -> str:
    """Return a size with its binary unit."""
    if number is None:
        return UNKNOWN
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def clock(ms: int | None, *, with_date: bool = False) -> str:
    """Return a time of day in this machine's zone."""
    if ms is None:
        return UNKNOWN
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S", time.localtime(ms / 1000))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def bar(share: float | None, width: int) -> str:
    """Return a bar with its percent behind it, `width` cells in all; without room for a bar the percent alone."""
    if share is None:
        return UNKNOWN.rjust(width)
    figure = f"{100 * share:3.0f}"
    cells = width - len(figure) - 1
    if cells < 3:
        return figure.rjust(width)
    filled = round(max(0.0, min(1.0, share)) * cells)
    return "█" * filled + "░" * (cells - filled) + " " + figure


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the newest values as a line of blocks against the largest of them; `·` where there is none."""
    newest = values[-width:] if width > 0 else ()
    top = max((value for value in newest if value is not None), default=0.0)
    steps = [
        "·" if value is None else _STEPS[min(7, max(0, round(7 * value / top)))] if top > 0 else _STEPS[0]
        for value in newest
    ]
    return "".join(steps).rjust(width)
