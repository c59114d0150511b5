"""Routes that a program adds to the frontend: the values that its function returns, and what it gets. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class FrontendResponse:
    """An answer with a status of its own. `body` is written as JSON."""

    status_code: int
    body: Any

    def __post_init__(self) -> None:
        if type(self.status_code) is not int or not 100 <= self.status_code <= 999:
            raise ValueError(f"status_code must be an integer from 100 to 999, got {self.status_code!r}")


@dataclass(frozen=True, slots=True)
class FrontendRoute:
    """One route: `handler()` returns what is answered, a `FrontendResponse` or a plain value for the status 200.

    The handler runs on the event loop of the frontend, where all streams wait for it.
    """

    method: str
    path: str
    handler: Callable[[], Any]

    def __post_init__(self) -> None:
        if self.method != "GET":
            raise ValueError(f"unsupported FrontendRoute method {self.method!r}; only GET is supported")
        if not self.path.startswith("/"):
            raise ValueError(f"frontend route path must start with '/': {self.path}")
        if any(character in "{}*" or character.isspace() for character in self.path):
            raise ValueError(f"frontend route path must be static (no '{{...}}', '*', or whitespace): {self.path}")
        if not callable(self.handler):
            raise TypeError("FrontendRoute handler must be callable")
        if any(map(inspect.iscoroutinefunction, (self.handler, getattr(self.handler, "__call__", None)))):  # noqa: B004
            raise ValueError("FrontendRoute handler must be synchronous; async def handlers are not supported")


class FrontendExtensionContext(Protocol):
    """What the function of an extension gets. It may be read at any time on the event loop of the frontend."""

    @property
    def is_ready(self) -> bool:
        """Whether the frontend takes requests."""

    @property
    def is_cancelled(self) -> bool:
        """Whether the frontend has begun to end."""

    @property
    def has_any_ready_model(self) -> bool:
        """Whether some model may get requests."""

    def is_model_ready_to_serve(self, model: str) -> bool:
        """Return whether a model may get requests; False for an unknown one."""
        ...

    def model_display_names(self) -> Sequence[str]:
        """Return the names of all models that workers have registered, sorted."""
        ...

    def serving_ready_display_names(self) -> Sequence[str]:
        """Return the names of those that may get requests, sorted."""
        ...
