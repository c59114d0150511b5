"""What a route needs of an API key, and the key behind a request as every room sees it.

Routes declare what they need with `Access`; one that declares nothing needs an admin's key. So a new route is closed until its author
opens it. The part `keys` puts a door in front of the routes and makes the `Caller`s; without it there are none, and nothing
here refuses anything.
"""

from __future__ import annotations

import enum
from typing import Final, Protocol

from dynamo.frontend.base.asgi import Scope
from dynamo.protocol.openai.errors import RequestRejected

IDENTITY: Final = "dynamo.identity"
"""The entry of a scope that holds the `Caller` of the request; there is none where no key is needed."""

CLOSED: Final = "dynamo.closed"
"""The entry of a scope that came through a door, with a key or, on an open route, without."""

_INVALID: Final = "invalid_request_error"


class RouteGroup(enum.StrEnum):
    """Routes that a key may use or not."""

    INFERENCE = "inference"
    EMBEDDINGS = "embeddings"
    MEDIA = "media"
    FILES = "files"
    BATCHES = "batches"
    METRICS = "metrics"
    """Never a part of "all routes": a key has it only where its record names it, as metrics show the ids of all keys."""


class KeyRole(enum.StrEnum):
    """What a key is for."""

    USER = "user"
    VIEWER = "viewer"
    """May view the inspector without content; uses no other routes unless its record names them."""
    CONTENT = "content"
    """The same, with the text of prompts and answers where the inspector shows it."""
    OPERATOR = "operator"
    """May view the inspector without content, and act: abort requests, drain workers."""
    ADMIN = "admin"
    """May use the admin routes, too."""

    @property
    def only_inspects(self) -> bool:
        """Whether such a key is for the inspector alone."""
        return self in (KeyRole.VIEWER, KeyRole.CONTENT, KeyRole.OPERATOR)


class Access(enum.Enum):
    """What a route needs of a key."""

    OPEN = enum.auto()
    """Nothing, not even a key."""
    ANY_KEY = enum.auto()
    ADMIN = enum.auto()
    INSPECT = enum.auto()
    """An admin's, or one for the inspector."""
    OPERATE = enum.auto()
    """An admin's, or an operator's."""
    INFERENCE = RouteGroup.INFERENCE
    EMBEDDINGS = RouteGroup.EMBEDDINGS
    MEDIA = RouteGroup.MEDIA
    FILES = RouteGroup.FILES
    BATCHES = RouteGroup.BATCHES
    METRICS = RouteGroup.METRICS

    def __init__(self, value: RouteGroup | int) -> None:
        self.group = value if isinstance(value, RouteGroup) else None
        """The group of routes that a key has to be for; None: the member itself states what it needs."""

    @property
    def is_for_operators(self) -> bool:
        """Whether such a route is one of the admin routes."""
        return self in (Access.ADMIN, Access.INSPECT, Access.OPERATE)


class Caller(Protocol):
    """The key behind a request. Shared by all requests of that key, and never changed."""

    @property
    def id(self) -> str:
        """The id of the key, for logs, metrics and records."""

    @property
    def owner(self) -> str:
        """Whose files, batches and stored responses it sees."""

    @property
    def shown_name(self) -> str:
        """What people call the key: its name, else its id."""

    @property
    def is_admin(self) -> bool: ...

    @property
    def sees_operations(self) -> bool:
        """Whether it may see what concerns all clients: metrics, and the details of `/health`."""

    @property
    def priority(self) -> int | None:
        """The highest priority of its requests; None: any."""

    @property
    def inspector_role(self) -> KeyRole | None:
        """What it may do at the inspector; None: nothing."""

    def allows_model(self, name: str) -> bool:
        """Return whether it may use, and see, the model of this name."""

    def check_admin(self) -> None:
        """Raise the 403 of a key that may not use the admin routes."""

    def check_inspector(self, *, acts: bool) -> None:
        """Raise the 403 of a key that may not view the inspector, or, with `acts`, may not act there."""

    def check_group(self, group: RouteGroup) -> None:
        """Raise the 403 of a key that may not use a group of routes."""


class CallerLookup(Protocol):
    """The keys in service."""

    def identity(self, key_id: str) -> Caller | None:
        """Return the key with this id; None: there is none any more."""

    def is_revoked(self, key_id: str) -> bool:
        """Return whether a key is gone, disabled or expired, so that what was begun with it is not gone on with."""


def key_rejection(code: str, message: str) -> RequestRejected:
    """Return the 401 of a request whose key is missing, unknown or not valid any more."""
    return RequestRejected(401, message, code=code, stream_type=_INVALID, more_headers={"www-authenticate": "Bearer"})


def check_access(scope: Scope, access: Access) -> None:
    """Raise the 403 of a request whose key may not use a route; does nothing where no keys are needed."""
    caller: Caller | None = scope.get(IDENTITY)
    if caller is None or access is Access.OPEN or access is Access.ANY_KEY:
        return
    if access is Access.ADMIN:
        caller.check_admin()
    elif access is Access.INSPECT or access is Access.OPERATE:
        caller.check_inspector(acts=access is Access.OPERATE)
    elif access.group is not None and (access is not Access.METRICS or not caller.is_admin):
        caller.check_group(access.group)


def identity_of(scope: Scope) -> Caller | None:
    """Return the key of a request; None where no keys are needed, or none was sent to an open route."""
    found: Caller | None = scope.get(IDENTITY)
    return found


def owner_of(scope: Scope) -> str:
    """Return the project that what a request keeps belongs to; empty where there are no keys."""
    identity = identity_of(scope)
    return "" if identity is None else identity.owner


def is_closed(scope: Scope) -> bool:
    """Return whether the listener of a request has a door: then what stands open shows no more than it must."""
    return CLOSED in scope
