"""The OpenAPI 3.1 document of the frontend, generated from the types that decode its requests.

Whatever `shapes` accepts is in the document, so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from dynamo import __version__
from dynamo.protocol.openai.errors import phrase_of
from dynamo.protocol.openai.key_schema import describe_keys
from dynamo.protocol.openai.responses import TokenLogprob
from dynamo.protocol.openai.shapes import ChatRequest, CompletionRequest, Message, Tool
from dynamo.protocol.openai.validation import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_COMPLETION_LOGPROBS,
    MAX_OUTPUT_TOKENS,
    MAX_STOPS,
    MAX_SUFFIX_CHARACTERS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
)

Content = Mapping[str, object]
"""A part of the document: the content of a body, a schema, a parameter."""

_REFERENCE: Final = "#/components/schemas/{name}"


class ApiDescription(Struct, frozen=True):
    """What a further API adds to the document."""

    types: Sequence[Any]  # structs, which become the schemas of their names
    paths: Mapping[str, Mapping[str, Any]]  # as OpenAPI has them
    properties: Mapping[str, Mapping[str, Any]] = {}  # of its structs, where these allow more than is checked


# Answers are spliced or built as plain values; these types exist for the document (and for the tests that hold the
# answers to it).


class PromptTokensDetails(Struct, omit_defaults=True):
    cached_tokens: int | None = None


class CompletionTokensDetails(Struct, omit_defaults=True):
    reasoning_tokens: int | None = None


class Usage(Struct, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class ChatLogprobs(Struct):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class ChatAnswerMessage(Struct):
    content: str | None
    refusal: str | None
    role: str
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None


class ChatChoice(Struct):
    index: int
    message: ChatAnswerMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    token_ids: list[int] | None = None  # with return_token_ids


class ChatCompletion(Struct):
    id: str
    choices: list[ChatChoice]
    created: int
    model: str
    object: str
    usage: Usage | None = None
    nvext: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None  # with return_token_ids
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # with prompt_logprobs


class ChatDelta(Struct):
    content: str | None = None
    role: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    finish_reason: str | None
    logprobs: ChatLogprobs | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Struct):
    id: str
    choices: list[ChatChunkChoice]
    created: int
    model: str
    object: str
    usage: Usage | None = None
    nvext: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None  # with return_token_ids
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # with prompt_logprobs


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None  # with return_token_ids, as the next one
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # with prompt_logprobs


class Completion(Struct):
    """Also the shape of a stream's chunks, whose `usage` is null until the last."""

    id: str
    choices: list[CompletionChoice]
    created: int
    model: str
    system_fingerprint: str | None
    object: str
    usage: Usage | None = None
    nvext: dict[str, Any] | None = None


class Model(Struct):
    id: str
    object: str
    created: int
    owned_by: str
    context_window: int | None
    max_model_len: int | None  # the same length, as vLLM and SGLang call it
    context_length: int | None  # and as OpenRouter and LM Studio do
    max_output_tokens: int | None = None


class ModelList(Struct):
    object: str
    data: list[Model]


class WorkerTypeReadiness(Struct):
    workers: int
    needs: list[list[str]]
    instance_ids: list[int]  # of these workers


class NamespaceReadiness(Struct):
    ready: bool
    worker_types: dict[str, WorkerTypeReadiness]
    present: list[str]
    missing_worker_types: list[str]
    rejected_workers: list[dict[str, Any]] | None = None  # left out: their card differs from the first
    error: str | None = None  # why the model cannot be served
    reason: str | None = None  # the roles without a live worker, of a namespace that is not ready


class ModelReadiness(Struct):
    model: str
    ready: bool
    namespaces: dict[str, NamespaceReadiness]
    reason: str | None = None


class ModelLoad(Struct):
    """How busy a model is."""

    model: str
    namespace: str
    in_flight: int
    waiting: int  # without a token yet
    queue_age_seconds: float  # of the oldest request that waits


