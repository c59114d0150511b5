"""The health check payload: what a canary sends, what may replace that, and how an engine recognises it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

__all__ = [
    "HEALTH_CHECK_KEY",
    "PAYLOAD_VARIABLE",
    "HealthCheckPayload",
    "load_health_check_from_env",
    "parse_health_check_payload",
    "with_marker",
]

HEALTH_CHECK_KEY: Final = "_HEALTH_CHECK"
"""A request with this key set to `True` is a probe. Only the very value `True` counts, so that no client's JSON number
or string passes for one by accident."""

PAYLOAD_VARIABLE: Final = "DYN_HEALTH_CHECK_PAYLOAD"

MAX_PAYLOAD_BYTES: Final = 1024 * 1024  # a probe is one small request; a larger file is a wrong path


def parse_health_check_payload(text: str, *, source: str) -> dict[str, Any] | None:
    """Read the object in `text` (JSON, or `@/path` of a JSON file); None and a WARNING naming `source` when there is none."""
    text = text.strip()
    try:
        if text.startswith("@"):
            path = Path(text[1:])
            if path.stat().st_size > MAX_PAYLOAD_BYTES:
                raise ValueError(f"{path} is larger than {MAX_PAYLOAD_BYTES} bytes")
            text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        logger.warning("%s is not usable as a health check payload (%s); it is ignored", source, error)
        return None
    if not isinstance(found, dict):
        logger.warning("%s must be a JSON object, got %s; it is ignored", source, type(found).__name__)
        return None
    return found


def load_health_check_from_env(
    variable: str = PAYLOAD_VARIABLE, *, env: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Read the operator's payload, without the marker; None when the variable is unset, blank or unusable."""
    text = (os.environ if env is None else env).get(variable, "").strip()
    return parse_health_check_payload(text, source=variable) if text else None


def with_marker(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `payload` that an engine can tell from a client's request."""
    return {**payload, HEALTH_CHECK_KEY: True}


class HealthCheckPayload:
    """Base of an engine's payload: a subclass sets `self.default_payload`, then calls `super().__init__()`.

    The environment replaces the default as a whole, also with `{}`.
    """

    default_payload: dict[str, Any]

    def __init__(self) -> None:
        if not isinstance(getattr(self, "default_payload", None), dict):
            raise NotImplementedError(
                f"{type(self).__name__} must set self.default_payload (a dict) before super().__init__()"
            )
        self._payload: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the payload to send, marker included; computed once."""
        if self._payload is None:
            override = load_health_check_from_env()
            self._payload = with_marker(self.default_payload if override is None else override)
        return self._payload
