"""Health check payloads of an engine: build one, recognise one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dynamo.health_check import (
    HEALTH_CHECK_KEY,
    load_health_check_from_env,
    parse_health_check_payload,
    with_marker,
)

logger = logging.getLogger(__name__)

__all__ = [
    "HEALTH_CHECK_KEY",
    "bos_token_id_or",
    "build_health_check_payload",
    "build_raw_health_check_payload",
    "is_probe",
    "parse_health_check_payload_cli",
    "resolve_health_check_payload",
]


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