class Health(Struct):
    status: str
    endpoints: list[str] | None = None
    instances: list[dict[str, Any]] | None = None
    processes: dict[str, int] | None = None  # that share the port
    load: list[ModelLoad] | None = None  # of the models with requests in flight
    degraded: list[str] | None = None  # what the frontend is short of, a sentence each
    stage: str | None = None
    message: str | None = None


class FrontendReadiness(Struct):
    status: str  # ready or not_ready
    message: str


class Live(Struct):
    status: str
    message: str


class NestedError(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """Both shapes in one: the flat keys of this API's native form and OpenAI's `error` object."""

    message: str
    type: str
    code: int
    error: NestedError
    details: dict[str, Any] | None = None


class StreamErrorDetail(Struct):
    message: str
    type: str
    code: int | str  # the status; `request_aborted` where an operator ended the request


class StreamError(Struct):
    """The event of a stream that failed after its 200."""

    error: StreamErrorDetail


_TYPES: Final[list[Any]] = [
    ChatRequest,
    CompletionRequest,
    Message,
    Tool,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelList,
    ModelReadiness,
    Health,
    Live,
    FrontendReadiness,
    ErrorBody,
    StreamError,
]

_OUTPUT_TOKENS: Final = {"minimum": 1, "maximum": MAX_OUTPUT_TOKENS}
BOUNDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 2},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": _OUTPUT_TOKENS,
    "max_completion_tokens": _OUTPUT_TOKENS,
    "truncate_prompt_tokens": {"minimum": -1},
    "request_id": {"pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    "stop": {"maxItems": MAX_STOPS},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
    "tools": {"maxItems": MAX_TOOLS},
    "best_of": {"minimum": 0, "maximum": 20},
    "suffix": {"maxLength": MAX_SUFFIX_CHARACTERS},
}
"""What the rules of `validation` allow of chat and completions, beside their types; a test holds both together."""

_FURTHER_BOUNDS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "ChatRequest": {"top_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}},
    "CompletionRequest": {
        "logprobs": {"minimum": 0, "maximum": MAX_COMPLETION_LOGPROBS},
        "max_tokens": {**_OUTPUT_TOKENS, "minimum": 0},  # 0 with `echo`
    },
}
_WHERE: Final = {
    "number": ("minimum", "exclusiveMinimum", "maximum"),
    "integer": ("minimum", "exclusiveMinimum", "maximum"),
    "string": ("pattern", "maxLength"),
    "array": ("maxItems",),
}

EXAMPLE_MODEL: Final = "demo"  # what `dynamo serve` serves where no model is named
EXAMPLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "ChatRequest": {
        "model": EXAMPLE_MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
    },
    "CompletionRequest": {"model": EXAMPLE_MODEL, "prompt": "The capital of France is", "max_tokens": 16},
    "ResponsesBody": {
        "model": EXAMPLE_MODEL,
        "input": "What is the capital of France?",
        "max_output_tokens": 32,
    },
    "MessagesRequest": {
        "model": EXAMPLE_MODEL,
        "max_tokens": 32,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    },
}
"""A body of each kind of request that is answered as it stands, by the demonstration model."""

_GENERATION_ERRORS: Final = {
    400: "The request is malformed or breaks a rule; the message names the field.",
    404: "No such model.",
    413: "The body exceeds the configured limit.",
    415: "The content type is not JSON.",
    422: "A parameter that is deprecated, or that this version does not implement.",
    431: "The metadata headers exceed their limit.",
    499: "The request was cancelled.",
    500: "The engine failed.",
    503: "No worker can serve the model now, or the service is stopping; see `Retry-After`.",
    504: "The deadline passed.",
    529: "Everything is busy; see `Retry-After`.",
}


