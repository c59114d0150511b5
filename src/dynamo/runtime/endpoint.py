"""One endpoint of a runtime: serving it, advertising it, calling it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynamo.errors import DynamoException, EngineShutdown
from dynamo.placement import RouterMode
from dynamo.runtime.client import Client
from dynamo.runtime.context import Context
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS
from dynamo.runtime.endpoint_metrics import EndpointMetrics
from dynamo.runtime.event_plane.base import EventPublisher, Scope
from dynamo.runtime.handler import PythonHandler, serve_python, serve_python_stream
from dynamo.runtime.health import Canary
from dynamo.runtime.instances import encode_instance
from dynamo.runtime.metrics import TypedFamily
from dynamo.runtime.progress import Progress
from dynamo.runtime.request_log import WorkerRequestLog
from dynamo.runtime.request_plane.base import Handler, ResponseSink

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

SCHEME: Final = "dyn://"
QUEUE_LOOK_SECONDS: Final = 0.01  # how often `wait_idle` looks at requests that were admitted and not yet begun

MetricsLabels = Iterable[tuple[str, str]] | Mapping[str, str]


def split_endpoint(path: str) -> tuple[str, str, str]:
    """Split "ns.comp.ep" or "dyn://ns.comp.ep" into ("ns", "comp", "ep"). Raises ValueError for anything else."""
    parts = path.removeprefix(SCHEME).split(".")
    if len(parts) != 3 or not all(parts):
        raise ValueError(f"endpoint path {path!r} must be NAMESPACE.COMPONENT.ENDPOINT")
    if any("/" in part for part in parts):
        raise ValueError(f"endpoint path {path!r} must not contain '/': it separates the parts of a discovery key")
    namespace, component, name = parts
    return namespace, component, name


class EndpointEvents:
    """One topic of an endpoint. Use it on the event loop."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher = publisher

    def publish(self, payload: Any) -> None:
        """Send one message: any value that msgpack can carry. Never blocks; without a reader it goes nowhere."""
        self._publisher.publish(msgspec.msgpack.encode(payload))

    @property
    def publisher_id(self) -> int:
        return self._publisher.publisher_id

    async def close(self) -> None:
        """Leave; idempotent."""
        await self._publisher.close()


