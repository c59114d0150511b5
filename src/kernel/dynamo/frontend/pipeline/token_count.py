"""The way of a request that only counts the tokens of its prompt. No worker receives anything."""

from __future__ import annotations

from typing import Any

from dynamo.frontend.pipeline.api import CountingApi
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.sink import OpenAnswer


class TokenCountCall(Call):
    """Counts for one API whose requests are chats: parsed, rendered and tokenised as those that are answered.

    A count takes a slot of the process and none of the model: it costs no worker anything.
    """

    def __init__(self, api: CountingApi[Any], pipeline: Pipeline) -> None:
        super().__init__(api, pipeline)
        self._counting = api

    async def _serve(self, exchange: Exchange, opened: OpenAnswer) -> None:
        resolved = await self._reader.read(exchange.arrival)
        for began in self._pipeline.hooks.began:
            began(exchange, resolved)
        body = await self._counting.count(self._pipeline.preprocessor, resolved.request, resolved.model, exchange.timer)
        exchange.model = resolved.model.name
        exchange.end()
        await opened.sink.reply(200, body)
