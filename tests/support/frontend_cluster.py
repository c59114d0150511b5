"""A frontend and scripted workers in one process, over the memory planes: real parts, no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from starlette.routing import Router

from dynamo.contract.engine import RawEngine
from dynamo.frontend.app import Frontend
from dynamo.frontend.base.offload import InlineOffload
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.pipeline.settings import ApiLimits
from dynamo.frontend.settings import FrontendSettings
from dynamo.protocol.records import ModelCard
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.worker.registration import build_card, read_model_directory
from dynamo.worker.serving import RawServing
from support.asgi_client import AsgiClient
from support.patience import PATIENCE_SECONDS

Script = Callable[[Mapping[str, Any], Context, ResponseSink], Awaitable[None]]


def say(*chunks: str | list[int], finish: str | None = "stop", extra: dict[str, Any] | None = None) -> Script:
    """A worker that sends these chunks (text as bytes, or ids) and ends; the finish reason is on the last one."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        for position, chunk in enumerate(chunks):
            ids = list(chunk.encode()) if isinstance(chunk, str) else chunk
            is_last = position == len(chunks) - 1
            sink.send_tokens(list(ids), finish_reason=finish if is_last else None, extra=extra)
            await asyncio.sleep(0)

    return script


def fail(error: Exception, *, after: tuple[str, ...] = ()) -> Script:
    """A worker that says something, then fails."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        for text in after:
            sink.send_tokens(list(text.encode()))
            await asyncio.sleep(0.002)
        raise error

    return script


def raw_engine(made: RawEngine) -> Script:
    """A worker with a real engine of objects behind its real adapter."""
    serving = RawServing(made)

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await serving.handle(dict(body), context, sink)

    return script


def sends(*objects: Any, fails: Exception | None = None) -> Script:
    """A worker that sends these objects, and ends or fails."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        for value in objects:
            sink.send_object({"data": value})
        if fails is not None:
            raise fails
        sink.end()

    return script


class ScriptedWorker:
    """One worker: whatever it is asked it does what its script says, and it keeps a record."""

    def __init__(self, runtime: DistributedRuntime, script: Script) -> None:
        self.runtime = runtime
        self.script = script
        self.requests: list[Mapping[str, Any]] = []
        self.contexts: list[Context] = []
        self.killed = asyncio.Event()
        self.started = asyncio.Event()
        self.served: Any = None
        self.endpoint: Any = None

    async def handle(self, body: Any, context: Context, sink: ResponseSink) -> None:
        self.requests.append(body)
        self.contexts.append(context)
        context.on_cancel(lambda killed: self.killed.set() if killed else None)
        self.started.set()
        await self.script(body, context, sink)

    async def hold(self, body: Any, context: Context, sink: ResponseSink) -> None:
        """A script: nothing until the request is killed."""
        await context.async_killed_or_stopped()

    async def stop(self) -> None:
        await self.runtime.aclose()


class Cluster:
    """Workers come and go with `worker()`; `client` speaks to the frontend."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self.client = AsgiClient(frontend.asgi)
        self.workers: list[ScriptedWorker] = []

    async def worker(
        self,
        script: Script | None = None,
        *,
        model: str = "m",
        namespace: str = "ns",
        component: str = "backend",
        directory: Path | None = None,
        card: ModelCard | None = None,
        wait: bool = True,
        **members: Any,
    ) -> ScriptedWorker:
        """Start a worker and wait until the frontend serves its model."""
        runtime = memory_runtime()
        worker = ScriptedWorker(runtime, script or say("hello"))
        self.workers.append(worker)
        worker.endpoint = runtime.endpoint(f"{namespace}.{component}.generate")
        worker.served = await worker.endpoint.start_serving(worker.handle)
        if card is None:
            assets = await asyncio.to_thread(read_model_directory, directory) if directory is not None else None
            card = build_card(model, assets=assets, **members)
        await worker.endpoint.publish_model(card.to_json())
        if wait:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self.frontend.models.wait_for(lambda: self.sees(worker, card.display_name))
        return worker

    @property
    def media(self) -> Any:
        """What takes and holds the media of requests."""
        return self.frontend.pipeline.media

    def sees(self, worker: ScriptedWorker, model: str) -> bool:
        instance_id = worker.endpoint.connection_id()
        listed = {record["instance_id"] for record in self.frontend.models.instances()}
        models = self.frontend.models.serving(model)
        return instance_id in listed and any(found.instance(instance_id) is not None for found in models)

    async def gone(self, model: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.frontend.models.wait_for(lambda: not self.frontend.models.is_registered(model))

    def metric(self, name: str, **labels: str) -> float:
        """One series by name and exact labels, 0 when it does not exist."""
        for line in self.frontend.metrics.expose().decode().splitlines():
            series, _, value = line.rpartition(" ")
            found, _, rest = series.partition("{")
            given = dict(pair.split("=", 1) for pair in rest.rstrip("}").split(",") if pair)
            if found == name and {key: text.strip('"') for key, text in given.items()} == labels:
                return float(value)
        return 0.0


def routes_of(app: Any) -> list[GuardedRoute]:
    """The real table of routes behind everything that stands in front of them."""
    while not isinstance(app, Router):
        app = app._app
    found = [route for route in app.routes if isinstance(route, GuardedRoute)]
    assert len(found) == len(app.routes), "a route that is not a GuardedRoute has no access of its own"
    return found


def memory_runtime() -> DistributedRuntime:
    return DistributedRuntime(asyncio.get_running_loop(), "mem", "mem")


@asynccontextmanager
async def cluster(tmp_path: Path, *, inline: bool = True, **settings: Any) -> AsyncIterator[Cluster]:
    """A frontend without workers; everything is closed at the end. `inline`: long work runs on the loop."""
    runtime = memory_runtime()
    settings.setdefault("model_cache_dir", tmp_path / "cache")
    # These tests lose workers for good, and do not wait for others.
    settings.setdefault("replacement_wait_seconds", 0.0)
    limits = {entry.name: settings.pop(entry.name) for entry in fields(ApiLimits) if entry.name in settings}
    settings.setdefault("limits", ApiLimits(**limits))
    made = FrontendSettings(**settings)
    async with Frontend(made, runtime, offload=InlineOffload() if inline else None) as frontend:
        found = Cluster(frontend)
        try:
            yield found
        finally:
            await found.client.aclose()
            for worker in found.workers:
                await worker.stop()
    await runtime.aclose()