class Endpoint:
    """A name in the cluster. Cheap: nothing happens until it is served or called."""

    def __init__(self, runtime: DistributedRuntime, path: str) -> None:
        self.runtime = runtime
        self.namespace, self.component, self.name = split_endpoint(path)

    @property
    def path(self) -> str:
        """ "ns.comp.ep"."""
        return f"{self.namespace}.{self.component}.{self.name}"

    @property
    def metrics(self) -> EndpointMetricsAccess:
        """Where an engine adds exposition of its own."""
        return EndpointMetricsAccess(self.runtime)

    def connection_id(self) -> int:
        """Return the id of every instance of this runtime."""
        return self.runtime.connection_id()

    def event_channel(self, topic: str) -> EndpointEvents:
        """Make a publisher of this endpoint's events on the runtime's event plane."""
        return EndpointEvents(self.runtime.events.new_publisher(self.event_scope, topic))

    @property
    def event_scope(self) -> Scope:
        """Whose events this endpoint's are."""
        return Scope(self.namespace, self.component, self.name)

    # -- serving -------------------------------------------------------------------------------------------------

    async def serve_endpoint(
        self,
        handler: PythonHandler,
        graceful_shutdown: bool = True,
        metrics_labels: MetricsLabels | None = None,
        health_check_payload: Mapping[str, Any] | None = None,
    ) -> None:
        """Serve with `async def handler(request[, context])` that yields; returns when the endpoint was shut down.

        `graceful_shutdown` False: a shutdown of the runtime cuts the streams in flight instead of waiting for them.
        """
        served = await self.start_serving(
            serve_python(handler, cancel_grace_seconds=self.runtime.settings.cancel_grace_seconds),
            metrics_labels=metrics_labels,
            health_check_payload=health_check_payload,
            graceful=graceful_shutdown,
        )
        try:
            await served.wait_closed()
        finally:
            await served.close()

    async def serve_bidirectional_endpoint(
        self, handler: PythonHandler, graceful_shutdown: bool = True, metrics_labels: MetricsLabels | None = None
    ) -> None:
        """Serve with `async def handler(requests[, context])` that yields; `requests` is iterated over with `async for`.

        Callers are native ones: on the native wire, over TCP or NATS. Any other request is an `InvalidArgument`. Returns
        when the endpoint was shut down.
        """
        grace = self.runtime.settings.cancel_grace_seconds
        served = await self.start_serving(
            serve_python_stream(handler, cancel_grace_seconds=grace),
            metrics_labels=metrics_labels,
            graceful=graceful_shutdown,
            takes_stream=True,
        )
        try:
            await served.wait_closed()
        finally:
            await served.close()

    def first_token_source(self, worker_type: Any) -> Any:
        """Raise an error: not built in this version."""
        raise NotImplementedError(
            "first-token sources belong to disaggregated serving, which is not built in this version; "
            "see 'Known limits' in docs/architecture.md"
        )

    async def start_serving(
        self,
        handler: Handler,
        *,
        metrics_labels: MetricsLabels | None = None,
        health_check_payload: Mapping[str, Any] | None = None,
        advertise: bool = True,
        graceful: bool = True,
        takes_stream: bool = False,
        watch_progress: bool = False,
    ) -> ServedEndpoint:
        """Serve with a runtime handler and return at once; `advertise` False leaves the record to the caller.

        `takes_stream`: native callers that send a stream of requests are let through; the handler's body is then a
        `RequestStream`. `watch_progress`: this process is not ready while nothing comes of its requests; not for handlers that
        may yield nothing for long.

        Raises ValueError when this runtime serves the endpoint already, or for labels that are taken.
        """
        server = await self.runtime.plane_server()
        served = ServedEndpoint(
            self,
            handler,
            labels=_label_pairs(metrics_labels),
            payload=health_check_payload,
            graceful=graceful,
            progress=self.runtime.progress if watch_progress else None,
        )
        server.register(served.route, served.handle)
        if takes_stream:
            self.runtime.take_streams(served.route)
        self.runtime.adopt(served)
        served.begin()
        if advertise:
            try:
                await served.advertise()
            except BaseException:
                await served.close()
                raise
        return served

    async def register_endpoint_instance(self) -> None:
        """Advertise this endpoint (again). Before `serve_endpoint` it is there to be found, as the leader and the followers
        of an engine of several nodes find each other; a request that comes then is declined, and may go elsewhere."""
        served = self.runtime.served(self.path)
        if served is not None:
            await served.advertise()
            return
        await self.runtime.plane_server()
        await self.runtime.discovery.put(self.instance_key, await self.instance_record())

    async def unregister_endpoint_instance(self) -> None:
        """Take the endpoint out of discovery; requests that come all the same are served. Absent is fine."""
        served = self.runtime.served(self.path)
        if served is not None:
            await served.withdraw()
            return
        await self.runtime.start()
        await self.runtime.discovery.delete(self.instance_key)

    @property
    def route(self) -> str:
        """The native routing path of this runtime's instance; opaque to callers."""
        return f"{self.connection_id():x}/{self.namespace}/{self.component}/{self.name}"

    @property
    def instance_key(self) -> str:
        """Where this runtime's instance record is in discovery."""
        return f"{INSTANCES}/{self.namespace}/{self.component}/{self.name}/{self.connection_id():x}"

    async def instance_record(self) -> bytes:
        """Return the record of this runtime's instance."""
        server = await self.runtime.plane_server()
        transport = server.transport(self.route)
        return encode_instance(self.namespace, self.component, self.name, self.connection_id(), transport)

    # -- calling -------------------------------------------------------------------------------------------------

    async def client(self, router_mode: RouterMode | str | Any | None = None) -> Client:
        """Make a client that knows the present instances and follows their changes."""
        client = Client(self, RouterMode.of(router_mode) if router_mode is not None else None)
        self.runtime.remember_client(client)
        try:
            await client.start()
        except BaseException:
            await client.close()
            raise
        return client

    # -- model records -------------------------------------------------------------------------------------------

    async def publish_model(self, card_json: dict[str, Any], suffix: str | None = None) -> None:
        """Publish the model that this instance serves; `suffix` is the slug of a LoRA."""
        record = {
            "type": "Model",
            "namespace": self.namespace,
            "component": self.component,
            "endpoint": self.name,
            "instance_id": self.connection_id(),
            "card_json": card_json,
        }
        if suffix:
            record["model_suffix"] = suffix
        await self.runtime.start()
        await self.runtime.discovery.put(self._model_key(suffix), msgspec.json.encode(record))

    async def withdraw_model(self, suffix: str | None = None) -> None:
        """Take the model back; absent is fine."""
        await self.runtime.start()
        await self.runtime.discovery.delete(self._model_key(suffix))

    async def published_model(self, suffix: str | None = None) -> dict[str, Any] | None:
        """Return the `card_json` this instance has published; None when there is none."""
        await self.runtime.start()
        key = self._model_key(suffix)
        value = (await self.runtime.discovery.get_prefix(key)).get(key)
        if value is None:
            return None
        card: dict[str, Any] = msgspec.json.decode(value)["card_json"]
        return card

    def _model_key(self, suffix: str | None) -> str:
        key = f"{MODEL_CARDS}/{self.namespace}/{self.component}/{self.name}/{self.connection_id():x}"
        return f"{key}/{suffix}" if suffix else key

    def __repr__(self) -> str:
        return f"Endpoint({self.path})"


