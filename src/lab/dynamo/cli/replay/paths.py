"""Which recorded requests may be sent again: those of the inference routes, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dynamo.frontend.settings import ROUTES

__all__ = ["inference_paths"]

_OVERRIDABLE: Final = ("chat", "completions", "responses", "messages", "embeddings")
_FIXED: Final = frozenset(
    {
        "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/classify", "/classify", "/v1/pooling", "/pooling",
        "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/audio/speech", "/v1/images/generations",
        "/v1/videos",
    }
)  # fmt: skip


def inference_paths(env: Mapping[str, str]) -> frozenset[str]:
    """Return the paths that a replay may post to: the usual ones, and those that this environment's settings name.

    A recording is only a file, and may come from a stranger. A request for an admin route in it would be sent with the
    operator's own key.
    """
    routes = [ROUTES[name] for name in _OVERRIDABLE]
    return _FIXED | {str(route.default) for route in routes} | {str(route.value(env)) for route in routes}
