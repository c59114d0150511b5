"""What multimodal requests carry, and the handoff from an encode worker to the one that generates."""

from __future__ import annotations

from typing import Any, Final

from dynamo.contract.chunks import CompletionUsage, GenerateChunk, final_chunk
from dynamo.contract.modes import DisaggregationMode

__all__ = ["encoder_terminal_chunk", "extract_multimodal_kwargs", "require_encoder_result"]

_MULTIMODAL_KEYS: Final = ("multi_modal_data", "mm_processor_kwargs")


def extract_multimodal_kwargs(request: Any) -> dict[str, Any] | None:
    """The multimodal members that are set; an empty dict counts as set. None: a request of text only."""
    found = {key: request[key] for key in _MULTIMODAL_KEYS if request.get(key) is not None}
    return found or None


def require_encoder_result(request: Any, mode: DisaggregationMode) -> dict[str, Any]:
    """What the encode worker handed over, the very object. Raises ValueError when it is missing or no object."""
    result = request.get("encoder_result")
    if result is None:
        raise ValueError(
            f"{mode.value} worker received request with no encoder_result; "
            "start an encode worker, or run this worker without --route-to-encoder"
        )
    if not isinstance(result, dict):
        raise ValueError(f"encoder_result must be a JSON object, got {type(result).__name__}")
    return result


def encoder_terminal_chunk(result: dict[str, Any], completion_usage: CompletionUsage | None = None) -> GenerateChunk:
    """The one chunk of an encode worker's stream: no tokens, the handoff. Raises TypeError for a non-dict."""
    if not isinstance(result, dict):
        raise TypeError(f"encoder_result must be a dict, got {type(result).__name__}")
    terminal = final_chunk("stop", usage=completion_usage)
    terminal["encoder_result"] = result
    return terminal
