"""The clients of the endpoints at which workers registered models, shared by all models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Final

from dynamo.errors import DynamoException
from dynamo.router.workers.pool import WorkerClient
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0

Connect = Callable[[str], Awaitable[WorkerClient]]
"""From "namespace.component.endpoint" to the client of that endpoint."""


class EndpointClients:
    """Opens and closes the clients as endpoints come and go. The clients that are left are the runtime's to close."""

    def __init__(self, connect: Connect, on_change: Callable[[], None], background: Background) -> None:
        """`on_change`: called when a client is new, and when the instances behind one have changed."""
        self._connect, self._on_change, self._background = connect, on_change, background
        self.by_endpoint: dict[str, WorkerClient] = {}

    async def connect(self, endpoints: Collection[str]) -> None:
        """Connect to those endpoints that have no client yet. Raises what connecting raises."""
        for endpoint in set(endpoints) - self.by_endpoint.keys():
            client = await self._connect(endpoint)
            if self.by_endpoint.setdefault(endpoint, client) is not client:  # another model was faster
                await client.close()
                continue
            client.on_change(self._on_change)
            self._on_change()

    def reach(self, model: str, endpoints: Callable[[], Collection[str]]) -> None:
        """Connect to the endpoints that joined a model, in the background and until it works.

        `endpoints`: those of the model now; none when the model has gone.
        """
        if set(endpoints()) - self.by_endpoint.keys():
            self._spawn(self._reach(model, endpoints), f"frontend: reach {model}")

    def leave_all_but(self, endpoints: Collection[str]) -> None:
        """Close the clients of endpoints that serve nothing any more; streams in flight go on."""
        for endpoint in self.by_endpoint.keys() - set(endpoints):
            self._spawn(self.by_endpoint.pop(endpoint).close(), f"frontend: leave {endpoint}")

    async def _reach(self, model: str, endpoints: Callable[[], Collection[str]]) -> None:
        while wanted := endpoints():
            try:
                await self.connect(wanted)
                return
            except (DynamoException, OSError) as error:
                logger.error(
                    "model %s: an endpoint cannot be reached, next attempt in %g s: %s", model, RETRY_SECONDS, error
                )
            await asyncio.sleep(RETRY_SECONDS)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        if self._background.is_closed:
            work.close()  # the directory has been left, and nothing needs it any more
        else:
            self._background.start(work, name)
