"""The health check payload: what a canary sends, what may replace it, how an engine builds and recognises one."""

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
    "bos_token_id_or",
    "build_health_check_payload",
    "build_raw_health_check_payload",
    "is_probe",
    "load_health_check_from_env",
    "parse_health_check_payload",
    "parse_health_check_payload_cli",
    "resolve_health_check_payload",
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
    """Return a copy of `payload` that an engine can distinguish from a client's request."""
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


def is_probe(request: Mapping[str, Any]) -> bool:
    """Return whether a request is the framework's health check (the marker is `True` itself, not 1 or "true")."""
    return isinstance(request, Mapping) and request.get(HEALTH_CHECK_KEY) is True


def bos_token_id_or(tokenizer: Any, default: int = 1) -> int:
    """Return the tokenizer's bos id, or the bos id of the tokenizer that it wraps, or `default`."""
    for holder in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        found = getattr(holder, "bos_token_id", None)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return default


def build_health_check_payload(bos_token_id: int, *, extras: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Request one greedy token from one bos token, with `extras` on top; `DYN_HEALTH_CHECK_PAYLOAD` replaces all of it."""
    return build_raw_health_check_payload(
        {
            "token_ids": [bos_token_id],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
            **(extras or {}),
        }
    )


def build_raw_health_check_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return `payload`, or the environment's payload if there is one (also `{}`), with the marker."""
    override = load_health_check_from_env()
    return with_marker(payload if override is None else override)


def parse_health_check_payload_cli(value: str | None) -> dict[str, Any] | None:
    """Read the payload of `--health-check-payload` (JSON or `@/path`), with the marker; None when absent or unusable."""
    if not value:
        return None
    found = parse_health_check_payload(value, source="--health-check-payload")
    return None if found is None else with_marker(found)


def resolve_health_check_payload(
    operator: Any, engine: Any, *, env: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Choose the payload a worker probes with: the operator's configuration, else the environment's, else the engine's own.

    None means there is no canary: there is no payload, or the payload that counts is not an object (a WARNING reports that).
    """
    candidates = (
        ("WorkerConfig.health_check_payload", operator),
        ("DYN_HEALTH_CHECK_PAYLOAD", load_health_check_from_env(env=env)),
        ("the engine's health_check_payload()", engine),
    )
    for source, payload in candidates:
        if payload is None:
            continue
        if isinstance(payload, Mapping):
            return with_marker(payload)
        logger.warning("%s must be a dict, got %s; the health canary is off", source, type(payload).__name__)
        return None
    return None
