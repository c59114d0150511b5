"""The routes of tokens as a part of the frontend."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.parts.switches import TokenRouteSettings
from dynamo.frontend.parts.token_routes.description import describe_vllm
from dynamo.frontend.parts.token_routes.plain_texts import TokenRoute
from dynamo.frontend.parts.token_routes.vllm_api import VllmGenerateCall
from dynamo.frontend.pipeline.inference import Call
from dynamo.protocol.openai.schema import ApiDescription

logger = logging.getLogger(__name__)


class TokenRoutes(Part):
    """The routes that its settings switch on."""

    name: ClassVar[str] = "token_routes"

    def __init__(self, kernel: Kernel, settings: TokenRouteSettings) -> None:
        self._kernel, self._settings = kernel, settings
        logger.warning("The engine-native Generate APIs are experimental.")

    def inference(self) -> Mapping[str, InferenceRoute]:
        calls: dict[str, Call] = {}
        if self._settings.vllm:
            calls[self._settings.vllm_path] = VllmGenerateCall(self._kernel.pipeline)
        limit, budget = self._kernel.settings.limits.body_limit_bytes, self._kernel.budget
        return {path: TokenRoute(call, body_limit_bytes=limit, budget=budget) for path, call in calls.items()}

    def described(self) -> Sequence[ApiDescription]:
        return [describe_vllm(self._settings.vllm_path)] if self._settings.vllm else []
