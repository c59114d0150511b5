"""Fixtures of this folder."""

from support.courses import valid_courses
from support.spans import exported

__all__ = ["exported", "valid_courses"]
