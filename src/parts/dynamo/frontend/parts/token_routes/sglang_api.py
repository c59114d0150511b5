"""`/generate`: what SGLang's engine answers reaches the client as it is, one event for each of its objects."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from dynamo.errors import Unknown
from dynamo.frontend.base.stage_timer import PARSE
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.token_routes.capable import CapableReader
from dynamo.frontend.parts.token_routes.rejections import SGLANG, SglangRejected
from dynamo.frontend.parts.token_routes.sglang_requests import (
    LoweredSglang,
    decode_sglang,
    validate_sglang,
    with_sglang_envelope,
)
from dynamo.frontend.pipeline.api import Api
from dynamo.frontend.pipeline.exchange import Exchange, Phase
from dynamo.frontend.pipeline.idle_timeout import IdleTimeout
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.plan import Plan, WorkRequest, reported_count
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.results import object_of
from dynamo.frontend.pipeline.sink import OpenAnswer
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.sse import DONE
from dynamo.router.dispatch.failover import AnswerSoFar, DispatchRequest
from dynamo.runtime.calls.request_plane.base import StreamItem

logger = logging.getLogger(__name__)

SGLANG_GENERATE: Final = "sglang_generate"
"""The entry of a worker's `runtime_data` that declares: its engine answers in SGLang's shapes."""

RESPONSE: Final = "sglang_response"
"""The member of an engine's `engine_data` with an object of SGLang's."""

SEVERAL: Final = "multiple SGLang models are registered; configure a model-specific generate endpoint"


class MissingObject(Unknown):
    """A worker sent a chunk without an object of SGLang's."""


class SglangGenerateApi(Api[LoweredSglang]):
    """Tokens to tokens, in SGLang's shapes."""

    endpoint = "generate"
    id_prefix = ""
    model_type = ModelType.Chat | ModelType.Completions
    dialect = SGLANG
    needs_model = False

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> LoweredSglang:
        return decode_sglang(body, limits)

    def validate(self, request: LoweredSglang) -> None:
        validate_sglang(request)


class SglangGenerateCall(Call):
    """The calls of the route."""

    def __init__(self, pipeline: Pipeline) -> None:
        api: Api[Any] = SglangGenerateApi()
        super().__init__(api, pipeline)
        self._reader = CapableReader(api, pipeline, SGLANG_GENERATE, SEVERAL)

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        request, model, stream = resolved.request, resolved.model, opened.stream
        assert isinstance(request, LoweredSglang)
        assert stream is not None  # no other request is taken
        given = (request.rid, exchange.arrival.client_request_id, exchange.context.id())
        request.rid = next(name for name in given if name is not None)
        work = self._work(exchange, resolved, self._plan(request, resolved, model))
        exchange.enter(Phase.PREPROCESSED, exchange.now())
        exchange.timer.mark(PARSE)
        relayed = _Relayed(exchange, work, model)
        limit = self._settings.backend_stream_timeout_seconds
        idle = None if limit is None else IdleTimeout(exchange, work.fail_over_idle_streams, limit)
        try:
            while (data := await relayed.next()) is not None:
                if idle is not None:
                    idle.last = exchange.now()
                await stream.write(data)
                exchange.timer.answering()
            exchange.check_end()
        except MissingObject:
            await stream.write(b"")  # as in the native route, the stream has begun
            raise
        finally:
            relayed.close()
            if idle is not None:
                idle.close()
        await stream.end(DONE)

    def _plan(self, request: LoweredSglang, resolved: Resolved, model: ServedModel) -> Plan:
        preprocessor = self._pipeline.preprocessor
        is_ranked = request.nvext is not None and request.nvext.dp_rank is not None
        if is_ranked and preprocessor.settings.router_mode != "kv":  # nothing else places a request at a rank
            text = "DP rank requires an explicit worker for session affinity"
            raise SglangRejected(400, text, param="x-data-parallel-rank")
        ids = cast("list[int]", request.prompts()[0])
        plan = preprocessor.plan(request, resolved.effects, model, [ids])
        with_sglang_envelope(plan.fields, request)
        return plan


class _Relayed:
    """The stream of one worker, as events."""

    def __init__(self, exchange: Exchange, work: WorkRequest, model: ServedModel) -> None:
        plan, prompt = work.plan, work.plan.prompts[0]
        self._exchange, self._work = exchange, work
        self._is_over = False
        dispatched = DispatchRequest(
            plan.fields.for_prompt(prompt),
            prompt,
            record=work.tally,
            timer=work.timer,
            limits=plan.limits,
            pinned_instance_id=plan.pinned_instance_id,
            answer=AnswerSoFar(takes_text=True),  # its objects count on from the first one, which no other worker would
            stall_detector=work.stall_detector,
        )
        self._stream = model.dispatcher.open(dispatched, exchange.context)
        work.running = (self._stream,)

    async def next(self) -> bytes | None:
        """Return the events of everything that has arrived; None at the end."""
        if self._is_over:
            return None
        items = await self._stream.next_batch()
        if not items:
            return None
        exchange, counters, before = self._exchange, self._exchange.counters, self._work.tally.completion_tokens
        now = exchange.now()
        exchange.enter(Phase.STREAMING, now)
        if exchange.slot is not None and before == 0:
            exchange.slot.begun(now)
        events = b"".join([self._event(item) for item in items if not self._is_over])
        assert counters is not None
        counters.tokens(max(0, self._work.tally.completion_tokens - before), now)
        return events

    def _event(self, item: StreamItem) -> bytes:
        """Return the event of one chunk. Raises MissingObject for a chunk without an object of SGLang's."""
        if item.index < 0:
            chunk = object_of(item)
            extra: Mapping[str, Any] = chunk if isinstance(chunk, Mapping) else {}
            reason = extra.get("finish_reason")
        else:
            extra, reason = item.extra or {}, item.finish_reason
        found = (extra.get("engine_data") or {}).get(RESPONSE)
        if not isinstance(found, Mapping):
            logger.error("missing opaque SGLang response")
            raise MissingObject("missing opaque SGLang response")
        self._note(found)
        if reason is not None:
            self._is_over = True
            self._work.tally.finish_reason = str(reason)
            self._stream.finish()
        return b"data: %b\n\n" % msgspec.json.encode(found)

    def _note(self, found: Mapping[str, object]) -> None:
        """Take over the counts that the engine reports."""
        meta, tally = found.get("meta_info"), self._work.tally
        if not isinstance(meta, Mapping):
            return
        if (made := reported_count(meta.get("completion_tokens"))) is not None:
            tally.completion_tokens = max(tally.completion_tokens, made)
        if (cached := reported_count(meta.get("cached_tokens"))) is not None:
            tally.note_cached(0, min(cached, tally.prompt_tokens))

    def close(self) -> None:
        """Leave the stream; a worker that has not ended it receives a kill."""
        self._is_over = True
        self._stream.close()
