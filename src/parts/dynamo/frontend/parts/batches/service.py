"""Files and batches of one frontend: what its routes call, and the work behind them."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from dynamo.frontend.admission.process import OPEN
from dynamo.frontend.base.access import Caller, CallerLookup
from dynamo.frontend.base.shares import Shares
from dynamo.frontend.parts.batches.conductor import BatchConductor
from dynamo.frontend.parts.batches.fair_slots import FairSlots
from dynamo.frontend.parts.batches.finishing import Step
from dynamo.frontend.parts.batches.line_call import LineCalls
from dynamo.frontend.parts.batches.line_pace import LinePace
from dynamo.frontend.parts.batches.metrics import BatchMetrics
from dynamo.frontend.parts.batches.model_gate import ModelGates
from dynamo.frontend.parts.batches.records import BatchRecord
from dynamo.frontend.parts.batches.room import MAX_OPEN_BATCHES, BatchRoom, BatchSettings
from dynamo.frontend.parts.batches.run import RunParts
from dynamo.frontend.parts.batches.stored_files import StoredFiles, no_such_file
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.outcome import Outcome, RequestListener
from dynamo.protocol.batches.objects import BatchObject
from dynamo.protocol.batches.requests import CreateBatch, PageQuery
from dynamo.protocol.batches.status import CANCELLABLE, BatchStatus
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.runtime.base.steady_wall import steady_wall
from dynamo.runtime.base.tasks import Background

WINDOW_SECONDS: Final = 24 * 3600
CANCEL: Final = "Cannot cancel a batch with status '{status}'."


def no_such_batch(id: str) -> RequestRejected:
    """Return the 404 for a batch."""
    text = f"No batch found with id '{id[:128]}'."
    return RequestRejected(404, text, param="batch_id", stream_type="invalid_request_error")


class BatchService(RequestListener):
    """The files and batches of a directory; several processes may share it."""

    def __init__(
        self,
        settings: BatchSettings,
        pipeline: Pipeline,
        keys: CallerLookup | None = None,
        shares: Shares | None = None,
        *,
        now: Callable[[], float] = steady_wall,
        after_step: Step = lambda _name: None,
    ) -> None:
        """`keys`: those in service, None: no route needs one. `now`: seconds since the epoch; `after_step` is called with each durable step, which tests use to stop there.

        Raises InvalidArgument when the directory cannot be used.
        """
        self._settings, self._pipeline, self._keys = settings, pipeline, keys
        self._now, self._after_step = now, after_step
        self._room = BatchRoom(settings, pipeline.settings, Shares() if shares is None else shares, now)
        self._work = Background()
        self._calls: Mapping[str, Call] = {}
        self._conductor: BatchConductor | None = None  # None: it has not started

    @property
    def files(self) -> StoredFiles:
        """The files of clients, and the results of their batches."""
        return self._room.files

    def serve(self, calls: Mapping[str, Call]) -> None:
        """Execute lines by these calls, by endpoint. Called once, before `start`."""
        self._calls = calls

    def start(self) -> None:
        """Run the batches of the directory as soon as no other process does."""
        pipeline, settings = self._pipeline, self._settings
        loop = asyncio.get_running_loop()
        settled_at = loop.time() + settings.model_wait_seconds
        rng = random.Random()
        calls = LineCalls(self._calls, overload_status=pipeline.settings.overload_status)
        pace = LinePace(lambda: pipeline.admission.in_flight > calls.running)
        parts = RunParts(
            calls,
            pipeline.models,
            ModelGates(rng),
            FairSlots(self._room.lines, pace.begin),
            pace,
            self._room.disk,
            BatchMetrics(pipeline.metrics.families),
            lambda: pipeline.admission.stage in OPEN,
            lambda: loop.time() >= settled_at,
            set(),
            self._identity,
            self._is_revoked,
            rng,
        )
        self._conductor = BatchConductor(self._room, parts, now=self._now, after_step=self._after_step)
        self._work.keep(self._conductor.run, "batches")

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        """Take account of how long a client has waited for an answer: lines of batches make room for clients."""
        if self._conductor is not None and outcome.is_answered:
            self._conductor.note_wait(exchange, outcome.at)

    async def aclose(self) -> None:
        """Stop: what runs is executed again by the next runner. Idempotent."""
        if not self._work.is_closed:
            await self._work.close()
            self._room.close()

    # -- batches -----------------------------------------------------------------------------------------------------

    async def create(self, request: CreateBatch, owner: str, key_id: str = "") -> BatchObject:
        """Make a batch. Raises RequestRejected."""
        if request.endpoint not in self._calls:
            raise not_built(f"Batches of {request.endpoint} are not built in this version", "endpoint")
        now = self._now()
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            created_at=int(now),
            expires_at=int(now) + WINDOW_SECONDS,
            metadata=request.metadata,
        )
        record = BatchRecord(
            batch=batch, owner=owner, key_id=key_id, output_expires_seconds=request.output_expires_seconds
        )
        problem = await self._room.disk(self._room.index.add_batch, record, now, self._room.batches.admits)
        if problem == "missing":
            raise no_such_file(request.input_file_id)
        if problem == "full":
            text = (
                f"There are too many batches that have not ended: {MAX_OPEN_BATCHES} of all projects, or those of this "
                f"project, which may have {self._room.batches.most_of_one()}. Wait for one of them, or cancel it"
            )
            raise RequestRejected(429, text, code="too_many_batches", retry_after_seconds=60)
        self._look()
        return batch

    async def get(self, id: str, owner: str) -> BatchObject:
        """Return a batch. Raises RequestRejected."""
        record: BatchRecord | None = await self._room.disk(self._room.index.batch, id, owner)
        if record is None:
            raise no_such_batch(id)
        return self._shown(record)

    async def page(self, owner: str, query: PageQuery) -> tuple[list[BatchObject], bool]:
        """Return one page of the batches, the newest first, and whether there are more. Raises RequestRejected."""
        found = await self._room.disk(self._room.index.list_batches, owner, query)
        if found is None:
            raise RequestRejected(400, f"after names no batch: {query.after}", param="after")
        return [self._shown(record) for record in found[0]], found[1]

    async def cancel(self, id: str, owner: str) -> BatchObject:
        """Cancel a batch; one that is being cancelled stays so. Raises RequestRejected: 409 when it has ended."""
        await self.get(id, owner)
        record: BatchRecord | None = await self._room.disk(self._room.index.change_batch, id, self._cancel)
        if record is None:
            raise no_such_batch(id)
        self._look()
        return record.batch

    def _shown(self, record: BatchRecord) -> BatchObject:
        """Return a batch as it is shown, with what stops it now."""
        why = None if self._conductor is None else self._conductor.troubles().get(record.batch.id)
        return record.batch if why is None else msgspec.structs.replace(record.batch, paused=why)

    def troubles(self) -> Iterator[str]:
        """Name the batches of this process that stand still, a sentence each."""
        if self._conductor is not None:
            yield from (f"batch {id} is paused: {why}" for id, why in self._conductor.troubles().items())

    def _cancel(self, record: BatchRecord) -> BatchRecord:
        if record.status is not BatchStatus.CANCELLING:
            if record.ending is not None or record.status not in CANCELLABLE:
                raise RequestRejected(409, CANCEL.format(status=record.batch.status), param="batch_id")
            record.enter(BatchStatus.CANCELLING, self._now())
        return record

    def _identity(self, key_id: str) -> Caller | None:
        keys = self._keys
        return None if keys is None or not key_id else keys.identity(key_id)

    def _is_revoked(self, key_id: str) -> bool:
        """Return whether a key that made a batch may not be used any more."""
        return bool(key_id) and self._keys is not None and self._keys.is_revoked(key_id)

    def _look(self) -> None:
        if self._conductor is not None:
            self._conductor.look()
