"""The routes of tokens as a part of the frontend."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from msgspec import Struct

from dynamo.frontend.base.asgi import Receive, Scope, Send
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.parts.switches import TokenRouteSettings
from dynamo.frontend.parts.token_routes.rejections import UNPARSED
from dynamo.frontend.parts.token_routes.sglang_api import SglangGenerateCall
from dynamo.frontend.parts.token_routes.sglang_requests import SglangGenerateRequest, SglangSampling
from dynamo.frontend.parts.token_routes.vllm_api import VllmGenerateCall
from dynamo.frontend.parts.token_routes.vllm_requests import VllmGenerateRequest, VllmSampling
from dynamo.frontend.pipeline.inference import Call
from dynamo.protocol.openai.schema import EVENTS, ApiDescription, describe_operation, generation_errors, json_content
from dynamo.protocol.openai.shapes import JsonObject

logger = logging.getLogger(__name__)

TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")
_UNPARSED: Final = UNPARSED.encode()


class TokenRoute(InferenceRoute):
    """One route of tokens as an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, _TextAware(send))


class _TextAware:
    """Sends the answer to a body that is not JSON as what it is."""

    __slots__ = ("_held", "_send")

    def __init__(self, send: Send) -> None:
        self._send: Send = send
        self._held: dict[str, Any] | None = None  # the head of a 400, until its body shows what it is

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start" and message["status"] == 400:
            self._held = message
            return
        held, self._held = self._held, None
        if held is not None:
            if message.get("body", b"").startswith(_UNPARSED):
                kept = [pair for pair in held["headers"] if pair[0] != b"content-type"]
                held = {**held, "headers": [*kept, TEXT]}
            await self._send(held)
        await self._send(message)


class TokenRoutes(Part):
    """The routes that its settings switch on."""

    name: ClassVar[str] = "token_routes"

    def __init__(self, kernel: Kernel, settings: TokenRouteSettings) -> None:
        self._settings = settings
        calls: dict[str, Call] = {}
        if settings.vllm:
            calls[settings.vllm_path] = VllmGenerateCall(kernel.pipeline)
        if settings.sglang:
            calls[settings.sglang_path] = SglangGenerateCall(kernel.pipeline)
        limit, budget = kernel.settings.limits.body_limit_bytes, kernel.budget
        self._routes = {path: TokenRoute(call, body_limit_bytes=limit, budget=budget) for path, call in calls.items()}
        logger.warning("The engine-native Generate APIs are experimental.")

    def inference(self) -> Mapping[str, InferenceRoute]:
        return self._routes

    def routes(self) -> Sequence[GuardedRoute]:
        route = self._routes.get(self._settings.sglang_path) if self._settings.sglang else None
        return [] if route is None else [GuardedRoute(self._settings.sglang_path, route, "PUT", access=route.access)]

    def described(self) -> Sequence[ApiDescription]:
        settings = self._settings
        vllm = [describe_vllm(settings.vllm_path)] if settings.vllm else []
        return [*vllm, *([describe_sglang(settings.sglang_path)] if settings.sglang else [])]


# Answers are written as plain values; these types exist for the document, and for the tests that hold the answers to it.


class GenerateError(Struct):
    message: str
    type: str
    code: int


class GenerateErrorBody(Struct):
    error: GenerateError


class TokenScore(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenScore):
    top_logprobs: list[TokenScore]


class TokenScores(Struct):
    content: list[ScoredToken]


class GeneratedChoice(Struct):
    index: int
    token_ids: list[int]
    logprobs: TokenScores | None
    finish_reason: Literal["stop", "length", "content_filter"] | None
    routed_experts: str | None
    sampling_mask: JsonObject | list[JsonObject] | str | None


class GenerateAnswer(Struct):
    request_id: str
    choices: list[GeneratedChoice]
    prompt_logprobs: list[JsonObject | None] | None
    kv_transfer_params: JsonObject | None


def describe_vllm(path: str) -> ApiDescription:
    """Return what the document has of vLLM's route."""
    operation = describe_operation(
        "vllmGenerate",
        "Tokens to tokens, as vLLM has it",
        {**json_content("GenerateAnswer"), **EVENTS},
        meaning="The answer. With `stream`, server-sent events, ended by `data: [DONE]`.",
        body=json_content("VllmGenerateRequest"),
        errors=generation_errors("GenerateErrorBody"),
    )
    return ApiDescription(
        [VllmGenerateRequest, VllmSampling, GenerateAnswer, GenerateErrorBody], {path: {"post": operation}}
    )


class SglangGenerateError(Struct):
    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int


class SglangNotImplementedError(Struct):
    message: str


class SglangNotImplemented(Struct):
    error: SglangNotImplementedError


def describe_sglang(path: str) -> ApiDescription:
    """Return what the document has of SGLang's route."""
    not_implemented = {"description": "The request is not streamed.", "content": json_content("SglangNotImplemented")}

    def operation(method: str) -> dict[str, object]:
        return describe_operation(
            f"sglangGenerate{method}",
            "Tokens to tokens, as SGLang has it",
            EVENTS,
            meaning="Server-sent events, each an object of SGLang's, ended by `data: [DONE]`.",
            body=json_content("SglangGenerateRequest"),
            errors={**generation_errors("SglangGenerateError"), "501": not_implemented},
        )

    types = [SglangGenerateRequest, SglangSampling, SglangGenerateError, SglangNotImplemented]
    return ApiDescription(types, {path: {method.lower(): operation(method) for method in ("Post", "Put")}})
