"""The frontend as an object: its kernel and its parts, its routes as one ASGI application, its life.

    async with Frontend(settings, runtime) as frontend:
        ...  # serve `frontend.asgi`

It can be entered at the ASGI application without any socket, which is how simulations and most tests drive it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dynamo.frontend.admission.process import Stage
from dynamo.frontend.application import FrontendRoutes, RoutedParts
from dynamo.frontend.base.metrics.process import LoopProbe
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.opening import PortGroup, open_kernel, open_parts
from dynamo.frontend.pipeline.exchange import FrontendStopping
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.settings import FrontendSettings

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime


class Frontend:
    """One HTTP frontend over one runtime. The runtime stays the caller's: it is not closed here."""

    def __init__(
        self,
        settings: FrontendSettings,
        runtime: DistributedRuntime,
        *,
        offload: Offload | None = None,
        now: Callable[[], datetime] = datetime.now,
        peers: PortGroup | None = None,
    ) -> None:
        """`now` is the clock that chat templates may print; `peers` are the other processes on the same port."""
        self.settings = settings
        opened = open_kernel(settings, runtime, offload, now, peers)
        self.kernel = kernel = opened.kernel
        self.metrics, self.admission = kernel.pipeline.metrics, kernel.pipeline.admission
        parts, history = open_parts(settings, opened, peers)
        over = RoutedParts(
            settings, parts, kernel.loads, opened.adapters, kernel.budget, kernel.offload, peers, kernel.shares, history
        )
        routes = FrontendRoutes(self.pipeline, over)
        self.asgi, self.admin_asgi = routes.for_clients(), routes.for_operators()
        self.parts: dict[str, Any] = {part.name: part for part in parts}
        """The parts that are switched on, by name."""
        measures = [self.models.measure, *[measure for part in parts for measure in part.measures()]]
        probe = LoopProbe(self.metrics.event_loop, measures)
        self._starts: list[Callable[[], Awaitable[None] | None]] = [
            runtime.start, self.models.start, kernel.loads.start, opened.adapters.start, probe.start,
        ]  # fmt: skip
        self._closing = AsyncExitStack()  # from the last one to the first: the view of the cluster goes late
        self._closing.callback(kernel.offload.close)
        for part in parts:
            part.connect(routes.calls)
            self._starts.append(part.start)
            if part.outlives_models:
                self._closing.push_async_callback(part.aclose)
        self._closing.callback(opened.text_models.close)
        for each in (opened.access, self.models, opened.adapters, kernel.loads):
            self._closing.push_async_callback(each.aclose)
        self._closing.callback(self.pipeline.stalls.close)
        self._closing.callback(probe.stop)
        for part in parts:
            if not part.outlives_models:
                self._closing.push_async_callback(part.aclose)

    async def __aenter__(self) -> Frontend:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Follow the store. Raises `CannotConnect` when it cannot be reached."""
        for start in self._starts:
            begun = start()
            if begun is not None:
                await begun

    @property
    def pipeline(self) -> Pipeline:
        return self.kernel.pipeline

    @property
    def models(self) -> ModelDirectory:
        return self.pipeline.models

    async def drain(self, timeout_seconds: float, *, grace_seconds: float = 0.0) -> bool:
        """Decline new requests and wait for those in flight; whether all of them ended in time.

        `grace_seconds`: how long `/health` reports that this frontend leaves before any request is declined.
        """
        if grace_seconds > 0:
            self.admission.move(Stage.LEAVING)
            await asyncio.sleep(grace_seconds)
        self.admission.move(Stage.DRAINING)
        return await self.admission.wait_idle(timeout_seconds)

    def cut(self) -> int:
        """End every request in flight with a 503 (or an error event); return how many there were."""
        return self.pipeline.register.end_all(FrontendStopping())

    def stopping(self) -> None:
        """Mark the process as neither ready nor alive: the listener is about to close."""
        self.admission.move(Stage.STOPPING)
        for part in self.parts.values():
            part.stopping()

    async def aclose(self) -> None:
        """Leave: the view of the cluster goes last. Idempotent."""
        self.stopping()
        await self._closing.aclose()