def openapi_document(
    *, title: str = "Dynamo OpenAI frontend", version: str = __version__, further: Sequence[ApiDescription] = ()
) -> dict[str, Any]:
    """Return the document as plain values, ready to encode. `further`: the APIs beside those of this package."""
    types = [*_TYPES, *(one for description in further for one in description.types)]
    (_, components) = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schemas: dict[str, Any] = dict(components)
    # A request keeps messages and tools as the client's own dicts; what they are judged by is documented instead.
    message_schema = msgspec.json.schema_components([Message], ref_template=_REFERENCE)[0][0]
    schemas["Message"] = message_schema
    chat = schemas["ChatRequest"]["properties"]
    chat["messages"] = {"type": "array", "items": {"$ref": _REFERENCE.format(name="Message")}, "minItems": 1}
    chat["tools"] = {
        "anyOf": [{"type": "array", "items": {"$ref": _REFERENCE.format(name="Tool")}}, {"type": "null"}],
        "default": None,
    }
    for name in ("ChatRequest", "CompletionRequest"):
        for member, bounds in {**BOUNDS, **_FURTHER_BOUNDS[name]}.items():
            if member in schemas[name]["properties"]:
                _bound(schemas[name]["properties"][member], bounds)
        schemas[name]["description"] = f"The body of `POST /v1/{'chat/' if name == 'ChatRequest' else ''}completions`."
    for description in further:
        for name, properties in description.properties.items():
            schemas[name]["properties"].update(properties)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": {
            "/v1/chat/completions": {
                "post": describe_generation(
                    "createChatCompletion",
                    "Answer a conversation",
                    "ChatRequest",
                    "ChatCompletion",
                    "ChatCompletionChunk",
                )
            },
            "/v1/completions": {
                "post": describe_generation("createCompletion", "Continue a text", "CompletionRequest", "Completion")
            },
            **{path: dict(operations) for description in further for path, operations in description.paths.items()},
            "/v1/models": {"get": describe_read("listModels", "The models that are served", "ModelList")},
            "/v1/models/{id}": {
                "get": describe_read(
                    "getModel", "One model", "Model", parameters=[_MODEL_ID], errors={404: "No such model."}
                )
            },
            "/v1/models/{id}/ready": {
                "get": describe_read(
                    "getModelReadiness",
                    "Whether a model can be served, and what it lacks",
                    "ModelReadiness",
                    parameters=[_MODEL_ID],
                    errors={404: "No such model."},
                    also={503: ("Not ready yet.", "ModelReadiness")},
                )
            },
            "/health": {
                "get": describe_read(
                    "getHealth", "Health and known instances", "Health", also={503: ("Draining.", "Health")}
                )
            },
            "/ready": {
                "get": describe_read(
                    "getReady",
                    "Whether a request can be served",
                    "FrontendReadiness",
                    also={503: ("Not now.", "FrontendReadiness")},
                )
            },
            "/live": {"get": describe_read("getLive", "Liveness", "Live", also={503: ("Stopping.", "Live")})},
            "/metrics": {
                "get": describe_operation(
                    "getMetrics",
                    "Prometheus metrics",
                    {"text/plain": {"schema": {"type": "string"}}},
                    meaning="The text exposition format.",
                )
            },
            "/openapi.json": {
                "get": describe_operation(
                    "getOpenApi",
                    "This document",
                    {"application/json": {"schema": {"type": "object"}}},
                    meaning="OpenAPI 3.1.",
                )
            },
        },
        "components": {"schemas": schemas},
    }


def openapi_json(
    *,
    title: str = "Dynamo OpenAI frontend",
    version: str = __version__,
    further: Sequence[ApiDescription] = (),
    open_paths: Collection[str] | None = None,
    root_path: str = "",
) -> bytes:
    """Return `openapi_document` as bytes; make it once, the answer never changes.

    `open_paths`: those that need no API key; None: none does. `root_path`: the prefix of all paths.
    """
    document = openapi_document(title=title, version=version, further=further)
    if root_path:
        document["servers"] = [{"url": root_path}]
    if open_paths is not None:
        describe_keys(document, open_paths)
    return msgspec.json.encode(document)


def _bound(schema: dict[str, Any], bounds: Mapping[str, Any]) -> None:
    """Put the bounds of a member into those of its alternatives that they are about."""
    for one in schema.get("anyOf", [schema]):
        about = _WHERE.get(one.get("type", ""), ())
        one.update({keyword: value for keyword, value in bounds.items() if keyword in about})


