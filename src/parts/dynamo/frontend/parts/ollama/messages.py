"""Ollama's API as values: its requests as those of chat and embeddings, its answers, and its errors. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Literal

import msgspec
from msgspec import Struct, field

from dynamo.protocol.dialect import Dialect
from dynamo.protocol.openai.body import DEFAULT_LIMITS, BodyLimits, check_messages, deserialisation_error, read_json
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.reader import decoder_of
from dynamo.protocol.openai.shapes import ChatRequest, JsonObject, JsonSchemaFormat, NvExt, ResponseFormat
from dynamo.protocol.vectors.requests import EmbeddingRequest

API_VERSION: Final = "0.12.0"
"""The version of Ollama whose API this is: its clients decline older ones."""


class OllamaOptions(Struct):
    """What changes an answer; how a model is to be run has no effect here."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class _Generating(Struct, kw_only=True):
    model: str
    stream: bool | None = None
    format: Literal["", "json"] | JsonObject | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None


class OllamaFunction(Struct):
    name: str
    arguments: JsonObject = field(default_factory=dict)


class OllamaCall(Struct):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChat(_Generating, kw_only=True):
    """The body of `/api/chat`; without messages it loads the model."""

    messages: list[OllamaMessage] = field(default_factory=list)
    tools: list[JsonObject] | None = None


class OllamaGenerate(_Generating, kw_only=True):
    """The body of `/api/generate`; without a prompt it loads the model."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class OllamaEmbed(Struct, kw_only=True):
    """The body of `/api/embed`."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: JsonObject | None = None
    keep_alive: str | float | None = None


