"""The routes of tokens in the OpenAPI document, from the types that decode their requests."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from dynamo.frontend.parts.token_routes.vllm_requests import VllmGenerateRequest, VllmSampling
from dynamo.protocol.openai.schema import EVENTS, ApiDescription, describe_operation, generation_errors, json_content
from dynamo.protocol.openai.shapes import JsonObject

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
