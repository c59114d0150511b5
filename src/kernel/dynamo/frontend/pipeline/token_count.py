"""The way of a request that only counts the tokens of its prompt. No worker receives anything."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo.frontend.pipeline.api import CountingApi
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.failures import classify
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.request_records import log_declined
from dynamo.frontend.pipeline.sink import AnswerSink

__all__ = ["TokenCountCall"]


class TokenCountCall(Call):
    """Counts for one API whose requests are chats: parsed, rendered and tokenised as those that are answered.

    A count takes a slot of the process and none of the model: it costs no worker anything.
    """

    def __init__(self, api: CountingApi[Any], pipeline: Pipeline) -> None:
        super().__init__(api, pipeline)
        self._counting = api

    async def _serve(self, exchange: Exchange, sink: AnswerSink) -> None:
        try:
            resolved = await self._parse_and_resolve(exchange.arrival)
            if exchange.arrival.charge is not None:
                exchange.arrival.charge.enter(resolved.model.name)
            body = await self._counting.count(
                self._pipeline.preprocessor, resolved.request, resolved.model, exchange.timer
            )
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the boundary: whatever it is, the client gets a well-formed answer
            rejected = self._rejection(error)
            self.decline_early(rejected, error, exchange.arrival.at)
            error_type = classify(error, rejected).error_type
            log_declined(exchange, self._api.endpoint, rejected.status, error_type, rejected.message)
            exchange.end()
            await sink.reject(rejected)
            return
        exchange.end()
        if exchange.arrival.charge is not None:
            exchange.arrival.charge.has_succeeded = True
        self._pipeline.metrics.requests.counted(resolved.model.name, self._api.endpoint)
        await sink.reply(200, body)
