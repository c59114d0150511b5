"""Lost KV events can be requested again: from an endpoint beside each publisher, which a record names.

A router that sees a gap in the event ids of a worker requests what it missed from `worker_kv_query_source_<publisher>`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec

from dynamo.errors import DynamoException
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.discovery.base import EVENT_SOURCES
from dynamo.worker.kv_publishing.publisher import KV_EVENTS_TOPIC, KvEventPublisher

if TYPE_CHECKING:
    from dynamo.runtime.endpoint import Endpoint
    from dynamo.runtime.served_endpoint import ServedEndpoint

logger = logging.getLogger(__name__)


class RecoveryQuery(msgspec.Struct):
    """A router's query: everything of one rank from an event on, or (`start_event_id` null) all blocks held now."""

    worker_id: int
    dp_rank: int = 0
    start_event_id: int | None = None
    end_event_id: int | None = None


def query_endpoint_name(publisher_id: int) -> str:
    return f"worker_kv_query_source_{publisher_id:x}"


class KvRecovery:
    """Answers for one publisher."""

    def __init__(self, endpoint: Endpoint, publisher: KvEventPublisher, publisher_id: int) -> None:
        self._endpoint = endpoint
        self._publisher = publisher
        self._publisher_id = publisher_id
        self._key = f"{EVENT_SOURCES}/{endpoint.event_scope.channel_key(KV_EVENTS_TOPIC, publisher_id)}"
        self._served: ServedEndpoint | None = None

    @classmethod
    async def begin(cls, endpoint: Endpoint, publisher: KvEventPublisher, publisher_id: int) -> Self:
        """Serve, and publish the record. Raises what serving and discovery raise."""
        made = cls(endpoint, publisher, publisher_id)
        name = query_endpoint_name(publisher_id)
        asked = endpoint.runtime.endpoint(f"{endpoint.namespace}.{endpoint.component}.{name}")
        made._served = await asked.start_serving(made._handle)
        try:
            await endpoint.runtime.discovery.put(made._key, made._record(await made._served.record()))
        except BaseException:
            await made.close()
            raise
        return made

    async def close(self) -> None:
        """Take the record back and stop serving; idempotent."""
        served, self._served = self._served, None
        if served is None:
            return
        try:
            await self._endpoint.runtime.discovery.delete(self._key)
        except (DynamoException, OSError, RuntimeError) as error:
            logger.debug("the event source %s could not be withdrawn, it expires by itself: %s", self._key, error)
        await served.close()

    def _record(self, instance: bytes) -> bytes:
        place = {
            "namespace": self._endpoint.namespace,
            "component": self._endpoint.component,
            "name": self._endpoint.name,
        }
        worker_id, dp_rank = self._publisher.rank
        target = msgspec.json.decode(instance, type=dict[str, object])
        target.pop("type", None)
        record = {
            "type": "EventSource",
            "scope": self._endpoint.event_scope.to_json(),
            "topic": KV_EVENTS_TOPIC,
            "publisher_id": self._publisher_id,
            "metadata": {
                "kv_state_endpoint": place,
                "worker": {"worker_id": worker_id, "dp_rank": dp_rank},
                "publisher_id": self._publisher_id,
                "recovery_target": target,
            },
        }
        return msgspec.json.encode(record)

    async def _handle(self, body: object, context: Context, sink: ResponseSink) -> None:
        # The answer is the whole item: on this endpoint the native system wraps nothing.
        sink.send_object(self._answer(body))
        sink.end()

    def _answer(self, body: object) -> dict[str, object]:
        try:
            query = msgspec.convert(body, RecoveryQuery)
        except msgspec.ValidationError as error:
            return {"Error": f"the query cannot be read: {error}"}
        worker_id, dp_rank = self._publisher.rank
        if query.worker_id != worker_id:
            return {"Error": f"worker_id mismatch: asked for {query.worker_id}, this is {worker_id}"}
        if query.dp_rank != dp_rank:
            return {"Error": f"dp_rank mismatch: asked for {query.dp_rank}, this is {dp_rank}"}
        return self._publisher.answer(query.start_event_id, query.end_event_id)


class BackgroundRecovery:
    """Answers for a publisher that was made without a worker around it, until `stop` or the end of the runtime."""

    def __init__(self, endpoint: Endpoint, publisher: KvEventPublisher, publisher_id: int) -> None:
        """Starts on the event loop that runs; after a failure it begins again, and lost events cannot be requested meanwhile."""
        self._runtime = endpoint.runtime
        self._stopped = asyncio.Event()
        self._background = Background()
        self._background.keep(partial(self._run, endpoint, publisher, publisher_id), f"kv recovery of {endpoint.path}")
        self._runtime.remember_client(self)

    async def _run(self, endpoint: Endpoint, publisher: KvEventPublisher, publisher_id: int) -> None:
        await endpoint.runtime.start()
        recovery = await KvRecovery.begin(endpoint, publisher, publisher_id)
        try:
            await self._stopped.wait()
        finally:
            await recovery.close()

    def stop(self) -> None:
        """Begin to stop. On the event loop; idempotent."""
        self._stopped.set()
        self._runtime.forget_client(self)

    async def close(self) -> None:
        """Stop, and wait for it. Idempotent."""
        self.stop()
        await self._background.close()

    def count_quarantined(self) -> int:
        """Return 0: it makes no calls."""
        return 0
