"""The stages of a request before the worker that answers it: a list, each of which passes the request on to the next.

Today that is the prefill of disaggregated models. An encode stage for media takes its place before it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from dynamo.errors import DynamoException, InvalidArgument, Unknown
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.handoff import PrefillAnswer
from dynamo.router.pool import ModelPool
from dynamo.router.prefill import DispatchTimer, PrefillRouter, can_fall_back_to_decode
from dynamo.router.query_of_death import Suspect
from dynamo.router.record import DispatchRecord
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import StreamItem

__all__ = ["DispatchStage", "DispatchTimer", "PrefillStage", "Proceed", "StageJob", "run_stages"]


class StageJob(NamedTuple):
    """A request on its way through the stages."""

    body: WorkerRequest
    context: Context
    record: DispatchRecord
    timer: DispatchTimer
    retries: int  # how many other workers a stage may try
    limit_seconds: float | None  # what one worker of a stage may take, where its answer is awaited
    suspect: Suspect  # counts the workers that die on the request


Proceed = Callable[[WorkerRequest], Awaitable[list[StreamItem]]]
"""From the request of the next stage to the first items of the answer."""


class DispatchStage(Protocol):
    """One step before the worker that answers."""

    async def run(self, job: StageJob, proceed: Proceed) -> list[StreamItem]:
        """Do this stage's part, then return `await proceed(body)` with the next stage's request.

        A stage that ends the request by itself returns the items of the answer without calling `proceed`.
        """
        ...

    async def advise(self, body: WorkerRequest, record: DispatchRecord) -> WorkerRequest:
        """Note in `record` which worker this stage would take now, and return the next stage's request."""
        ...


async def run_stages(stages: Sequence[DispatchStage], job: StageJob, answer: Proceed) -> list[StreamItem]:
    """Pass the request through `stages` in order, then to `answer`; return the first items of the answer."""
    if not stages:
        return await answer(job.body)
    first, rest = stages[0], stages[1:]
    if not rest:
        return await first.run(job, answer)
    return await first.run(job, lambda body: run_stages(rest, job._replace(body=body), answer))


class PrefillStage:
    """Has the prompt computed by a prefill worker, or by the decode worker where no prefill worker can and that is allowed."""

    __slots__ = ("_decoders", "router")

    def __init__(self, router: PrefillRouter, decoders: ModelPool) -> None:
        """`decoders`: the workers of the next stage."""
        self.router, self._decoders = router, decoders

    async def advise(self, body: WorkerRequest, record: DispatchRecord) -> WorkerRequest:
        """Note the prefill worker. See `DispatchStage.advise`."""
        router = self.router
        try:
            return await router.advise(body, record)
        except DynamoException as error:
            if router.is_enforced or not can_fall_back_to_decode(error):
                raise
            return body

    async def run(self, job: StageJob, proceed: Proceed) -> list[StreamItem]:
        """Request the prefill and pass on where to fetch the result. See `DispatchStage.run`."""
        router, context = self.router, job.context
        try:
            handoff = await router.prefill(
                job.body,
                context,
                job.timer,
                record=job.record,
                retries=job.retries,
                limit_seconds=job.limit_seconds,
                suspect=job.suspect,
            )
        except DynamoException as error:
            if router.is_enforced or context.is_stopped() or not can_fall_back_to_decode(error):
                raise
            router.note(error)
            try:
                return await proceed(job.body)
            except (InvalidArgument, Unknown) as refusal:
                raise error from refusal  # an engine that only decodes: it is not the client's request that is wrong
        router.note(None)
        job.record.prefill_instance_id = handoff.instance.instance_id
        if isinstance(handoff, PrefillAnswer):
            job.record.instances.append(handoff.instance)
            return handoff.items
        if context.is_stopped():
            router.release_blocks(handoff, self._decoders, context)
            return []
        return await handoff.join_decode(proceed(handoff.body))
