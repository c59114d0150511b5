"""A worker for reinforcement learning: its admin routes, and the endpoint `rl` at which a frontend reads their names.

registry = RLRouteRegistry(runtime, world_size=8)
register_rl_routes(runtime, registry, {"pause_generation": pause}, enable_dispatch=True)
await runtime.endpoint("ns.backend.rl").serve_endpoint(registry.dispatch_stream)
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from dynamo.contract import flag_declarations
from dynamo.runtime import DistributedRuntime

__all__ = [
    "RLAdminValidationError", "RLRouteRegistry", "env_bool", "first_endpoint_response", "register_rl_routes",
    "require_lora_load_request", "require_lora_unload_request",
]  # fmt: skip

Route = Callable[[Any], Awaitable[dict[str, Any]]]

LISTING: Final = "routes"  # the one method of the endpoint `rl`


class RLAdminValidationError(ValueError):
    """The body of an admin request is wrong; holds what is to be mended."""


def env_bool(name: str, default: bool = False) -> bool:
    """Return whether a variable is set to a yes. See `dynamo.common.utils.env.env_bool`."""
    return flag_declarations.env_bool(name, default=default)


# -- the list of routes ------------------------------------------------------------------------------------------------


class RLRouteRegistry:
    """The routes that a frontend reads. The routes themselves are served by the runtime, at `/engine/NAME`."""

    def __init__(
        self, runtime: DistributedRuntime, *, logger_: logging.Logger | None = None, world_size: int | None = None
    ) -> None:
        """`world_size`: how many processes the engine has. Raises ValueError unless it is a positive integer."""
        if world_size is not None and (
            isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1
        ):
            raise ValueError(f"world_size must be a positive integer, got {world_size!r}")
        self._runtime = runtime
        self._log = logger_ or logging.getLogger(__name__)
        self._world_size = world_size
        self._by_name: dict[str, Route] = {}  # bounded by what the engine's code adds

    def add_route(self, name: str, handler: Route) -> None:
        """Add one route, or replace the one of that name."""
        self.add_routes({name: handler})

    def add_routes(self, routes: Mapping[str, Route]) -> None:
        """Add routes by their names."""
        self._by_name |= routes

    def describe(self) -> dict[str, Any]:
        """Return what a frontend reads: the names of the routes, and, where they are known, where and how many processes."""
        answer: dict[str, Any] = {"status": "ok", "routes": sorted(self._by_name)}
        if (url := self._runtime.system_status_server_url()) is not None:
            answer["system_url"] = url
        if self._world_size is not None:
            answer["world_size"] = self._world_size
        return answer

    async def dispatch(self, request: Any) -> dict[str, Any]:
        """Answer a request at the endpoint `rl`. One that is wrong has an answer, too: status `error` with a message."""
        wrong = _mistake(request)
        if wrong is None:
            return self.describe()
        self._log.warning("a request at the endpoint rl is refused: %s", wrong)
        return {"status": "error", "message": wrong}

    async def dispatch_stream(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        """Answer as `dispatch` does, in the form of an endpoint's handler."""
        yield await self.dispatch(request)


def _mistake(request: Any) -> str | None:
    """Return what is wrong with a request at the endpoint `rl`; None: nothing."""
    if not isinstance(request, Mapping) or not request:
        return "rl_dispatch: request required"
    method, arguments = request.get("method"), request.get("kwargs")
    if not isinstance(method, str):
        return "rl_dispatch: missing 'method' (str)"
    if arguments is not None and not isinstance(arguments, Mapping):
        return "rl_dispatch: 'kwargs' must be an object"
    return None if method == LISTING else f"rl request-plane endpoint only supports method='{LISTING}'"


def register_rl_routes(
    runtime: DistributedRuntime, registry: RLRouteRegistry, routes: Mapping[str, Route], *, enable_dispatch: bool
) -> None:
    """Serve routes as `POST /engine/NAME`. `enable_dispatch`: frontends are to find them, so the registry has them as well."""
    for name in routes:
        runtime.register_engine_route(name, routes[name])
    if enable_dispatch:
        registry.add_routes(routes)


# -- what handlers need ------------------------------------------------------------------------------------------------


async def first_endpoint_response(
    handler: Callable[[dict[str, Any]], AsyncGenerator[dict[str, Any] | None, None]], body: dict[str, Any]
) -> dict[str, Any]:
    """Return the first item of what a handler yields for `body`, and end the handler; without an item the status `ok`."""
    answer = handler(body)
    try:
        async for item in answer:
            if item is not None:
                return item
            break
    finally:
        await answer.aclose()
    return {"status": "ok"}


def require_lora_load_request(request: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return (`lora_name`, `source.uri`) of a request to load an adapter. Raises RLAdminValidationError."""
    return _required(request, "lora_name"), _required(request, "source", "uri")


def require_lora_unload_request(request: Mapping[str, Any] | None) -> str:
    """Return `lora_name` of a request to unload an adapter. Raises RLAdminValidationError."""
    return _required(request, "lora_name")


def _required(request: Mapping[str, Any] | None, *path: str) -> str:
    """Return the text at a path of members. Raises RLAdminValidationError that names how far the request has it."""
    found: Any = request
    for depth, name in enumerate(path):
        if not isinstance(found, Mapping):
            raise RLAdminValidationError(f"{'.'.join(path[:depth]) or 'the body'} must be an object with {name!r}")
        found = found.get(name)
    if not isinstance(found, str) or not found:
        raise RLAdminValidationError(f"{'.'.join(path)} must be a text that is not empty, got {found!r}")
    return found
