"""One endpoint of a runtime: serving it, advertising it, calling it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynamo.placement import RouterMode
from dynamo.runtime.calls.event_plane.base import EventPublisher, EventScope
from dynamo.runtime.calls.handler import PythonHandler, serve_python, serve_python_stream
from dynamo.runtime.calls.instances import encode_instance
from dynamo.runtime.calls.request_plane.base import Handler
from dynamo.runtime.client import Client
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS
from dynamo.runtime.observe.metrics import TypedFamily
from dynamo.runtime.served_endpoint import ServedEndpoint

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

SCHEME: Final = "dyn://"

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

    def publish(self, payload: object) -> None:
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
    def event_scope(self) -> EventScope:
        """Whose events this endpoint's are."""
        return EventScope(self.namespace, self.component, self.name)

    # -- serving -------------------------------------------------------------------------------------------------

    async def serve_endpoint(
        self,
        generator: PythonHandler,
        graceful_shutdown: bool = True,
        metrics_labels: MetricsLabels | None = None,
        health_check_payload: Mapping[str, object] | None = None,
    ) -> None:
        """Serve with `async def generator(request[, context])` that yields; returns when the endpoint was shut down.

        `graceful_shutdown` False: a shutdown of the runtime cuts the streams in flight instead of waiting for them.
        """
        served = await self.start_serving(
            serve_python(generator, cancel_grace_seconds=self.runtime.settings.cancel_grace_seconds),
            metrics_labels=metrics_labels,
            health_check_payload=health_check_payload,
            graceful=graceful_shutdown,
        )
        try:
            await served.wait_closed()
        finally:
            await served.close()

    async def serve_bidirectional_endpoint(
        self, generator: PythonHandler, graceful_shutdown: bool = True, metrics_labels: MetricsLabels | None = None
    ) -> None:
        """Serve with `async def generator(requests[, context])` that yields; `requests` is iterated over with `async for`.

        Callers are native ones: on the native wire, over TCP or NATS. Any other request is an `InvalidArgument`. Returns
        when the endpoint was shut down.
        """
        grace = self.runtime.settings.cancel_grace_seconds
        served = await self.start_serving(
            serve_python_stream(generator, cancel_grace_seconds=grace),
            metrics_labels=metrics_labels,
            graceful=graceful_shutdown,
            takes_stream=True,
        )
        try:
            await served.wait_closed()
        finally:
            await served.close()

    async def first_token_source(self, worker_type: object) -> Any:
        """Return what reports first tokens to routers (`FirstTokenSource`); None for workers that make no tokens."""
        return await import_module("dynamo.bindings.first_token").open_source(self, worker_type)

    async def start_serving(
        self,
        handler: Handler,
        *,
        metrics_labels: MetricsLabels | None = None,
        health_check_payload: Mapping[str, object] | None = None,
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
            self.runtime.planes.take_streams(served.route)
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

    async def client(self, router_mode: RouterMode | str | object | None = None) -> Client:
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

    async def publish_model(self, card_json: dict[str, object], suffix: str | None = None) -> None:
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


def _label_pairs(labels: MetricsLabels | None) -> list[tuple[str, str]]:
    if labels is None:
        return []
    pairs = labels.items() if isinstance(labels, Mapping) else labels
    return [(str(name), str(value)) for name, value in pairs]
