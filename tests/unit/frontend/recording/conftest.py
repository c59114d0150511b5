"""Fixtures of this folder."""

from support.spans import exported

__all__ = ["exported"]
