"""What ends a build with one sentence and status 2."""

from __future__ import annotations

__all__ = ["CannotBuild"]


class CannotBuild(Exception):
    """The image cannot be built; the text says what to change."""
