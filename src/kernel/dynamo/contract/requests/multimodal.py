"""What multimodal requests carry, and the hand-off from an encode worker to the worker that generates."""

from __future__ import annotations

from typing import Any, Final

from dynamo.contract.chunks import CompletionUsage, GenerateChunk, final_chunk
from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.requests.invalid import InvalidRequest

__all__ = ["encoder_terminal_chunk", "extract_multimodal_kwargs", "require_encoder_result"]

_MULTIMODAL_KEYS: Final = ("multi_modal_data", "mm_processor_kwargs")


def extract_multimodal_kwargs(request: Any) -> dict[str, Any] | None:
    """Return the multimodal members that are set; an empty dict counts as set. None: a request of text only."""
    found = {key: request[key] for key in _MULTIMODAL_KEYS if request.get(key) is not None}
    return found or None


def require_encoder_result(request: Any, mode: DisaggregationMode) -> dict[str, Any]:
    """Return what the encode worker handed over, the very object. Raises InvalidRequest when it is missing or not an object."""
    result = request.get("encoder_result")
    if result is None:
        raise InvalidRequest(
            f"{mode.value} worker received request with no encoder_result; "
            "start an encode worker, or run this worker without --route-to-encoder"
        )
    if not isinstance(result, dict):
        raise InvalidRequest(f"encoder_result must be a JSON object, got {type(result).__name__}")
    return result


def encoder_terminal_chunk(
    encoder_result: dict[str, Any], *, completion_usage: CompletionUsage | None = None
) -> GenerateChunk:
    """Make the one chunk of an encode worker's stream: no tokens, the hand-off. Raises TypeError for a non-dict."""
    if not isinstance(encoder_result, dict):
        raise TypeError(f"encoder_result must be a dict, got {type(encoder_result).__name__}")
    terminal = final_chunk("stop", usage=completion_usage)
    terminal["encoder_result"] = encoder_result
    return terminal
