"""An endpoint while it is served: its record in discovery, its requests in flight, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from dynamo.errors import DynamoException, EngineShutdown
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.health import Canary
from dynamo.runtime.calls.progress import ServingProgress
from dynamo.runtime.calls.request_log import WorkerRequestLog
from dynamo.runtime.calls.request_plane.base import Handler, ResponseSink
from dynamo.runtime.observe.endpoint_metrics import EndpointMetrics

if TYPE_CHECKING:
    from dynamo.runtime.endpoint import Endpoint

logger = logging.getLogger(__name__)

QUEUE_LOOK_SECONDS: Final = 0.01  # how often `wait_idle` checks requests that were admitted and not yet begun


class RequestsInFlight:
    """The requests that an endpoint handles now."""

    __slots__ = ("_contexts", "_idle", "_queued", "are_declined", "cut_with")

    def __init__(self, queued: Callable[[], int]) -> None:
        """`queued`: how many requests were admitted and wait for a place."""
        self._contexts: dict[ResponseSink, Context] = {}
        self._queued = queued
        self._idle = asyncio.Event()
        self._idle.set()
        self.are_declined = False  # new ones, by the request plane
        self.cut_with: DynamoException | None = None  # why nothing may begin any more

    def __len__(self) -> int:
        return len(self._contexts)

    def enter(self, sink: ResponseSink, context: Context) -> None:
        """Add a request."""
        self._contexts[sink] = context
        self._idle.clear()

    def leave(self, sink: ResponseSink) -> None:
        """Remove a request that has ended."""
        del self._contexts[sink]
        if not self._contexts:
            self._idle.set()

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is in flight, `timeout` seconds at most; whether that is so now."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    await self._idle.wait()
                    if not self._queued():
                        return True
                    await asyncio.sleep(QUEUE_LOOK_SECONDS)
        except TimeoutError:
            return not self._contexts and not self._queued()

    def cut(self, error: DynamoException) -> int:
        """End every stream with `error` and kill its request; how many there were."""
        self.cut_with = error
        victims = list(self._contexts.items())
        for sink, context in victims:
            sink.end(error)  # before the kill: what a sink gets after a kill is dropped
            context.kill()
        return len(victims)


class Advertisement:
    """The instance record of one served endpoint, and its readiness, which follows the record."""

    __slots__ = ("_endpoint", "_is_withdrawn", "_withdrawals", "payload")

    def __init__(self, endpoint: Endpoint, payload: Mapping[str, object] | None) -> None:
        """`payload`: of the canary that decides when the endpoint is ready; None: there is none."""
        self._endpoint, self.payload = endpoint, payload
        self._is_withdrawn = False
        self._withdrawals = 0

    def register_health(self) -> None:
        """Let the readiness of the process depend on this endpoint."""
        self._endpoint.runtime.health.register(self._endpoint.path, has_payload=self.payload is not None)

    async def put(self) -> None:
        """Put the record: from here on clients find the endpoint. Idempotent."""
        endpoint, withdrawals = self._endpoint, self._withdrawals
        runtime = endpoint.runtime
        server = await runtime.plane_server()
        await server.start()  # it is there; a path that was just registered may take a moment
        await runtime.discovery.put(endpoint.instance_key, await endpoint.instance_record())
        if withdrawals != self._withdrawals:
            return  # withdrawn while the store was writing
        if self._is_withdrawn:  # an engine that slept is back: ready again, or as soon as the canary has seen it
            self._is_withdrawn = False
            self.register_health()

    async def delete(self) -> None:
        """Remove the record. Idempotent."""
        self._is_withdrawn = True
        self._withdrawals += 1
        self._endpoint.runtime.health.unregister(self._endpoint.path)
        await self._endpoint.runtime.discovery.delete(self._endpoint.instance_key)


class _Reports(NamedTuple):
    """Where the requests of one endpoint are reported."""

    metrics: EndpointMetrics
    log_fields: dict[str, str]
    progress: ServingProgress | None


class ServedEndpoint:
    """One endpoint that this process serves. Made by `Endpoint.start_serving`."""

    def __init__(
        self,
        endpoint: Endpoint,
        handler: Handler,
        *,
        labels: list[tuple[str, str]],
        payload: Mapping[str, object] | None,
        graceful: bool,
        progress: ServingProgress | None,
    ) -> None:
        """`payload`: of the canary's requests, where there is one. `labels` are further ones of its metrics.

        Raises ValueError for labels that are taken.
        """
        self.endpoint, self.graceful = endpoint, graceful
        self._handler = handler
        runtime = endpoint.runtime
        instance_id = f"{endpoint.connection_id():x}"
        place = {"namespace": endpoint.namespace, "component": endpoint.component, "endpoint": endpoint.name}
        metrics = EndpointMetrics(runtime.metrics, **place, worker_id=instance_id, user_labels=labels)
        self._reports = _Reports(metrics, {**place, "instance_id": instance_id}, progress)
        settings = runtime.observability.canary_settings
        self._canary: Canary | None = None
        if payload is not None and settings.enabled:
            self._canary = Canary(endpoint.path, handler, payload, runtime.health, settings)
        self._requests = RequestsInFlight(lambda: runtime.observability.queued_requests)
        self._record = Advertisement(endpoint, payload)
        self._ended = asyncio.Event()
        self._closing = False

    @property
    def route(self) -> str:
        """The path under which the request plane serves it."""
        return self.endpoint.route

    def begin(self) -> None:
        """Report readiness, and start the canary where there is one."""
        self._record.register_health()
        if self._canary is not None:
            self._canary.start()

    # -- one request -------------------------------------------------------------------------------------------------

    async def handle(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Serve a request of the request plane with the user's handler, counted."""
        requests = self._requests
        if requests.cut_with is not None:  # its turn in the queue has come, but the time is over
            sink.end(requests.cut_with)
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        log = WorkerRequestLog(self._reports.log_fields, context, body)
        failure: BaseException | None = None
        metrics = self._reports.metrics
        metrics.started(sink.request_bytes)
        requests.enter(sink, context)
        progress = self._reports.progress
        if progress is not None:
            progress.entered(sink)
        try:
            await self._handler(body, context, sink)
        except BaseException as error:
            failure = error
            metrics.error("generate")
            raise
        else:
            failure = getattr(sink, "failure", None)  # a handler may also end its sink with an error and return
            if failure is not None:
                metrics.error("generate")
            elif self._canary is not None and not context.is_stopped():
                self._canary.activity()
        finally:
            if context.is_stopped():
                metrics.cancelled()
            metrics.response_bytes(getattr(sink, "response_bytes", 0))
            seconds = loop.time() - began
            metrics.finished(seconds)
            log.completed(seconds, failure)
            if progress is not None:
                progress.left(sink, is_answered=not context.is_stopped())
            requests.leave(sink)

    @property
    def health_check_payload(self) -> Mapping[str, object] | None:
        """The body of the canary's requests; None: no canary was declared."""
        return self._record.payload

    @property
    def inflight(self) -> int:
        """Requests being handled now."""
        return len(self._requests)

    @property
    def unfinished(self) -> int:
        """Requests being handled, and those that were admitted and wait for a place."""
        return len(self._requests) + self.endpoint.runtime.observability.queued_requests

    # -- the record --------------------------------------------------------------------------------------------------

    async def advertise(self) -> None:
        """Put the instance record: from here on clients find this endpoint. Idempotent."""
        await self._record.put()

    async def record(self) -> bytes:
        """Return the instance record, as `advertise` puts it."""
        return await self.endpoint.instance_record()

    async def withdraw(self) -> None:
        """Remove the instance record; what arrives all the same is served. Idempotent."""
        await self._record.delete()

    # -- the end -----------------------------------------------------------------------------------------------------

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is in flight, `timeout` seconds at most; whether that is so now."""
        return await self._requests.wait_idle(timeout)

    def stop_accepting(self) -> None:
        """Decline new requests from now on; those in flight go on. Idempotent."""
        self._requests.are_declined = True
        self.endpoint.runtime.planes.decline(self.route)

    async def accept_again(self) -> None:
        """Accept new requests again after `stop_accepting`. Idempotent; without effect once it is closed."""
        if self._requests.are_declined and not self._closing:
            self._requests.are_declined = False
            (await self.endpoint.runtime.plane_server()).register(self.route, self.handle)

    def cut(self, error: DynamoException) -> int:
        """End every stream in flight with `error` and kill its request; how many there were.

        A request that still waits in the queue gets the same error when its turn comes.
        """
        return self._requests.cut(error)

    async def drain(self, timeout: float) -> None:
        """Leave discovery, let the streams in flight end (a graceful endpoint: for `timeout` seconds), cut the rest."""
        try:
            await self.withdraw()
        except (DynamoException, OSError) as error:
            logger.warning("could not withdraw %s: %s; its record expires by itself", self.endpoint.path, error)
        if self.graceful:
            await self.wait_idle(timeout)
        self.stop_accepting()
        cut = self.cut(EngineShutdown("the worker is shutting down"))
        if cut:
            logger.warning("%d streams of %s were cut", cut, self.endpoint.path)
        await self.close()

    async def wait_closed(self) -> None:
        """Return when the endpoint is no longer served."""
        await self._ended.wait()

    async def close(self) -> None:
        """Stop serving at once: leave discovery, decline new requests. Streams in flight go on. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self.stop_accepting()
        self.endpoint.runtime.release(self)
        try:
            if self._canary is not None:
                await self._canary.close()
            await self.withdraw()
        except (DynamoException, OSError, RuntimeError) as error:
            logger.warning("could not withdraw %s: %s; its record expires by itself", self.endpoint.path, error)
        finally:
            self._ended.set()
