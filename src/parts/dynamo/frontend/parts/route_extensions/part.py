"""The routes that programs add: their functions are called once, before the frontend serves, and their handlers for each GET."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Final

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp

from dynamo.errors import InvalidArgument
from dynamo.frontend.admission.process import Stage
from dynamo.frontend.base.access import Access
from dynamo.frontend.base.asgi import Receive, Scope, Send, reply
from dynamo.frontend.http.routes import GuardedRoute, Site
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.protocol.frontend_routes import FrontendExtensionContext, FrontendResponse, FrontendRoute
from dynamo.protocol.openai.schema import ApiDescription, describe_operation

logger = logging.getLogger(__name__)

Extension = Callable[[FrontendExtensionContext], Iterable[FrontendRoute]]

ENTRY_POINTS: Final = "dynamo.frontend.routes"
FAILED: Final = b'{"error":"frontend route extension failed"}'


class ModelsInView:
    """What extensions see of a frontend (`FrontendExtensionContext`)."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def is_ready(self) -> bool:
        return self._pipeline.admission.stage is Stage.SERVING

    @property
    def is_cancelled(self) -> bool:
        return not self.is_ready

    @property
    def has_any_ready_model(self) -> bool:
        return any(map(self.is_model_ready_to_serve, self.model_display_names()))

    def is_model_ready_to_serve(self, model: str) -> bool:
        """Return whether a model may get requests; False for an unknown one."""
        body = self._pipeline.models.readiness(model)
        return body is not None and body["ready"] is True

    def model_display_names(self) -> list[str]:
        """Return the names of all models that workers have registered, sorted."""
        return sorted({group.card.display_name for group in self._pipeline.models.groups()})

    def serving_ready_display_names(self) -> list[str]:
        """Return the names of those that may get requests, sorted."""
        return list(filter(self.is_model_ready_to_serve, self.model_display_names()))


class _Handled:
    """The ASGI application of one route."""

    def __init__(self, route: FrontendRoute, extension: str) -> None:
        self._route, self._extension = route, extension

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body = self._answer()
        await reply(send, status, body)

    def _answer(self) -> tuple[int, bytes]:
        try:
            found = self._route.handler()
            if isinstance(found, FrontendResponse):
                return found.status_code, msgspec.json.encode(found.body)
            return 200, msgspec.json.encode(found)
        except Exception:  # of code that is not ours: its client gets an answer all the same
            logger.exception("the route %s of the extension %s failed", self._route.path, self._extension)
            return 500, FAILED


class RouteExtensions(Part):
    """The routes of all extensions."""

    name: ClassVar[str] = "route_extensions"

    def __init__(self, names: Sequence[str], kernel: Kernel) -> None:
        """Call each extension. Raises InvalidArgument that names the one that cannot be used, or whose path is taken."""
        context = ModelsInView(kernel.pipeline)
        self._routes: list[GuardedRoute] = []
        for name in names:
            for route in _routes_of(name, context):
                if any(route.path == other.path for other in self._routes):
                    raise InvalidArgument(f"route extension {name}: {route.path} is served by two extensions")
                self._routes.append(
                    GuardedRoute(route.path, _Handled(route, name), route.method, access=Access.ANY_KEY)
                )

    def routes(self) -> Sequence[GuardedRoute]:
        return self._routes

    def described(self) -> Sequence[ApiDescription]:
        paths = {
            route.path: {
                "get": describe_operation(
                    f"extension{number}",
                    "A route of an extension",
                    {"application/json": {"schema": {}}},
                    errors={"500": {"description": "The extension failed."}},
                )
            }
            for number, route in enumerate(self._routes, 1)
        }
        return (ApiDescription([], paths),)

    def in_front_of(self, app: ASGIApp, site: Site) -> ASGIApp:
        """Return the application as it is. Raises InvalidArgument for a path that the frontend serves itself."""
        own = set(map(id, self._routes))
        for route in site.routes:
            if id(route) in own or not isinstance(route, Route):
                continue
            for extension in self._routes:
                if route.path_regex.match(extension.path):
                    raise InvalidArgument(f"route extension: {extension.path} is a path of the frontend")
        return app


def _routes_of(name: str, context: FrontendExtensionContext) -> list[FrontendRoute]:
    try:
        routes = list(_extension(name)(context))
    except InvalidArgument:
        raise
    except Exception as error:  # of code that is not ours
        raise InvalidArgument(f"route extension {name}: {type(error).__name__}: {error}") from error
    for route in routes:
        if not isinstance(route, FrontendRoute):
            raise InvalidArgument(f"route extension {name}: expected FrontendRoute, got {type(route).__name__}")
    return routes


def _extension(name: str) -> Extension:
    """Return the function of an extension. Raises InvalidArgument where there is none, and what its import raises."""
    module, colon, function = name.partition(":")
    found: Any
    if colon:
        found = getattr(import_module(module), function, None)
    else:
        named = entry_points(group=ENTRY_POINTS, name=name)
        found = next(iter(named)).load() if named else None
    if not callable(found):
        where = f"the module {module}" if colon else f"the entry points {ENTRY_POINTS}"
        raise InvalidArgument(f"route extension {name}: no function of this name in {where}")
    extension: Extension = found
    return extension
