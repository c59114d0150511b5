"""Facade: the health check payloads of `dynamo.contract.health_check` under the native path."""

from dynamo.contract.health_check import (
    HEALTH_CHECK_KEY,
    PAYLOAD_VARIABLE,
    HealthCheckPayload,
    load_health_check_from_env,
    parse_health_check_payload,
    with_marker,
)

__all__ = [
    "HEALTH_CHECK_KEY",
    "PAYLOAD_VARIABLE",
    "HealthCheckPayload",
    "load_health_check_from_env",
    "parse_health_check_payload",
    "with_marker",
]
