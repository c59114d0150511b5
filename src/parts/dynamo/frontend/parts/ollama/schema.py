"""Ollama's API in the OpenAPI document, from the types that decode its requests."""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import Struct

from dynamo.frontend.parts.ollama.messages import OllamaCall, OllamaChat, OllamaEmbed, OllamaGenerate, OllamaNamed
from dynamo.protocol.openai.schema import (
    ApiDescription,
    describe_operation,
    generation_errors,
    json_content,
)

# Answers are written as plain values; these types exist for the document, and for the tests that hold the answers to it.


class OllamaError(Struct):
    error: str


class OllamaAnswered(Struct):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class _OllamaLine(Struct, kw_only=True):
    model: str
    created_at: str
    done: bool
    # Of the last line:
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatLine(_OllamaLine, kw_only=True):
    message: OllamaAnswered


class OllamaGenerateLine(_OllamaLine, kw_only=True):
    response: str
    thinking: str | None = None


class OllamaVectors(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaListed(Struct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]
    expires_at: str | None = None  # these three: of `/api/ps`
    size_vram: int | None = None
    context_length: int | None = None


class OllamaModelList(Struct):
    models: list[OllamaListed]


class OllamaShown(Struct):
    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(Struct):
    version: str


def _post(name: str, summary: str, request: str, answer: str, *, is_streamed: bool = False) -> dict[str, Any]:
    content, meaning = json_content(answer), "The answer."
    if is_streamed:
        content["application/x-ndjson"] = {"schema": {"type": "string"}}
        meaning = f"The answer. Unless `stream` is false, lines of `{answer}`, the last of which has `done`."
    body, errors = json_content(request), generation_errors("OllamaError")
    return {"post": describe_operation(name, summary, content, meaning=meaning, body=body, errors=errors)}


def _get(name: str, summary: str, answer: str) -> dict[str, Any]:
    refused = {"description": "Forbidden. A page of another site sent it.", "content": json_content("OllamaError")}
    return {"get": describe_operation(name, summary, json_content(answer), errors={"403": refused})}


OLLAMA_API: Final = ApiDescription(
    [
        OllamaChat, OllamaGenerate, OllamaEmbed, OllamaNamed, OllamaChatLine, OllamaGenerateLine, OllamaVectors,
        OllamaModelList, OllamaShown, OllamaVersion, OllamaError,
    ],
    {
        "/api/chat": _post(
            "ollamaChat", "Answer a conversation, in Ollama's form", "OllamaChat", "OllamaChatLine", is_streamed=True
        ),
        "/api/generate": _post(
            "ollamaGenerate", "Answer a prompt, in Ollama's form", "OllamaGenerate", "OllamaGenerateLine", is_streamed=True
        ),
        "/api/embed": _post("ollamaEmbed", "Turn texts into vectors, in Ollama's form", "OllamaEmbed", "OllamaVectors"),
        "/api/show": _post("ollamaShow", "What a model can do, in Ollama's form", "OllamaNamed", "OllamaShown"),
        "/api/tags": _get("ollamaTags", "The models, in Ollama's form", "OllamaModelList"),
        "/api/ps": _get("ollamaPs", "The models that are loaded, in Ollama's form", "OllamaModelList"),
        "/api/version": _get("ollamaVersion", "The version of Ollama's API", "OllamaVersion"),
    },
)  # fmt: skip
