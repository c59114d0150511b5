"""Log records under the native path, and the same format for engines that configure their own loggers.

Records are made in `dynamo.runtime.observe.logging`; a name like `VllmColorFormatter` is one that configurations refer to.
"""

from __future__ import annotations

import atexit
import copy
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from dynamo.runtime.observe.logging import (
    LEVELS,
    LogFilter,
    LoggingSettings,
    LoggingVariables,
    LogHandler,
    configure_dynamo_logging,
    format_jsonl,
    format_readable,
)
from dynamo.settings.foreign import has_colour
from dynamo.settings.readers import switch
from dynamo.settings.table import declared

__all__ = [
    "LogHandler", "VllmColorFormatter", "configure_dynamo_logging", "configure_logger", "configure_sglang_logging",
    "configure_vllm_logging", "construct_formatter_prefix", "get_bool_env_var", "log_level_mapping",
    "python_log_level_mapping",
]  # fmt: skip

logger = logging.getLogger(__name__)

KEEP_SGLANG_FORMAT: Final = declared(
    "DYN_SKIP_SGLANG_LOG_FORMATTING", switch, "`configure_sglang_logging` leaves SGLang's loggers alone", unset=False
)


def configure_logger(service_name: str | None, worker_id: int | None, level: int = logging.INFO) -> None:
    """Take over the root logger, as `configure_dynamo_logging`, from `level` on."""
    configure_dynamo_logging(service_name, worker_id)
    logging.getLogger().setLevel(level)


def construct_formatter_prefix(service_name: str | None, worker_id: int | None) -> str:
    """Return `service:worker`, without what is None."""
    named = "" if service_name is None else service_name.strip()
    return named if worker_id is None else f"{named}:{worker_id}"


def log_level_mapping(level: str) -> int:
    """Return the number of a level's name; INFO for `trace` and for any other word."""
    found = LEVELS.get(level.lower(), logging.INFO)
    return found if logging.DEBUG <= found <= logging.CRITICAL else logging.INFO


def python_log_level_mapping(filters: str) -> int:
    """Return the lowest level that a list of filters, as in DYN_LOG, lets through: DEBUG where a file of levels is set."""
    file = LoggingVariables.from_env().config_path
    return logging.DEBUG if file is not None and file.is_file() else max(LogFilter.parse(filters).lowest, logging.DEBUG)


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Read a variable as true or 1, false or 0. Any other text is False, with a warning."""
    given = os.environ.get(name, default).strip().lower()
    if given not in ("true", "1", "false", "0"):
        logger.warning("%s=%r is neither true nor false; using false", name, given)
    return given in ("true", "1")


class VllmColorFormatter(logging.Formatter):
    """Formats the records of an engine as this process formats its own, under `file.function`."""

    def __init__(self) -> None:
        super().__init__()
        self._settings = LoggingSettings.from_env(is_tty=has_colour(sys.stderr, os.environ))

    def format(self, record: logging.LogRecord) -> str:
        named = copy.copy(record)
        named.name = f"{record.module}.{record.funcName}"
        if self._settings.jsonl:
            return format_jsonl(named, local_time=self._settings.local_time)
        return format_readable(named, ansi=self._settings.ansi, local_time=self._settings.local_time)


class HealthCheckFilter(logging.Filter):
    """Drops what vLLM logs of each health check at DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG or record.funcName != "check_health"


def configure_vllm_logging(dyn_level: int) -> None:
    """Make vLLM, and the processes that it starts, log in this format; call it before vLLM is imported.

    The level is VLLM_LOGGING_LEVEL, else `dyn_level`.
    """
    os.environ["VLLM_CONFIGURE_LOGGING"] = "1"
    level = os.environ.get("VLLM_LOGGING_LEVEL") or logging.getLevelName(dyn_level)
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = _written(level, "vllm")


def configure_sglang_logging(dyn_level: int) -> None:
    """Make SGLang and its memory service log in this format, from `dyn_level` on; call it before SGLang is imported."""
    if not KEEP_SGLANG_FORMAT.value(os.environ):
        level = logging.getLevelName(dyn_level)
        os.environ["SGLANG_LOGGING_CONFIG_PATH"] = _written(level, "sglang", "gpu_memory_service")


def _written(level: str, *loggers: str) -> str:
    """Return the path of a configuration of these loggers; the file goes with this process."""
    own: dict[str, Any] = {"handlers": ["stderr"], "level": level, "propagate": False}
    handler = {
        "class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "dynamo", "filters": ["health"],
    }  # fmt: skip
    content = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"dynamo": {"()": f"{__name__}.{VllmColorFormatter.__name__}"}},
        "filters": {"health": {"()": f"{__name__}.{HealthCheckFilter.__name__}"}},
        "handlers": {"stderr": handler},
        "loggers": dict.fromkeys(loggers, own),
    }
    with tempfile.NamedTemporaryFile("w", prefix="dynamo_logging_", suffix=".json", delete=False) as file:
        json.dump(content, file)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return file.name
