"""What came of one request, and the hooks of a request to which the parts of a frontend may listen.

The end of a request is reported in one place, `Call.run`, whether it was answered, refused at the door, failed or left by its
client: one `Outcome` is made, and each listener gets it. No listener is called for a token.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.router.dispatch.migration import Move
from dynamo.runtime.calls.request_plane.base import Instance

if TYPE_CHECKING:
    from dynamo.frontend.pipeline.exchange import Exchange
    from dynamo.frontend.pipeline.failures import FailureLabels
    from dynamo.frontend.pipeline.plan import Plan
    from dynamo.frontend.pipeline.reading import Resolved
    from dynamo.frontend.pipeline.sink import OpenAnswer
    from dynamo.protocol.inspector.views import ModelsInMemory
    from dynamo.protocol.openai.requests import Request
    from dynamo.protocol.vectors.requests import ResultRequest

Answering = Callable[["Exchange", "Resolved", "OpenAnswer"], Awaitable[None]]
"""Prepares a request, has workers serve it, and sends the answer. Raises what went wrong on the way."""

CLIENT_LEFT: Final = 499  # in logs and traces; the client does not read it


class Reached(enum.IntEnum):
    """How far a request had come when it ended."""

    DOOR = 0  # nothing of it was read: the process is full or stopping, or its body could not be read
    READ = 1  # it breaks a rule, or names no model that serves it
    RESOLVED = 2  # its model, or its key, has no room for it
    ADMITTED = 3


class TokensTaken(Struct, frozen=True):
    """The tokens that a request took; they are those of its model where a worker counted them."""

    prompt_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt; None: no worker has reported it
    output_tokens: int = 0
    reasoning_tokens: int | None = None  # of the output; None: nothing counts them
    images: int = 0  # that were made


class Outcome(Struct, frozen=True):
    """What came of one request. Made once, and never changed."""

    endpoint: str  # of the API, as metrics name it
    at: float  # loop time of the end; of a failure, before its answer was sent
    reached: Reached
    status: int = 200  # 499: its client left
    error_type: str = ""  # as metrics name it; "": it was answered in full
    failure: FailureLabels | None = None  # None: it was answered, or its client left
    rejected: RequestRejected | None = None  # the answer to a request that failed
    why: BaseException | None = None  # what went wrong, of which clients get only a part
    usage: TokensTaken = TokensTaken()
    stage_seconds: Sequence[float] = ()  # of each stage, in the order of `STAGES`
    instances: Sequence[Instance] = ()  # the workers that answered, in order
    moves: Sequence[Move] = ()  # its changes of worker

    @property
    def is_answered(self) -> bool:
        """Whether it was answered in full."""
        return self.status == 200

    @property
    def message(self) -> str | None:
        """The text of the error that its client reads; None: there is none."""
        return None if self.rejected is None else self.rejected.message


OnDemand = Callable[
    ["Exchange", Callable[["Request | ResultRequest"], None], "Request | ResultRequest"], Awaitable[str]
]
"""Returns the name of the model that serves a request, once it is loaded; the second argument is called before it waits.

May change the request. Raises RequestRejected and DynamoException, for a model that cannot be had.
"""


Residents = Callable[[Callable[[float], int]], "ModelsInMemory"]
"""Returns the models that are loaded on demand; the argument turns a loop time into milliseconds since the epoch."""


class RequestListener:
    """Listens to the course of each request. Every method returns at once; one that does nothing costs nothing.

    `arrived`, `began` and `planned` may raise `RequestRejected`, which ends the request with that answer.
    """

    def arrived(self, exchange: Exchange) -> None:
        """Take note of a request whose body is complete; nothing of it was read."""

    def began(self, exchange: Exchange, resolved: Resolved) -> None:
        """Take note of a request whose model is known, before it takes a place of that model."""

    def planned(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> None:
        """Take note of a request whose prompt is known, before any worker gets it. May shorten its answers in `plan.fields`.

        Called again for each further model that is tried (`exchange.fallbacks`), with a plan of its own.
        """

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        """Take note of the end. Called once for each request; of a failure, before its answer is sent.

        Keep neither `outcome` nor its errors: their tracebacks hold all of the request.
        """


class Fallbacks(Protocol):
    """Has another model serve a request that fails before its first token. Never called for a token."""

    async def admitted(self, exchange: Exchange, resolved: Resolved, answer: Answering) -> Answering | None:
        """Take a place of the first model that has one, and return `answer` for all models of the chain of a request.

        None: it has no chain. Raises Overloaded where none of them has a place.
        """


class Hooks:
    """The listeners of a frontend, by what they listen to."""

    __slots__ = ("arrived", "began", "ended", "fallbacks", "on_demand", "planned", "residents")

    def __init__(self, listeners: Sequence[RequestListener] = ()) -> None:
        self.fallbacks: Fallbacks | None = None
        self.arrived: tuple[Callable[[Exchange], None], ...] = ()
        self.began: tuple[Callable[[Exchange, Resolved], None], ...] = ()
        self.planned: tuple[Callable[[Exchange, Resolved, Plan], None], ...] = ()
        self.ended: tuple[Callable[[Exchange, Outcome], None], ...] = ()
        self.on_demand: OnDemand | None = None
        self.residents: Residents | None = None
        for listener in listeners:
            self.add(listener)

    def add(self, listener: RequestListener) -> None:
        """Call `listener` from now on, after those that were added before. What it does not define is not called."""
        kind = type(listener)
        if kind.arrived is not RequestListener.arrived:
            self.arrived = (*self.arrived, listener.arrived)
        if kind.began is not RequestListener.began:
            self.began = (*self.began, listener.began)
        if kind.planned is not RequestListener.planned:
            self.planned = (*self.planned, listener.planned)
        if kind.ended is not RequestListener.ended:
            self.ended = (*self.ended, listener.ended)
