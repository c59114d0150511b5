"""Finds the model of a request among those whose workers declare that they take its kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import Api
from dynamo.frontend.pipeline.exchange import Arrival
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.reading import CallReader, Resolved
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import Request
from dynamo.protocol.vectors.requests import ResultRequest


class CapableReader(CallReader):
    """Reads the requests of one route of tokens."""

    def __init__(self, api: Api[Any], pipeline: Pipeline, key: str, several: str) -> None:
        """`key`: of the runtime data by which a worker declares the route; `several`: what a client reads that has to choose."""
        super().__init__(api, pipeline.settings, pipeline.models, pipeline.preprocessor.offload)
        self._dialect, self._key, self._several = api.dialect, key, several

    async def read(
        self,
        arrival: Arrival,
        on_demand: Callable[[Request | ResultRequest], Awaitable[str]] | None = None,
    ) -> Resolved:
        """Do as every reader, and refuse a model whose workers do not declare the route."""
        resolved = await super().read(arrival, on_demand)
        if not self._is_capable(resolved.model):
            raise self._dialect.unknown_model(resolved.request.model)
        return resolved

    def _is_capable(self, model: ServedModel) -> bool:
        return not model.takes_text and model.card.runtime_config.runtime_data.get(self._key) is True

    def _only_model(self, arrival: Arrival) -> str:
        caller = arrival.identity
        found = [
            model.name
            for model in self._models.models()
            if self._is_capable(model) and (caller is None or caller.allows_model(model.name))
        ]
        if not found:
            text = "no generate-capable model is registered"
            raise RequestRejected(404, text, param="model", code="model_not_found")
        if len(found) > 1:
            raise RequestRejected(400, self._several, param="model")
        return found[0]
