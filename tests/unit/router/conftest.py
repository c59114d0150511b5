"""Fixtures of this folder."""

from support.courses import valid_courses

__all__ = ["valid_courses"]
