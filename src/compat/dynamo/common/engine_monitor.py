"""How often an engine's process is checked, and how long its end may take: the settings of a monitor that an engine brings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Self

from dynamo.settings.readers import seconds
from dynamo.settings.table import declared

__all__ = [
    "ENGINE_HEALTH_CHECK_INTERVAL", "ENGINE_HEALTH_CHECK_INTERVAL_ENV", "ENGINE_HEALTH_CHECK_TIMEOUT",
    "ENGINE_HEALTH_CHECK_TIMEOUT_ENV", "ENGINE_HEALTH_SHUTDOWN_TIMEOUT", "ENGINE_HEALTH_SHUTDOWN_TIMEOUT_ENV",
    "EngineHealthMonitorConfig",
]  # fmt: skip

ENGINE_HEALTH_CHECK_INTERVAL: Final = 2.0
ENGINE_HEALTH_CHECK_INTERVAL_ENV: Final = "DYN_ENGINE_HEALTH_CHECK_INTERVAL"
ENGINE_HEALTH_CHECK_TIMEOUT: Final = 30.0
ENGINE_HEALTH_CHECK_TIMEOUT_ENV: Final = "DYN_ENGINE_HEALTH_CHECK_TIMEOUT"
ENGINE_HEALTH_SHUTDOWN_TIMEOUT: Final = 60.0
ENGINE_HEALTH_SHUTDOWN_TIMEOUT_ENV: Final = "DYN_ENGINE_HEALTH_SHUTDOWN_TIMEOUT"
SETTINGS: Final = tuple(
    declared(
        variable, seconds(), f"For engines that bring a monitor (`dynamo.common.engine_monitor`): {what}", unset=default
    )
    for variable, what, default in (
        (ENGINE_HEALTH_CHECK_INTERVAL_ENV, "between two checks", ENGINE_HEALTH_CHECK_INTERVAL),
        (ENGINE_HEALTH_CHECK_TIMEOUT_ENV, "for one check", ENGINE_HEALTH_CHECK_TIMEOUT),
        (ENGINE_HEALTH_SHUTDOWN_TIMEOUT_ENV, "for the end of a dead engine; 0: none", ENGINE_HEALTH_SHUTDOWN_TIMEOUT),
    )
)


@dataclass(frozen=True)
class EngineHealthMonitorConfig:
    """The three times of a monitor, in seconds."""

    interval: float
    check_timeout: float
    shutdown_timeout: float

    @classmethod
    def from_env(
        cls, *, interval: float | None = None, check_timeout: float | None = None, shutdown_timeout: float | None = None
    ) -> Self:
        """Read what is not given from the environment; a text that is not a number is a warning, and the default holds."""
        given = zip((interval, check_timeout, shutdown_timeout), SETTINGS, strict=True)
        return cls(*(made.value(os.environ) if value is None else value for value, made in given))
