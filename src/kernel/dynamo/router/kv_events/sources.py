"""The event sources of workers: where the lost KV events of each rank can be requested, and the requests."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from dynamo.errors import DynamoException
from dynamo.kv.events import BadEvents, KvAnswer, read_answer
from dynamo.kv.overlap import WorkerRank
from dynamo.runtime.calls.context import Context
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime

MAX_RECOVERIES: Final = 16  # at once: each may bring the whole cache of a rank
ASK_SECONDS: Final = 30.0


class EventSource(msgspec.Struct):
    """What is needed of a `v1/event_sources` record."""

    metadata: _Metadata

    @property
    def rank(self) -> WorkerRank:
        """The rank whose events the source knows."""
        return WorkerRank(self.metadata.worker.worker_id, self.metadata.worker.dp_rank)

    @property
    def target(self) -> RecoveryTarget:
        """Where they can be requested."""
        return self.metadata.recovery_target


class _Metadata(msgspec.Struct):
    worker: _Worker
    recovery_target: RecoveryTarget


class _Worker(msgspec.Struct):
    worker_id: int
    dp_rank: int = 0


class RecoveryTarget(msgspec.Struct, frozen=True):
    """An endpoint that answers for one rank."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int

    @property
    def path(self) -> str:
        """As endpoints are named."""
        return f"{self.namespace}.{self.component}.{self.endpoint}"


def read_source(record: bytes) -> EventSource:
    """Decode a `v1/event_sources` record. Raises BadEvents."""
    try:
        return msgspec.json.decode(record, type=EventSource)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also no UTF-8, or nested too deep
        raise BadEvents(str(error)) from error


class SourceClients:
    """Requests from event sources what was lost."""

    def __init__(self, runtime: DistributedRuntime, slots: asyncio.Semaphore | None = None) -> None:
        """`slots`: shared by feeds that recover side by side."""
        self._runtime = runtime
        self._slots = slots or asyncio.Semaphore(MAX_RECOVERIES)
        self._clients: dict[str, Client] = {}  # by endpoint path

    async def request(self, rank: WorkerRank, target: RecoveryTarget, start: int | None) -> KvAnswer:
        """Request the events of a rank from `start` on; None: everything that it holds.

        Raises DynamoException, OSError and BadEvents for a source that gives no answer to that.
        """
        body = {"worker_id": rank.worker_id, "dp_rank": rank.dp_rank, "start_event_id": start, "end_event_id": None}
        context = Context()
        async with self._slots, asyncio.timeout(ASK_SECONDS):
            client = self._clients.get(target.path)
            if client is None:
                made = await self._client(target.path)
                client = self._clients.setdefault(target.path, made)
                if client is not made:  # native workers of a component share the name: others were called meanwhile
                    await made.close()
            stream = await client.open(client.named(target.instance_id), body, context)
            try:
                items = await stream.next_batch()
            finally:
                stream.close()
        if not items:
            raise BadEvents("an empty answer")
        answer = read_answer(items[0].extra)
        if answer.kind == "Error":
            raise BadEvents(answer.text)
        return answer

    async def leave(self, target: RecoveryTarget) -> None:
        """Forget the last source of an endpoint, which has gone."""
        client = self._clients.pop(target.path, None)
        if client is not None:
            await client.close()

    async def close(self) -> None:
        """Forget every source."""
        while self._clients:
            await self._clients.popitem()[1].close()

    async def _client(self, path: str) -> Client:
        try:
            return await self._runtime.endpoint(path).client()
        except ValueError as error:  # a name that no endpoint has
            raise BadEvents(f"{path}: {error}") from error


UNANSWERED: Final = (DynamoException, OSError, BadEvents)  # TimeoutError is an OSError
"""How a request for lost events may end."""