class OllamaEmbedding(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """The request for embeddings that a request of Ollama becomes."""

    began = 0.0  # when it was read, on the clock of the reader


class LoweredOllama(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """The chat request that a request of Ollama becomes."""

    clamps_output: ClassVar[bool] = True

    is_prompt = False  # it came to `/api/generate`
    shows_thinking = True
    only_loads = False  # there is nothing to answer


class OllamaNamed(Struct):
    """The body of `/api/show`; `name` is the older name of `model`."""

    model: str = ""
    name: str = ""


_NAMED: Final = decoder_of(OllamaNamed)
_CHAT: Final = decoder_of(OllamaChat)
_GENERATE: Final = decoder_of(OllamaGenerate)
_EMBED: Final = decoder_of(OllamaEmbed)
_KINDS: Final = {"/9j/": "jpeg", "iVBOR": "png", "R0lGOD": "gif", "UklGR": "webp", "Qk": "bmp"}  # by their first bytes


def decode_chat(body: bytes, limits: BodyLimits, name_of: Callable[[str], str]) -> LoweredOllama:
    """Return the chat request of a body of `/api/chat`. Raises RequestRejected (400, 422) that names the field."""
    source, repaired = _read(body, _CHAT, limits)
    check_messages(source.messages, limits.messages)
    if source.messages:
        request = _lower(source, chat_messages(source.messages), name_of)
        request.tools = source.tools or None
    else:
        request = _loading(source, name_of)
    request.repaired = repaired
    return request


def decode_generate(body: bytes, limits: BodyLimits, name_of: Callable[[str], str]) -> LoweredOllama:
    """Return the chat request of a body of `/api/generate`. Raises RequestRejected (400, 422) that names the field."""
    source, repaired = _read(body, _GENERATE, limits)
    for member in ("suffix", "template", "context"):
        if getattr(source, member):
            raise not_built(f"`{member}` is not in this version", member)
    if source.prompt:
        user = OllamaMessage("user", source.prompt, images=source.images)
        system = [OllamaMessage("system", source.system)] if source.system else []
        request = _lower(source, chat_messages([*system, user]), name_of)
        if source.raw:
            request.nvext = NvExt(use_raw_prompt=True)
    else:
        request = _loading(source, name_of)
    request.is_prompt, request.repaired = True, repaired
    return request


def decode_embed(body: bytes, limits: BodyLimits, name_of: Callable[[str], str]) -> OllamaEmbedding:
    """Return the request for embeddings of a body of `/api/embed`. Raises RequestRejected (400) that names the field."""
    source, repaired = _read(body, _EMBED, limits)
    cut = None if source.truncate is False else -1
    texts = [*source.input] if isinstance(source.input, list) else source.input
    request = OllamaEmbedding(
        model=name_of(source.model), input=texts, dimensions=source.dimensions, truncate_prompt_tokens=cut
    )
    request.repaired = repaired
    return request


def chat_messages(messages: Sequence[OllamaMessage]) -> list[JsonObject]:
    """Return the messages as chat has them: pictures as parts, arguments as text, and results with the id of their call."""
    found: list[JsonObject] = []
    waiting: deque[str] = deque()  # the ids of calls without a result yet
    for place, message in enumerate(messages):
        lowered: JsonObject = {"role": message.role, "content": message.content or ""}
        if message.images:
            parts: list[JsonObject] = [{"type": "text", "text": message.content}] if message.content else []
            lowered["content"] = [*parts, *map(_picture, message.images)]
        if message.thinking:
            lowered["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call_{place}_{number}" for number, call in enumerate(message.tool_calls)]
            waiting.extend(ids)
            lowered["tool_calls"] = [_call(id, call.function) for id, call in zip(ids, message.tool_calls, strict=True)]
        if message.role == "tool":
            lowered["tool_call_id"] = message.tool_call_id or (waiting.popleft() if waiting else f"call_{place}")
            if message.tool_name:
                lowered["name"] = message.tool_name
        found.append(lowered)
    return found


def _call(id: str, function: OllamaFunction) -> JsonObject:
    arguments = msgspec.json.encode(function.arguments).decode()
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _picture(encoded: str) -> JsonObject:
    kind = next((kind for begin, kind in _KINDS.items() if encoded.startswith(begin)), "png")
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{encoded}"}}


_AT_ONCE: Final = re.compile(r"0+(\.0*)?([a-z]+)?")  # a `keep_alive` by which Ollama unloads a model


def _loading(source: OllamaChat | OllamaGenerate, name_of: Callable[[str], str]) -> LoweredOllama:
    """Return the request that only loads a model. Raises RequestRejected (422) for one that unloads it."""
    if source.keep_alive is not None and _AT_ONCE.fullmatch(str(source.keep_alive)):
        raise not_built("`keep_alive` of 0: other clients use the model, too, and the server unloads it", "keep_alive")
    # One that keeps the rules of chats, and is never rendered. Ollama answers it with one object.
    request = _lower(source, [{"role": "user", "content": ""}], name_of)
    request.only_loads, request.stream = True, False
    return request


def _lower(
    source: OllamaChat | OllamaGenerate, messages: list[JsonObject], name_of: Callable[[str], str]
) -> LoweredOllama:
    options, form = source.options or OllamaOptions(), source.format
    if source.logprobs:
        raise not_built("`logprobs` is not in this version", "logprobs")
    request = LoweredOllama(
        model=name_of(source.model),
        messages=messages,
        stream=source.stream is not False,
        max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,  # negative: no limit
        repetition_penalty=options.repeat_penalty,
        stop=[*([options.stop] if isinstance(options.stop, str) else options.stop or ())] or None,
        **{name: getattr(options, name) for name in _SAME},
    )
    if form == "json":
        request.response_format = ResponseFormat("json_object")
    elif isinstance(form, dict):
        request.response_format = ResponseFormat("json_schema", JsonSchemaFormat("format", form))
    if isinstance(source.think, str):
        request.reasoning_effort = source.think
    elif source.think is not None:
        request.thinking = source.think
    request.shows_thinking = source.think is not False
    return request


_SAME: Final = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")


def _read(body: bytes, decode: Callable[[bytes], Any], limits: BodyLimits) -> tuple[Any, bool]:
    try:
        return read_json(body, decode, limits)
    except msgspec.ValidationError as error:
        raise deserialisation_error(error) from error


class OllamaDialect(Dialect):
    """`{"error": "..."}`, also as the last line of a stream."""

    keep_alive = b" "  # which JSON allows before the next line
    stream_type = b"application/x-ndjson"

    def error_body(self, rejected: RequestRejected, request_id: str) -> bytes:
        return msgspec.json.encode({"error": rejected.message})

    def stream_failure(self, rejected: RequestRejected, request_id: str) -> bytes:
        return msgspec.json.encode({"error": rejected.stream_message}) + b"\n"


OLLAMA: Final = OllamaDialect()


def described_model(name: str, modified_at: str) -> dict[str, Any]:
    """Return a model as Ollama's lists have it; what only a file of Ollama's would have is empty."""
    details = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    return {"name": name, "model": name, "modified_at": modified_at, "size": 0, "digest": "", "details": details}


def embed_body(request: OllamaEmbedding, answer: bytes, now: float) -> bytes:
    """Return the answer of `/api/embed` from OpenAI's. `now`: on the clock of `request.began`."""
    found = msgspec.json.decode(answer)
    return msgspec.json.encode(
        {
            "model": request.model,
            "embeddings": [each["embedding"] for each in found["data"]],
            "total_duration": nanoseconds(now - request.began),
            "load_duration": 0,
            "prompt_eval_count": found["usage"]["prompt_tokens"],
        }
    )


def read_named(body: bytes) -> str:
    """Return the model that the body of `/api/show` names. Raises RequestRejected (400)."""
    named: OllamaNamed = _read(body, _NAMED, DEFAULT_LIMITS)[0]
    return named.model or named.name


def called(name: str, arguments: str) -> JsonObject:
    """Return a call as Ollama writes it: with its arguments as an object."""
    try:
        found = msgspec.json.decode(arguments) if arguments.strip() else {}
    except msgspec.DecodeError:  # the model broke it off
        found = {}
    return {"function": {"name": name, "arguments": found if isinstance(found, dict) else {}}}


def nanoseconds(seconds: float) -> int:
    """Return a length of time as Ollama counts it."""
    return int(seconds * 1e9)
