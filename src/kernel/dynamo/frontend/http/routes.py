"""Routes by their paths: inference first, then the others in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo.frontend.base.access import IDENTITY, check_access
from dynamo.frontend.base.request_id import reject_route
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.protocol.openai.errors import RequestRejected

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
            route = self._inference[scope["path"]]
            if IDENTITY in scope:
                try:
                    check_access(scope, route.access)
                except RequestRejected as rejected:
                    await reject_route(scope, send, rejected, route.dialect)
                    return
            await route(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
