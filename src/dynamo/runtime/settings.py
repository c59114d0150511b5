"""Environment variables, read once at the edge into plain values.

The helpers follow one rule: unset and empty mean the default; a value that cannot be read is a warning naming the
variable and the default, never a crash at 3 a.m.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

TRUTHY: Final = frozenset({"1", "true", "on", "yes"})
FALSY: Final = frozenset({"", "0", "false", "off", "no"})


def env_str(name: str, default: str | None = None, *, env: Mapping[str, str] | None = None) -> str | None:
    """The variable's text, or `default` when it is unset or blank."""
    value = (os.environ if env is None else env).get(name, "").strip()
    return value or default


def env_bool(name: str, default: bool = False, *, env: Mapping[str, str] | None = None) -> bool:
    """1/true/on/yes or 0/false/off/no, any case."""
    value = env_str(name, env=env)
    if value is None:
        return default
    if value.lower() in TRUTHY:
        return True
    if value.lower() not in FALSY:
        logger.warning("%s=%r is neither true nor false; using %s", name, value, default)
        return default
    return False


def env_int(name: str, default: int, *, minimum: int | None = None, env: Mapping[str, str] | None = None) -> int:
    """An integer, at least `minimum`."""
    value = env_str(name, env=env)
    if value is None:
        return default
    try:
        number = int(value)
    except ValueError:
        logger.warning("%s=%r is not an integer; using %s", name, value, default)
        return default
    if minimum is not None and number < minimum:
        logger.warning("%s=%r is below %s; using %s", name, value, minimum, minimum)
        return minimum
    return number


def env_float(
    name: str, default: float, *, minimum: float | None = None, env: Mapping[str, str] | None = None
) -> float:
    """A finite number, at least `minimum`."""
    value = env_str(name, env=env)
    if value is None:
        return default
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        logger.warning("%s=%r is not a finite number; using %s", name, value, default)
        return default
    if minimum is not None and number < minimum:
        logger.warning("%s=%r is below %s; using %s", name, value, minimum, minimum)
        return minimum
    return number
