"""Routes by their paths: inference first, then the others in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo.frontend.http.inference_route import InferenceRoute

__all__ = ["InferenceFirst"]


class InferenceFirst(Router):
    """A router that knows the inference routes by their whole paths.

    A request to one of them has no path parameters and needs no route object: it saves nineteen calls of a pattern's way.
    Anything else about such a path (another method) goes the usual way.
    """

    def __init__(self, inference: Mapping[str, InferenceRoute], routes: Sequence[BaseRoute], default: ASGIApp) -> None:
        super().__init__(routes=routes, redirect_slashes=False, default=default)
        self._inference = dict(inference)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._inference:
            await self._inference[scope["path"]](scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
