"""Requests with one result: their parts go to workers side by side, within bounds, and what comes back is gathered.

A part is one request to a worker that is answered with one object. Nothing is shown before all are there, so a part whose
worker is lost is sent to another one like a prompt without its first token.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final, cast

from msgspec import Struct

from dynamo.errors import Unknown, revive
from dynamo.frontend.base.stage_timer import PARSE
from dynamo.frontend.pipeline.api import CountingApi
from dynamo.frontend.pipeline.exchange import Exchange, Phase
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.plan import GenerationModel, WorkRequest
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.result_api import ResultAnswer, ResultApi
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.frontend.pipeline.sink import OpenAnswer
from dynamo.frontend.pipeline.tap import TAP
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.failover import AnswerSoFar, DispatchRequest
from dynamo.router.dispatch.fan_out import FanOut
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import StreamItem

PARTS_AT_ONCE: Final = 8  # of one request, at all workers together: a batch of thousands must not take every place


class ResultCall(Call):
    """One inference API whose answers are one result."""

    def __init__(self, api: ResultApi[Any], pipeline: Pipeline) -> None:
        super().__init__(api, pipeline)
        self._results = api

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        pipeline, timer, counters = self._pipeline, exchange.timer, exchange.counters
        request, model = resolved.request, resolved.model
        assert counters is not None
        plan = await self._results.plan(pipeline.preprocessor, request, model, timer)
        work = self._work(exchange, resolved, plan)
        work.tap = exchange.of(TAP)
        exchange.enter(Phase.PREPROCESSED, exchange.now())
        timer.mark(PARSE)
        results = await gather_results(model, work, plan, exchange.context)
        exchange.check_end()
        counters.tokens(0, exchange.now())  # its time to the first, and only, output
        answer = ResultAnswer(exchange.response_id, model, plan, work.tally, results)
        reply = await self._results.render(pipeline.preprocessor.offload, request, answer)
        timer.answering()
        if work.tap is not None:
            work.tap.body = reply.body
        headers = reply.headers
        if timer.is_wanted:
            timer.ended()
            headers = (*headers, *timer.headers())
        await opened.sink.reply(200, reply.body, headers)


async def gather_results(model: GenerationModel, work: WorkRequest, plan: ResultPlan, context: Context) -> list[object]:
    """Return the object of each part, in their order. A failure of one cancels the others.

    Raises:
        DynamoException: typed; `errors.rule_of` gives the client's status.
    """
    if len(plan.parts) == 1:
        only = _Part(model, work, plan, context, 0, asyncio.Semaphore())
        try:
            found = await only.next()
        finally:
            only.close()
        return [] if found is None else [found.value]
    slots = asyncio.Semaphore(PARTS_AT_ONCE)
    results: list[object] = [None] * len(plan.parts)
    async with FanOut[_Found](context) as fan_out:
        for number in range(len(plan.parts)):
            fan_out.add(_Part(model, work, plan, fan_out.child(number), number, slots))
        async for batch in fan_out:
            for found in batch:
                results[found.part] = found.value
    return results


class _Found(Struct, frozen=True):
    """The result of one part."""

    part: int
    value: Any


class _Part:
    """One request to a worker."""

    def __init__(
        self, model: GenerationModel, work: WorkRequest, plan: ResultPlan, context: Context, number: int,
        slots: asyncio.Semaphore,
    ) -> None:  # fmt: skip
        request = DispatchRequest(
            cast(WorkerRequest, plan.parts[number]),
            (),
            record=work.tally,
            timer=work.timer,
            limits=plan.limits,
            pinned_instance_id=plan.pinned_instance_id,
            answer=AnswerSoFar(takes_text=True),  # there are no tokens from which another worker could go on
            stall_detector=work.stall_detector,
        )
        self._number, self._slots, self._is_over = number, slots, False
        self._stream = model.dispatcher.open(request, context)
        work.running = (*work.running, self._stream)

    async def next(self) -> _Found | None:
        """Return the result; None when it was returned, or the request was cancelled."""
        if self._is_over:
            return None
        self._is_over = True
        async with self._slots:
            items = await self._stream.next_batch()
            if not items:
                return None
            found = _Found(self._number, object_of(items[0]))
            self._stream.finish()
            return found

    def close(self) -> None:
        self._is_over = True
        self._stream.close()


def object_of(item: StreamItem) -> object:
    """Return the object of an item. Raises the error that the item may carry, and Unknown for tokens."""
    if item.index >= 0:
        raise Unknown("the worker sent token ids in place of a result")
    envelope = item.extra or {}
    if envelope.get("event") == "error":
        raise revive(envelope.get("error") or {"message": "; ".join(envelope.get("comment") or ["unknown error"])})
    return envelope.get("data")


class TokenCountCall(Call):
    """Counts for one API whose requests are chats: parsed, rendered and tokenised as those that are answered.

    A count takes a slot of the process and none of the model: it costs no worker anything.
    """

    def __init__(self, api: CountingApi[Any], pipeline: Pipeline) -> None:
        super().__init__(api, pipeline)
        self._counting = api

    async def _serve(self, exchange: Exchange, opened: OpenAnswer) -> None:
        on_demand = self._pipeline.hooks.on_demand
        loading = (
            None if on_demand is None else partial(on_demand, exchange, partial(self._open_early, exchange, opened))
        )
        resolved = await self._reader.read(exchange.arrival, loading)
        for began in self._pipeline.hooks.began:
            began(exchange, resolved)
        body = await self._counting.count(self._pipeline.preprocessor, resolved.request, resolved.model, exchange.timer)
        exchange.model = resolved.model.name
        exchange.end()
        await opened.sink.reply(200, body)
