"""The calls of the APIs whose answers are generated token by token."""

from __future__ import annotations

from typing import Any

from dynamo.frontend.base.stage_timer import QUEUE
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import Answer, GenerationApi, RenderOptions
from dynamo.frontend.pipeline.delivery import StreamDelivery, UnaryDelivery, annotation_events, send_placement
from dynamo.frontend.pipeline.exchange import Exchange, Phase
from dynamo.frontend.pipeline.inference import Call, Pipeline
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
        pipeline, api, settings, media = self._pipeline, self._generating, self._settings, request.media
        effects, model, timer = resolved.effects, resolved.model, exchange.timer
        try:
            if media is not None:
                await self._check_media(media, request.key_owner, model)
            plan, text = await api.prepare(pipeline.preprocessor, request, effects, model, timer)
            work = self._work(exchange, resolved, plan)
            work.tap = open_tap(exchange, request, effects)
            if media is not None and pipeline.media is not None:
                await pipeline.media.fill(media, model, work, text, exchange.context)
                timer.mark(QUEUE)
            exchange.enter(Phase.PREPROCESSED, exchange.now())
            answer = Answer(exchange, request, model, work, explains_routing=effects.explains_routing)
            options = self._continuous if request.continuous_usage else self._options
            opened.renderer = renderer = api.renderer(answer, options)
            limit, stream = settings.backend_stream_timeout_seconds, opened.stream
            if plan.is_query:
                await send_placement(answer, renderer, opened.sink, stream)
            elif stream is None:
                await UnaryDelivery(answer, renderer, limit).send(opened.sink)
            else:
                head = annotation_events(request, answer, text) if request.annotations else b""
                with_usage = request.include_usage or settings.force_include_usage
                await StreamDelivery(answer, renderer, limit).send(stream, head, with_usage=with_usage)
        finally:
            if media is not None:
                media.end()

    async def _check_media(self, media: RequestMedia, owner: str | None, model: ServedModel) -> None:
        taker = self._pipeline.media
        if taker is None:
            raise not_built("Validation: media are not supported by this frontend", media.parts[0].where)
        if any(part.file_id is not None for part in media.parts):
            await taker.take_files(media, owner)
        taker.check_model(model, media)
