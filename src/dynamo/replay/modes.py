"""The router modes that a replay knows, by name, and what makes their frontends. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.placement.policies import RouterMode
from dynamo.replay.frontend import CountingFrontend, MakeFrontend

__all__ = ["MODES", "check_mode", "frontend_of"]

_COUNTING: Final = (RouterMode.ROUND_ROBIN, RouterMode.RANDOM, RouterMode.LEAST_LOADED, RouterMode.POWER_OF_TWO)
MODES: Final[tuple[str, ...]] = tuple(mode.value for mode in _COUNTING)

PolicyParameters = Mapping[str, object]


def check_mode(name: str) -> None:
    """Raise InvalidArgument for a mode that cannot be replayed."""
    if name not in MODES:
        raise InvalidArgument(f"there is no mode {name!r} to replay; use {', '.join(MODES)}")


def frontend_of(name: str) -> MakeFrontend:
    """Return what makes frontends of a mode. Raises InvalidArgument for an unknown one."""
    check_mode(name)
    mode = RouterMode(name)
    return lambda seed: CountingFrontend(mode, random.Random(f"{seed} {mode}"))
