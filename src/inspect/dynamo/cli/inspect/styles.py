"""The colours of tones, in the sixteen colours that every terminal has: they follow its own light or dark scheme."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dynamo.cli.inspect.lines import Tone

_STYLES: Final[Mapping[Tone, str]] = MappingProxyType(
    {
        Tone.NORMAL: "",
        Tone.DIM: "dim",
        Tone.STRONG: "bold",
        Tone.GOOD: "green",
        Tone.WARN: "yellow",
        Tone.BAD: "bold red",
        Tone.ACCENT: "cyan",
    }
)


def rich_style(tone: Tone) -> str:
    """Return the style of a tone for the printer of `--once`."""
    return _STYLES[tone]