class EndpointMetricsAccess:
    """What an engine may do with the metrics of its process."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str | bytes]) -> None:
        """Append what `callback()` returns (exposition text) to every scrape."""
        self._runtime.metrics.add_callback(callback)

    def register_prometheus_typed_callback(self, callback: Callable[[], Iterable[TypedFamily]]) -> None:
        """Append the families `callback()` returns to every scrape."""
        self._runtime.metrics.add_typed_callback(callback)


class ServedEndpoint:
    """An endpoint while it is served: its record, its requests in flight, its end."""

    def __init__(
        self,
        endpoint: Endpoint,
        handler: Handler,
        *,
        labels: list[tuple[str, str]],
        payload: Mapping[str, Any] | None,
        graceful: bool,
        progress: Progress | None,
    ) -> None:
        self.endpoint = endpoint
        self.graceful = graceful
        self._runtime = endpoint.runtime
        self._handler = handler
        self._payload = payload
        self._instance_id = endpoint.connection_id()
        self.route = endpoint.route
        self._key = endpoint.instance_key
        self._metrics = EndpointMetrics(
            self._runtime.metrics,
            namespace=endpoint.namespace,
            component=endpoint.component,
            endpoint=endpoint.name,
            worker_id=f"{self._instance_id:x}",
            user_labels=labels,
        )
        self._log_fields = {
            "namespace": endpoint.namespace,
            "component": endpoint.component,
            "endpoint": endpoint.name,
            "instance_id": f"{self._instance_id:x}",
        }
        self._canary: Canary | None = None
        self._progress = progress
        self._inflight: dict[ResponseSink, Context] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Event()
        self._closing = False
        self._is_withdrawn = False
        self._withdrawals = 0
        self._cut_with: DynamoException | None = None  # why nothing may begin any more

    def begin(self) -> None:
        """Report readiness, and start the canary where there is one."""
        path = self.endpoint.path
        self._runtime.health.register(path, has_payload=self._payload is not None)
        settings = self._runtime.canary_settings
        if self._payload is not None and settings.enabled:
            self._canary = Canary(path, self._handler, self._payload, self._runtime.health, settings)
            self._canary.start()

    # -- one request ---------------------------------------------------------------------------------------------

    async def handle(self, body: Any, context: Context, sink: ResponseSink) -> None:
        """Serve a request of the request plane with the user's handler, counted."""
        if self._cut_with is not None:  # its turn in the queue has come, but the time is over
            sink.end(self._cut_with)
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        log = WorkerRequestLog(self._log_fields, context, body)
        failure: BaseException | None = None
        metrics = self._metrics
        metrics.started(sink.request_bytes)
        self._inflight[sink] = context
        self._idle.clear()
        progress = self._progress
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
            del self._inflight[sink]
            if progress is not None:
                progress.left(sink, is_answered=not context.is_stopped())
            if not self._inflight:
                self._idle.set()

    @property
    def inflight(self) -> int:
        """Requests being handled now."""
        return len(self._inflight)

    # -- the record ----------------------------------------------------------------------------------------------

    async def advertise(self) -> None:
        """Put the instance record: from here on clients find this endpoint. Idempotent."""
        server = await self._runtime.plane_server()
        await server.start()  # it is there; a path that was just registered may take a moment
        endpoint, withdrawals = self.endpoint, self._withdrawals
        await self._runtime.discovery.put(self._key, await self.record())
        if withdrawals != self._withdrawals:
            return  # withdrawn while the store was writing
        if self._is_withdrawn:  # an engine that slept is back: ready again, or as soon as the canary has seen it
            self._is_withdrawn = False
            self._runtime.health.register(endpoint.path, has_payload=self._payload is not None)

    async def record(self) -> bytes:
        """Return the instance record, as `advertise` puts it."""
        return await self.endpoint.instance_record()

    async def withdraw(self) -> None:
        """Remove the instance record; what arrives all the same is served. Idempotent."""
        self._is_withdrawn = True
        self._withdrawals += 1
        self._runtime.health.unregister(self.endpoint.path)
        await self._runtime.discovery.delete(self._key)

    # -- the end -------------------------------------------------------------------------------------------------

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is in flight, `timeout` seconds at most; whether that is so now."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    await self._idle.wait()
                    if not self._runtime.queued_requests:
                        return True
                    await asyncio.sleep(QUEUE_LOOK_SECONDS)
        except TimeoutError:
            return not self._inflight and not self._runtime.queued_requests

    def stop_accepting(self) -> None:
        """Decline new requests from now on; those in flight go on. Idempotent."""
        self._runtime.decline(self.route)

    def cut(self, error: DynamoException) -> int:
        """End every stream in flight with `error` and kill its request; how many there were.

        A request that still waits in the queue gets the same error when its turn comes.
        """
        self._cut_with = error
        victims = list(self._inflight.items())
        for sink, context in victims:
            sink.end(error)  # before the kill: what a sink gets after a kill is dropped
            context.kill()
        return len(victims)

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
        self._runtime.release(self)
        try:
            if self._canary is not None:
                await self._canary.close()
            await self.withdraw()
        except (DynamoException, OSError, RuntimeError) as error:
            logger.warning("could not withdraw %s: %s; its record expires by itself", self.endpoint.path, error)
        finally:
            self._ended.set()


def _label_pairs(labels: MetricsLabels | None) -> list[tuple[str, str]]:
    if labels is None:
        return []
    pairs = labels.items() if isinstance(labels, Mapping) else labels
    return [(str(name), str(value)) for name, value in pairs]
