"""The calls of the APIs whose answers are generated token by token."""

from __future__ import annotations

from typing import Any

from dynamo.frontend.base.stage_timer import QUEUE
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import Answer, GenerationApi, Renderer, RenderOptions
from dynamo.frontend.pipeline.delivery import StreamDelivery, UnaryDelivery, annotation_events, send_placement
from dynamo.frontend.pipeline.exchange import Exchange, Phase
from dynamo.frontend.pipeline.idle_timeout import IdleTimeout
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.plan import Plan, WorkRequest
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.sink import OpenAnswer
from dynamo.frontend.pipeline.tap import open_tap
from dynamo.protocol.openai.errors import not_built
from dynamo.protocol.openai.requests import Request
from dynamo.protocol.openai.shapes import RequestMedia


class GenerationCall(Call):
    """One inference API whose answers are generated token by token."""

    def __init__(self, api: GenerationApi[Any], pipeline: Pipeline) -> None:
        super().__init__(api, pipeline)
        self._generating = api
        settings = pipeline.settings
        self._options, self._continuous = [
            RenderOptions(
                continuous_usage=is_continuous or settings.force_include_usage,
                reasoning_field=settings.reasoning_field_name,
                dispatches_calls=settings.streaming_tool_dispatch,
                dispatches_reasoning=settings.streaming_reasoning_dispatch,
            )
            for is_continuous in (False, True)
        ]

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        request: Request = resolved.request  # type: ignore[assignment]  # its API decodes nothing else
        try:
            answer, text = await self._prepare(exchange, resolved, request)
            options = self._continuous if request.continuous_usage else self._options
            opened.renderer = renderer = self._generating.renderer(answer, options)
            if answer.work.plan.is_query:
                await send_placement(answer, renderer, opened.sink, opened.stream)
            else:
                await self._deliver(answer, renderer, opened, text)
        finally:
            if request.media is not None:
                request.media.end()

    async def _prepare(self, exchange: Exchange, resolved: Resolved, request: Request) -> tuple[Answer, str | None]:
        """Return what is to be answered, and the text that was tokenised."""
        pipeline, timer, model, media = self._pipeline, exchange.timer, resolved.model, request.media
        if media is not None:
            await self._check_media(media, request.key_owner, model)
        plan, text = await self._generating.prepare(pipeline.preprocessor, request, resolved.effects, model, timer)
        work = self._work(exchange, resolved, plan)
        if media is not None and pipeline.media is not None:
            await pipeline.media.fill(media, model, work, text, exchange.context)
            timer.mark(QUEUE)
        exchange.enter(Phase.PREPROCESSED, exchange.now())
        return Answer(exchange, request, model, work, explains_routing=resolved.effects.explains_routing), text

    async def _check_media(self, media: RequestMedia, owner: str | None, model: ServedModel) -> None:
        taker = self._pipeline.media
        if taker is None:
            raise not_built("Validation: media are not supported by this frontend", media.parts[0].where)
        if any(part.file_id is not None for part in media.parts):
            await taker.take_files(media, owner)
        taker.check_model(model, media)

    def _work(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> WorkRequest:
        work = super()._work(exchange, resolved, plan)
        work.tap = open_tap(exchange, resolved.request, resolved.effects)
        return work

    async def _deliver(self, answer: Answer, renderer: Renderer, opened: OpenAnswer, text: str | None) -> None:
        """Generate and answer; `text` is what was tokenised. Raises what went wrong on the way."""
        request, stream, limit = answer.request, opened.stream, self._settings.backend_stream_timeout_seconds
        idle = None if limit is None else IdleTimeout(answer.exchange, answer.work.fail_over_idle_streams, limit)
        if stream is None:
            await UnaryDelivery(answer, renderer, idle).send(opened.sink)
        else:
            head = annotation_events(request, answer, text)
            with_usage = request.include_usage or self._settings.force_include_usage
            await StreamDelivery(answer, renderer, idle).send(stream, head, with_usage=with_usage)
