"""The two halves of disaggregated serving, seen from an engine: prefill hands over, decode continues."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.requests.invalid import InvalidRequest

__all__ = ["enforce_prefill_max_tokens", "extract_prefill_result", "require_prefill_result"]

RequestT = TypeVar("RequestT", bound=Any)


def enforce_prefill_max_tokens(request: RequestT) -> RequestT:
    """Set `stop_conditions.max_tokens` to 1, in place, and return the request. For prefill workers; not checked here."""
    stop_conditions = request.get("stop_conditions")
    if stop_conditions is None:
        stop_conditions = request["stop_conditions"] = {}
    stop_conditions["max_tokens"] = 1
    return request


def extract_prefill_result(request: Any) -> dict[str, Any] | None:
    """Return what the prefill worker handed over, or None."""
    result = request.get("prefill_result")
    return cast("dict[str, Any]", result) if isinstance(result, dict) else None


def require_prefill_result(request: Any, mode: DisaggregationMode = DisaggregationMode.DECODE) -> dict[str, Any]:
    """Return what the prefill worker handed over. Raises InvalidRequest without it; let canaries (`is_probe`) pass first."""
    result = extract_prefill_result(request)
    if result is None:
        raise InvalidRequest(
            f"{mode.value} worker received request with no prefill_result; "
            "route it through a prefill worker, or run this worker with --disaggregation-mode agg"
        )
    return result
