"""The socket of the frontend: what an optional feature is, and what it is opened over.

A part listens to the course of each request (`RequestListener`), has routes and metrics of its own, and a life within that of
the frontend. The kernel knows no part by name: `frontend/opening.py` opens those that are switched on and hands them over as a
list. A part imports the kernel, and no other part. No part is called for a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from starlette.types import ASGIApp

from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.peers import Peers
from dynamo.frontend.base.shares import Shares
from dynamo.frontend.http.admin import SameSiteOnly, rule_of_admins
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.routes import GuardedRoute, Site
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.models.busy_threshold import LoadFollower
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.outcome import RequestListener
from dynamo.protocol.openai.schema import ApiDescription
from dynamo.runtime.observe.metrics import Family

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime


class Kernel(Struct, frozen=True):
    """What parts are opened over."""

    settings: HttpSettings
    pipeline: Pipeline
    loads: LoadFollower
    runtime: DistributedRuntime
    offload: Offload
    budget: BodyBudget
    peers: Peers | None  # the other processes on the same port
    shares: Shares

    def same_site(self, route: ASGIApp) -> ASGIApp:
        """Return an admin route that does nothing for pages of other sites."""
        return SameSiteOnly(route, rule_of_admins(self.settings))


class Part(RequestListener):
    """One optional feature. What a part has no use for, it leaves as it is here."""

    name: ClassVar[str]  # of its folder
    families: ClassVar[Sequence[Family]] = ()  # the metrics that only this part has
    outlives_models: ClassVar[bool] = False
    """Whether it is closed after the view of the cluster, because requests that end with that view are reported to it."""

    def listeners(self) -> Sequence[RequestListener]:
        """Return what listens to the course of each request: this part, or what does its work. Called once."""
        return (self,)

    # -- what it serves ----------------------------------------------------------------------------------------------

    def inference(self) -> Mapping[str, InferenceRoute]:
        """Return further inference routes, by their paths."""
        return {}

    def routes(self) -> Sequence[GuardedRoute]:
        """Return all other routes."""
        return ()

    def in_front_of(self, app: ASGIApp, site: Site) -> ASGIApp:
        """Return the application of a listener with whatever this part puts in front of it."""
        return app

    def described(self) -> Sequence[ApiDescription]:
        """Return what the OpenAPI document has of its routes."""
        return ()

    def document_of_operators(self) -> Callable[[], bytes] | None:
        """Return what writes the OpenAPI document of the listener for operators; None: this part has none."""
        return None

    def open_paths(self) -> Collection[str] | None:
        """Return the only paths that need no key; None: this part has none."""
        return None

    def links(self) -> Sequence[tuple[str, str]]:
        """Return further links of the home page: path and description."""
        return ()

    # -- its life ----------------------------------------------------------------------------------------------------

    def connect(self, calls: Mapping[str, Call]) -> None:
        """Take the calls of the inference APIs, by their paths. Called once, before `start`."""

    async def start(self) -> None:
        """Begin to work; the store of the cluster is followed. Whether it was called or not, `aclose` is."""

    def measures(self) -> Sequence[Callable[[float], None]]:
        """Return what is to be called once a second, with the time."""
        return ()

    def troubles(self) -> Sequence[str]:
        """Return what `/health` shows as degraded, a sentence each."""
        return ()

    def stopping(self) -> None:
        """Prepare for the end: the listener is about to close. May be called again."""

    async def aclose(self) -> None:
        """Let go of all that it holds; idempotent."""