EVENTS: Final[dict[str, Any]] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "required": ["data"],
            "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
        }
    }
}
"""The content of a stream of server-sent events; a schema there is that of one event, as OpenAPI 3.2 has it."""


def json_content(name: str) -> dict[str, Any]:
    """Return the content of a body that is the schema of that name, with an example where there is one."""
    content: dict[str, Any] = {"schema": {"$ref": _REFERENCE.format(name=name)}}
    if name in EXAMPLES:
        content["example"] = EXAMPLES[name]
    return {"application/json": content}


def generation_errors(body: str) -> dict[str, Any]:
    """Return the failures of an inference API whose error bodies have the schema of that name."""
    return _errors(_GENERATION_ERRORS, body)


def _errors(statuses: Mapping[int, str], body: str = "ErrorBody") -> dict[str, Any]:
    return {
        str(status): {"description": f"{phrase_of(status)}. {text}", "content": json_content(body)}
        for status, text in statuses.items()
    }


def describe_operation(
    name: str,
    summary: str,
    answer: Content,
    *,
    meaning: str = "",
    body: Content | None = None,
    parameters: Sequence[Content] = (),
    errors: Content | None = None,
) -> dict[str, Any]:
    """Return an operation. `answer`: the content of a 200, and `meaning` what that is; without it, the summary.

    `errors`: the other answers, by their statuses.
    """
    found: dict[str, Any] = {"operationId": name, "summary": summary}
    if parameters:
        found["parameters"] = list(parameters)
    if body is not None:
        found["requestBody"] = {"required": True, "content": body}
    success = {"description": meaning or f"{summary}.", "content": answer}
    return {**found, "responses": {"200": success, **(errors or {})}}


def query_parameter(name: str, schema: Content, **more: object) -> dict[str, object]:
    """Return a parameter of the query, which may be left out."""
    return {"name": name, "in": "query", "required": False, "schema": dict(schema), **more}


def path_parameter(name: str, schema: Content | None = None, **more: object) -> dict[str, object]:
    """Return a part of the path, a text unless it has another schema."""
    return {"name": name, "in": "path", "required": True, "schema": schema or {"type": "string"}, **more}


def describe_generation(
    operation: str, summary: str, request: str, answer: str, chunk: str | None = None
) -> dict[str, Any]:
    """Return the operation that generates; the names are those of schemas, `chunk` that of a stream's data (None: `answer`)."""
    chunk = chunk or answer
    return describe_operation(
        operation,
        summary,
        {**json_content(answer), "text/event-stream": {"schema": _event_of(chunk)}},
        meaning=f"The answer. With `stream`, server-sent events of `{chunk}`, ended by `data: [DONE]`.",
        body=json_content(request),
        errors=generation_errors("ErrorBody"),
    )


def _event_of(chunk: str) -> dict[str, Any]:
    """Return one event of a stream, the way OpenAPI 3.2 describes them: `data` is a chunk, an error, or the end."""

    def json_text(name: str) -> dict[str, Any]:
        schema = {"$ref": _REFERENCE.format(name=name)}
        return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}

    data = {"anyOf": [{"const": "[DONE]"}, json_text(chunk), json_text("StreamError")]}
    return {"type": "object", "required": ["data"], "properties": {"data": data, "event": {"type": "string"}}}


def describe_read(
    operation: str,
    summary: str,
    answer: str,
    *,
    parameters: Sequence[Content] = (),
    errors: Mapping[int, str] | None = None,
    also: Mapping[int, tuple[str, str]] | None = None,
) -> dict[str, Any]:
    """Return an operation that reads; `also` are further answers, each with its text and its schema."""
    further = {
        str(status): {"description": text, "content": json_content(name)}
        for status, (text, name) in (also or {}).items()
    }
    return describe_operation(
        operation, summary, json_content(answer), parameters=parameters, errors={**further, **_errors(errors or {})}
    )


_MODEL_ID: Final = path_parameter("id", description="The model's name; it may contain slashes.")
