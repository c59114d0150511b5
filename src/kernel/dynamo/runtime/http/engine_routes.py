"""The routes that change the engine: `/engine/...`, and `/v1/loras` in front of three of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import unquote

from dynamo.errors import InvalidArgument
from dynamo.runtime.http.replies import NOT_FOUND, Reply

logger = logging.getLogger(__name__)

EngineRoute = Callable[[object], Awaitable[object]]
"""`await callback(body)`: the decoded JSON body (`{}` when empty) in, a JSON value out."""

MAX_ROUTES: Final = 1024
RESERVED: Final = frozenset({"drain", "resume", "status"})  # the worker's own, beside those of its engine
ENGINE_PREFIX: Final = "/engine/"
LORA_PREFIX: Final = "/v1/loras"


class EngineRoutes:
    """Callbacks by name, each given a JSON body and answered with a JSON value."""

    def __init__(self, *, depth_limit: int, refused: Callable[[str], None]) -> None:
        """`depth_limit`: how deep a body may nest; `refused` counts."""
        self._depth_limit, self._refused = depth_limit, refused
        self._routes: dict[str, EngineRoute] = {}
        self._read_only: set[str] = set()  # of them, those that are read with GET

    def register(self, name: str, callback: EngineRoute) -> None:
        """Serve `POST /engine/{name}`; a second registration replaces the first. Raises ValueError."""
        if name.strip("/") in RESERVED:
            raise ValueError(f"the engine route {name!r} is the worker's own ({', '.join(sorted(RESERVED))})")
        self._add(name, callback)

    def register_reserved(self, name: str, method: str, callback: EngineRoute) -> None:
        """Serve one of the worker's own routes, with GET or POST."""
        self._add(name, callback)
        (self._read_only.add if method == "GET" else self._read_only.discard)(name)

    def _add(self, name: str, callback: EngineRoute) -> None:
        name = name.strip("/")
        if not name:
            raise ValueError("an engine route needs a name")
        if name not in self._routes and len(self._routes) >= MAX_ROUTES:
            raise ValueError(f"more than {MAX_ROUTES} engine routes")
        self._routes[name] = callback

    def unregister(self, name: str) -> None:
        """Remove a route; an absent one is fine. A call under way goes on."""
        self._routes.pop(name.strip("/"), None)

    @property
    def names(self) -> list[str]:
        """The engine routes, sorted."""
        return sorted(self._routes)

    async def call_loras(self, method: str, path: str, body: bytes) -> Reply:
        """Answer a request below `/v1/loras`."""
        name = unquote(path.removeprefix(LORA_PREFIX).removeprefix("/"))
        match method, bool(name):
            case "GET", False:
                return await self.call("POST", "update/list_loras", b"")
            case "POST", False:
                return await self.call("POST", "update/load_lora", body)
            case "DELETE", True:
                return await self.call("POST", "update/unload_lora", json.dumps({"lora_name": name}).encode())
        return NOT_FOUND

    async def call(self, method: str, name: str, body: bytes) -> Reply:
        """Answer a request for `/engine/{name}`."""
        allowed = "GET" if name in self._read_only else "POST"
        if method != allowed:  # an image of any page could be a GET
            return Reply(405, b"Method not allowed", headers={"allow": allowed})
        callback = self._routes.get(name)
        if callback is None:
            return Reply.json(404, {"error": "Route not found", "message": f"Route {ENGINE_PREFIX}{name} not found"})
        try:
            request = json.loads(body) if body.strip() else {}
        except RecursionError:
            return self._too_deep()
        except ValueError as error:  # also a UnicodeDecodeError
            return Reply.json(400, {"error": "Invalid JSON", "message": str(error)})
        if _is_deeper(request, self._depth_limit):
            return self._too_deep()
        try:
            return Reply.json(200, await callback(request))
        except InvalidArgument as error:  # the mistake of a caller has no traceback that would help
            logger.warning("engine route %s refused a request: %s", name, error)
            return Reply.json(500, {"error": "Handler error", "message": str(error)})
        except Exception as error:  # the boundary: the operator gets the reason, the log the traceback
            logger.exception("engine route %s failed", name)
            message = f"Python callback failed: {type(error).__name__}: {error}"
            return Reply.json(500, {"error": "Handler error", "message": message})

    def _too_deep(self) -> Reply:
        self._refused("json_depth")
        text = f"nested deeper than {self._depth_limit} levels (DYN_SYSTEM_JSON_DEPTH_LIMIT)"
        return Reply.json(400, {"error": "Invalid JSON", "message": text})


def _is_deeper(value: object, limit: int) -> bool:
    """Return whether arrays and objects nest deeper than `limit`; level by level, without recursion."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return False
    return any(isinstance(value, dict | list) for value in level)
