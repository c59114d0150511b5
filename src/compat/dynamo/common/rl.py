"""The routes of a worker that a trainer calls, and the endpoint `rl` over which a frontend lists them (`/v1/rl/workers`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from dynamo.contract import flag_declarations
from dynamo.runtime import DistributedRuntime

__all__ = [
    "RLAdminValidationError", "RLRouteHandler", "RLRouteRegistry", "env_bool", "first_endpoint_response",
    "register_rl_routes", "require_lora_load_request", "require_lora_unload_request",
]  # fmt: skip

RLRouteHandler = Callable[[Any], Awaitable[dict[str, Any]]]


class RLAdminValidationError(ValueError):
    """A request of a trainer is not valid; the message is for the trainer."""


def env_bool(name: str, default: bool = False) -> bool:
    """Read a variable, as `dynamo.common.utils.env.env_bool`."""
    return flag_declarations.env_bool(name, default=default)


class RLRouteRegistry:
    """Lists the routes of a worker: `endpoint.serve_endpoint(registry.dispatch_stream)` at the endpoint `rl`."""

    def __init__(
        self, runtime: DistributedRuntime, *, logger_: logging.Logger | None = None, world_size: int | None = None
    ) -> None:
        """`world_size`: the processes of the engine. Raises ValueError unless it is a positive integer."""
        if world_size is not None and (type(world_size) is not int or world_size < 1):
            raise ValueError(f"world_size must be a positive integer, got {world_size!r}")
        self._runtime, self._logger, self._world_size = runtime, logger_ or logging.getLogger(__name__), world_size
        self.routes: dict[str, RLRouteHandler] = {}  # one for each that the engine's code names

    def add_route(self, name: str, handler: RLRouteHandler) -> None:
        """List a route; a second one of a name replaces the first."""
        self.routes[name] = handler

    def add_routes(self, routes: Mapping[str, RLRouteHandler]) -> None:
        """List several routes."""
        self.routes.update(routes)

    def describe(self) -> dict[str, Any]:
        """Return the names of the routes, and where they are."""
        found = {"system_url": self._runtime.system_status_server_url(), "world_size": self._world_size}
        known = {name: value for name, value in found.items() if value is not None}
        return {"status": "ok", "routes": sorted(self.routes), **known}

    async def dispatch(self, request: Any) -> dict[str, Any]:
        """Answer one request of a frontend. What is wrong with it is an answer with the status `error`."""
        if not request or not isinstance(request, Mapping):
            message = "rl_dispatch: request required"
        elif not isinstance(request.get("method"), str):
            message = "rl_dispatch: missing 'method' (str)"
        elif not isinstance(request.get("kwargs") or {}, Mapping):
            message = "rl_dispatch: 'kwargs' must be an object"
        elif request["method"] != "routes":
            message = "rl request-plane endpoint only supports method='routes'"
        else:
            return self.describe()
        self._logger.warning("%s", message)
        return {"status": "error", "message": message}

    async def dispatch_stream(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        """Answer one request as an endpoint does: with a stream of one item."""
        yield await self.dispatch(request)


async def first_endpoint_response(
    endpoint_handler: Callable[[dict[str, Any]], AsyncGenerator[dict[str, Any] | None, None]], body: dict[str, Any]
) -> dict[str, Any]:
    """Return the first item of an endpoint's answer, else the status `ok`; the rest of the answer is left."""
    async with aclosing(endpoint_handler(body)) as items:
        return await anext(items, None) or {"status": "ok"}


def register_rl_routes(
    runtime: DistributedRuntime,
    registry: RLRouteRegistry,
    routes: Mapping[str, RLRouteHandler],
    *,
    enable_dispatch: bool,
) -> None:
    """Serve `POST /engine/NAME` for each route; with `enable_dispatch` the registry lists them."""
    for name, handler in routes.items():
        runtime.register_engine_route(name, handler)
    if enable_dispatch:
        registry.add_routes(routes)


def require_lora_load_request(request: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return name and URI of the adapter to load. Raises RLAdminValidationError naming the member."""
    name = require_lora_unload_request(request, "'lora_name' and 'source.uri'")
    source = (request or {}).get("source")
    if not isinstance(source, Mapping):
        raise RLAdminValidationError("'source' object is required in request")
    return name, _text(source, "uri", "source.uri")


def require_lora_unload_request(request: Mapping[str, Any] | None, _members: str = "'lora_name'") -> str:
    """Return the name of the adapter to unload. Raises RLAdminValidationError naming the member."""
    if not isinstance(request, Mapping):
        raise RLAdminValidationError(f"Request is required with {_members}")
    return _text(request, "lora_name", "lora_name")


def _text(found: Mapping[str, Any], name: str, path: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not value:
        raise RLAdminValidationError(f"'{path}' is required and must be a string")
    return value
